"""The memory curve: what was held when, sampled before and after each operation of a job.

A plan foretells one peak; the curve shows what became of it: bytes that tensors hold on the device,
bytes that its allocator holds, and the process's resident set, over the seconds since the start.

Beside it stand the bytes and seconds that each stage took. The kernel's and the allocator's peaks are reset at the
beginning of a stage. These are observations: no two runs have the same, and nothing under a digest depends on them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import torch

from engine.memory.budget import begin_peak, device_bytes, highest_allocated_bytes, highest_bytes, resident_bytes
from engine.memory.plan import Plan, Stage, readable_bytes

_ALIKE = 1.02
"""The resident sets of two runs of one job differ by as much: that is not an error of a plan."""


@dataclass(kw_only=True)
class StageTaken:
    """One stage, as often as it was entered."""

    stage: Stage
    seconds: float = 0.0
    device_bytes: int | None = None
    """Most held by the device's allocator, what it has kept of earlier stages included; None on a CPU."""
    device_allocated_bytes: int | None = None
    """Most held by tensors on the device; None on a CPU."""
    host_bytes: int | None = None
    """Largest resident set; None where the kernel does not let its peak begin anew."""


@dataclass(kw_only=True)
class StagePeaks:
    """All stages of a job, in the order in which it came to them."""

    apart: bool = False
    """Let the peaks of the process begin anew with each stage: for a job with a process to itself. Otherwise there are
    seconds alone."""
    clock: Callable[[], float] = time.monotonic
    plan: Plan | None = None
    """The first that the job had; what it was wrong about changes nothing of what it said."""
    taken: dict[Stage, StageTaken] = field(default_factory=dict)
    _before: tuple[int | None, int] = (None, 0)

    @contextlib.contextmanager
    def within(self, stage: Stage, device: torch.device) -> Iterator[None]:
        """Measure the seconds and the peaks of a stage, one stage at a time; one that is entered again is added to."""
        apart = self._forget(device)
        begun = self.clock()
        try:
            yield
        finally:
            found = self.taken.setdefault(stage, StageTaken(stage=stage))
            found.seconds += self.clock() - begun
            on_device, on_host = highest_bytes(device)
            found.device_bytes = _most(found.device_bytes, on_device if self.apart else None)
            allocated = highest_allocated_bytes(device) if self.apart else None
            found.device_allocated_bytes = _most(found.device_allocated_bytes, allocated)
            found.host_bytes = _most(found.host_bytes, on_host if apart else None)

    def peak_bytes(self, device: torch.device) -> int:
        """Return the most bytes since the process began: reserved on a CUDA device, or else resident on the host."""
        on_device, on_host = (
            _most(one, other) or 0 for one, other in zip(self._before, highest_bytes(device), strict=True)
        )
        return on_device if device.type == "cuda" else on_host

    def as_json(self) -> list[dict[str, Any]]:
        """Planned and measured of each stage; an error is measured over planned, less 1."""
        return [self._compared(found) for found in self.taken.values()]

    def plan_error(self) -> float | None:
        """Return the error of the job's planned peak: on the device, or on the host of a CPU. None without a plan."""
        if self.plan is None:
            return None
        foreseen = [each for each in self.taken.values() if each.stage in self.plan.stages]
        on_device = max((each.device_bytes or 0 for each in foreseen), default=0)
        if on_device:
            return _error(self.plan.peak_bytes("device"), on_device)
        on_host = max((each.host_bytes or 0 for each in foreseen), default=0)
        return _error(self.plan.peak_bytes("host"), on_host or None)

    def exceeded(self) -> Iterator[str]:
        """Yield a warning for each stage that held more than was planned for it, by more than runs differ."""
        for row in self.as_json():
            for place in ("device", "host"):
                planned, measured = row[f"planned_{place}_bytes"], row[f"measured_{place}_bytes"]
                if planned and measured and measured > _ALIKE * planned:
                    yield (
                        f"planning error: stage `{row['stage']}` held {readable_bytes(measured)} on the {place}, "
                        f"where {readable_bytes(planned)} were planned"
                    )

    def _forget(self, device: torch.device) -> bool:
        if not self.apart:
            return False
        found = highest_bytes(device)
        self._before = _most(self._before[0], found[0]), max(self._before[1], found[1])
        return begin_peak(device)

    def _compared(self, found: StageTaken) -> dict[str, Any]:
        planned = {}
        if self.plan is not None and found.stage in self.plan.stages:
            planned = {
                "seconds": self.plan.seconds.get(found.stage),
                "device_bytes": self.plan.stage_bytes("device", found.stage),
                "device_allocated_bytes": self.plan.stage_bytes("device", found.stage),
                "host_bytes": self.plan.stage_bytes("host", found.stage),
            }
        row: dict[str, Any] = {"stage": found.stage}
        measured = {name: value for name, value in asdict(found).items() if name != "stage"}
        for name, value in measured.items():
            row |= {
                f"planned_{name}": planned.get(name),
                f"measured_{name}": round(value, 4) if name == "seconds" else value,
                f"error_{name}": _error(planned.get(name), value),
            }
        return row


