"""The fit of T + U Vᵀ to a dense matrix: masked alternating least squares.

The band is free: only entries with |i − j| > 1 must be met by U Vᵀ, and T = band(H − U Vᵀ) is exact then. With V
orthonormal and the three columns B_i = {i − 1, i, i + 1} that row i need not meet,

    u_i = (I − Σ_{j∈B_i} v_j v_jᵀ + μ I)⁻¹ ((H V)_i − Σ_{j∈B_i} H_ij v_j),       μ = 1e-13

which is one product with H and N small systems; the same for V with Hᵀ. The factor that is held fixed is made
orthonormal before each half, or its Gram matrix would square the condition. Two starts, the truncated SVD of H without
its band and that of H: either can end in a saddle that the other avoids. The first start is the widely copied recipe,
which spends its rank on the hole that it cuts into the diagonal.

References:
    Srebro & Jaakkola (2003), Weighted low-rank approximations
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.semiseparable.semiseparable_matrix import default_rank, require_matrix, require_rank
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank

_SWEEPS = 60
_LEAST_GAIN = 1e-12
"""Relative, or that of rounding where H is in float32."""
_RIDGE = 1e-13
_ROWS_AT_ONCE = 2048
_EXACT_ROWS = 512
"""Rows up to which the starts are exact SVDs; above, by subspace iteration."""
_EXTRA_COLUMNS = 8
_ITERATIONS = 4


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The end of a fit."""

    matrix: TridiagonalLowRank
    relative_error: float
    """‖H − T − U Vᵀ‖_F / ‖H‖_F."""
    errors: tuple[float, ...]
    """The same after each sweep from the start that ended better, the start's own first."""


def fit_tridiagonal_low_rank(
    matrix: Tensor, ranks: int | tuple[int, ...] | None = None, after_sweep: Callable[[], None] | None = None
) -> Fitted:
    """Fit T + U Vᵀ to a dense matrix.

    Args:
        matrix: H, shape (N, N), float or complex.
        ranks: r, or the ranks of several levels, whose columns are those of one U and V of their sum; None takes
            ⌈log₂ N⌉.
        after_sweep: Called after each sweep, where the caller may raise to stop.

    Returns:
        The matrix in H's precision, and its errors.

    Raises:
        MatrixRefused: If the rank is below 1 or above N.
        NonFiniteFactor: If the matrix holds NaN or Inf.
        WrongShape: If it is not square.

    Memory:
        H, a copy without its band during the start, 4 N r numbers, and 2048 systems of r² at a time.
    """
    H = require_matrix(matrix)
    n = H.shape[0]
    levels = (default_rank(n),) if ranks is None else (ranks,) if isinstance(ranks, int) else ranks
    rank = sum(levels)
    if len(levels) == 1:
        require_rank(rank, n)
    rank = min(rank, n)
    levels = levels if sum(levels) == rank else (rank,)
    ends = []
    for without_band in (True, False):
        start = _truncated_svd(_without_band(H) if without_band else H, rank)
        ends.append(_alternate(H, *start, after_sweep))
    U, V, errors = min(ends, key=lambda end: end[2][-1])
    norm = float(torch.linalg.vector_norm(H)) or 1.0
    band = [
        H.diagonal(offset) - (U[max(-offset, 0) : n - max(offset, 0)] * V[max(offset, 0) : n - max(-offset, 0)]).sum(1)
        for offset in (0, -1, 1)
    ]
    fitted = TridiagonalLowRank(band[0], band[1], band[2], U, V, ranks=levels)
    return Fitted(matrix=fitted, relative_error=errors[-1] / norm, errors=tuple(each / norm for each in errors))


def _without_band(H: Tensor) -> Tensor:
    copied = H.clone()
    for offset in (-1, 0, 1):
        copied.diagonal(offset).zero_()
    return copied


