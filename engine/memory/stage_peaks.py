"""Stage peaks: the bytes and seconds that each stage of a job took, beside those that its plan predicted.

The kernel's and the allocator's peaks are reset at the beginning of a stage. These are observations: no two runs have
the same, and nothing under a digest depends on them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from engine.memory.budget import begin_peak, highest_bytes
from engine.memory.plan import Plan, Stage, readable_bytes

_ALIKE = 1.02
"""The resident sets of two runs of one job differ by as much: that is no error of a plan."""


@dataclass(kw_only=True)
class StageTaken:
    """One stage, as often as it was entered."""

    stage: Stage
    seconds: float = 0.0
    device_bytes: int | None = None
    """Most held by the device's allocator; None on a CPU."""
    host_bytes: int | None = None
    """Largest resident set; None where the kernel does not let its peak begin anew."""


@dataclass(kw_only=True)
class StagePeaks:
    """All stages of a job, in the order in which it came to them."""

    apart: bool = False
    """Let the peaks of the process begin anew with each stage: for whoever has the process to itself. Otherwise there
    are seconds alone."""
    clock: Callable[[], float] = time.monotonic
    plan: Plan | None = None
    """The first that the job had; what it was wrong about changes nothing of what it said."""
    taken: dict[Stage, StageTaken] = field(default_factory=dict)
    _before: tuple[int | None, int] = (None, 0)

    @contextlib.contextmanager
    def within(self, stage: Stage, device: torch.device) -> Iterator[None]:
        """Measure the seconds and the peaks of a stage, one stage at a time.

        Args:
            stage: The stage that the body belongs to; one that is entered again is added to.
            device: Where the job computes.

        Yields:
            Nothing.
        """
        apart = self._forget(device)
        begun = self.clock()
        try:
            yield
        finally:
            found = self.taken.setdefault(stage, StageTaken(stage=stage))
            found.seconds += self.clock() - begun
            on_device, on_host = highest_bytes(device)
            found.device_bytes = _most(found.device_bytes, on_device if self.apart else None)
            found.host_bytes = _most(found.host_bytes, on_host if apart else None)

    def peak_bytes(self, device: torch.device) -> int:
        """Return the highest memory use since the process began.

        Args:
            device: Where the job computes.

        Returns:
            Bytes reserved on a CUDA device, or resident on the host of a CPU.
        """
        on_device, on_host = (
            _most(one, other) or 0 for one, other in zip(self._before, highest_bytes(device), strict=True)
        )
        return on_device if device.type == "cuda" else on_host

    def as_json(self) -> list[dict[str, Any]]:
        """Planned and measured of each stage; an error is measured over planned, less 1."""
        return [self._compared(found) for found in self.taken.values()]

    def plan_error(self) -> float | None:
        """Of the job's peak where it computes: on the device, or on the host of a CPU. None without a plan."""
        if self.plan is None:
            return None
        foreseen = [each for each in self.taken.values() if each.stage in self.plan.stages]
        on_device = max((each.device_bytes or 0 for each in foreseen), default=0)
        if on_device:
            return _error(self.plan.peak_bytes("device"), on_device)
        on_host = max((each.host_bytes or 0 for each in foreseen), default=0)
        return _error(self.plan.peak_bytes("host"), on_host or None)

    def exceeded(self) -> Iterator[str]:
        """What to warn of: a stage that held more than was planned for it, by more than runs differ."""
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
