"""Eigendecomposition of one factor, with or without vectors, by a list of solvers that never skips a layer silently.

The arithmetic is float64 whatever the factor's precision. Float32 gives eigenvalues to about
1e-6·λ_max, so it is allowed only to a caller who looks at nothing below 1e-4·λ_max
(``smallest_ratio``); the damping and κ_max that are the default look further down. A covariance of
T positions has rank at most T, so the n − T smallest values are zero exactly, and rounding below
zero is cut off. ``Decomposition.precision`` says which it was.

Rungs, in order; those that were tried are in the layer's record:

1. ``device_float32``: torch on the factor's own device, where float32 suffices;
2. ``device_float64``: the same in float64;
3. ``host_gram``: values of a factor kept in float64 with T ≤ n/4, from T columns of its pivoted Cholesky factor;
4. ``host_float64``: torch on the CPU (LAPACK syevd, vectors in place);
5. ``host_syevr``: relatively robust representations, another algorithm whose workspace is O(n);
6. ``host_in_place``: QR iteration, which overwrites one copy by the vectors, and takes longest;
7. ``host_float32_in_place``: the same in float32, where that suffices;
8. ``jittered``: the fourth again on M + ε·mean(diag)·I, shifted back.

Rungs 4 to 6 differ by rounding alone. What a rung gives is checked against the factor: the sum of
the values and of their squares against trace and Frobenius norm, vectors by products with probes.

References:
    Dhillon, Parlett & Vömel (2006), The design and implementation of the MRRR algorithm
"""

import math
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from engine.errors import NonFiniteFactor, NotConverged
from engine.linalg.eigensolvers import LARGEST, Need, RungCost, Solver, solvers
from engine.memory.guard import Fallback, FallbackFailed, Guard, Refused

SINGLE_SUFFICES = 1e-4
"""Float32 does for a caller who looks at no eigenvalue below this share of the largest."""
_ROWS_AT_ONCE = 128
_PROBES = 8
_LEAST_NUMBER = 5e-324
"""Distance of neighbouring denormal numbers of float64."""
_FULL_PROBES = 128
"""Up to so many rows the residual is that of the whole matrix, not of probes."""


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """The eigenvalues of one factor, and its basis where that was asked for."""

    values: Tensor
    """(n,) float64 on the host, ascending; what is known to be zero is zero."""
    signed: Tensor | None = None
    """(n,) float64 on the host: those of a matrix (n, n) as it was given, whose rounding leaves zeros on either side of
    zero; None where none can be negative."""
    vectors: Tensor | None
    """Orthonormal, one a column, on the device that made them: (n, n), or of a structured side (n, r) for the last
    r values. None where none were asked for, and of a diagonal factor, whose basis is the standard one."""
    rungs: tuple[str, ...]
    """Rungs that were tried, the last of which gave this."""
    refused: tuple[Refused, ...] = ()
    """Rungs that were passed over, as too little memory was free."""
    ended_in: str | None = None
    """Rung of the device that an earlier attempt ended in, so that those of the device were passed over; else None."""
    residual: float | None
    """‖A − QΛQᵀ‖_F / ‖A‖_F, from probes above 128 rows; None without vectors."""
    precision: str
    """Precision of the arithmetic: `float64` or `float32`."""


@cache
def rungs(
    n: int,
    *,
    need: Need,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    smallest_ratio: float = 0.0,
    rank_bound: int | None = None,
) -> tuple[RungCost, ...]:
    """Return the cost of each solver beside the factor itself, the preferred first; the device's alone beyond LAPACK.

    Args:
        n: Rows.
        need: Whether vectors are asked for.
        device: Where the arithmetic is wanted.
        dtype: Precision that the factor is kept in.
        smallest_ratio: As for ``decompose``.
        rank_bound: As for ``decompose``.

    Returns:
        Name, bytes on device and host with their formula, and equivalent operations of every solver that
        ``decompose`` would try, in its order.
    """
    single = smallest_ratio >= SINGLE_SUFFICES
    return tuple(each.cost for each in solvers(n, need, device, dtype, single=single, rank_bound=rank_bound))


def kept_dtype(factor: torch.dtype) -> torch.dtype:
    """Return the precision that vectors are spilled in: float32, unless the factor itself is kept in float64.

    Args:
        factor: Precision of the factor.

    Returns:
        ``torch.float64`` or ``torch.float32``.
    """
    return torch.float64 if factor == torch.float64 else torch.float32


