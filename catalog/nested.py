"""Nested sample sizes: one layer's metrics over the first examples of the data, ever more of them."""

from catalog.record import record


@record
class NestedTraces:
    """Traces of the factors that the first examples give."""

    examples: int
    """Examples that entered them."""
    trace_A: float
    trace_G: float
    trace: float
    """Trace of G ⊗ A."""


@record
class NestedCapacity:
    """Capacity metrics of F = G ⊗ A that the first examples give."""

    examples: int
    """Examples that entered it."""
    trace: float
    participation_ratio: float | None
    """(Σλ)² / Σλ²."""
    effective_rank: float | None
    """exp of the entropy of λ/Σλ."""
