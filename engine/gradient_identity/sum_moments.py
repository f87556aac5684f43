"""Sum moments: the same two numbers, trace and form, read from what a layer's statistics have summed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.accumulation.gradient_rows import GradientRows, ProbabilityRows
from engine.accumulation.sketched_rows import SketchRows
from engine.factors.kronecker_factors import mirrored_
from engine.layers.convolution import ConvolutionLayer
from engine.layers.layer import TreatedLayer
from engine.linalg.eigendecomposition import is_diagonal

_MIRRORED = 64
"""Rows of a matrix that is mirrored as the factor will be; of a larger one as many, evenly spaced."""
_STRIP, _STRIP_ON_DEVICE = 128, 1024
"""Rows that are read at once; on a device each strip is some launches."""
_NUMBERS_AT_ONCE = 2**17


@dataclass(frozen=True)
class SumMoments:
    """Trace and form of one side of a layer, from its sums."""

    squares: Tensor
    """(groups,) float64."""
    forms: Tensor
    """(groups,) float64."""
    dtype: torch.dtype
    """The narrowest precision that the sums are kept in."""
    rounding: float = 0.0
    """Most that the numbers of a row were changed before they were multiplied, relative to each."""
    mirroring: Tensor | None = None
    """(groups,) float64: difference of the mirrored rows' form from that of their triangle, over their trace; None of
    a matrix that is mirrored as a whole, whose form has it."""


def of_sum(total: Tensor, vector: Tensor, rounding: float = 0.0) -> SumMoments:
    """Read a sum of outer products, or its diagonal.

    Args:
        total: Shape (groups, n, n) or (n, n), of which the upper triangle counts; or (n,).
        vector: v (groups, n) float64.
        rounding: Most that the products changed a number, relative to it; a diagonal is made by none.

    Returns:
        Its trace and form.

    Memory:
        256 Ki numbers; on a device 2 Mi.
    """
    own = vector.to(total.device)
    if is_diagonal(total):
        wide = total.to(torch.float64)
        return SumMoments(wide.sum()[None], (wide @ own[0].square())[None], total.dtype)
    total = total if total.ndim == 3 else total[None]
    squares = total.diagonal(dim1=1, dim2=2).to(torch.float64).sum(1)
    size = total.shape[1]
    if size > _MIRRORED:
        forms, mirroring = torch.stack([_form(*each) for each in zip(total, own, strict=True)]).T
        return SumMoments(squares, forms, total.dtype, rounding, mirroring)
    step, forms = max(1, _NUMBERS_AT_ONCE // max(1, size * size)), torch.empty_like(squares)
    for start in range(0, total.shape[0], step):
        forms[start : start + step] = _whole(total[start : start + step], own[start : start + step])
    return SumMoments(squares, forms, total.dtype, rounding)


def _whole(total: Tensor, own: Tensor) -> Tensor:
    matrix = mirrored_(total.clone())
    products = torch.matmul(matrix, own.to(matrix.dtype)[:, :, None])[:, :, 0]
    return (products.to(torch.float64) * own).sum(1)


def _form(matrix: Tensor, own: Tensor) -> Tensor:
    """The form (2,) of a large matrix by its upper triangle, with some rows and columns as they are mirrored.

    Beside it the difference that those make, over their trace: it is rounding, however the triangle was summed.
    """
    last = matrix.shape[0] - 1
    places = torch.arange(_MIRRORED, device=matrix.device).mul_(last).div_(_MIRRORED - 1, rounding_mode="floor")
    some, mine = matrix[places[:, None], places], own[places]
    mirrored = _whole(some[None], mine[None])[0] - _upper(some, mine)
    trace = some.diagonal().to(torch.float64).sum() + torch.finfo(matrix.dtype).tiny
    return torch.stack([_upper(matrix, own) + mirrored, mirrored.abs() / trace])


def _upper(matrix: Tensor, own: Tensor) -> Tensor:
    narrow, form = own.to(matrix.dtype), -(matrix.diagonal().to(torch.float64) @ own.square())
    strip = _STRIP if matrix.device.type == "cpu" else _STRIP_ON_DEVICE
    for start in range(0, matrix.shape[0], strip):
        stop = start + strip
        products = matrix[start:stop, start:stop].triu() @ narrow[start:stop]
        if stop < matrix.shape[0]:
            products += matrix[start:stop, stop:] @ narrow[stop:]
        form += 2 * (own[start:stop] @ products.to(torch.float64))
    return form


def in_order_of_sums(layer: TreatedLayer, vector: Tensor) -> Tensor:
    """Arrange a vector in the weight's order as the sums of A have it: those of a convolution, kernel before channels.

    Args:
        vector: v (groups, in_dim).

    Returns:
        The same numbers; a copy for a convolution.
    """
    width = layer.fan_in if layer.weight else 0
    if not isinstance(layer, ConvolutionLayer) or not width:
        return vector
    places = vector[:, :width].view(vector.shape[0], -1, layer.module.weight[0, 0].numel()).transpose(1, 2)
    places = places.flip(1) if layer.module.transposed else places
    return torch.cat([places.reshape(vector.shape[0], width), vector[:, width:]], 1)


def of_rows(kept: GradientRows, vector: Tensor) -> SumMoments:
    """Read rows that are kept in place of their sum; of a sketch its diagonal.

    A sketch leaves out what its bound says, so no form of its rows is exact: the diagonal beside it is.

    Args:
        kept: Rows of one batch; gradients, or probabilities with their weights.
        vector: v (groups, n) float64.

    Returns:
        Trace and form of the G that they stand for.
    """
    if isinstance(kept, SketchRows) and kept.diagonals is not None:
        own = vector.to(kept.diagonals.device).square()
        return SumMoments(kept.diagonals.sum(1), (kept.diagonals * own).sum(1), kept.rows.dtype)
    groups = kept.rows.shape[0]
    squares = vector.new_zeros(groups, device=kept.rows.device)
    forms, own = squares.clone(), vector.to(kept.rows.device)
    height = max(1, _NUMBERS_AT_ONCE // kept.size)
    for group in range(groups):
        for start in range(0, kept.count, height):
            stop = min(start + height, kept.count)
            rows = kept.rows[group, start:stop].to(torch.float64)
            scales = kept.scales[group, start:stop].to(rows.device)
            if isinstance(kept, ProbabilityRows):
                rows /= rows.sum(1, keepdim=True)
                squares[group] += ((rows * (1 - rows)).sum(1) * scales).sum()
                centred = own[group] - (rows @ own[group])[:, None]
                forms[group] += ((rows * centred.square()).sum(1) * scales).sum()
            else:
                squares[group] += (rows.square().sum(1) * scales.square()).sum()
                forms[group] += ((rows @ own[group]) * scales).square().sum()
        if kept.triangle is not None:
            triangle = kept.triangle[group]
            squares[group] += torch.linalg.vector_norm(triangle, dim=1).to(torch.float64).square().sum()
            forms[group] += (triangle @ own[group].to(triangle.dtype)).to(torch.float64).square().sum()
    return SumMoments(squares, forms, kept.rows.dtype)
