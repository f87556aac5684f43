"""The plan: how many bytes a job will hold, term by term, before it holds them.

Every term names its formula, its stage and where it comes from: ``exact`` from shapes, ``traced`` in a dry
run, ``estimated`` where a library decides, ``calibrated`` from this machine's own runs, ``measured`` for
what the process holds already. The peak is the largest of the stages'. It is compared with the
budget before anything large is allocated; what does not fit is refused with the terms that make
it so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from catalog import PLANNED_STAGES
from catalog.record_reader import Reader
from catalog.responses.time_estimate import Paced, pace_of, seconds_range
from engine.errors import BudgetExceeded
from engine.memory.budget import MemoryBudget

LIBRARY_BYTES = 96 * 2**20
"""Bytes that libraries take for themselves once work begins (BLAS, autograd's threads, files on their way
to disk): 50 to 90 MB measured on a CPU build."""

DEVICE_LIBRARY_BYTES = (2 * 32 + 17) * 2**20
"""Bytes that cuBLAS takes on a device once work begins: a workspace of 32 MiB for each of two threads, the caller's and
autograd's (CUBLAS_WORKSPACE_CONFIG=:4096:8, and torch's default on Hopper), and 17 MiB that are measured beside them.
Two jobs of a small network held 84.4 and 85.4 MB beyond their other terms on an H100 (`benchmarks/results/device.json`,
row `mlp`). What NCCL takes is not torch's, and not measured."""

Budgeted = Literal["device", "host"]
BUDGETED: tuple[Budgeted, ...] = ("device", "host")
"""The places that a budget counts."""
Place = Budgeted | Literal["disk"]
Stage = str
"""One of ``PLANNED_STAGES``, or ``throughout``."""
Source = Literal["exact", "traced", "estimated", "calibrated", "measured"]


@dataclass(frozen=True)
class Term:
    """One contribution to the peak."""

    name: str
    formula: str
    size_bytes: int
    place: Place
    source: Source = field(default="exact", kw_only=True)
    stage: Stage = "throughout"
    """When it is held: during one stage, or always."""
    layer: str | None = None
    """The only layer that it is held for: of such terms, a stage holds one layer's at a time. None: throughout its
    stage."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The choices of a plan that numbers depend on, by rounding at least; stored with the job.

    A job's first attempt decides, and every later one replays it, whatever is free by then.
    """

    parts: tuple[tuple[str, ...], ...] = ()
    """Layers of each pass over the data; one pass collects them all wherever they fit."""
    micro_batch: int | None = None
    """Examples that go through the model at once; None is the whole batch."""
    corrections: tuple[tuple[str, ...], ...] = ()
    """Layers of each further pass that EK-FAC makes; none without it."""
    offload: bool = False
    """The sums stand on the host, and contributions reach them by way of a staging buffer."""
    sketched: tuple[str, ...] = ()
    """Layers of whose G only the diagonal is kept, and a sketch where the job allows it."""
    activation_checkpointing: bool = False
    """The inside of the model's repeated layers is computed again in the backward pass."""
    rungs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """For each layer, the rungs among the fallbacks that the decompositions of its A and its G begin with."""
    placement: Mapping[str, str] = field(default_factory=dict)
    """Placement of each layer that is reconstructed: `panels`, `device` or `host`."""
    search: Mapping[str, int] = field(default_factory=dict)
    """Choice for the search of a spectrum: ``length`` of its basis, and ``columns`` of a pass; empty without one."""
    training: Mapping[str, int] = field(default_factory=dict)
    """Choice for a training: ``chunk`` of images (0: all), ``checkpointing`` and ``head_slices``; empty without one."""

    def rung(self, layer: str, side: Literal["A", "G"]) -> str | None:
        """Return the fallback that one factor's decomposition begins with; None where nothing was decided."""
        pair = self.rungs.get(layer)
        return None if pair is None else pair["AG".index(side)] or None

    @classmethod
    def read(cls, plan: Mapping[str, Any]) -> "Chosen":
        """Restore an earlier attempt's choices from ``Plan.as_json``; what an older one lacks has its default."""
        stored = {name: value for name, value in plan.items() if value is not None}
        return Reader(strict=False).read(cls, stored, "plan")  # type: ignore[no-any-return] # by its annotation


