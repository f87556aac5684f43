"""`capacity`: how many directions of a layer the loss really curves in, from the two spectra."""

from catalog.analysis import Analysis, Coverage
from catalog.nested import NestedCapacity
from catalog.record import FieldError, record


@record
class CapacityParams:
    """Options of the capacity analysis."""

    rank_tolerance: float | None = None
    """Eigenvalues of F = G ⊗ A above this fraction of the largest count towards the rank; null takes
    max(n, m) · ε of the accumulators' precision, the usual numerical rank."""

    def __post_init__(self) -> None:
        """Refuse a tolerance outside [0, 1)."""
        if self.rank_tolerance is not None and not 0 <= self.rank_tolerance < 1:
            raise FieldError("rank_tolerance", f"is {self.rank_tolerance}; take a fraction in [0, 1), or null")


@record
class CapacityMetrics:
    """Metrics of F = G ⊗ A; undefined values are null."""

    form: str
    """`kronecker` (A dense), `diagonal` (A diagonal) or `block` (exact block in G, A = 1)."""
    dimension: int
    """Rows of F: eigenvalues there are."""
    trace: float
    frobenius_norm: float
    spectral_norm: float
    stable_rank: float | None
    """‖F‖_F² / ‖F‖₂²."""
    participation_ratio: float | None
    """(Σλ)² / Σλ²."""
    effective_rank: float | None
    """exp of the entropy of λ/Σλ (Roy & Vetterli 2007)."""
    rank: int
    """Eigenvalues above the tolerance."""
    logdet: float | None
    """log det F, undamped; null where F is singular."""
    damping: float | None
    """λ of the damped metrics below, absolute."""
    logdet_damped: float | None
    """log det(F + λI)."""
    effective_dimension: float | None
    """Σ λᵢ/(λᵢ + λ) over the eigenvalues of F."""
    effective_dimension_factored: float | None
    """The same under factored damping (A + λ_A I) ⊗ (G + λ_G I): another quantity, what K-FAC inverts."""
    effective_dimension_share: float | None
    """effective_dimension / dimension."""
    kappa: float | None
    """λ_max/λ_min of F; null where F is singular."""
    kappa_clipped: float | None
    """The same after both factors are clipped at κ_max."""
    trace_A: float
    """Trace of A."""
    trace_G: float
    """Trace of G."""
    effective_rank_A: float | None
    """Entropy effective rank of A."""
    effective_rank_G: float | None
    """Entropy effective rank of G."""
    nested: tuple[NestedCapacity, ...] | None
    """Three of these at each sample size up to the whole, for `collection.nested`; else null."""


@record
class CapacitySummary:
    """The whole model."""

    coverage: Coverage
    layers: int
    eigendecompositions: int
    dimension: int
    trace: float
    effective_dimension: float
    effective_dimension_share: float | None
    effective_rank: float
    """Sum over layers."""
    logdet_damped: float
    damping: float
    damping_mode: str
    kappa_max: float | None
    fisher: str
    sharing: str
    update_freq: int
    identity_layers: tuple[str, ...]
    """Layers where λ exceeds λ_max: the preconditioner is the identity there."""


CAPACITY = Analysis(
    kind="capacity",
    title="Capacity metrics",
    description="Effective rank and dimension, stable rank, condition and log-determinant of each layer.",
    function="engine.analyses.capacity:measure_capacity",
    params=CapacityParams,
    metrics=CapacityMetrics,
    summary=CapacitySummary,
)
