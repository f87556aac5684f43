"""Gram products of which only one triangle is computed: ``Σ rowᵀ row`` in blocks of columns.

A symmetric product needs half the multiplications of a general one. BLAS has a routine for that
and torch has none, so the upper triangle is covered by horizontal strips, each one GEMM from its
own diagonal to the right edge: with b strips (b + 1)/2b of the full product. The blocks below
the diagonal keep whatever they held; ``factors.mirrored_`` fills them once, at the end.
"""

import torch
from torch import Tensor

_SMALL, _WIDE, _LARGE = 64, 384, 1024


def add_gram_(total: Tensor, rows: Tensor) -> Tensor:
    """Add ``rowsᵀ rows`` to the upper triangle of ``total`` (n, n), for ``rows`` (P, n), in place.

    Memory:
        Nothing besides its arguments.
    """
    size = total.shape[0]
    strips = _strips(total, rows)
    height = -(-size // strips)
    for start in range(0, size, height):
        stop = min(start + height, size)
        total[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])
    return total


def _strips(total: Tensor, rows: Tensor) -> int:
    """The number of strips in which the triangle is fastest, as measured."""
    size = total.shape[0]
    if total.is_cuda:
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


def add_grams_(totals: Tensor, rows: Tensor) -> Tensor:
    """Add ``rowsᵀ rows`` of each group of columns to ``totals`` (groups, n, n), for ``rows`` (P, groups · n), in place.

    Memory:
        Nothing besides its arguments; for groups of one column P · groups numbers.
    """
    groups, size = totals.shape[:2]
    if size >= _WIDE:
        for total, own in zip(totals, rows.view(-1, groups, size).unbind(1), strict=True):
            add_gram_(total, own)
        return totals
    if size == 1:
        totals[:, 0, 0] += rows.square().sum(0)
        return totals
    columns = rows.view(-1, groups, size).permute(1, 2, 0)
    return torch.baddbmm(totals, columns, columns.mT, out=totals)
