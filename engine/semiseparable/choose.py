"""The choice of a structure for a matrix, by measurement: each candidate is fitted, and its error is looked at.

    within a number of bytes    the candidate with the smallest error among those that take no more
    within a tolerance          the candidate with the fewest bytes among those whose error is no more

Candidates are T + U Vᵀ at one or several ranks, and block SSS at several sizes of the block. Where none takes fewer
bytes than the dense matrix, or meets the tolerance within them, the matrix stays dense, and the choice says so.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.semiseparable.block_sss import BlockSSS
from engine.semiseparable.construct_sss import construct_sss
from engine.semiseparable.fit import fit_tridiagonal_low_rank
from engine.semiseparable.semiseparable_matrix import MatrixRefused, SemiseparableMatrix, default_rank, require_matrix
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank

BLOCKS = (4, 8, 16, 32)
"""Rows of a block that are tried."""
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A structure that was fitted."""

    name: str
    """Such as `tridiagonal_lowrank, rank 11` or `block_sss, block 16, order 3`."""
    matrix: SemiseparableMatrix
    relative_error: float
    """By Frobenius norm, measured against the dense matrix."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return self.matrix.size_bytes


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The structure that was chosen; None where the matrix stays dense."""

    chosen: Candidate | None
    why: str
    """One sentence, with the figures that decided."""
    losers: tuple[Candidate, ...]


def choose(
    matrix: Tensor,
    *,
    budget_bytes: int | None = None,
    tolerance: float | None = None,
    rank: int | None = None,
    after_sweep: Callable[[], None] | None = None,
) -> Choice:
    """Fit the candidates to a matrix, and choose one.

    Args:
        matrix: Shape (N, N).
        budget_bytes: The most bytes that a candidate may take; None takes those of T + U Vᵀ at ``rank``. With a
            tolerance, those of the dense matrix bound it in any case.
        tolerance: The largest relative error; None chooses by error alone.
        rank: r of T + U Vᵀ; None takes ⌈log₂ N⌉.
        after_sweep: Called between steps of the fits, where the caller may raise to stop.

    Returns:
        The choice, with every other candidate.

    Raises:
        MatrixRefused: If the tolerance is not between 0 and 1.
        NonFiniteFactor: If the matrix holds NaN or Inf.
        WrongShape: If it is not square.

    Memory:
        The dense matrix twice, and the candidates.
    """
    dense = require_matrix(matrix)
    if tolerance is not None and not 0 < tolerance < 1:
        raise MatrixRefused(f"`tolerance` must be above 0 and below 1 (got {tolerance})")
    n, item = dense.shape[0], dense.element_size()
    first_rank = min(rank or default_rank(n), n)
    allowed = item * (3 * n - 2 + 2 * n * first_rank) if budget_bytes is None else budget_bytes
    fitted = list(
        _within_tolerance(dense, tolerance, first_rank, after_sweep)
        if tolerance is not None
        else _within_bytes(dense, allowed, first_rank, after_sweep)
    )
    smaller = [each for each in fitted if each.size_bytes < dense.nbytes]
    if tolerance is None:
        fits = [each for each in smaller if each.size_bytes <= allowed]
        best = min(fits, key=lambda each: (each.relative_error, each.size_bytes), default=None)
        why = f"dense: no structure takes fewer than the {dense.nbytes:,} bytes of the dense matrix"
        if best is not None:
            why = f"{best.name} has the smallest error within {allowed:,} bytes"
    else:
        fits = [each for each in smaller if each.relative_error <= tolerance]
        best = min(fits, key=lambda each: (each.size_bytes, each.relative_error), default=None)
        why = _why_dense(fitted, tolerance, n)
        if best is not None:
            why = f"{best.name} takes the fewest bytes within a relative error of {tolerance:g}"
    return Choice(chosen=best, why=why, losers=tuple(each for each in fitted if each is not best))