def decompose(  # noqa: PLR0913 - each is a fact of its own
    factor: Tensor,
    layer: str,
    *,
    host: Tensor | None = None,
    need: Need = "values",
    rank_bound: int | None = None,
    smallest_ratio: float = 0.0,
    guard: Guard | None = None,
    begin: str | None = None,
    what: str = "the eigendecomposition",
) -> Decomposition:
    """Decompose a positive semidefinite ``factor``, which is left as it is.

    Args:
        factor: (n, n) symmetric, or (n,) the diagonal of a diagonal matrix.
        layer: Name for the messages.
        host: The same factor on the host, where there is one: solvers there read no device that may have failed.
        need: Values alone take a workspace of O(n); vectors 2 n² more.
        rank_bound: Most nonzero eigenvalues there can be; None if that is not known.
        smallest_ratio: Smallest eigenvalue that the caller looks at, over the largest; 0 looks at all.
        guard: Knows what memory is free; None assumes that every solver fits.
        begin: The solver that a plan chose to begin with; None begins with the first that fits.
        what: The work, for messages.

    Returns:
        Values (n,) and, where asked for, vectors, with the solvers tried and the residual.

    Memory:
        The cost in ``rungs`` of the solver that is taken.

    Raises:
        NonFiniteFactor: If the factor holds NaN or Inf.
        NotConverged: If every solver failed, or a factor on the host is beyond LAPACK.
        BudgetExceeded: If none fits into what is free.
    """
    if is_diagonal(factor):
        if not bool(torch.isfinite(factor).all()):
            raise _not_finite(factor, layer)
        values = torch.sort(factor.to("cpu", torch.float64)).values.clamp_min_(0)
        return Decomposition(values=values, vectors=None, rungs=("diagonal",), residual=None, precision="float64")
    size = factor.shape[0]
    single = smallest_ratio >= SINGLE_SUFFICES
    ladder = solvers(size, need, factor.device, factor.dtype, single=single, rank_bound=rank_bound)
    if ladder and begin == solvers(size, need, factor.device, factor.dtype, single=single)[0].cost.name:
        # nothing was passed over; how many rows would enter, a plan may not have known
        begin = None
    if not ladder:
        raise NotConverged(
            f"layer `{layer}`: a {size}×{size} factor on the host is beyond LAPACK's 32-bit indices, which reach "
            f"{LARGEST} rows; take `woodbury.approximate: true`, by which a head's G of that size is sketched and "
            "never made, or a GPU with memory for it",
            layer=layer,
        )
    expected = _Expected.of(factor, need)
    if not math.isfinite(expected.norm):
        raise _not_finite(factor, layer)
    if expected.norm > torch.finfo(torch.float64).max / expected.unit:
        raise NonFiniteFactor(
            f"layer `{layer}`: eigenvalues must be below {torch.finfo(torch.float64).max:.2g}, the largest of float64 "
            f"(got a matrix with {expected.unit:.3g} on its diagonal); divide it by a power of two",
            layer=layer,
        )
    own = factor if host is None else host
    steps = [
        Fallback(
            name=solver.cost.name,
            formula=solver.cost.formula,
            device_bytes=solver.cost.device_bytes,
            host_bytes=solver.cost.host_bytes,
            run=partial(_attempt, solver, factor if solver.cost.device_bytes else own, expected, rank_bound),
        )
        for solver in ladder
    ]
    watch = guard or Guard.unlimited()
    try:
        found = watch.run_with_fallbacks(steps, what=what, layer=layer, stage="decomposition", begin=begin)
    except FallbackFailed as error:
        raise NotConverged(
            f"layer `{layer}`: no eigenvalue solver converged on a {size}×{size} factor ({error})", layer=layer
        ) from error
    return replace(found.value, rungs=found.taken, refused=found.refused)


def is_diagonal(factor: Tensor) -> bool:
    """Return whether a factor, or a sum of one, is held as its diagonal (n,), not as (n, n) or (groups, n, n)."""
    return factor.ndim == 1


def _not_finite(factor: Tensor, layer: str) -> NonFiniteFactor:
    # a few rows at a time: the answer for the whole would take as much as the factor
    bad = sum(int((~torch.isfinite(rows)).sum()) for rows in torch.split(factor, _ROWS_AT_ONCE))
    return NonFiniteFactor(
        f"layer `{layer}`: the factor holds NaN or Inf in {bad} of its {factor.numel()} numbers", layer=layer
    )


