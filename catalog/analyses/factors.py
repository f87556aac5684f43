"""`factors`: collect the Kronecker factors of every layer and keep them."""

from collections.abc import Mapping

from catalog.analyses.analysis import SHAPE, Analysis, AnalysisStage, Column, Coverage, Figure
from catalog.analyses.subsamples import NestedTraces
from catalog.brief import Brief
from catalog.record import record


@record
class FactorsMetrics(Brief):
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
class FactorsSummary(Brief):
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


_COLUMNS = (
    SHAPE,
    Column("metrics.form", "form"),
    *(Column(f"metrics.trace_{side}", f"trace {side}", f"Trace of {side}", f"Sum of the eigenvalues of {side}",
             relative=True) for side in "AG"),
    Column("metrics.exact_trace", "exact", "Exact trace", "Trace of the layer's block of the exact curvature, from "
           "each example's squared gradient", relative=True),
    Column("metrics.trace_ratio", "ratio", "K-FAC / exact", "K-FAC's trace, tr(A)·tr(G), over the exact trace"),
    *(Column(f"record.kappa_{side}", f"κ_{side}", counted=f"record.clipped_{side}") for side in "AG"),
    *(Column(f"record.relative_standard_error_{side}", f"noise {side}", f"Noise of {side}", f"Standard error of {side} "
             "over batches, relative to its Frobenius norm", optional=True) for side in "AG"),
    Column("metrics.calls", None, "Calls", "Calls of the module in one forward pass"),
    Column("record.factor_bytes", None, "Size", "Bytes of the dense factors", form="bytes"),
    Column("metrics.shared_A_with", None, "A shared with", "Layer that reads the same input", form="text"),
)  # fmt: skip
_FIGURES = (
    Figure("Examples", "{examples}", "{updates:update|updates}, {passes:pass|passes}",
           "The number of examples that the factors are averaged over."),
    Figure("Layers", "{layers}", "{fisher} Fisher, {sharing}", "Layers whose A and G were collected."),
    Figure("Size of the factors", "{factor_bytes:bytes}", "{dense_factor_bytes:bytes} without sharing",
           "Layers that read the same input share one A."),
)  # fmt: skip

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
    keeps_factors=True,
    columns=_COLUMNS,
    figures=_FIGURES,
    sentence="the Kronecker factors A and G of each layer",
    damped=False,
)
