"""Capacity metrics of one layer, and of the whole model as one block-diagonal matrix."""

from collections.abc import Mapping

from catalog.analyses.subsamples import Convergence, NestedCapacity
from catalog.brief import Brief
from catalog.record import FieldError, record

MAX_PROBES = 4096
MAX_ITERATIONS = 1000


@record
class CrossCheck:
    """Trace and largest eigenvalue of a block of the exact Gauss-Newton matrix, beside those of K-FAC."""

    trace: float
    """Hutchinson's estimate of the block's trace."""
    trace_low: float | None
    """Lower end of the trace's 95 % confidence interval; null with a single probe."""
    trace_high: float | None
    """Upper end of it."""
    kronecker_trace: float
    """K-FAC's trace, tr(A)·tr(G); for the model the sum over its layers."""
    trace_ratio: float | None
    """K-FAC's trace over the exact one; null where that is zero."""
    probes: int
    """Random vectors of the trace's estimate."""
    top_eigenvalue: float | None
    """Largest eigenvalue of the block by Lanczos, which never exceeds the true one; null without iterations."""
    top_residual: float | None
    """The block has an eigenvalue within this distance of `top_eigenvalue`."""
    top_converged: bool | None
    """Whether the residual came below √ε times the eigenvalue, which then is exact to nearly ε."""
    kronecker_spectral_norm: float | None
    """K-FAC's largest eigenvalue; for the model, which it takes to be block-diagonal, the largest over its layers,
    null where that of one is not known."""
    iterations: int
    """Products that Lanczos took."""


@record
class Quantile:
    """A quantile of the eigenvalues of F."""

    level: float
    """The share of eigenvalues, between 0 and 1."""
    value: float
    """The smallest eigenvalue that at least `level` of all do not exceed."""


@record
class SpectralDensity:
    """Eigenvalues of F counted in equal steps of the logarithm over the 16 decades below the largest."""

    edges: tuple[float, ...]
    """One more than counts; ascending up to the largest eigenvalue."""
    counts: tuple[int | None, ...]
    """Eigenvalues above the left edge, up to the right one; null below the rounding of the factors, which is the larger
    dimension times ε of their dtype of the largest eigenvalue."""
    below: int
    """Eigenvalues up to the first edge whose count is not null, the zeros among them."""


@record
class SpectralDecay:
    """The exponent α of λ_k ∝ k^−α, by least squares of log λ_k against log k at ranks evenly spread in log k."""

    exponent: float
    """α."""
    first_rank: int
    """Of the range that the fit is over, from 1 for the largest eigenvalue: the tenth."""
    last_rank: int
    """A quarter of the numerical rank."""
    r_squared: float | None
    """How straight the line is: 1 for a power law; null where all eigenvalues are equal."""


@record
class EffectiveDimensionCurve:
    """Σ λᵢ/(λᵢ + λ) over a grid of absolute λ, which shows it where all curvature has shrunk alike."""

    damping: tuple[float, ...]
    """λ, in absolute numbers."""
    effective_dimension: tuple[float | None, ...]
    """Null where λ lies within the rounding of the factors, as the counts of the density, or of a G that is never made
    dense."""


