"""The factor set: what a collection leaves for the analyses, in memory or read from artifacts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from catalog.analyses.analysis import LookedAt
from catalog.requests.collection import Collection
from catalog.requests.woodbury import Woodbury
from engine.factors.kronecker_factors import Factors
from engine.layers.coverage import DeclaredLayer
from engine.layers.layer import Form
from engine.layers.parameter_slice import Window
from engine.model.example_digests import EnteredExamples

GIVEN_MATRIX = "Matrix"
"""Module of a layer that was not collected: a matrix of the caller's own, as a block."""
WHOLE_MATRIX = "factors/matrix.safetensors"
"""Name under which a matrix of the caller's is read as it stands in its file, symmetric or not."""


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """One layer's curvature in the eigenbasis of its factors, with the eigenvalues re-estimated there.

    The block of the curvature is near ``(Q_G ⊗ Q_A) diag(λ) (Q_G ⊗ Q_A)ᵀ``, λ row by row.
    """

    eigenvectors_A: Tensor | None
    """Q_A (in_dim, in_dim), one eigenvector a column; None is the identity, of a diagonal A."""
    eigenvectors_G: Tensor | None
    """Q_G (out_dim, out_dim); None is the identity, of a diagonal G."""
    eigenvalues: Tensor
    """λ (out_dim, in_dim)."""

    def stored(self, *, own_a: bool) -> dict[str, Tensor]:
        """Return the tensors under the names they are stored by.

        Args:
            own_a: Whether the layer has an A of its own; another layer's Q_A is stored with that layer.

        Returns:
            Q_A (in_dim, in_dim), Q_G (out_dim, out_dim) and λ (out_dim, in_dim), without those that are the identity.
        """
        tensors = {
            "eigenvectors_A": self.eigenvectors_A if own_a else None,
            "eigenvectors_G": self.eigenvectors_G,
            "corrected_eigenvalues": self.eigenvalues,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@dataclass(frozen=True, kw_only=True)
class VarianceSums:
    """The sums behind the variance of one factor over batches."""

    squares: float
    """``Σ w_b ‖A_b − A‖²`` over the batches."""
    batches: int
    """Batches that had a factor of their own."""
    weights: float
    """``Σ w_b``."""


@dataclass(frozen=True, kw_only=True)
class TiedSums:
    """The product that head and table of one weight became, by its coefficients, and the count of lookups."""

    lookups: float
    """Lookups, that the counts of ids are divided by."""
    head_G: float
    """Coefficient of the head's own G in G."""
    table_G: float
    """Coefficient of the relative counts of ids."""


@dataclass(frozen=True, kw_only=True)
class LayerSums:
    """The counts and sums behind one layer's factors: with them, sets over other examples can be added to it."""

    whole: str
    """Name of the layer that this is a group of; its own where it has no groups."""
    reason_uncalled: str
    """The reason why it is not covered where no data call it."""
    weight_A: float
    """The count that A was divided by; 0 where nothing entered."""
    weight_G: float
    """The loss terms that G was divided by, weighted."""
    rows_A: int
    """Rows that entered A."""
    rows_G: int
    """Rows that entered G."""
    gradients: int
    """Gradients that arrived."""
    unproven: bool
    """Inputs entered A though no gradient arrived at the layer in a batch that had loss terms."""
    row_dtype: str | None = None
    """Precision that gradient rows are kept in; None where there are none."""
    examples: int = 0
    """Examples that entered the trace."""
    traces: tuple[float, ...] | None = None
    """``Σ s, Σ s², Σ s m, Σ m²`` of each example's squared gradient s and loss terms m; None without a trace."""
    variance_A: VarianceSums | None = None
    variance_G: VarianceSums | None = None
    tied: TiedSums | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive examples."""

    begin: int
    """The first one's index."""
    end: int
    """The index after the last one's."""


@dataclass(frozen=True, kw_only=True)
class CalledOnce:
    """One call of a part of a layer in a forward pass."""

    part: str
    number: int
    """The calls of that part before it."""


@dataclass(frozen=True, kw_only=True)
class CountedExamples:
    """The examples of a collection, by which sets prove that they have none in common."""

    runs: tuple[Run, ...]
    """Indices of all examples that were read, ascending and disjoint."""
    terms_weight: float
    """Loss terms of the examples that entered, weighted."""
    begin: int
    """Examples of the data before these, by their position."""
    whole: int | None
    """N, examples in the data of which this is a part; None where it is all of them."""
    model: str
    """Digest of the model's numbers."""
    unmasked: tuple[CalledOnce, ...]
    """Calls whose padding takes part."""
    overwritten: tuple[str, ...]
    """Layers whose input the model writes to afterwards."""

    @property
    def count(self) -> int:
        """Examples that were read."""
        return sum(run.end - run.begin for run in self.runs)


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """The facts of a covered layer besides its factors."""

    ordinal: int
    name: str
    module: str
    form: Form
    why: str
    parameters: tuple[str, ...]
    parameter_count: int
    in_dim: int
    out_dim: int
    bias: bool
    positions: int
    terms: int
    calls: int
    sharing: str
    rank_bound_A: int | None
    """Rows that entered A, which its rank cannot exceed; None where that bounds nothing."""
    rank_bound_G: int | None
    """The same of G."""
    shared_A_with: int | None
    """Ordinal of the layer whose A this is."""
    exact_trace: float | None = None
    """Trace of the layer's block of the curvature of the mean loss; None where it was not gathered."""
    trace_standard_error: float | None = None
    """Standard error of that trace over the examples as a sample."""
    representation_G: str = "dense"
    """How G is kept: `dense`, or the kind of what stands for it."""
    gradient_identity: float | None = None
    """Largest relative difference between the layer's rows and the gradient of each example alone; None unchecked."""
    examples_checked: int | None = None
    """Examples that were held against themselves alone."""
    checked_against: str | None = None
    """Reference that the rows were compared with: `alone`, `single`, `inputs` or `same_forward`."""
    identity_tolerance: float | None = None
    """Tolerance of a deciding check that was not that of float64; None where there was none."""
    identity_tolerance_reason: str | None = None
    """Why it was not."""
    relative_variance_A: float | None = None
    """`E‖A_b − A‖² / ‖A‖²` of the factors of single batches; None where it was not gathered."""
    relative_variance_G: float | None = None
    """The same of G."""
    relative_standard_error_A: float | None = None
    """Standard error of A over batches, relative to ‖A‖."""
    relative_standard_error_G: float | None = None
    """The same of G."""
    no_batch_variance: str | None = None
    """Why one of them is None where it was asked for."""
    rows_place: str | None = None
    """Place of gradient rows while they were collected; None where none were kept."""
    world_size: int = 1
    """Ranks that collected together."""
    reduction: str = "none"
    """How their sums of G were combined."""
    positions_local: int | None = None
    """Positions that entered A on this rank; None where it was the only one."""
    sent_bytes: int | None = None
    """Bytes that this rank has sent to the others for the layer; None where it was the only one."""
    pieces: int = 1
    """Sets over disjoint examples that were added up; 1 where one collection read all of them."""
    windows: tuple[Window, ...] | None = None
    """Positions of the layer's matrix entries in the parameters; None where they are not known."""
    sums: LayerSums | None = None
    """Sums that a merge with factors of other examples takes; None of a collection that did not keep them."""
    holders: tuple[str, ...] = ()
    """Modules that hold the parameters; empty of a collection that did not keep it."""
    frozen_bias: bool = False
    """Whether the module adds a bias that is not trained, and that A has no column for."""
    reached: bool = False
    """Whether a gradient other than zero entered G, which float32 sums of squares may have lost."""

    @property
    def leader(self) -> int:
        """Ordinal of the layer that A is kept with."""
        return self.ordinal if self.shared_A_with is None else self.shared_A_with


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """A trainable parameter of the model."""

    name: str
    """Qualified name, the first under which ``named_parameters()`` lists it."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NestedSize:
    """The same layers after the first examples alone."""

    eighths: int
    """Eighths of the data: 1, 2 or 4."""
    examples: int
    """Examples that entered."""
    rank_bounds: tuple[tuple[int | None, int | None], ...]
    """Rank bounds of A and of G, by ordinal."""
    load: Callable[[int], Factors]
    """Factors of one ordinal."""
    sums: tuple[LayerSums | None, ...] = ()
    """Sums that a merge takes, by ordinal; empty where they were not kept."""


@dataclass(frozen=True, kw_only=True)
class CollectionCounts:
    """The counts of a collection, and how it computed; an earlier job may not have said what has a default."""

    trainable_parameters: int
    examples: int
    updates: int
    passes: int
    micro_batch: int | None = None
    """Examples that went through the model at once."""
    nondeterministic: tuple[str, ...] | None = None
    """Operations of the model without a deterministic form; None where they were not recorded."""
    amp: str = "off"
    """Mixed-precision mode that the model computed in."""
    amp_fallback: str | None = None
    """Why that is not what was asked for."""
    accumulation_precision: str = "ieee"
    """Precision of the products that the sums were added up of."""
    accumulation_fallback: str | None = None
    """Why that is not what was asked for."""
    loss_scale: float | None = None
    """Factor that `fp16` came to multiply directions by."""
    loss: str | None = None
    """The task's loss."""
    task: Mapping[str, Any] | None = None
    """The task's options, with the loss in force."""


@dataclass(frozen=True, kw_only=True)
class CollectionFacts(CollectionCounts):
    """A collection beside its covered layers, as an index records it; None of one that did not keep a fact."""

    declared: tuple[DeclaredLayer, ...]
    collection: Collection
    woodbury: Woodbury
    looked_at: LookedAt | None = None
    """Batches that the self-check looked at; None too where nothing was checked."""
    parameters: tuple[ParameterShape, ...] | None = None
    """Every trainable parameter once, in the order of ``named_parameters()``."""
    counted: CountedExamples | None = None
    """Which examples these are."""
    entered: EnteredExamples | None = None
    """The examples that entered, by their digest."""


@dataclass(frozen=True, kw_only=True)
class FactorSet(CollectionFacts):
    """Every covered layer's factors, and the layers that are declared."""

    layers: tuple[LayerFacts, ...]
    device: str
    storage_policy: str
    """`resident`: in memory together; `laid aside`: in a scratch place; `stored`: of an earlier job."""
    planned_peak_bytes: int | None
    not_replayed: tuple[str, ...]
    """Numerics of the job's first attempt that this one could not repeat."""
    load: Callable[[int], Factors]
    """Factors of one ordinal."""
    let_go: Callable[[int], object] | None = None
    """Frees the factors of one ordinal, once they are written; None where they do not wait on the device for that."""
    nested: tuple[NestedSize, ...]
    """Smaller sample sizes, ascending; none of stored factors."""
    reused_from: str | None = None
    """The earlier job whose collection this is, where a cache had it."""
    load_corrected: Callable[[int], Corrected] | None = None
    """EK-FAC's correction of one ordinal; None where there was none."""
    owners: Mapping[int, int] | None = None
    """The only rank that has the factors of each layer, by ordinal; None where this process has all of them."""

    @property
    def covered_parameters(self) -> int:
        """Trainable numbers of the covered layers."""
        return sum(layer.parameter_count for layer in self.layers)
