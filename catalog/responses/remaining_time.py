"""The remaining time of a job: the plan's seconds, corrected by the speed of the work that is done.

A plan foresees the seconds of each stage, within the factor that `catalog.responses.time_estimate` states. The rest of
the stage under way follows from its own speed, over the later half of its time so far, since a stage starts slowly.
Later stages take what the plan says, times how far the plan was off so far, and by no more than that factor.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from catalog import stages_of
from catalog.responses.time_estimate import OFF_BY, pace_of

_KEPT_REPORTS = 200


class _Stage:
    """A stage under way: what was done when, over the later half of the time since it was first reported."""

    def __init__(self, name: str, now: float, done: int) -> None:
        self.name = name
        self._begun_at = now
        self._reports = deque([(now, done)])

    def take(self, now: float, done: int) -> float | None:
        """Take a report; returns the seconds of a unit, None before any is done."""
        elapsed = now - self._begun_at
        while len(self._reports) > 1 and self._reports[1][0] <= self._begun_at + elapsed / 2:
            self._reports.popleft()
        since, before = self._reports[0]
        if now - self._reports[-1][0] >= elapsed / _KEPT_REPORTS:
            self._reports.append((now, done))
        return (now - since) / (done - before) if done > before and now > since else None


class RemainingTime:
    """The remaining seconds of one attempt, from its plan and its reports of progress.

    ``kinds`` are the analyses, in the order in which they run. A report names a stage (`model`, `data`, `collection`,
    `correction`, or one of an analysis), its units that are done, and its units in all, None where unknown.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = tuple(kinds)
        self._stages = {kind: stages_of(kind) for kind in kinds}
        self._planned: dict[str, float | None] = {}
        self._bound = 1.0
        self._off = 1.0
        self._stage: _Stage | None = None

    def take_plan(self, plan: Mapping[str, Any]) -> None:
        """Take the plan of the job as its frame has it."""
        stages: Mapping[str, Mapping[str, Any]] = plan.get("stages") or {}
        seconds = {name: stage.get("seconds") for name, stage in stages.items()}
        self._bound = OFF_BY[pace_of(plan)]
        self._planned = {name: _sum(seconds, name) for name in ("collection", "correction")} if seconds else {}
        for kind in self._kinds if seconds else ():
            of_kind = self._stages[kind]
            # factors are decomposed when the first analysis asks for them
            decomposes = next(stage for stage in of_kind if not stage.before_decomposition)
            for stage in of_kind:
                names = [] if stage.planned is None else [stage.planned]
                if kind == self._kinds[0] and stage is decomposes:
                    names.append("decomposition")
                self._planned[stage.name] = _sum(seconds, *names)

    def take(self, stage: str, done: int, total: int | None, now: float) -> float | None:
        """Take a report at a time in seconds, by a clock that never goes back, and return the job's remaining seconds.

        None where the plan or the report leaves them open.
        """
        if self._stage is None or self._stage.name != stage:
            self._stage = _Stage(stage, now, done)
        unit_seconds = self._stage.take(now, done)
        later = self._later(stage)
        planned = self._planned.get(stage)
        if later is None or total is None or total <= 0:
            return None
        if unit_seconds is not None:
            rest = unit_seconds * (total - done)
            if planned:
                self._off = min(self._bound, max(1 / self._bound, unit_seconds * total / planned))
        elif planned is not None:
            rest = planned * self._off * (total - done) / total
        else:
            return None
        return max(0.0, rest) + self._off * later

    def seconds(self) -> Mapping[str, float] | None:
        """Return the planned seconds of each stage, in the order of the work; None where those of one are open."""
        known = {name: seconds for name, seconds in self._planned.items() if seconds is not None}
        return known if known and len(known) == len(self._planned) else None

    def _later(self, stage: str) -> float | None:
        """The planned seconds of the stages after this one; None if the plan lacks one of them, or the stage."""
        order = list(self._planned)
        if stage not in order:
            return None
        seconds = [self._planned[name] for name in order[order.index(stage) + 1 :]]
        return None if None in seconds else sum(each for each in seconds if each is not None)


def written_remaining(seconds: float) -> str:
    """Write remaining seconds as people say them: `12 s`, `4 min`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def _sum(seconds: Mapping[str, float | None], *names: str) -> float | None:
    """The seconds of some stages; one that is not in the plan takes none, and one without seconds leaves all open."""
    found = [seconds.get(name, 0.0) for name in names]
    return None if None in found else sum(each for each in found if each is not None)
