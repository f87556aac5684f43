"""`factors`: collect the Kronecker factors of every layer and keep them."""

from collections.abc import Mapping

from catalog.analyses.analysis import Analysis, AnalysisStage, Coverage
from catalog.analyses.subsamples import NestedTraces
from catalog.record import record


@record
class FactorsMetrics:
    """One layer's factors in a few numbers."""

    form: str
    """`kronecker` (A dense), `diagonal` (A diagonal), `block` (exact block in G, A = 1) or
    `diagonal_block` (its diagonal alone)."""
    trace_A: float
    """Trace of A."""
    trace_G: float
    """Trace of G."""
    exact_trace: float | None
    """Trace of the layer's block of the curvature itself; null where it was not gathered."""
    trace_ratio: float | None
    """K-FAC's trace, tr(A)·tr(G), over the exact one; null where that is zero or was not gathered."""
    shared_A_with: str | None
    """Layer whose A this is, where one input feeds several layers."""
    calls: int
    """Calls of the module in one forward pass."""
    nested: tuple[NestedTraces, ...] | None
    """The traces at each sample size up to the whole, for `collection.nested`; else null."""


@record
class FactorsSummary:
    """The closing line of a collection."""

    coverage: Coverage
    """Parameters that are covered and that are not, with reasons."""
    layers: int
    """Layers that are covered."""
    branches: Mapping[str, int]
    """Covered layers by `branch`: they add up to `layers`."""
    eigendecompositions: int
    """Layers that another analysis of the job had decomposed; this one asks for no eigenvalues."""
    woodbury_layers: int
    """Layers whose G is kept as its gradient rows."""
    examples: int
    """Examples that entered the factors."""
    updates: int
    """Updates that entered the factors."""
    passes: int
    """Passes over the data."""
    fisher: str
    """`collection.fisher`."""
    sharing: str
    """`collection.sharing`."""
    update_freq: int
    """`collection.update_freq`."""
    factor_bytes: int
    """Bytes of the factors as they are held."""
    dense_factor_bytes: int
    """What the same factors would take without sharing A between layers of one input."""


FACTORS = Analysis(
    kind="factors",
    title="K-FAC factors",
    description="Collect A and G of every layer, write them as safetensors with their digests.",
    implementation="engine.analyses.factors:KeptFactors",
    params=None,
    metrics=FactorsMetrics,
    summary=FactorsSummary,
    decomposition="none",
    stages=(AnalysisStage(name="factors"),),
    layerwise=True,
    keeps=("factors",),
)
