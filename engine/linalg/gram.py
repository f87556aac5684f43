"""Gram products of which only one triangle is computed: ``Σ rowᵀ row`` in blocks of columns.

A symmetric product needs half the multiplications of a general one. BLAS has a routine for that
and torch has none, so the upper triangle is covered by horizontal strips, each one GEMM from its
own diagonal to the right edge: with b strips (b + 1)/2b of the full product. The blocks below
the diagonal keep whatever they held; ``factors.mirrored_`` fills them once, at the end.

Sums that stand elsewhere than the rows (see ``offload``) get the same strips by way of a staging
buffer, each no larger than that.
"""

from functools import partial

import torch
from torch import Tensor

from engine.memory.host_accumulation import Staging

_SMALL, _WIDE, _LARGE = 64, 384, 1024
_CAST = 2**22


def add_gram_(total: Tensor, rows: Tensor, staging: Staging | None = None) -> Tensor:
    """Add ``rowsᵀ rows`` to the upper triangle of ``total``, in place.

    Args:
        total: Sum so far, shape (n, n); blocks below the diagonal keep whatever they held.
        rows: Shape (P, n); rows of another precision are brought to that of ``total`` 4 Mi numbers at a time.
        staging: Buffer for a ``total`` on another device than ``rows``; None where both are on one device.

    Returns:
        ``total``.

    Raises:
        TypeError: If ``rows`` are complex.

    Memory:
        Nothing besides its arguments and, where the precisions differ, 4 Mi numbers.
    """
    require_real(rows)
    size = total.shape[0]
    if size == 0:
        return total
    if rows.dtype != total.dtype:
        for piece in _pieces(rows):
            add_gram_(total, piece.to(total.dtype), staging)
        return total
    strips = _strips(total, rows)
    height = -(-size // strips)
    if staging is not None:
        height = max(1, min(height, staging.numbers // size))
    for start in range(0, size, height):
        stop = min(start + height, size)
        here, left, right = total[start:stop, start:], rows[:, start:stop].T, rows[:, start:]
        if staging is None:
            here.addmm_(left, right)
        else:
            staging.add_(here, partial(_product, left, right))
    return total


def require_real(rows: Tensor) -> Tensor:
    """Require that what enters a sum is real: a cast to the sum's precision would drop the imaginary part.

    Args:
        rows: A tensor of any shape.

    Raises:
        TypeError: If it is complex.
    """
    if rows.is_complex():
        raise TypeError(f"rows of A and G must be real, and these are {rows.dtype}; declare their layer as not covered")
    return rows


def _strips(total: Tensor, rows: Tensor) -> int:
    """The number of strips in which the triangle is fastest, as measured."""
    size = total.shape[0]
    if rows.is_cuda:
        # each strip is a launch, and a device wants large ones
        return 1 if size < _LARGE else min(4, size // _LARGE)
    if rows.stride(0) == 1 and rows.shape[0] > 1:
        # whole columns lie together: a low strip of them is read badly
        return max(1, min(8, size // 128))
    if size < _SMALL or (size <= 2 * _SMALL and rows.shape[0] < _LARGE):
        return 1
    if size < _WIDE:
        return 4
    if size < _LARGE or (size < 2 * _LARGE and rows.shape[0] < _LARGE):
        return 8
    # lower strips of many rows are slow where a row is a multiple of a page
    return min(16, size // 192)


def _pieces(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, max(1, _CAST // max(rows.shape[1], 1)))


def _product(left: Tensor, right: Tensor, made: Tensor) -> None:
    torch.matmul(left, right, out=made)


def add_grams_(totals: Tensor, rows: Tensor, staging: Staging | None = None) -> Tensor:
    """Add ``rowsᵀ rows`` of each group of columns to ``totals``, in place.

    Args:
        totals: Sums so far, shape (groups, n, n), of which the upper triangles count.
        rows: Shape (P, groups · n), the columns of a group next to one another.
        staging: Buffer for ``totals`` on another device than ``rows``; None where both are on one device.

    Returns:
        ``totals``.

    Raises:
        TypeError: If ``rows`` are complex.

    Memory:
        Nothing besides its arguments; for groups of one column P · groups numbers.
    """
    require_real(rows)
    groups, size = totals.shape[:2]
    if rows.dtype != totals.dtype:
        for piece in _pieces(rows):
            add_grams_(totals, piece.to(totals.dtype), staging)
        return totals
    if size >= _WIDE or (staging is not None and size * size > staging.numbers):
        for total, own in zip(totals, rows.view(-1, groups, size).unbind(1), strict=True):
            add_gram_(total, own, staging)
        return totals
    if staging is not None:
        columns = rows.view(-1, groups, size).permute(1, 2, 0)
        at_once = max(1, staging.numbers // (size * size))
        for start in range(0, groups, at_once):
            own = columns[start : start + at_once]
            staging.add_(totals[start : start + at_once], partial(_product, own, own.mT))
        return totals
    if size == 1:
        totals[:, 0, 0] += rows.square().sum(0)
        return totals
    columns = rows.view(-1, groups, size).permute(1, 2, 0)
    return torch.baddbmm(totals, columns, columns.mT, out=totals)
