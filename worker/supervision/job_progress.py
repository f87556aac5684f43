"""Job progress for people: one stage, one percentage and rows done, from a child's progress frames."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from catalog import stages_of
from catalog.analyses.analysis import AnalysisStage
from catalog.frames import LayerDone, Progress
from catalog.responses.remaining_time import RemainingTime

COLLECTION_SHARE = 70.0
"""Per cent of a job's bar that collecting takes, and the analyses share the rest, where the plan lacks seconds."""
PIECE_SHARE = 95.0
"""The same of a piece of a divided job, which then stores what it has collected."""
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
        self._piece = piece
        self._after_pieces = percent > 0
        self._start = (PIECE_SHARE if piece else COLLECTION_SHARE) if collects else 0.0
        self._remaining = RemainingTime(kinds)
        self._layers: int | None = None
        self._percent = percent
        self._plan: Mapping[str, Any] = {}
        self._written_stage: str | None = None
        self._written_at = 0.0

    def take_plan(self, plan: Mapping[str, Any]) -> None:
        """Take the job's plan, which foresees the seconds of its stages."""
        self._remaining.take_plan(plan)
        self._plan = plan

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
        divided = self._piece or self._after_pieces
        planned = self._remaining.share(frame.stage, frame.done, frame.total)
        if planned is not None and not divided and not self._lacks_seconds():
            return 100.0 * planned
        within = min(1.0, frame.done / frame.total) if frame.total else 0.0
        if self._piece and not self._start:
            return PIECE_SHARE * within
        if frame.stage == "collection":
            return 0.0 if self._after_pieces else self._start * within
        each = (100.0 - self._start) / len(self._analyses)
        for place, kind in enumerate(self._analyses):
            before = 0.0
            stages = [stage for stage in stages_of(kind) if frame.stage == stage.name or self._will_come(stage)]
            for stage in stages:
                share = stage.share / sum(one.share for one in stages)
                if stage.name == frame.stage:
                    return self._start + each * (place + before + share * within)
                before += share
        return 0.0

    def _lacks_seconds(self) -> bool:
        """Whether the plan leaves out a stage that will come."""
        planned = self._plan.get("stages") or {}
        stages = (stage for kind in self._analyses for stage in stages_of(kind))
        return any(stage.planned not in (None, *planned) and self._will_come(stage) for stage in stages)

    def _will_come(self, stage: AnalysisStage) -> bool:
        """Whether the plan announces a stage."""
        announced: Any = self._plan
        for name in stage.announced_by:
            announced = announced.get(name) if isinstance(announced, Mapping) else None
        return not stage.announced_by or bool(announced)