@dataclass(frozen=True, kw_only=True)
class Enough:
    """A budget that would do."""

    size_bytes: int
    keeping: str = ""
    """All that is kept then, in words, where that is less than a larger budget would keep."""

    @property
    def written(self) -> str:
        """As the remedy names it."""
        which = f" (with {self.keeping})" if self.keeping else ""
        return f"{written_bytes(self.size_bytes)}, the smallest that would do{which}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All terms of a job, and what was chosen so that they fit."""

    terms: tuple[Term, ...]
    chosen: Chosen = field(default_factory=Chosen)
    why: str = ""
    """Considerations that were weighed, in words."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Foreseen for each stage."""
    start_seconds: float = 0.0
    """Taken from the start of the job's process until the plan was made: imports, model, data, dry run."""
    self_check_seconds: float = 0.0
    """The part of the collection's that its self-check takes."""
    pace: Paced = "usual"
    """Whether the seconds are foreseen from what this machine was measured to do, or from what is usual."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Those that hold anything of their own, in order."""
        held = {term.stage for term in self.terms}
        return tuple(stage for stage in PLANNED_STAGES if stage in held)

    @property
    def whole_seconds(self) -> float:
        """Seconds from the start of the job's process to its last row."""
        return self.start_seconds + sum(self.seconds.values())

    @property
    def whole_seconds_range(self) -> tuple[float, float] | None:
        """Their bounds; None where the stages' have none. What the start took is known."""
        bounds = seconds_range(sum(self.seconds.values()), self.pace)
        return None if bounds is None else (self.start_seconds + bounds[0], self.start_seconds + bounds[1])

    @cached_property
    def _sums(self) -> Mapping[tuple[Place, str, str | None], int]:
        """Bytes by place, stage and layer; a search asks hundreds of times."""
        sums: dict[tuple[Place, str, str | None], int] = {}
        for term in self.terms:
            key = term.place, term.stage, term.layer
            sums[key] = sums.get(key, 0) + term.size_bytes
        return sums

    def peak_bytes(self, place: Place) -> int:
        """Return the bytes held at once in one place, in the stage that holds most."""
        return max((self.stage_bytes(place, stage) for stage in self.stages), default=self.stage_bytes(place, "model"))

    def stage_bytes(self, place: Place, stage: Stage) -> int:
        """Return the bytes held at once in one place during one stage.

        The sum of its terms and of those held throughout; of terms that belong to a layer, those of the layer that
        takes most.
        """
        common, layers = 0, dict[str, int]()
        for (where, when, layer), size in self._sums.items():
            if where != place or when not in (stage, "throughout"):
                continue
            if layer is None:
                common += size
            else:
                layers[layer] = layers.get(layer, 0) + size
        return common + max(layers.values(), default=0)

    def _at_peak(self, place: Place) -> list[Term]:
        """The terms of the stage that holds most in one place."""
        stage = max(self.stages, key=lambda each: self.stage_bytes(place, each), default="model")
        return [term for term in self.terms if term.stage in (stage, "throughout")]

    @property
    def largest_peak_bytes(self) -> int:
        """The larger of the two peaks that shapes foretell: what the record quotes.

        What was measured differs between faithful runs, and the record is under the layer's digest.
        """
        foretold = Plan(terms=tuple(term for term in self.terms if term.source not in ("measured", "calibrated")))
        return max(foretold.peak_bytes("device"), foretold.peak_bytes("host"))

    def as_json(self) -> dict[str, Any]:
        """The plan for the job's row."""
        return {
            "device_peak_bytes": self.peak_bytes("device"),
            "host_peak_bytes": self.peak_bytes("host"),
            "disk_peak_bytes": self.peak_bytes("disk"),
            "stages": {
                stage: {
                    **{f"{place}_bytes": self.stage_bytes(place, stage) for place in ("device", "host", "disk")},
                    "seconds": self.seconds.get(stage),
                    "seconds_range": seconds_range(self.seconds.get(stage), self.pace),
                }
                for stage in self.stages
            },
            "terms": [asdict(term) for term in self.terms],
            **asdict(self.chosen),
            "self_check_seconds": self.self_check_seconds,
            "start_seconds": self.start_seconds,
            "seconds": self.whole_seconds,
            "seconds_range": self.whole_seconds_range,
            "why": self.why,
            "pace": self.pace,
        }

    def fits(self, budget: MemoryBudget) -> bool:
        """Return whether device and host hold what the plan needs of them: no peak exceeds its budget."""
        return self.peak_bytes("device") <= budget.device_bytes and self.peak_bytes("host") <= budget.host_bytes

    def require(self, budget: MemoryBudget, smallest: Mapping[Budgeted, Enough | None]) -> None:
        """Refuse a plan that does not fit.

        Args:
            budget: Bytes of each place.
            smallest: The budget of each place that would do, for the message; None if it is unknown.

        Raises:
            BudgetExceeded: The message lists the largest terms and the remedy.
        """
        for place in BUDGETED:
            needed, allowed = self.peak_bytes(place), budget.device_bytes if place == "device" else budget.host_bytes
            if needed > allowed:
                enough = smallest.get(place)
                least = "" if enough is None else f" to {enough.written}"
                raise BudgetExceeded(
                    f"the plan needs {readable_bytes(needed)} of {place} memory "
                    f"and the budget is {readable_bytes(allowed)}: "
                    + ", ".join(largest(self._at_peak(place), place))
                    + f"; {budget.remedy(place)}{least}",
                    pointer=f"/memory/{place}",
                )


def read_plan(document: Mapping[str, Any]) -> Plan:
    """Read a plan that an earlier attempt announced by ``Plan.as_json``; what an older one lacks has its default."""
    known = {each.name for each in fields(Term)}
    return Plan(
        terms=tuple(
            Term(**{name: value for name, value in term.items() if name in known})
            for term in document.get("terms") or ()
        ),
        chosen=Chosen.read(document),
        why=str(document.get("why") or ""),
        seconds={
            stage: float(each["seconds"])
            for stage, each in (document.get("stages") or {}).items()
            if each.get("seconds") is not None
        },
        self_check_seconds=float(document.get("self_check_seconds") or 0.0),
        start_seconds=float(document.get("start_seconds") or 0.0),
        pace=pace_of(document),
    )


def readable_bytes(size_bytes: int) -> str:
    """Write a number of bytes as a person reads it: three digits and a binary unit, such as `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes} B"


def written_bytes(size_bytes: int) -> str:
    """Write a number of bytes as a document's budget is written."""
    return f"{-(-size_bytes // 2**20)}MiB"


def largest(terms: Iterable[Term], place: str) -> list[str]:
    """Return the four terms that hold most in one place, in words."""
    here = sorted((term for term in terms if term.place == place), key=lambda term: -term.size_bytes)
    return [f"{term.name} {readable_bytes(term.size_bytes)} ({term.formula})" for term in here[:4]]