@record
class CapacityMetrics(Brief):
    """Metrics of F = G ⊗ A; what is undefined, or was not asked for, is null."""

    form: str
    """`kronecker` (A dense), `diagonal` (A diagonal), `block` (exact block in G, A = 1) or
    `diagonal_block` (its diagonal alone)."""
    dimension: int
    """Rows of F: eigenvalues there are."""
    approximate: bool
    """Whether G is not the factor itself but a sketch of it."""
    no_spectrum: str | None
    """Why there are no eigenvalues, and what follows from them is null; null where there are."""
    estimated: str | None
    """How the eigenvalues of G are known where they are estimates between bounds, and what follows from their order
    (rank, condition, quantiles, density, decay, the largest) is too; null where they were computed."""
    intervals: Mapping[str, tuple[float | None, float | None]] | None
    """Bounds that hold of such a metric, by its name, `quantiles[0.5]` for that of a level, `top_eigenvalues[0]` for
    the largest; a bound is null where there is none. Null where nothing is estimated."""
    undefined: Mapping[str, str]
    """Why a metric that was asked for is null, by its name."""
    trace: float | None
    """Sum of the eigenvalues."""
    frobenius_norm: float | None
    """Root of the sum of the squared eigenvalues."""
    spectral_norm: float | None
    """The largest eigenvalue."""
    stable_rank: float | None
    """‖F‖_F² / ‖F‖₂²."""
    participation_ratio: float | None
    """(Σλ)² / Σλ²."""
    effective_rank: float | None
    """exp of the entropy of λ/Σλ (Roy & Vetterli 2007)."""
    rank: int | None
    """Eigenvalues above the tolerance."""
    logdet: float | None
    """log det F, undamped; null where A or G is singular, to within the tolerance of the rank."""
    damping: float | None
    """λ of F + λI below, absolute."""
    logdet_damped: float | None
    """log det(F + λI)."""
    logdet_factored: float | None
    """log det of (A + λ_A I) ⊗ (G + λ_G I): another quantity, that of what K-FAC inverts."""
    effective_dimension: float | None
    """Σ λᵢ/(λᵢ + λ) over the eigenvalues of F."""
    effective_dimension_factored: float | None
    """tr A(A + λ_A I)⁻¹ · tr G(G + λ_G I)⁻¹: the same under factored damping, another quantity."""
    effective_dimension_share: float | None
    """effective_dimension / dimension."""
    kappa: float | None
    """λ_max/λ_min of F; null where F is singular, to the rounding of its factors' entries."""
    kappa_damped: float | None
    """(λ_max + λ)/(λ_min + λ), of F + λI."""
    kappa_factored: float | None
    """The condition of (A + λ_A I) ⊗ (G + λ_G I)."""
    kappa_clipped: float | None
    """The condition of F after both factors are clipped at κ_max."""
    trace_A: float | None
    """Trace of A."""
    trace_G: float | None
    """Trace of G."""
    effective_rank_A: float | None
    """Entropy effective rank of A."""
    effective_rank_G: float | None
    """Entropy effective rank of G."""
    quantiles: tuple[Quantile, ...] | None
    """Quantiles of the eigenvalues."""
    density: SpectralDensity | None
    """Histogram of the eigenvalues."""
    decay: SpectralDecay | None
    """Null where the range of the fit would be shorter than half a decade."""
    top_eigenvalues: tuple[float, ...] | None
    """The largest eigenvalues of F, descending."""
    effective_dimension_curve: EffectiveDimensionCurve | None
    """Effective dimension over a grid of λ."""
    nested: tuple[NestedCapacity, ...] | None
    """Three of these at each sample size up to the whole, for `collection.nested`; else null."""
    convergence: tuple[Convergence, ...] | None
    """Each metric that is one number over the same sizes (a decay is its exponent), with where it is heading; null
    without `collection.nested`."""
    cross_check: CrossCheck | None
    """The exact curvature of the layer, for `cross_check`; null also where the layer is no run of whole rows of a
    parameter, which the log says."""


WITHOUT_DECOMPOSITION = ("trace", "frobenius_norm", "participation_ratio", "trace_A", "trace_G")
"""Metrics that the factors themselves give."""

METRICS = tuple(
    name
    for name in CapacityMetrics.__dataclass_fields__
    if name
    not in (
        "form", "dimension", "approximate", "no_spectrum", "estimated", "intervals", "undefined", "damping", "nested",
        "convergence", "cross_check",
    )
)  # fmt: skip
"""Metrics that can be selected by name."""


@record
class TopEigenvalue:
    """One of the largest eigenvalues of the model."""

    value: float
    """The eigenvalue."""
    layer: str
    """The layer that it belongs to."""


