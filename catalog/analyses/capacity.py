"""`capacity`: how many directions of a layer the loss really curves in, from the two spectra."""

from collections.abc import Mapping
from typing import Any, Literal

from catalog.analyses.analysis import SHAPE, Analysis, AnalysisStage, Column, Coverage, Figure
from catalog.analyses.capacity_metrics import (
    METRICS,
    WITHOUT_DECOMPOSITION,
    CapacityMetrics,
    CrossCheck,
    ModelCapacity,
    TokenImportance,
    require_cross_check,
)
from catalog.brief import Brief
from catalog.field_errors import suggestion
from catalog.record import FieldError, record

MAX_GRID = 1000
DAMPING_GRID = tuple(10.0 ** (half / 2) for half in range(-32, 5))
"""Half decades from 1e-16 to 1e2."""


@record
class CapacityParams:
    """Options of the capacity analysis."""

    metrics: tuple[str, ...] | None = None
    """Which metrics, by name; null is all of them. Where `trace`, `frobenius_norm`, `participation_ratio`, `trace_A`
    and `trace_G` are all that is asked, nothing is decomposed."""
    rank_tolerance: float | None = None
    """Eigenvalues of F = G ⊗ A above this fraction of the largest count towards the rank; null takes
    max(n, m) · ε of the accumulators' precision, the usual numerical rank. A or G with an eigenvalue below it, over
    their own largest, is singular."""
    quantile_levels: tuple[float, ...] = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
    """Which quantiles of the eigenvalues, each from 0 (the smallest) to 1 (the largest)."""
    top_k: int = 10
    """How many of the largest eigenvalues are listed."""
    density_bins: int = 32
    """Bins of the density over the 16 decades below the largest eigenvalue."""
    damping_grid: tuple[float, ...] | None = None
    """λ of the curve of the effective dimension, in absolute numbers; null takes half decades from 1e-16 to 1e2,
    the same for every model, so that a curvature that has shrunk as a whole is seen to have."""
    cross_check: Literal["ggn"] | None = None
    """`ggn` adds trace and largest eigenvalue of the exact Gauss-Newton matrix over the same data, of each layer's
    block and of the whole model; it needs the model, and passes over the data of its own."""
    cross_check_probes: int = 32
    """Random probes of the trace: its standard error falls with their root."""
    cross_check_iterations: int = 20
    """Most products per block on the way to its largest eigenvalue, each of which pulls back three times; 0 takes
    the trace alone."""

    token_importance: str | None = None
    """Name of a layer whose outputs are a vocabulary's tokens, such as `lm_head`: the exact diagonal of its G, by which
    tokens are pruned, is kept as an artifact. Of a head whose weight is the table's too there is none; the summary
    says so."""

    def __post_init__(self) -> None:
        """Refuse unknown metrics and numbers outside their meaning."""
        if self.rank_tolerance is not None and not 0 <= self.rank_tolerance < 1:
            raise FieldError("rank_tolerance", f"is {self.rank_tolerance}; take a fraction in [0, 1), or null")
        if self.metrics is not None:
            unknown = [name for name in self.metrics if name not in METRICS]
            if unknown or not self.metrics:
                said = f"holds `{unknown[0]}`" if unknown else "is empty"
                near = suggestion(unknown[0], METRICS) if unknown else ""
                raise FieldError("metrics", f"{said}; take null for all, or some of {', '.join(METRICS)}{near}")
        wrong = [level for level in self.quantile_levels if not 0 <= level <= 1]
        if wrong or len(self.quantile_levels) > MAX_GRID:
            said = f"holds {wrong[0]}" if wrong else f"has {len(self.quantile_levels)} levels"
            raise FieldError("quantile_levels", f"{said}; take at most {MAX_GRID} numbers from 0 to 1")
        if not 0 <= self.top_k <= MAX_GRID:
            raise FieldError("top_k", f"is {self.top_k}; take 0 to {MAX_GRID}")
        if not 1 <= self.density_bins <= MAX_GRID:
            raise FieldError("density_bins", f"is {self.density_bins}; take 1 to {MAX_GRID}")
        grid = self.damping_grid
        if grid is not None:
            wrong = [value for value in grid if not 1e-30 <= value <= 1e30]
            if wrong or not 1 <= len(grid) <= MAX_GRID or sorted(set(grid)) != list(grid):
                counted = f"has {len(grid)} numbers" if not 1 <= len(grid) <= MAX_GRID else "does not ascend"
                said = f"holds {wrong[0]}" if wrong else counted
                raise FieldError(
                    "damping_grid", f"{said}; take 1 to {MAX_GRID} ascending numbers between 1e-30 and 1e30, or null"
                )
        require_cross_check(self.cross_check_probes, self.cross_check_iterations)

    @property
    def needs_model(self) -> str | None:
        """The option that factors of an earlier job cannot serve, as the document says it."""
        return None if self.cross_check is None else f"capacity.cross_check: {self.cross_check}"

    @property
    def reads_all_factors(self) -> bool:
        """Whether a rank reads factors of layers that belong to others."""
        return self.token_importance is not None

    @property
    def selected(self) -> frozenset[str]:
        """The metrics asked for."""
        return frozenset(METRICS if self.metrics is None else self.metrics)

    @property
    def decomposition(self) -> Literal["none", "values"]:
        """Decomposition of the factors that the selected metrics need."""
        bare = self.selected <= set(WITHOUT_DECOMPOSITION) and not (self.cross_check and self.cross_check_iterations)
        return "none" if bare else "values"


