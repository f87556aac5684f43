"""Gram products of which only one triangle is computed: ``Σ rowᵀ row`` in blocks of columns.

A symmetric product needs half the multiplications of a general one. BLAS has a routine for that
and torch has none, so the upper triangle is covered by horizontal strips, each one GEMM from its
own diagonal to the right edge: with b strips (b + 1)/2b of the full product. The blocks below
the diagonal keep whatever they held; ``factors.mirrored_`` fills them once, at the end.
"""

import torch
from torch import Tensor

_WIDE = 384


def add_gram_(total: Tensor, rows: Tensor) -> Tensor:
    """Add ``rowsᵀ rows`` to the upper triangle of ``total`` (n, n), for ``rows`` (P, n), in place.

    Memory:
        Nothing besides its arguments.
    """
    size = total.shape[0]
    # measured on a CPU: more strips save more only where each of them stays a large product
    strips = 8 if size >= _WIDE else 4
    height = -(-size // strips)
    for start in range(0, size, height):
        stop = min(start + height, size)
        total[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])
    return total


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
