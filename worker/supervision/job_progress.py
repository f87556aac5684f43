"""Job progress for people: one stage, one percentage and rows done, from a child's progress frames."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from catalog.frames import LayerDone, Progress
from catalog.responses.remaining_time import RemainingTime

COLLECTION_SHARE = 70.0
"""Per cent of a job's bar that collecting takes; the analyses share the rest."""
PIECE_SHARE = 95.0
"""The same of a piece of a divided job, which then stores what it has collected."""
CROSS_CHECK_SHARE = 0.9
"""Of the capacity's part of the bar, where there is a cross-check."""
LAYERS_SHARE = 0.1
"""Share of the spectrum's part of the bar, where products with an exact curvature follow its layers."""
_WRITE_SECONDS = 0.5


class ProgressView:
    """The progress of one attempt. Batches may come by the hundred a second; two views a second are written."""

    def __init__(
        self,
        kinds: Sequence[str],
        done: Sequence[tuple[str, int]],
        *,
        collects: bool,
        piece: bool = False,
        percent: float = 0.0,
    ) -> None:
        """Begin a view."""
        self._analyses = list(kinds)
        self._rows = set(done)
        self._kinds = len(kinds)
        self._after_pieces = percent > 0
        self._start = (PIECE_SHARE if piece else COLLECTION_SHARE) if collects else 0.0
        self._remaining = RemainingTime(kinds)
        self._layers: int | None = None
        self._percent = percent
        self._multiplies = False
        self._written_stage: str | None = None
        self._written_at = 0.0

    def take_plan(self, plan: Mapping[str, Any]) -> None:
        """Take the job's plan, which foresees the seconds of its stages."""
        self._remaining.take_plan(plan)
        self._multiplies = bool(plan.get("search"))

    def take_layer(self, frame: LayerDone) -> None:
        """Count a row."""
        self._rows.add((frame.kind, frame.ordinal))

    def take(self, frame: Progress) -> Mapping[str, Any] | None:
        """Return the progress to write now."""
        if frame.unit == "layers" and frame.total is not None:
            self._layers = frame.total * self._kinds
        self._percent = max(self._percent, self._estimate(frame))
        now = time.monotonic()
        remaining = self._remaining.take(frame.stage, frame.done, frame.total, now)
        ended = frame.total is not None and frame.done >= frame.total
        if frame.stage == self._written_stage and not ended and now - self._written_at < _WRITE_SECONDS:
            return None
        self._written_stage, self._written_at = frame.stage, now
        return {
            "stage": frame.stage,
            "done": frame.done,
            "total": frame.total,
            "unit": frame.unit,
            "layers_done": len(self._rows),
            "layers_total": None if self._layers is None else max(self._layers, len(self._rows)),
            "percent": None if frame.stage == "collection" and not frame.total else round(self._percent, 1),
            "eta_seconds": None if remaining is None else round(remaining, 1),
        }

    def _estimate(self, frame: Progress) -> float:
        within = min(1.0, frame.done / frame.total) if frame.total else 0.0
        if frame.stage == "collection":
            return 0.0 if self._after_pieces else self._start * within
        each = (100.0 - self._start) / len(self._analyses)
        if frame.stage == "cross_check" and "capacity" in self._analyses:
            # before the first row of its analysis, and the longer part of it
            return self._start + each * (self._analyses.index("capacity") + CROSS_CHECK_SHARE * within)
        if frame.stage in ("spectrum", "products") and "spectrum" in self._analyses and self._multiplies:
            part = LAYERS_SHARE * within if frame.stage == "spectrum" else LAYERS_SHARE + (1 - LAYERS_SHARE) * within
            return self._start + each * (self._analyses.index("spectrum") + part)
        if frame.stage in self._analyses:
            return self._start + each * (self._analyses.index(frame.stage) + within)
        return 0.0
