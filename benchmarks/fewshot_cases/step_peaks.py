"""Peaks of whole training steps: predicted from shapes, and measured on a real step in a process of its own.

python -P -m benchmarks.fewshot_cases.step_peaks CASE    # one measurement, as JSON
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.fewshot_cases.episode_step import (
    EpisodeSize,
    allocated_bytes,
    differentiate,
    draw_images,
    parameters_of,
    training_step,
)
from engine.memory.budget import warm_up
from engine.training.batch_statistics import BatchNormMode
from engine.training.training_peak import StepMemory
from engine.training.ways import Way

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class PeakCase:
    """A step, and the way to its gradients."""

    backbone: str
    size: EpisodeSize
    chunk: int | None = None
    checkpointing: bool = False

    @property
    def way(self) -> Way:
        """The way."""
        return Way(chunk=self.chunk, checkpointing=self.checkpointing)

    @property
    def batch_norm(self) -> BatchNormMode:
        """Statistics of all images, the default, unless images are sliced."""
        return "whole" if self.chunk is None else "frozen"

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.backbone}/{self.size.image_size}, {self.way.described}"


def three_ways(backbone: str, size: EpisodeSize, chunk: int) -> tuple[PeakCase, ...]:
    """Return the cases of a backbone: undivided, two passes in chunks, and checkpointing."""
    return (
        PeakCase(backbone=backbone, size=size),
        PeakCase(backbone=backbone, size=size, chunk=chunk),
        PeakCase(backbone=backbone, size=size, checkpointing=True),
    )


def predict(case: PeakCase, device: torch.device) -> int:
    """Return the predicted bytes at the peak of a step on a device."""
    step = training_step(case.backbone, case.size, device, case.batch_norm, on_meta=True)
    return StepMemory(step).peak(case.way).size_bytes


def measure(case: PeakCase, device: torch.device) -> dict[str, Any]:
    """Take two steps; return the bytes of the first in pages of the process, and of the second by torch's allocator.

    Returns:
        ``held``: bytes of weights, moments and images; ``allocated``: the most that a step takes beyond them;
        ``resident``: growth of the process's pages, None on a device.
    """
    warm_up()
    step = training_step(case.backbone, case.size, device, case.batch_norm)
    images, parameters = draw_images(step, device), parameters_of(step)
    optimiser = step.optimiser(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    optimiser.zero_grad()

    def work() -> None:
        differentiate(step, images, case.way)
        optimiser.step()
        optimiser.zero_grad()

    states = [each for state in optimiser.state.values() for each in state.values()]
    buffers = [each for module in step.modules for each in module.buffers()]
    # code of libraries is read from files when it first runs, and their pages count too
    step.model(images[:2]).sum().backward()
    optimiser.zero_grad()
    resident = _grown_bytes(work) if device.type == "cpu" else None
    held = sum(each.nbytes for each in (images, *parameters, *buffers, *states))
    return {"held": held, "allocated": allocated_bytes(work, device), "resident": resident}


def compare(case: PeakCase, device: torch.device, *, alone: bool = True) -> dict[str, Any]:
    """Return the predicted peak beside the one that is measured, in a process of its own or in this one."""
    measured = _measure_alone(case, device) if alone else measure(case, device)
    held, allocated, resident = measured["held"], measured["allocated"], measured["resident"]
    predicted, peak = predict(case, device), held + allocated
    ratio = predicted / peak
    return {
        "case": case.name,
        "batch_norm": case.batch_norm,
        "predicted_bytes": predicted,
        "measured_bytes": peak,
        "ratio": ratio,
        "holds": 0.8 <= ratio <= 1.1,
        "allocated_bytes": allocated,
        "resident_growth_bytes": resident,
        "growth_beyond_allocated_bytes": None if resident is None else resident - allocated,
    }


def _measure_alone(case: PeakCase, device: torch.device) -> dict[str, Any]:
    described = json.dumps(asdict(case) | {"device": str(device)})
    command = [sys.executable, "-P", "-m", "benchmarks.fewshot_cases.step_peaks", described]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=_ROOT)  # noqa: S603 - our own
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _grown_bytes(work: Callable[[], object]) -> int:
    """Return the most pages that a process holds during work, beyond those before, in bytes."""

    def size(name: str) -> int:
        with Path("/proc/self/status").open() as lines:
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    # the peak of a process begins with that of the one that started it
    Path("/proc/self/clear_refs").write_text("5")
    before = size("VmRSS")
    work()
    return size("VmHWM") - before


def main() -> None:
    """Measure one case and print it."""
    torch.set_num_threads(1)
    described = json.loads(sys.argv[1])
    device = torch.device(described.pop("device"))
    case = PeakCase(**described | {"size": EpisodeSize(**described["size"])})
    print(json.dumps(measure(case, device)))


if __name__ == "__main__":
    main()
