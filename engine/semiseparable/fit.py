"""The fit of T + U Vᵀ to a dense matrix: masked alternating least squares.

The band is free: only entries with |i − j| > 1 must be met by U Vᵀ, and T = band(H − U Vᵀ) is exact then. With V
orthonormal and the three columns B_i = {i − 1, i, i + 1} that row i need not meet,

    u_i = (I − Σ_{j∈B_i} v_j v_jᵀ + μ I)⁻¹ ((H V)_i − Σ_{j∈B_i} H_ij v_j),       μ = 1e-13

which is one product with H and, by Woodbury's formula, N systems of three; the same for V with Hᵀ. The factor that is
held fixed is made orthonormal before each half, or its Gram matrix would square the condition. Two starts, the SVD
of H without its band, cut off, and that of H: either can end in a saddle that the other avoids. The first is the widely
copied recipe, which spends its rank on the hole that it cuts into the diagonal.

References:
    Srebro & Jaakkola (2003), Weighted low-rank approximations
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.linalg.panels import frobenius_norm
from engine.semiseparable.semiseparable_matrix import default_rank, read_whole, require_matrix, require_rank
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank

SWEEPS = 60
"""The most sweeps from each of the two starts."""
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


class TridiagonalFit:
    """Fits of T + U Vᵀ to one dense matrix, at one rank after another.

    Memory:
        H, a copy without its band during a start, and 4 N r numbers. Up to 512 rows the
        singular vectors of both starts, 4 N², which serve every rank.
    """

    def __init__(self, matrix: Tensor, after_sweep: Callable[[], None] | None = None) -> None:
        """Check the matrix.

        Args:
            matrix: H, shape (N, N), float or complex.
            after_sweep: Called after each sweep, where the caller may raise to stop.

        Raises:
            NonFiniteFactor: If it holds NaN or Inf.
            WrongShape: If it is not square.
        """
        self.matrix = require_matrix(matrix)
        self._after_sweep = after_sweep
        self._starts: list[tuple[Tensor, Tensor]] = []

    def at(self, ranks: int | tuple[int, ...] | None = None, sweeps: int = SWEEPS) -> Fitted:
        """Return the fit of a rank.

        Args:
            ranks: r, or the ranks of several levels, whose columns are those of one U and V of their sum; None takes
                ⌈log₂ N⌉.
            sweeps: The most from each start.

        Returns:
            The matrix in H's precision, and its errors.

        Raises:
            MatrixRefused: If a rank is not a whole number, or below 1, or one alone above N.
        """
        H, n = self.matrix, self.matrix.shape[0]
        given = ranks if isinstance(ranks, (tuple, list)) else (default_rank(n) if ranks is None else ranks,)
        levels = tuple(read_whole(each, "rank", 1 if len(given) > 1 else None) for each in given)
        rank = require_rank(levels[0] if len(levels) == 1 else min(sum(levels), n), n)
        levels = levels if sum(levels) == rank else (rank,)
        ends = [_alternate(H, *start, sweeps, self._after_sweep) for start in self._started(rank)]
        U, V, errors = min(ends, key=lambda end: end[2][-1])
        norm = frobenius_norm(H) or 1.0
        band = [
            H.diagonal(offset)
            - (U[max(-offset, 0) : n - max(offset, 0)] * V[max(offset, 0) : n - max(-offset, 0)]).sum(1)
            for offset in (0, -1, 1)
        ]
        fitted = TridiagonalLowRank(band[0], band[1], band[2], U, V, ranks=levels)
        return Fitted(matrix=fitted, relative_error=errors[-1] / norm, errors=tuple(each / norm for each in errors))

    def _started(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """U and V of both starts; what was found for a larger rank serves a smaller one."""
        if not self._starts or self._starts[0][0].shape[1] < rank:
            n = self.matrix.shape[0]
            most = n if n <= _EXACT_ROWS else rank
            self._starts = [_truncated_svd(each(self.matrix), most) for each in (_without_band, lambda whole: whole)]
        return [(U[:, :rank], V[:, :rank]) for U, V in self._starts]


def fit_tridiagonal_low_rank(matrix: Tensor, ranks: int | tuple[int, ...] | None = None) -> Fitted:
    """Fit T + U Vᵀ to a dense matrix once; arguments and errors as ``TridiagonalFit`` has them."""
    return TridiagonalFit(matrix).at(ranks)


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
    H: Tensor, U: Tensor, V: Tensor, sweeps: int, after_sweep: Callable[[], None] | None
) -> tuple[Tensor, Tensor, list[float]]:
    """Sweeps from a start, until one gains nothing."""
    errors = [_off_band_norm(H, U, V)]
    least_gain = max(_LEAST_GAIN, 4 * torch.finfo(H.dtype).eps)
    for _ in range(sweeps):
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
    zero = fixed.new_zeros(1, r)
    padded = torch.cat([zero, fixed, zero]).conj()
    entries = torch.stack([torch.nn.functional.pad(H.diagonal(offset), _ends(offset)) for offset in (-1, 0, 1)], 1)
    rows = []
    for start in range(0, n, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, n)
        near = torch.stack([padded[start + shift : stop + shift] for shift in range(3)], 2).to(wide)
        side = product[start:stop].to(wide) - (near @ entries[start:stop, :, None].to(wide))[:, :, 0]
        rows.append(_solved(near, side).to(H.dtype))
    return torch.cat(rows)


def _ends(offset: int) -> tuple[int, int]:
    """Zeros before and after a diagonal, so that its entry of row i stands at i."""
    return (max(-offset, 0), max(offset, 0))


def _solved(near: Tensor, side: Tensor) -> Tensor:
    """Solve ((1 + μ) I − C Cᴴ) u = b for C (k, r, 3) and b (k, r), by systems of three: Woodbury's formula.

    Where three rows hold a whole direction it is free, and gets what b has of it, which is nothing but rounding.
    """
    ridge = 1 + _RIDGE
    small = ridge * torch.eye(3, dtype=near.dtype, device=near.device) - near.mH @ near
    inside = near.mH @ side[:, :, None]
    factor, failed = torch.linalg.cholesky_ex(small)
    solution = torch.cholesky_solve(inside, factor)
    bad = (failed != 0) | ~torch.isfinite(solution).all(dim=(1, 2))
    if bool(bad.any()):
        solution[bad] = torch.linalg.pinv(small[bad], hermitian=True, rtol=math.sqrt(_RIDGE)) @ inside[bad]
    return (side + (near @ solution)[:, :, 0]) / ridge


def _off_band_norm(H: Tensor, U: Tensor, V: Tensor) -> float:
    """‖H − U Vᵀ‖_F without the band, a few rows at a time."""
    norms, n = [], H.shape[0]
    for start in range(0, n, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, n)
        rest = H[start:stop] - U[start:stop] @ V.mT
        for offset in (-1, 0, 1):
            rest.diagonal(start + offset).zero_()
        norms.append(frobenius_norm(rest))
    return math.hypot(*norms)
