"""Pooled rows: one row for each example, its positions averaged or summed, as `reduce` takes them.

References:
    Eschenhagen et al. (2023), Kronecker-factored approximate curvature for modern neural network architectures
"""

import torch
from torch import Tensor

from engine.layers.layer import Use


def pooled_rows(rows: Tensor, use: Use) -> tuple[Tensor, int]:
    """Average the rows of each example over its positions that count; one without any is left out.

    Args:
        rows: Rows of one call, shape (P, d), any float dtype.
        use: The call: its examples, and which of its positions count.

    Returns:
        The means, shape (n, d) for the n examples with a position, and the number of positions.
    """
    examples, kept = use.examples, use.kept
    if use.owners is not None:
        owners = use.picked(use.owners)
        numbers = torch.bincount(owners, minlength=examples)
        means = summed_rows(rows, use) / numbers.clamp_min(1)[:, None].to(rows.dtype)
        return means[numbers > 0], owners.shape[0]
    if rows.shape[0] == 0:
        # an expert that no token chose
        return rows, 0
    grouped = rows.view(examples, -1, rows.shape[-1])
    if kept is None:
        return grouped.mean(1), rows.shape[0]
    weights = kept.view(examples, -1, 1).to(rows.dtype)
    counts = weights.sum(1)
    means = (grouped * weights).sum(1) / counts.clamp_min(1)
    # an example without any would be a row of zeros
    reaches_all = use.lengths is not None and 0 not in use.lengths
    return means if reaches_all else means[counts[:, 0] > 0], use.count or 0


def summed_rows(rows: Tensor, use: Use) -> Tensor:
    """Sum the rows of each example over its positions that count.

    Args:
        rows: Rows of one call, shape (P, d), any float dtype.
        use: The call: its examples, and which of its positions count.

    Returns:
        The sums, shape (N, d).
    """
    counted = rows if use.kept is None else rows * use.kept[:, None]
    if use.owners is None:
        return counted.view(use.examples, -1, rows.shape[-1]).sum(1)
    return rows.new_zeros(use.examples, rows.shape[-1]).index_add_(0, use.owners, counted)
