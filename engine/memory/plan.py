"""The plan: how many bytes a collection will hold, term by term, before it holds them.

Every term names its formula and where it comes from: ``exact`` from shapes, ``traced`` in a dry run,
``estimated`` where a library decides, ``measured`` for what the process holds already. The plan is compared with the
budget before anything large is allocated; what does not fit is refused with the terms that make
it so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from engine.errors import BudgetExceeded
from engine.memory.budget import MemoryBudget

LIBRARY_BYTES = 96 * 2**20
"""What libraries take for themselves once work begins (BLAS, autograd's threads, files on their way
to disk): 50 to 90 MB measured on a CPU build."""

Phase = Literal["collection", "correction", "measuring", "throughout"]


@dataclass(frozen=True, kw_only=True)
class Term:
    """One contribution to the peak."""

    name: str
    formula: str
    size_bytes: int
    place: Literal["device", "host"]
    source: Literal["exact", "traced", "estimated", "measured"]
    phase: Phase = "throughout"
    """When it is held: while the data passes through, again for EK-FAC, while one layer is measured, or always."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What a plan decides and numbers depend on, by rounding at least; stored with the job.

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
    activation_checkpointing: bool = False
    """The inside of the model's repeated layers is computed again in the backward pass."""

    @classmethod
    def read(cls, plan: Mapping[str, Any]) -> "Chosen":
        """What the plan document of an earlier attempt chose."""
        parts, corrections = (
            tuple(tuple(str(name) for name in part) for part in plan.get(key) or ()) for key in ("parts", "corrections")
        )
        return cls(
            parts=parts,
            micro_batch=plan.get("micro_batch"),
            corrections=corrections,
            offload=bool(plan.get("offload", False)),
            activation_checkpointing=bool(plan.get("activation_checkpointing", False)),
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All terms of a job, and what was chosen so that they fit."""

    terms: tuple[Term, ...]
    chosen: Chosen = field(default_factory=Chosen)
    why: str = ""
    """What was weighed, in words."""

    def peak_bytes(self, place: Literal["device", "host"]) -> int:
        """Bytes held at once in one place, in the phase that holds most."""
        return max(
            self.phase_bytes(place, "collection"),
            self.phase_bytes(place, "correction"),
            self.phase_bytes(place, "measuring"),
        )

    def phase_bytes(self, place: Literal["device", "host"], phase: Phase) -> int:
        """Bytes held at once in one place during one phase."""
        return sum(
            term.size_bytes for term in self.terms if term.place == place and term.phase in (phase, "throughout")
        )

    @property
    def largest_peak_bytes(self) -> int:
        """The larger of the two peaks that shapes foretell: what the record quotes.

        What was measured differs between faithful runs, and the record is under the layer's digest.
        """
        foretold = Plan(terms=tuple(term for term in self.terms if term.source != "measured"))
        return max(foretold.peak_bytes("device"), foretold.peak_bytes("host"))

    def as_json(self) -> dict[str, Any]:
        """The plan for the job's row."""
        return {
            "device_peak_bytes": self.peak_bytes("device"),
            "host_peak_bytes": self.peak_bytes("host"),
            "terms": [asdict(term) for term in self.terms],
            **asdict(self.chosen),
            "why": self.why,
        }

    def fits(self, budget: MemoryBudget) -> bool:
        """Whether both places hold what the plan needs of them."""
        return self.peak_bytes("device") <= budget.device_bytes and self.peak_bytes("host") <= budget.host_bytes

    def require(self, budget: MemoryBudget) -> None:
        """Refuse what does not fit.

        Raises:
            BudgetExceeded: The message lists the largest terms and the remedy.
        """
        for place, allowed in (("device", budget.device_bytes), ("host", budget.host_bytes)):
            needed = self.peak_bytes("device" if place == "device" else "host")
            if needed > allowed:
                raise BudgetExceeded(
                    f"the plan needs {readable_bytes(needed)} of {place} memory "
                    f"and the budget is {readable_bytes(allowed)}: "
                    + ", ".join(_largest(self.terms, place))
                    + f"; raise `memory.{place}`, or analyse fewer layers at a time",
                    pointer=f"/memory/{place}",
                )


def readable_bytes(size_bytes: int) -> str:
    """Bytes as a person reads them."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes} B"


def _largest(terms: Iterable[Term], place: str) -> list[str]:
    here = sorted((term for term in terms if term.place == place), key=lambda term: -term.size_bytes)
    return [f"{term.name} {readable_bytes(term.size_bytes)} ({term.formula})" for term in here[:4]]