def relative_error(dense: Tensor, matrix: SemiseparableMatrix) -> float:
    """Return ‖H − A‖_F / ‖H‖_F, from columns a few at a time.

    Args:
        dense: H, shape (N, N).
        matrix: A.

    Memory:
        1024 columns three times.
    """
    n, missed, whole = dense.shape[0], 0.0, 0.0
    for start in range(0, n, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, n)
        unit = torch.zeros(n, stop - start, dtype=dense.dtype, device=dense.device)
        unit[start:stop].fill_diagonal_(1)
        columns = dense[:, start:stop]
        missed += float(torch.linalg.vector_norm(matrix.matvec(unit) - columns)) ** 2
        whole += float(torch.linalg.vector_norm(columns)) ** 2
    return math.sqrt(missed / whole) if whole > 0 else math.sqrt(missed)


def tridiagonal_candidate(
    dense: Tensor, ranks: int | tuple[int, ...], after_sweep: Callable[[], None] | None = None
) -> Candidate:
    """Return T + U Vᵀ as a candidate."""
    matrix = fit_tridiagonal_low_rank(dense, ranks, after_sweep).matrix
    return Candidate(
        name=f"{TridiagonalLowRank.kind}, rank {matrix.rank}",
        matrix=matrix,
        relative_error=relative_error(dense, matrix),
    )


def sss_candidate(dense: Tensor, block: int, *, order: int | None = None, tolerance: float | None = None) -> Candidate:
    """Return block SSS as a candidate."""
    matrix = construct_sss(dense, block=block, order=order, tolerance=tolerance)
    largest = matrix.memory_usage()["orders"]["largest"]
    return Candidate(
        name=f"{BlockSSS.kind}, block {matrix.block}, order {largest}",
        matrix=matrix,
        relative_error=relative_error(dense, matrix),
    )


def _within_bytes(
    dense: Tensor, allowed: int, rank: int, after_sweep: Callable[[], None] | None
) -> Iterator[Candidate]:
    n, item = dense.shape[0], dense.element_size()
    most = (allowed // item - 3 * n + 2) // (2 * n)
    if most >= 1:
        yield tridiagonal_candidate(dense, min(rank, most), after_sweep)
    for block in BLOCKS:
        # p + 4r + 2r²/p numbers a row
        blocks = -(-n // block)
        order = next(
            (
                r
                for r in range(min(n, 8 * block), 0, -1)
                if item * blocks * (block**2 + 4 * block * r + 2 * r * r) <= allowed
            ),
            0,
        )
        if order and block <= n:
            yield sss_candidate(dense, block, order=order)
            if after_sweep is not None:
                after_sweep()


def _within_tolerance(
    dense: Tensor, tolerance: float, rank: int, after_sweep: Callable[[], None] | None
) -> Iterator[Candidate]:
    n = dense.shape[0]
    for block in BLOCKS:
        if block <= n:
            yield sss_candidate(dense, block, tolerance=tolerance)
            if after_sweep is not None:
                after_sweep()
    # twice the rank until the error is within the tolerance, then halves between the last two
    below, above = 0, rank
    while 2 * above + 3 < n:
        found = tridiagonal_candidate(dense, above, after_sweep)
        yield found
        if found.relative_error <= tolerance:
            break
        below, above = above, 2 * above
    else:
        return
    while above - below > max(1, above // 8):
        middle = (above + below) // 2
        found = tridiagonal_candidate(dense, middle, after_sweep)
        yield found
        below, above = (below, middle) if found.relative_error <= tolerance else (middle, above)


def _why_dense(fitted: list[Candidate], tolerance: float, n: int) -> str:
    orders = [each.matrix.memory_usage()["orders"]["largest"] for each in fitted if isinstance(each.matrix, BlockSSS)]
    needed = f"order {min(orders)} of {n} would be needed" if orders else f"{n} rows are too few for a structure"
    return f"dense: {needed} for a relative error of {tolerance:g}"