def _error(planned: float | None, measured: float | None) -> float | None:
    return round(measured / planned - 1, 4) if planned and measured is not None else None


def _most(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)


_QUANTITIES = tuple(each.name for each in fields(StageTaken) if each.name != "stage")

FORMAT = "kronoscope-memory-curve/1"
MOST_POINTS = 2_000
_BLOCK = 12
"""Neighbours of which the extremes of each series stay: at most half of them."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The memory held at one moment."""

    seconds: float
    """Since the curve began."""
    operation: str
    moment: Literal["before", "within", "after"]
    """Moment relative to the operation."""
    device_allocated_bytes: int | None
    """Held by tensors on the device; null on a CPU."""
    device_reserved_bytes: int | None
    """Held by the device's allocator; null on a CPU."""
    host_bytes: int
    """Resident set of the process."""


@dataclass
class MemoryCurve:
    """Samples in order, at most ``MOST_POINTS`` of them: extremes stay when others go."""

    clock: Callable[[], float] = time.monotonic
    samples: list[Sample] = field(default_factory=list)
    stages: StagePeaks = field(default_factory=StagePeaks)
    """Peaks of each stage, measured and planned."""
    begun: float | None = None
    """The moment at which the job's process began, by the clock; None takes that of the first sample."""

    def elapsed_seconds(self) -> float:
        """Return the seconds since the job's process began, or since its first sample."""
        now = self.clock()
        self.begun = now if self.begun is None else self.begun
        return now - self.begun

    def sample(self, operation: str, moment: Literal["before", "within", "after"], device: torch.device) -> None:
        """Record what is held before, within or after an operation. It reads counters only, and waits for no device."""
        seconds = round(self.elapsed_seconds(), 4)
        allocated, reserved = device_bytes(device)
        self.samples.append(
            Sample(
                seconds=seconds,
                operation=operation,
                moment=moment,
                device_allocated_bytes=allocated,
                device_reserved_bytes=reserved,
                host_bytes=resident_bytes(),
            )
        )
        while len(self.samples) > MOST_POINTS:
            self.samples = thinned(self.samples)

    def as_json(self, device: torch.device) -> dict[str, Any]:
        """Return the document that the curve is stored as.

        The format's name, peaks in bytes, planned and measured, each stage's row, and every sample.
        """
        plan = self.stages.plan
        return {
            "format": FORMAT,
            "device": device.type,
            "planned_device_peak_bytes": None if plan is None else plan.peak_bytes("device"),
            "planned_host_peak_bytes": None if plan is None else plan.peak_bytes("host"),
            "measured_peak_bytes": self.stages.peak_bytes(device),
            "plan_error": self.stages.plan_error(),
            "pace": None if plan is None else plan.pace,
            "seconds_range": None if plan is None else plan.whole_seconds_range,
            "stages": [*self.stages.as_json(), self._whole_job(plan)],
            "samples": [asdict(sample) for sample in self.samples],
        }

    def _whole_job(self, plan: Plan | None) -> dict[str, Any]:
        """Return the row of the job from the start of its process until now, in seconds alone."""
        planned = plan.whole_seconds if plan is not None and plan.seconds else None
        measured = round(self.elapsed_seconds(), 4)
        row = {f"{part}_{name}": None for name in _QUANTITIES for part in ("planned", "measured", "error")}
        return row | {
            "stage": "whole job",
            "planned_seconds": planned,
            "measured_seconds": measured,
            "error_seconds": _error(planned, measured),
        }


def thinned(samples: list[Sample]) -> list[Sample]:
    """Return fewer samples, among them the first, the last, and both extremes of each series in every run of 12."""
    kept: list[Sample] = []
    for start in range(0, len(samples), _BLOCK):
        block = samples[start : start + _BLOCK]
        places: set[int] = set()
        for series in ("device_allocated_bytes", "device_reserved_bytes", "host_bytes"):
            values = [getattr(sample, series) or 0 for sample in block]
            if any(values):
                places |= {values.index(min(values)), values.index(max(values))}
        if start == 0:
            places.add(0)
        if start + _BLOCK >= len(samples):
            places.add(len(block) - 1)
        kept += [block[place] for place in sorted(places)]
    return kept
