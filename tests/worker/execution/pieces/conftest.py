"""A divided job in this process: the attempts of the job and of its pieces, as a parent would start them."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from catalog.frames import Divided, Finished, Frame, LayerDone, Planned, decode
from catalog.requests.assignment import read_assignment
from engine.factors.factor_files import read_factors
from engine.factors.factor_set import FactorSet
from engine.memory.device_speed import DeviceSpeed, measure_speed
from worker.execution import attempt, computing_environment
from worker.execution.__main__ import execute
from worker.execution.attempt import StopFlag
from worker.execution.data import builtin
from worker.execution.files.artifact_files import ArtifactFiles
from worker.execution.frame_pipe import FramePipe

speed_of, table_of_digits = cache(measure_speed), cache(builtin._table_of_digits)
version_of = cache(computing_environment._version)


@pytest.fixture(autouse=True)
def found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine, look for packages, and read the table of digits, for the first attempt in this process."""

    def speed(device: torch.device, scratch: Path | None = None) -> DeviceSpeed:
        return speed_of(device) if scratch is None else measure_speed(device, scratch)

    monkeypatch.setattr(attempt, "measure_speed", speed)
    monkeypatch.setattr(builtin, "_table_of_digits", table_of_digits)
    monkeypatch.setattr(computing_environment, "_version", version_of)


@dataclass
class Run:
    """One job, whole or divided."""

    folder: Path
    frames: list[Frame] = field(default_factory=list)
    """Of the job's own attempts."""
    pieces: list[dict[str, Any]] = field(default_factory=list)
    finished: Finished = field(default_factory=Finished)

    @property
    def factors(self) -> FactorSet:
        return read_factors(ArtifactFiles(self.folder / "artifacts", None))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [dict(frame.outcome) for frame in self.frames if isinstance(frame, LayerDone)]

    @property
    def digests(self) -> dict[tuple[str, str], tuple[str, str]]:
        return {
            (row["kind"], row["layer"]): (row["record"]["digest_A"], row["record"]["digest_G"])
            for row in self.rows
            if row["status"] != "declared"
        }


@dataclass(frozen=True)
class Runner:
    """Runs jobs below a folder."""

    folder: Path
    store: Path

    def attempt(
        self, assignment: dict[str, Any], flag: StopFlag | None = None
    ) -> tuple[list[Frame], Finished | Divided]:
        """One attempt; what it raises is raised."""
        given = {
            "threads": 1,
            "allowed": {"factories": ["*"], "directories": ["*"]},
            "paths": [str(self.folder)],
            "store": str(self.store),
            "offline": True,
            **assignment,
        }
        with tempfile.TemporaryFile() as pipe:
            last = execute(read_assignment(json.dumps(given).encode()), FramePipe(pipe.fileno()), flag or StopFlag())
            os.lseek(pipe.fileno(), 0, os.SEEK_SET)
            return [decode(line) for line in pipe], last

    def job(
        self,
        name: str,
        document: dict[str, Any],
        order: Callable[[Sequence[dict[str, Any]]], Sequence[dict[str, Any]]] = list,
        **more: Any,
    ) -> Run:
        """One job to its end; the pieces of a round are computed in the order that ``order`` puts them in."""
        run = Run(folder=self.folder / name)
        own: dict[str, Any] = {"document": document, "artifacts": str(run.folder / "artifacts"), **more}
        plan: Any = None
        done: list[dict[str, Any]] = []
        while True:
            known = {"pieces": done, "divided": own["artifacts"]} if done else {}
            frames, last = self.attempt({**own, **known, "plan": plan})
            run.frames += frames
            if isinstance(last, Finished):
                run.finished, run.pieces = last, done
                return run
            plan = next((frame.plan for frame in frames if isinstance(frame, Planned)), plan)
            ended = {}
            for piece in order(last.pieces):
                place = run.folder / f"{piece['round']}-{piece['index']}"
                _, finished = self.attempt(
                    {**own, **known, "piece": dict(piece), "artifacts": str(place), "plan": plan}
                )
                assert isinstance(finished, Finished)
                ended[piece["index"]] = {
                    "piece": dict(piece),
                    "job": place.name,
                    "path": str(place),
                    "model_sha256": finished.model_sha256,
                    "data_sha256": finished.data_sha256,
                    "examples": finished.examples,
                }
            done = [*done, *(ended[index] for index in sorted(ended))]


@pytest.fixture
def runner(tmp_path: Path, store: Path) -> Runner:
    return Runner(tmp_path, store)