@dataclass(frozen=True)
class _Expected:
    """The values that a factor's decomposition must agree with, in units of its largest diagonal entry."""

    unit: float
    trace: float
    norm: float
    probes: Tensor | None
    """(n, k) float64 on the host."""
    images: Tensor | None
    """The factor times them."""

    @classmethod
    def of(cls, factor: Tensor, need: Need) -> "_Expected":
        size = factor.shape[0]
        diagonal = factor.diagonal().to(torch.float64)
        # squares of entries near the ends of float64 are beyond it
        unit = float(diagonal.abs().max()) if size else 0.0
        unit = unit or 1.0
        probes = _probes(size).to(factor.device) if need == "vectors" else None
        squares = torch.zeros((), dtype=torch.float64, device=factor.device)
        images = None if probes is None else torch.empty_like(probes)
        for start in range(0, size, _ROWS_AT_ONCE):
            rows = factor[start : start + _ROWS_AT_ONCE].to(torch.float64) / unit
            squares += torch.linalg.vector_norm(rows).square()
            if images is not None and probes is not None:
                images[start : start + _ROWS_AT_ONCE] = rows @ probes
        trace = float((diagonal / unit).sum())
        on_host = (None if each is None else each.to("cpu") for each in (probes, images))
        return cls(unit, trace, math.sqrt(float(squares)), *on_host)

    def values_agree(self, values: Tensor, tolerance: float) -> bool:
        """Whether ``values`` add up to the trace, and their squares to the squared Frobenius norm."""
        scaled = values / self.unit
        return bool(torch.isfinite(values).all()) and (
            abs(float(scaled.sum()) - self.trace) <= tolerance * max(abs(self.trace), self.norm)
            and abs(float(scaled.norm()) - self.norm) <= tolerance * self.norm
        )

    def residual(self, values: Tensor, vectors: Tensor) -> tuple[float, float]:
        """‖A − QΛQᵀ‖/‖A‖ and ‖I − QQᵀ‖/√n, by Frobenius norm, estimated from products with the probes."""
        if self.probes is None or self.images is None:
            raise ValueError("no probes were drawn")
        probes, images = (each.to(vectors.device, vectors.dtype) for each in (self.probes, self.images))
        inside = vectors.T @ probes
        unitary = float((vectors @ inside - probes).norm()) / float(probes.norm())
        scaled = (values / self.unit).to(vectors.device, vectors.dtype)
        # probes of independent ±1 give the squared norm of a matrix in the mean, over their number
        missed = float((vectors @ (scaled[:, None] * inside) - images).norm()) / math.sqrt(self._count)
        return (missed / self.norm if self.norm > 0 else missed), unitary

    @property
    def _count(self) -> int:
        """Divisor of the squared norm of a product with the probes."""
        return 1 if self.probes is None or self.probes.shape[0] <= _FULL_PROBES else self.probes.shape[1]


def _probes(size: int) -> Tensor:
    """Signs (n, 8), the same every time; the identity for a small matrix."""
    return torch.eye(size, dtype=torch.float64) if size <= _FULL_PROBES else signs(size)


def signs(size: int) -> Tensor:
    """Return independent ±1, shape (size, 8), float64, the same every time."""
    signs = torch.randint(0, 2, (size, _PROBES), generator=torch.Generator().manual_seed(size))
    return signs.to(torch.float64).mul_(2).sub_(1)


def _attempt(solver: Solver, factor: Tensor, expected: _Expected, rank_bound: int | None) -> Decomposition:
    """Return the solver's decomposition.

    Raises:
        FallbackFailed: If it fails, or its result is not the factor's: some library versions err without an error.
    """
    size = factor.shape[0]
    # values of a matrix of denormal numbers are themselves rounded to multiples of the least of them
    coarse = size * _LEAST_NUMBER / expected.unit
    tolerance = 100 * math.sqrt(size) * torch.finfo(solver.precision).eps + coarse
    solved, vectors = solver.solve(factor)
    signed = solved.to("cpu", torch.float64)
    values = signed.clone()
    if not expected.values_agree(values, tolerance):
        raise FallbackFailed("its values are not those of the factor's trace and norm")
    residual = None
    if vectors is not None:
        residual, unitary = expected.residual(values, vectors)
        # comparisons that NaN fails
        if not (residual <= tolerance and unitary <= tolerance):
            raise FallbackFailed(
                f"its vectors give the factor back to {residual:.2g}, and are orthonormal to {unitary:.2g}"
            )
    values.clamp_min_(0)
    if rank_bound is not None and rank_bound < size:
        values[: size - rank_bound] = 0
    return Decomposition(
        values=values,
        signed=signed,
        vectors=vectors,
        rungs=(solver.cost.name,),
        residual=residual,
        precision=str(solver.precision).removeprefix("torch."),
    )