@record
class CapacitySummary(Brief):
    """The whole model."""

    coverage: Coverage
    """Parameters that are covered and that are not, with reasons."""
    layers: int
    """Layers that are covered."""
    branches: Mapping[str, int]
    """Covered layers by `branch`: they add up to `layers`."""
    eigendecompositions: int
    """Layers whose factors have eigenvalues that were computed."""
    dimension: int
    """Eigenvalues of all covered layers."""
    trace: float | None
    """Sum over layers."""
    effective_dimension: float | None
    """Sum over layers of Σ λᵢ/(λᵢ + λ)."""
    effective_dimension_share: float | None
    """`effective_dimension` over `dimension`."""
    effective_rank: float | None
    """Sum over layers."""
    logdet_damped: float | None
    """Sum over layers of log det(F + λI)."""
    damping: float
    """`stabilisation.damping`."""
    damping_mode: str
    """`stabilisation.damping_mode`."""
    damping_split: str
    """`stabilisation.damping_split`."""
    kappa_max: float | None
    """`stabilisation.kappa_max`."""
    fisher: str
    """`collection.fisher`."""
    sharing: str
    """`collection.sharing`."""
    update_freq: int
    """`collection.update_freq`."""
    identity_layers: tuple[str, ...]
    """Layers where λ exceeds λ_max: the preconditioner is the identity there."""
    not_converged: Mapping[str, int] | None
    """Layers whose metric has not converged, by metric; null without `collection.nested`."""
    model: ModelCapacity
    """Metrics of all covered layers as one matrix."""
    cross_check: CrossCheck | None
    """The exact curvature of all covered parameters together, for `cross_check`."""
    token_importance: TokenImportance | None
    """Null without `token_importance`."""


_COLUMNS = (
    SHAPE,
    Column("metrics.trace", "trace"),
    Column("metrics.effective_dimension", None, "Effective dim.", "Σ λᵢ/(λᵢ + λ): directions with more curvature than "
           "the damping; the bar is their share of all directions", whole="metrics.dimension"),
    Column("metrics.effective_rank", "eff. rank", "Effective rank", "Exponential of the spectrum's entropy; the bar is "
           "its share of all directions", whole="metrics.dimension", converging=True),
    Column("metrics.effective_dimension", "eff. dim."),
    Column("metrics.effective_dimension_share", "share", form="percent"),
    Column("metrics.decay.exponent", "decay", "Decay", "Exponent α of λ_k ∝ k^−α"),
    Column("metrics.trace", None, "Trace", "Sum of all eigenvalues of F = G ⊗ A; the bar compares layers",
           relative=True),
    Column("metrics.kappa", "κ", "κ", "λ_max/λ_min of F; ∞ where F is singular", counted="metrics.rank"),
)  # fmt: skip
_TOKENS = (
    "{token_importance.tokens_for_99_percent} of {token_importance.tokens} tokens carry 99% of the trace of G of "
    "{token_importance.layer:names}"
)
_TRACES = (
    "trace {cross_check.kronecker_trace} where the exact one is {cross_check.trace} ({cross_check.trace_low:-} to "
    "{cross_check.trace_high:-})"
)
_LARGEST, _TOP = (
    ", largest eigenvalue {cross_check.kronecker_spectral_norm:-} where it is ",
    "{cross_check.top_eigenvalue}",
)
_FIGURES = (
    Figure("Effective dimension", "{effective_dimension:4}", "of {dimension} directions",
           "The number of directions in which the loss has more curvature than the damping.",
           ("effective dimension {effective_dimension} of {dimension:count}",
            "effective dimension {effective_dimension}")),
    Figure("Share of directions", "{effective_dimension_share:percent}", "effective dimension / dimension",
           "The other directions have less curvature than the damping."),
    Figure("Sum of effective ranks", "{effective_rank:4}", "over layers", "A layer's effective rank is the size of a "
           "flat spectrum with the same entropy: the more even the spectrum, the larger.",
           ("effective rank {effective_rank} summed over layers, {model.effective_rank} of the model as a whole",
            "effective rank {effective_rank}")),
    Figure("Trace", "{trace:4}", "total curvature", "The sum of all eigenvalues: the larger, the more the loss changes "
           "under small random changes of the weights."),
    Figure(line="approximate, as a sketch stands for G of {model.approximate:names}"),
    Figure(line="eigenvalues estimated between bounds in {model.estimated:names}"),
    Figure(line="effective rank not converged in {not_converged.effective_rank:layer|layers} (*): take more examples"),
    Figure(line=("no token importance of {token_importance.layer:names}: {token_importance.why}", _TOKENS)),
    Figure(line=(f"{_TRACES}{_LARGEST}{{cross_check.top_converged:=True}}{_TOP}", f"{_TRACES}{_LARGEST}at least {_TOP}",
                 _TRACES)),
)  # fmt: skip


def _sentence(options: Mapping[str, Any]) -> str:
    text = "the spectra, traces and effective dimensions of each layer's block"
    if options["cross_check"] is None:
        return text
    return (
        f"{text}, beside the trace (by {options['cross_check_probes']} random probes) and the largest eigenvalue of "
        "the exact Gauss-Newton matrix"
    )


CAPACITY = Analysis(
    kind="capacity",
    title="Capacity metrics",
    description="Ranks, effective dimension, condition, log-determinant and spectrum of each layer and of the model.",
    implementation="engine.analyses.capacity:Capacity",
    params=CapacityParams,
    metrics=CapacityMetrics,
    summary=CapacitySummary,
    stages=(
        AnalysisStage(
            name="cross_check",
            planned="cross_check",
            share=0.9,
            before_decomposition=True,
            announced_by=("stages", "cross_check"),
        ),
        AnalysisStage(name="capacity", planned="capacity", share=0.1),
    ),
    layerwise=True,
    columns=_COLUMNS,
    figures=_FIGURES,
    sentence=_sentence,
    opens=True,
)
