"""A small model whose job stops at named points for as long as a file stands there, or dies there.

Loaded by the computing process through the factory setting; it knows nothing of the service. The
points, in the order in which a job comes to them:

    start        the model is made, nothing is measured
    batch<N>     in the forward pass number N (two dry runs come first)
    row<N>       N rows of results were sent to the worker
"""

import os
import signal
import time
from itertools import count
from pathlib import Path

import torch
from torch import nn, relu

from worker.execution.frame_pipe import FramePipe


class Gates:
    """Files `<name>.<point>.hold` hold the job, `.die` kills it, `.murder` kills its worker; `.seen` is left behind."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = Path(folder), name

    def at(self, point: str) -> None:
        if self._file(point, "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if self._file(point, "murder").exists():
            guardian = _parent(os.getpid())
            os.kill(_parent(guardian), signal.SIGKILL)
            time.sleep(60)
        if self._file(point, "hold").exists():
            with self._file(point, "seen").open("ab") as file:
                file.write(b".")  # one for each process that waits
            while self._file(point, "hold").exists():
                time.sleep(0.01)

    def passed(self) -> None:
        """Leave a byte for every forward pass."""
        with (self._folder / f"{self._name}.passes").open("ab") as file:
            file.write(b".")

    def _file(self, point: str, kind: str) -> Path:
        return self._folder / f"{self._name}.{point}.{kind}"


class Gated(nn.Module):
    def __init__(self, gates: Gates | None, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second, self.head = nn.Linear(12, 20), nn.Linear(20, 10), nn.Linear(10, 3)
        self._gates, self._seconds, self._calls = gates, seconds, count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = next(self._calls)
        time.sleep(self._seconds)
        if self._gates is not None:
            self._gates.at(f"batch{number}")
            self._gates.passed()
        return self.head(relu(self.second(relu(self.first(x)))))


def make(folder: str = "", name: str = "", seconds: float = 0.0) -> Gated:
    gates = Gates(folder, name) if folder else None
    if gates is not None:
        gates.at("start")
        _count_rows(gates)
    return Gated(gates, seconds)


def _count_rows(gates: Gates) -> None:
    send, rows = FramePipe.send, 0

    def counting(pipe: FramePipe, frame: object) -> None:
        nonlocal rows
        send(pipe, frame)
        if getattr(frame, "frame", None) == "layer":
            rows += 1
            gates.at(f"row{rows}")

    FramePipe.send = counting


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
