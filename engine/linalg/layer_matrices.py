"""Layer matrices: the matrices (rows, k, columns) of k vectors, and their products with a factor from either side.

Rows begin at multiples of 64 bytes, and what lies between a row's end and the next row is zero where k is not 1: it is
multiplied along. Every function but ``arranged`` takes them as it gives them. Products are in the precision and on the
device of the matrices; they take their result, and 16 MiB of a factor that is elsewhere or of another precision.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

PANEL_BYTES = 16 * 2**20
"""Bytes of a factor that are on the device of the vectors, or in their precision, at once."""
_ALIGNED = 16


def aligned(rows: int, columns: int, width: int, *, like: Tensor) -> Tensor:
    """Return memory for matrices (rows, k, width), not initialised, of the dtype and device of ``like``."""
    whole = like.new_empty(rows, columns, _padded(width))
    if columns != 1:
        whole[..., width:].zero_()
    return whole[..., :width]


def arranged(matrices: Tensor) -> Tensor:
    """Return matrices of any strides as the products take them: themselves where k is 1, or ``aligned`` made them."""
    rows, columns, width = matrices.shape
    padded = _padded(width)
    if columns == 1 or (
        matrices.stride() == (columns * padded, padded, 1)
        and matrices.storage_offset() == 0
        and matrices.untyped_storage().nbytes() == rows * columns * padded * matrices.element_size()
    ):
        return matrices
    return aligned(rows, columns, width, like=matrices).copy_(matrices)


def as_columns(matrices: Tensor) -> Tensor:
    """Return a view with one row for each row of the matrices.

    Shape (rows, columns) where k is 1, else (rows, k times the columns with what lies between them).
    """
    rows, columns, width = matrices.shape
    if columns == 1:
        return matrices[:, 0, :]
    wide = columns * _padded(width)
    return matrices.as_strided((rows, wide), (wide, 1))


def as_rows(matrices: Tensor) -> Tensor:
    """Return a view with one row for each row of each vector's matrix, (rows · k, columns)."""
    rows, columns, width = matrices.shape
    return matrices[:, 0, :] if columns == 1 else matrices.as_strided((rows * columns, width), (_padded(width), 1))


def left_product(factor: Tensor, matrices: Tensor, into: Tensor | None = None) -> Tensor:
    """Return ``S V``, shape (m, k, columns), or add it to ``into`` in place.

    Args:
        factor: S (m, n), any float dtype, on any device.
        matrices: V of k vectors, shape (n, k, columns).
        into: As ``aligned`` gives it; None is zero.
    """
    found = aligned(factor.shape[0], matrices.shape[1], matrices.shape[2], like=matrices) if into is None else into
    source, target = as_columns(matrices), as_columns(found)
    for rows, panel in _panels(factor, matrices):
        if into is None:
            torch.mm(panel, source, out=target[rows])
        else:
            target[rows].addmm_(panel, source)
    return found


def right_product(matrices: Tensor, factor: Tensor) -> Tensor:
    """Return ``V S``, shape (rows, k, m), of V (rows, k, n) and S (n, m), any float dtype, on any device."""
    found = aligned(matrices.shape[0], matrices.shape[1], factor.shape[-1], like=matrices)
    source, target = as_rows(matrices), as_rows(found)
    for columns, panel in _panels(factor.mT, matrices):
        torch.mm(source, panel.mT, out=target[:, columns])
    return found


def _panels(factor: Tensor, like: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a factor where ``like`` is and in its precision, a few at a time where they are not so already."""
    if factor.dtype == like.dtype and factor.device == like.device:
        yield slice(None), factor
        return
    height = max(1, PANEL_BYTES // (max(factor.shape[1], 1) * like.element_size()))
    for start in range(0, factor.shape[0], height):
        rows = slice(start, start + height)
        yield rows, factor[rows].to(like)


def _padded(width: int) -> int:
    return -(-width // _ALIGNED) * _ALIGNED if width > _ALIGNED else width
