"""Choose a structure for a matrix by measurement: each candidate is fitted, and its error is looked at.

    within a number of bytes    the candidate with the smallest error among those that take no more
    within a tolerance          the candidate with the fewest bytes among those whose error is no more

Candidates are T + U Vᵀ at one or several ranks, and block SSS at several sizes of the block. Where none takes fewer
bytes than the dense matrix, or meets the tolerance within them, the matrix stays dense, and the choice says so.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.linalg.panels import frobenius_norm
from engine.semiseparable.block_sss import BlockSSS
from engine.semiseparable.construct_sss import OrderBeyond, construct_sss
from engine.semiseparable.fit import TridiagonalFit
from engine.semiseparable.semiseparable_matrix import (
    SemiseparableMatrix,
    default_rank,
    read_tolerance,
    read_whole,
    require_matrix,
)
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank

BLOCKS = (4, 8, 16, 32)
"""Rows of a block that are tried."""
_ROWS_AT_ONCE = 1024
_SHORT = 6
"""Sweeps by which a rank is tried."""


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
    """One sentence, with the figures that decided, and those of the others."""
    losers: tuple[Candidate, ...]


def choose(
    matrix: Tensor,
    *,
    budget_bytes: int | None = None,
    tolerance: float | None = None,
    rank: int | None = None,
    kinds: tuple[str, ...] = (TridiagonalLowRank.kind, BlockSSS.kind),
    after_sweep: Callable[[], None] | None = None,
) -> Choice:
    """Fit the candidates to a matrix, and choose one.

    Args:
        matrix: Shape (N, N).
        budget_bytes: The most bytes that a candidate may take; None takes those of T + U Vᵀ at ``rank``. With a
            tolerance, those of the dense matrix bound it in any case.
        tolerance: The largest relative error; None chooses by error alone.
        rank: r of T + U Vᵀ; None takes ⌈log₂ N⌉.
        kinds: The structures that are tried.
        after_sweep: Called between steps of the fits, where the caller may raise to stop.

    Returns:
        The choice, with every other candidate.

    Raises:
        MatrixRefused: If the tolerance is not between 0 and 1, or the rank is not a whole number of at least 1.
        NonFiniteFactor: If the matrix holds NaN or Inf.
        WrongShape: If it is not square.

    Memory:
        The dense matrix twice, and the candidates.
    """
    dense = require_matrix(matrix)
    tolerance = read_tolerance(tolerance)
    n, item = dense.shape[0], dense.element_size()
    first_rank = min(default_rank(n) if rank is None else read_whole(rank, "rank", 1), n)
    whole = item * (3 * n - 2 + 2 * n * first_rank)
    allowed = whole if budget_bytes is None else read_whole(budget_bytes, "budget_bytes", 0)
    least = 0 if tolerance is None else _least_order(dense, tolerance)
    fitted = list(_sss_candidates(dense, allowed, tolerance, least, after_sweep)) if BlockSSS.kind in kinds else []
    fit = TridiagonalFit(dense, after_sweep)
    if TridiagonalLowRank.kind in kinds and tolerance is not None:
        fitted += _ranks_within(fit, tolerance, first_rank, max(least - 1, 1))
    elif TridiagonalLowRank.kind in kinds and (most := (allowed // item - 3 * n + 2) // (2 * n)) >= 1:
        fitted.append(tridiagonal_candidate(fit, min(first_rank, most)))
    smaller = [each for each in fitted if each.size_bytes < dense.nbytes and math.isfinite(each.relative_error)]
    if tolerance is None:
        fits = [each for each in smaller if each.size_bytes <= allowed]
        best = min(fits, key=lambda each: (each.relative_error, each.size_bytes), default=None)
        why = f"dense: no structure of a finite error takes fewer than the {dense.nbytes:,} bytes of the dense matrix"
        if best is not None:
            why = f"{best.name} has the smallest error within {allowed:,} bytes"
    else:
        fits = [each for each in smaller if each.relative_error <= tolerance]
        best = min(fits, key=lambda each: (each.size_bytes, each.relative_error), default=None)
        why = f"dense: at least order {least} of {n} would be needed for a relative error of {tolerance:g}"
        if best is not None:
            why = f"{best.name} takes the fewest bytes within a relative error of {tolerance:g}"
    losers = tuple(each for each in fitted if each is not best)
    tried = "; ".join(f"{each.name}: {each.relative_error:.3g} in {each.size_bytes:,} bytes" for each in losers)
    return Choice(chosen=best, why=f"{why} (others: {tried})" if tried else why, losers=losers)


def relative_error(dense: Tensor, matrix: SemiseparableMatrix) -> float:
    """Return ‖H − A‖_F / ‖H‖_F, from columns a few at a time.

    Args:
        dense: H, shape (N, N).

    Memory:
        1024 columns three times.
    """
    n, missed = dense.shape[0], []
    for start in range(0, n, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, n)
        unit = torch.zeros(n, stop - start, dtype=dense.dtype, device=dense.device)
        unit[start:stop].fill_diagonal_(1)
        missed.append(frobenius_norm(matrix.matvec(unit) - dense[:, start:stop]))
    return math.hypot(*missed) / (frobenius_norm(dense) or 1.0)


def tridiagonal_candidate(
    fit: TridiagonalFit, ranks: int | tuple[int, ...], lowrank: torch.dtype | None = None
) -> Candidate:
    """Return T + U Vᵀ as a candidate, of rank r or the ranks of several levels.

    ``lowrank`` is a precision of 16 bits for U and V; None leaves them in that of the matrix.
    """
    matrix = fit.at(ranks).matrix
    name = f"{TridiagonalLowRank.kind}, rank {matrix.rank}"
    if len(matrix.ranks) > 1:
        name += f" in {len(matrix.ranks)} levels"
    if lowrank is not None:
        matrix, name = matrix.rounded(lowrank), f"{name} in {str(lowrank).removeprefix('torch.')}"
    return Candidate(name=name, matrix=matrix, relative_error=relative_error(fit.matrix, matrix))


def default_order(size: int, block: int) -> int:
    """Return the largest order with which block SSS takes no more numbers than T + U Vᵀ at ⌈log₂ N⌉, at least 1."""
    return max(1, _order_within(3 * size - 2 + 2 * size * default_rank(size), size, block))


def largest_order(size: int, block: int) -> int:
    """Return the largest order with which block SSS takes no more numbers than the dense matrix; 0 where none does."""
    return _order_within(size * size, size, block)


def sss_candidate(
    dense: Tensor,
    block: int,
    *,
    order: int | None = None,
    tolerance: float | None = None,
    most_order: int | None = None,
) -> Candidate:
    """Return block SSS as a candidate; arguments as ``construct_sss`` takes them."""
    matrix = construct_sss(dense, block=block, order=order, tolerance=tolerance, most_order=most_order)
    largest = matrix.memory_usage()["orders"]["largest"]
    return Candidate(
        name=f"{BlockSSS.kind}, block {matrix.block}, order {largest}",
        matrix=matrix,
        relative_error=relative_error(dense, matrix),
    )


def _least_order(dense: Tensor, tolerance: float) -> int:
    """The least order of the middle edge within a tolerance, which no block SSS matrix can do without.

    The rank of T + U Vᵀ can be one less, as the band has one entry in each of the two corners beside that edge.
    """
    middle, allowed = dense.shape[0] // 2, tolerance * frobenius_norm(dense) or 1.0
    corners = [corner for corner in (dense[:middle, middle:], dense[middle:, :middle]) if corner.numel()]
    shares = [torch.linalg.svdvals(each).to(torch.float64) / allowed for each in corners]
    tails = [each.square().flip(0).cumsum(0).flip(0) for each in shares]
    together = sum(tails, torch.zeros((), dtype=torch.float64, device=dense.device))
    return int((together > 1).sum())


def _sss_candidates(
    dense: Tensor, allowed: int, tolerance: float | None, least: int, after_sweep: Callable[[], None] | None
) -> Iterator[Candidate]:
    n = dense.shape[0]
    for block in (each for each in BLOCKS if each <= n):
        numbers = n * n if tolerance is not None else allowed // dense.element_size()
        order = _order_within(numbers, n, block)
        if order and tolerance is None:
            yield sss_candidate(dense, block, order=order)
        elif order >= max(least, 1):
            with contextlib.suppress(OrderBeyond):  # more bytes than the dense matrix
                yield sss_candidate(dense, block, tolerance=tolerance, most_order=order)
        if after_sweep is not None:
            after_sweep()


def _order_within(numbers: int, size: int, block: int) -> int:
    """The largest order within so many numbers, of p + 4r + 2r²/p a row; 0 where none is."""
    blocks = -(-size // block)
    fits = (r for r in range(min(size, 8 * block), 0, -1) if blocks * (block**2 + 4 * block * r + 2 * r * r) <= numbers)
    return next(fits, 0)


def _ranks_within(fit: TridiagonalFit, tolerance: float, rank: int, least: int) -> Iterator[Candidate]:
    """Yield the fit of the least rank that short fits have found to meet the tolerance; of none, if none does.

    Twice the rank until the error is within the tolerance, then halves between the last two. No rank below ``least``
    can meet it.
    """
    n, below, above = fit.matrix.shape[0], least - 1, max(rank, least)

    def meets(tried: int) -> bool:
        return fit.at(tried, _SHORT).relative_error <= tolerance

    while 2 * above + 3 < n and not meets(above):
        below, above = above, 2 * above
    if 2 * above + 3 >= n:
        return
    while above - below > max(1, above // 16):
        middle = (above + below) // 2
        below, above = (below, middle) if meets(middle) else (middle, above)
    yield tridiagonal_candidate(fit, above)