def _truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U and V of the best matrix of a rank, or near it, with the singular values in U."""
    n = matrix.shape[0]
    if n <= _EXACT_ROWS or rank + _EXTRA_COLUMNS >= n:
        left, values, right = torch.linalg.svd(matrix)
    else:
        # the same directions in every run
        generator = torch.Generator().manual_seed(0)
        basis = torch.randn(n, rank + _EXTRA_COLUMNS, generator=generator, dtype=torch.float64)
        basis = torch.linalg.qr(matrix @ basis.to(matrix.device, matrix.dtype)).Q
        for _ in range(_ITERATIONS):
            basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.mH @ basis).Q).Q
        left, values, right = torch.linalg.svd(basis.mH @ matrix, full_matrices=False)
        left = basis @ left
    return left[:, :rank] * values[:rank].to(left.dtype), right[:rank].mT


def _alternate(
    H: Tensor, U: Tensor, V: Tensor, after_sweep: Callable[[], None] | None
) -> tuple[Tensor, Tensor, list[float]]:
    """Sweeps from a start, until one gains nothing."""
    errors = [_off_band_norm(H, U, V)]
    least_gain = max(_LEAST_GAIN, 4 * torch.finfo(H.dtype).eps)
    for _ in range(_SWEEPS):
        fixed = torch.linalg.qr(V).Q
        moved = _solve_rows(H, fixed)
        moved = torch.linalg.qr(moved).Q
        next_V = _solve_rows(H.mT, moved)
        error = _off_band_norm(H, moved, next_V)
        if after_sweep is not None:
            after_sweep()
        if not error <= errors[-1]:
            # rounding, where nothing is left to gain
            break
        gained = errors[-1] - error
        U, V = moved, next_V
        errors.append(error)
        if gained <= least_gain * error:
            break
    return U, V, errors


def _solve_rows(H: Tensor, fixed: Tensor) -> Tensor:
    """Rows u_i (N, r) for orthonormal columns (N, r), in H's precision; the small systems are solved in float64."""
    n, r = fixed.shape
    product = H @ fixed.conj()
    wide = torch.complex128 if H.is_complex() else torch.float64
    neighbours = torch.nn.functional.pad(
        torch.view_as_real(fixed).flatten(1) if H.is_complex() else fixed, (0, 0, 1, 1)
    )
    padded = torch.view_as_complex(neighbours.view(n + 2, r, 2)) if H.is_complex() else neighbours
    entries = [torch.nn.functional.pad(H.diagonal(offset), _ends(offset)) for offset in (-1, 0, 1)]
    rows = []
    for start in range(0, n, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, n)
        gram = torch.eye(r, dtype=wide, device=H.device).expand(stop - start, -1, -1) * (1 + _RIDGE)
        side = product[start:stop].to(wide)
        for shift, entry in enumerate(entries):
            near = padded[start + shift : stop + shift].to(wide)
            gram = gram - near.conj()[:, :, None] * near[:, None, :]
            side = side - entry[start:stop, None].to(wide) * near.conj()
        rows.append(_solved(gram, side).to(H.dtype))
    return torch.cat(rows)


def _ends(offset: int) -> tuple[int, int]:
    """Zeros before and after a diagonal, so that its entry of row i stands at i."""
    return (max(-offset, 0), max(offset, 0))


def _solved(gram: Tensor, side: Tensor) -> Tensor:
    """Solve Hermitian systems (k, r, r); where one has lost its rank, the least solution."""
    factor, failed = torch.linalg.cholesky_ex(gram)
    solution = torch.cholesky_solve(side[:, :, None], factor)[:, :, 0]
    bad = (failed != 0) | ~torch.isfinite(solution).all(1)
    if bool(bad.any()):
        inverse = torch.linalg.pinv(gram[bad], hermitian=True, rtol=math.sqrt(_RIDGE))
        solution[bad] = (inverse @ side[bad][:, :, None])[:, :, 0]
    return solution


def _off_band_norm(H: Tensor, U: Tensor, V: Tensor) -> float:
    """‖H − U Vᵀ‖_F without the band, a few rows at a time."""
    squares, n = 0.0, H.shape[0]
    for start in range(0, n, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, n)
        rest = H[start:stop] - U[start:stop] @ V.mT
        for offset in (-1, 0, 1):
            rest.diagonal(start + offset).zero_()
        squares += float(torch.linalg.vector_norm(rest)) ** 2
    return math.sqrt(squares)
