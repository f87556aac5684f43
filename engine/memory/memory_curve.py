"""The memory curve: what was held when, sampled before and after each operation of a job.

A plan foretells one peak; the curve shows what became of it: bytes that tensors hold on the device,
bytes that its allocator holds, and the process's resident set, over the seconds since the start.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from engine.memory.budget import device_bytes, resident_bytes
from engine.memory.stage_peaks import StagePeaks

FORMAT = "kronoscope-memory-curve/1"
MOST_POINTS = 2_000
_BLOCK = 12
"""Of so many neighbours the extremes of each series stay: at most half of them."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What is held at one moment."""

    seconds: float
    """Since the curve began."""
    operation: str
    moment: Literal["before", "within", "after"]
    """Of the operation."""
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
    """What each stage took, and was planned to take."""
    _begun: float | None = None

    def sample(self, operation: str, moment: Literal["before", "within", "after"], device: torch.device) -> None:
        """Record what is held now. It reads counters only, and waits for no device.

        Args:
            operation: Name of the operation.
            moment: Whether the operation is about to begin, runs, or has ended.
            device: Where the job computes.
        """
        now = self.clock()
        self._begun = now if self._begun is None else self._begun
        allocated, reserved = device_bytes(device)
        self.samples.append(
            Sample(
                seconds=round(now - self._begun, 4),
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

        Args:
            device: Where the job computed.

        Returns:
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
            "stages": self.stages.as_json(),
            "samples": [asdict(sample) for sample in self.samples],
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
