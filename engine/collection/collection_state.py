"""The state of a collection: the sums and factors of its passes so far, and the position in the one under way.

Everything that an attempt changes stands here, and a checkpoint holds all of it: fields are found by the records
themselves (``engine.saved_fields``), and ``NOT_SAVED`` says of each other one why a later attempt has it all the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from catalog.analyses.analysis import LookedAt
from engine.accumulation.batch_variance import BatchVariance
from engine.accumulation.gradient_rows import GradientRows
from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.sketched_rows import SketchRows
from engine.accumulation.tied_statistics import TiedHeadStatistics
from engine.distributed.traffic import Moved, Traffic
from engine.factors.factor_set import LayerSums, TiedSums, VarianceSums
from engine.factors.kronecker_factors import Factors
from engine.factors.spilled_factors import SpilledFactors
from engine.gradient_identity.findings import LayerCheck
from engine.gradient_identity.self_check import SelfCheck
from engine.memory.plan import Chosen
from engine.merging.example_runs import MOST_RUNS, joined, runs_of
from engine.model.batches import Batch, tensors
from engine.model.example_digests import EnteredExamples
from engine.model.mixed_precision import FIRST_SCALE, LossScale
from engine.model.state.model_state import bit_sum
from engine.row_layout.attention_masks import Key
from engine.saved_fields import load_fields, save_fields, saved_names

_MASK = 2**63 - 1


@dataclass(kw_only=True)
class Snapshot:
    """Factors of the first examples alone; plain values, so that a checkpoint can name it."""

    eighths: int
    """The size, in eighths of the data."""
    examples: int
    """Examples that entered."""
    spilled: dict[str, SpilledFactors] = field(default_factory=dict)
    """Places of each layer's factors, by name."""
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Rows that had entered its A and its G."""
    sums: dict[str, LayerSums | None] = field(default_factory=dict)
    """Sums of each layer that a merge takes."""


@dataclass(kw_only=True)
class CollectionState:
    """The sums and factors of the passes over the data so far."""

    NOT_SAVED: ClassVar[Mapping[str, str]] = {
        "statistics": "a checkpoint holds them layer by layer (`Sums.state`)",
        "factors": "they are loaded from `spilled`; those in memory are made of the sums again",
        "self_check": "a checkpoint holds its own saved fields",
        "checked": "a checkpoint holds its own saved fields",
        "traffic": "a checkpoint holds its own saved fields",
        "chosen": "a choice of the plan, which is among a checkpoint's conditions",
    }
    _LEARNT: ClassVar[frozenset[str]] = frozenset(
        {"shared", "unmasked", "overwritten", "deferred", "nested", "nondeterministic", "traffic", "chosen"}
    )
    """Fields that outlast a pass that did not end: what it has shown of the model holds for the next one."""

    statistics: dict[str, LayerStatistics]
    """Statistics of every treated layer, by name; without sums once its factors are made."""
    factors: dict[str, Callable[[], Factors]]
    """Loads the factors of every covered layer, by name."""
    shared: dict[str, str]
    """Follower → leader of the layers that share one A."""
    unmasked: frozenset[Key] = frozenset()
    """Calls that the mask is not laid on after all."""
    spilled: dict[str, SpilledFactors] = field(default_factory=dict)
    """Places of the factors that are spilled, by name."""
    nested: dict[int, Snapshot] = field(default_factory=dict)
    """Smaller sample sizes, by eighths."""
    nondeterministic: set[str] = field(default_factory=set)
    """Operations without a deterministic form that were heard of."""
    examples: int = 0
    runs: list[list[int]] = field(default_factory=list)
    """Indices of all examples that were read; none where they are too scattered, or a checkpoint did not say."""
    updates: int = 0
    entered: EnteredExamples | None = None
    """The examples that entered the first pass, which every later one must see; None before its end."""
    passes: int = 0
    batches: int = 0
    """Batches of this rank in a pass, with those that enter nothing."""
    loss_scale: float = FIRST_SCALE
    overwritten: frozenset[str] = frozenset()
    """Layers whose input the model writes to afterwards."""
    deferred: frozenset[str] = frozenset()
    """Layers some of whose calls get no gradient: an input enters A when the gradient of its call arrives."""
    self_check: SelfCheck | None = None
    """Checks of the layers so far; None where nothing is checked."""
    checked: SelfCheck | None = None
    """The same when the pass under way began, which a pass that is begun anew begins with."""
    traffic: Traffic | None = None
    """Bytes between ranks so far; None where there is one."""
    chosen: Chosen = field(default_factory=Chosen)
    """The choice that the passes follow: the plan's, or a fallback where memory ran out."""

    def snapshot(self, eighths: int, examples: int) -> Snapshot:
        """Return the snapshot of a sample size: the first pass that reaches it makes it, later ones add layers."""
        return self.nested.setdefault(eighths, Snapshot(eighths=eighths, examples=examples))

    def settled(self) -> dict[str, Any]:
        """Return copies of the state that a pass changes, for ``restore``."""
        names = [entry.name for entry in fields(self) if entry.name not in self._LEARNT]
        return {name: _copied(getattr(self, name)) for name in names}

    def restore(self, before: dict[str, Any]) -> None:
        """Go back to what ``settled`` returned before a pass that did not end; which layers share no A stays known."""
        for name, value in before.items():
            setattr(self, name, value)

    def begin_pass(self) -> None:
        """Count a pass, and note what the checks have found before it."""
        self.passes += 1
        self.checked = _copied(self.self_check)

    def begin_anew(self) -> None:
        """Forget what the checks of a pass that was left have found: what is begun anew is checked anew."""
        self.self_check = _copied(self.checked)

    def state(self) -> dict[str, Any]:
        """Return all that a checkpoint holds, but the layers' statistics, as plain values."""
        return {
            "fields": save_fields(self),
            "self_check": None if self.self_check is None else self.self_check.state(),
            "checked": None if self.checked is None else self.checked.state(),
            "traffic": None if self.traffic is None else save_fields(self.traffic),
        }

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> "CollectionState":
        """Read the saved fields of what ``state`` returned, and take nothing over.

        ``ValueError`` if a field is missing, unknown, or does not hold what its type says.
        """
        for kind, name in ((SelfCheck, "self_check"), (SelfCheck, "checked"), (Traffic, "traffic")):
            if stored[name] is not None:
                load_fields(kind, stored[name])
        return cls(statistics={}, factors={}, **load_fields(cls, stored["fields"]))

    def take_over(self, stored: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned; ``read`` tells beforehand if it does not fit."""
        heard = self.nondeterministic
        for name, value in load_fields(type(self), stored["fields"]).items():
            setattr(self, name, value)
        # the set that this attempt's warnings enter
        heard |= self.nondeterministic
        self.nondeterministic = heard
        if self.self_check is not None:
            self.self_check, self.checked = (
                self.self_check.resumed(stored[name]) for name in ("self_check", "checked")
            )
        if self.traffic is not None:
            for name, value in load_fields(Traffic, stored["traffic"]).items():
                held = getattr(self.traffic, name)
                held.clear()
                held.update(value)


def _copied(value: Any) -> Any:  # noqa: ANN401 - any field
    """The value, so that what a pass does to the field does not change it."""
    if isinstance(value, SelfCheck):
        return value.resumed(value.state())
    return value.copy() if isinstance(value, (dict, set, list)) else value


@dataclass(kw_only=True)
class Cursor:
    """The position in one pass over the data."""

    number: int
    """The pass, from 0."""
    batches: int = 0
    read: int = 0
    """Examples of those batches."""
    examples: int = 0
    """Examples that entered the statistics."""
    updates: int = 0
    terms: int = 0
    """Loss terms of those examples."""
    entered: EnteredExamples = field(default_factory=EnteredExamples)
    """Those examples by their digest."""
    first: EnteredExamples | None = None
    """The first batch, by its digest."""
    loss_scale: float = FIRST_SCALE
    """The number that `fp16` multiplies directions by."""
    steady: int = 0
    """Directions since that last changed."""
    data: int = 0
    """A checksum over the batches so far, where one is wanted."""
    runs: list[list[int]] = field(default_factory=list)
    """Indices of the examples of those batches, ``[begin, end]`` of each run."""
    scattered: bool = False
    """They were more runs than are kept."""

    def note(self, scale: LossScale | None) -> None:
        """Remember the loss scale."""
        if scale is not None:
            self.loss_scale, self.steady = scale.value, scale.steady

    def take(self, batch: Batch, *, checked: bool) -> None:
        """Count one batch, whether or not it enters the statistics."""
        self.batches += 1
        self.read += batch.size
        self._list(batch)
        if checked:
            for tensor in (batch.index, *tensors(batch.inputs), *tensors(batch.targets)):
                self.data = (self.data * 31 + bit_sum(tensor)) & _MASK

    def _list(self, batch: Batch) -> None:
        """Note the indices of a batch."""
        if self.scattered:
            return
        for begin, end in runs_of(batch.index):
            if self.runs and self.runs[-1][1] == begin:
                self.runs[-1][1] = end
            else:
                self.runs.append([begin, end])
        if len(self.runs) > 2 * MOST_RUNS:
            self.runs = joined(self.runs)
            if len(self.runs) > MOST_RUNS:
                self.runs, self.scattered = [], True


RECORDS = (
    CollectionState,
    Cursor,
    Snapshot,
    SpilledFactors,
    LayerSums,
    TiedSums,
    VarianceSums,
    EnteredExamples,
    SelfCheck,
    LookedAt,
    LayerCheck,
    Traffic,
    Moved,
    LayerStatistics,
    TiedHeadStatistics,
    GradientRows,
    SketchRows,
    BatchVariance,
)
"""Every record that a checkpoint holds fields of."""


def fields_of_state() -> dict[str, list[str]]:
    """List every field that a checkpoint holds: one with other fields is of another version."""
    return {record.__name__: list(saved_names(record)) for record in RECORDS}