@record
class TraceShare:
    """One layer's part of the model's trace."""

    layer: str
    """The layer's name."""
    trace: float
    """Trace of the layer's block."""
    share: float | None
    """Null where the model has no curvature."""


@record
class ModelCapacity(Brief):
    """The whole model as one block-diagonal matrix: its eigenvalues are those of all covered layers together."""

    no_spectrum: tuple[str, ...]
    """Layers without eigenvalues; where there are any, what needs all eigenvalues is null."""
    estimated: tuple[str, ...]
    """Layers whose eigenvalues are estimates between bounds; what follows from the order of all eigenvalues is too."""
    intervals: Mapping[str, tuple[float | None, float | None]] | None
    """Bounds that hold of such a metric, as in the layers' rows; null where nothing is estimated."""
    undefined: Mapping[str, str]
    """Why a metric that was asked for is null, by its name."""
    approximate: tuple[str, ...]
    """Layers of which a sketch stands for G; where there are any, only the traces are exact."""
    trace_shares: tuple[TraceShare, ...] | None
    """Each layer's part of the trace."""
    frobenius_norm: float | None
    """Root of the sum of the squared eigenvalues."""
    spectral_norm: float | None
    """The largest eigenvalue."""
    stable_rank: float | None
    """(`frobenius_norm` / `spectral_norm`)²."""
    participation_ratio: float | None
    """(Σ λ)² / Σ λ²."""
    effective_rank: float | None
    """exp of the entropy of all eigenvalues over the model's trace; the layers' own do not add up to it."""
    rank: int | None
    """Eigenvalues above the tolerance times the largest of the model."""
    logdet: float | None
    """Sum of the logarithms of the eigenvalues."""
    kappa: float | None
    """Largest over smallest eigenvalue of all; null where one is zero."""
    kappa_damped: float | None
    """The same of F + λI, each layer with its own λ."""
    quantiles: tuple[Quantile, ...] | None
    """Quantiles of the eigenvalues."""
    density: SpectralDensity | None
    """Histogram of the eigenvalues."""
    decay: SpectralDecay | None
    """Power law fitted to the eigenvalues."""
    top_eigenvalues: tuple[TopEigenvalue, ...] | None
    """The largest eigenvalues with their layers."""
    effective_dimension_curve: EffectiveDimensionCurve | None
    """Effective dimension over a grid of λ."""
    convergence: tuple[Convergence, ...] | None
    """These over the sample sizes, where they are one number (a decay is its exponent), and the summary's trace,
    effective dimension and damped log-determinant; null without `collection.nested`."""


@record
class TokenImportance:
    """The exact diagonal of G of the head, one number a token, by which a vocabulary is pruned.

    Under K-FAC the block of the curvature that belongs to a token's row of weights has the trace `G_vv · tr(A)`, so
    that tokens stand in the same order. Where it cannot be had all but `layer` and `why` is null.
    """

    layer: str
    """The head, as `capacity.token_importance` names it."""
    why: str | None
    """Why there is none; null where there is."""
    tokens: int | None
    """Rows of G."""
    artifact: str | None
    """File with `importance`, (tokens,) float64, in the order of the vocabulary."""
    trace: float | None
    """Their sum, the trace of G."""
    tokens_for_99_percent: int | None
    """Fewest tokens that carry 99 % of it; the others are what pruning by it removes first."""
    most: tuple[int, ...] | None
    """The ten tokens of the largest importance, descending; of equals the first."""


def require_cross_check(probes: int, iterations: int) -> None:
    """Require 1 to 4,096 probes and 0 (none) to 1,000 iterations of Lanczos; a ``FieldError`` names the field."""
    if not 1 <= probes <= MAX_PROBES:
        raise FieldError("cross_check_probes", f"is {probes}; take 1 to {MAX_PROBES}")
    if not 0 <= iterations <= MAX_ITERATIONS:
        raise FieldError("cross_check_iterations", f"is {iterations}; take 0 (the trace alone) to {MAX_ITERATIONS}")
