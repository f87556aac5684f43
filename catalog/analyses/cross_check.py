"""The cross-check: what the curvature itself says of a layer, beside what its Kronecker factors say."""

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


def require_cross_check(probes: int, iterations: int) -> None:
    """Refuse numbers of probes and iterations outside their ranges.

    Args:
        probes: Random vectors of the trace's estimate, 1 to 4,096.
        iterations: Products of the Lanczos iteration, 0 (none) to 1,000.

    Raises:
        FieldError: If one is out of range; it names the field.
    """
    if not 1 <= probes <= MAX_PROBES:
        raise FieldError("cross_check_probes", f"is {probes}; take 1 to {MAX_PROBES}")
    if not 0 <= iterations <= MAX_ITERATIONS:
        raise FieldError("cross_check_iterations", f"is {iterations}; take 0 (the trace alone) to {MAX_ITERATIONS}")
