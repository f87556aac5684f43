"""Job progress for people: one stage, one percentage and rows done, from a child's progress frames.

percent = 100 · Σ weight(stage) · share(stage) / Σ weight(stage)

The weight of a stage is its planned seconds. The share is 1 of the stages before the one under way, done / total of
that one, and of later ones what a checkpoint of an earlier attempt holds: a job that is tried again begins at what is
kept. As soon as a stage reports less than its checkpoint was to hold, that one was not found, and counts no more.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from catalog import ANALYSES, stages_of
from catalog.analyses.analysis import AnalysisStage
from catalog.frames import LayerDone, Progress
from catalog.requests.pieces import Round
from catalog.responses.remaining_time import RemainingTime

COLLECTION_SHARE = 70.0
"""Per cent of a job's bar that collecting takes, and the analyses share the rest, where the plan lacks seconds."""
PIECE_SHARE = 95.0
"""The same of the work of a piece of a divided job, which then stores what it has made."""
_STAGE_OF_ROUND: Mapping[Round, str] = {
    "collect": "collection",
    "decompose": "decomposition",
    "correct": "correction",
    "score": "influence",
}
_PIECES = "pieces"
"""In place of the collection, where pieces have done it: a stage that no attempt reports."""
_WRITE_SECONDS = 0.5


class ProgressView:
    """The progress of one attempt. Batches may come by the hundred a second; two views a second are written."""

    def __init__(
        self,
        kinds: Sequence[str],
        done: Sequence[tuple[str, int]],
        *,
        collects: bool,
        work: Round | None = None,
        percent: float = 0.0,
        kept: Mapping[str, float] | None = None,
    ) -> None:
        """Begin a view.

        Args:
            kinds: The analyses, in order.
            done: Kind and ordinal of the rows that earlier attempts have written.
            collects: Whether the job collects its factors.
            work: The round of a piece of a divided job.
            percent: What the pieces of a divided job have done, where they are behind it.
            kept: The share of each stage that a checkpoint of an earlier attempt holds.
        """
        self._analyses = list(kinds)
        self._of_layers = [kind for kind in kinds if kind in ANALYSES and ANALYSES[kind].unit == "layer"]
        self._rows = {(kind, ordinal) for kind, ordinal in done if kind in self._of_layers}
        self._work = work
        self._after_pieces = percent > 0
        self._start = COLLECTION_SHARE if collects else 0.0
        self._remaining = RemainingTime(kinds)
        self._layers: int | None = None
        self._percent = percent
        self._kept = dict(kept or {})
        self._plan: Mapping[str, Any] = {}
        self._view: dict[str, Any] | None = None
        self._written: Mapping[str, Any] | None = None
        self._written_at = self._kept_at = 0.0

    def take_plan(self, plan: Mapping[str, Any]) -> None:
        """Take the job's plan, which foresees the seconds of its stages."""
        self._remaining.take_plan(plan)
        self._plan = plan

    def take_layer(self, frame: LayerDone) -> None:
        """Count a row."""
        if frame.kind in self._of_layers:
            self._rows.add((frame.kind, frame.ordinal))

    def take(self, frame: Progress) -> Mapping[str, Any] | None:
        """Return the progress to write now; None where it is too soon for another."""
        if frame.unit == "layers" and frame.total is not None and frame.stage in self._of_layers:
            self._layers = frame.total * len(self._of_layers)
        within = min(1.0, frame.done / frame.total) if frame.total else 0.0
        lost = within < self._kept.get(frame.stage, 0.0)
        if lost:
            del self._kept[frame.stage]
        if frame.kept and within:
            self._kept[frame.stage] = within
        percent = self._estimate(frame.stage, within)
        self._percent = percent if lost else max(self._percent, percent)
        now = time.monotonic()
        remaining = self._remaining.take(frame.stage, frame.done, frame.total, now)
        self._view = {
            "stage": frame.stage,
            "done": frame.done,
            "total": frame.total,
            "unit": frame.unit,
            "percent": None if frame.stage == "collection" and not frame.total else round(self._percent, 1),
            "eta_seconds": None if remaining is None else round(remaining, 1),
        }
        if self._kept:
            kept = self._estimate(None, 0.0)
            self._view["kept"] = {"stages": dict(self._kept), "percent": round(kept, 1)}
        before = self._written
        ended = frame.total is not None and frame.done >= frame.total
        since = min(self._written_at, self._kept_at if frame.kept else now)
        new = before is None or frame.stage != before["stage"] or ended or lost
        if not new and now - since < _WRITE_SECONDS:
            return None
        self._kept_at = now if frame.kept else self._kept_at
        return self._write(now)

    def rest(self) -> Mapping[str, Any] | None:
        """Return the progress if the last one that was written lacks a report or a row."""
        return None if self._view is None or self._counted() == self._written else self._write(time.monotonic())

    def _write(self, now: float) -> Mapping[str, Any]:
        self._written, self._written_at = self._counted(), now
        return self._written

    def _counted(self) -> Mapping[str, Any]:
        """The view with the rows so far; where no row is of a layer there is nothing to count."""
        total = None if self._layers is None else max(self._layers, len(self._rows))
        return {
            **(self._view or {}),
            "layers_done": len(self._rows) if self._of_layers else None,
            "layers_total": total,
        }

    def _estimate(self, stage: str | None, within: float) -> float:
        """Return the percentage at a share of a stage; of one that has no weight, or of none, what is kept."""
        weights = self._weights(stage)
        percent, before = 0.0, stage in weights
        for name, weight in weights.items():
            if name == stage:
                share, before = within, False
            else:
                share = 1.0 if before else self._kept.get(name, 0.0)
            percent += weight * share
        return percent

    def _weights(self, stage: str | None) -> dict[str, float]:
        """The stages in order with their parts of the bar, in per cent."""
        if self._work is not None:
            return {_STAGE_OF_ROUND[self._work]: PIECE_SHARE}
        planned = None if self._after_pieces or self._lacks_seconds() else self._remaining.seconds()
        names = list(planned or {})
        left = names[names.index(stage) :] if stage in names else names
        # stages that take no seconds at the end of a job have their shares
        if planned and any(planned[name] for name in left):
            whole = sum(planned.values())
            return {name: 100.0 * seconds / whole for name, seconds in planned.items()}
        passes = ["collection", *(["correction"] if "correction" in (self._plan.get("stages") or {}) else [])]
        passes = [_PIECES] if self._after_pieces else passes
        weights = dict.fromkeys(passes, self._start / len(passes))
        each = (100.0 - self._start) / len(self._analyses)
        for kind in self._analyses:
            stages = [one for one in stages_of(kind) if stage == one.name or self._will_come(one)]
            for one in stages:
                weights[one.name] = each * one.share / sum(other.share for other in stages)
        return weights

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
