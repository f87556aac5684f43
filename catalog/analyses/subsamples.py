"""Subsamples of growing size: one layer's metrics over the first examples of the data."""

from catalog.record import record


@record
class NestedTraces:
    """Traces of the factors that the first examples give."""

    examples: int
    """Examples that entered them."""
    trace_A: float
    """Trace of A."""
    trace_G: float
    """Trace of G."""
    trace: float
    """Trace of G ⊗ A."""


@record
class NestedCapacity:
    """Capacity metrics of F = G ⊗ A that the first examples give."""

    examples: int
    """Examples that entered it."""
    trace: float
    """Sum of the eigenvalues."""
    participation_ratio: float | None
    """(Σλ)² / Σλ²."""
    effective_rank: float | None
    """exp of the entropy of λ/Σλ."""


@record
class Convergence:
    """One metric over ever more examples, with the damping of the whole throughout."""

    metric: str
    """Name of the metric."""
    examples: tuple[int, ...]
    """Sizes, ascending up to the whole."""
    values: tuple[float | None, ...]
    """The metric at each size of `examples`."""
    extrapolation: float | None
    """The value at infinitely many examples, from the last two sizes, if the error falls with 1/N; where N is below
    the dimension the truth lies further still."""
    not_converged: bool | None
    """Whether that is more than 5 % away from the last value (a log-determinant: more than 0.05 per dimension)."""
    no_extrapolation: str | None = None
    """Why `extrapolation` is null where two sizes have values: it lies outside of the metric's range."""
