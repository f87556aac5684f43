"""Weight formats: a layer's weights as fewer bits hold them, and the bytes that this takes.

Rounding is to the nearest, half to even; a scale is the largest number of its row, or of its group of columns, over the
largest that the format holds. These are the perturbations that a sensitivity is of, not a quantiser: a tool that
compensates errors, as GPTQ does, makes smaller ones.
"""

import torch
from torch import Tensor

from catalog.analyses.sensitivity import SensitivityParams, WeightFormat
from engine.linalg.eigensolvers import exact_svd

_SCALE_BYTES = 2
_KEPT_OF_FOUR = 2


def in_format(weights: Tensor, name: WeightFormat, params: SensitivityParams) -> Tensor:
    """Return weights as a format holds them.

    Args:
        weights: (out, in), float64.
        params: The size of groups, and the rank.

    Returns:
        (out, in), float64.
    """
    match name:
        case "int8":
            return _rounded(weights, 127)
        case "int4":
            return _rounded(weights, 7)
        case "int4_group":
            groups = torch.split(weights, params.group, dim=1)
            return torch.cat([_rounded(each, 7) for each in groups], dim=1)
        case "fp8":
            scale = _scale(weights, torch.finfo(torch.float8_e4m3fn).max)
            return (weights / scale).to(torch.float32).to(torch.float8_e4m3fn).to(torch.float64) * scale
        case "2:4":
            return _two_of_four(weights)
        case "low_rank":
            left, values, right = exact_svd(weights, full_matrices=False)
            return (left[:, : params.rank] * values[: params.rank]) @ right[: params.rank]


def format_bytes(rows: int, columns: int, name: WeightFormat, params: SensitivityParams) -> int:
    """Return the bytes of a matrix in a format.

    Args:
        rows: Rows of the weights.
        columns: Their columns, the bias left out.
        params: The size of groups, and the rank.
    """
    count = rows * columns
    match name:
        case "int8" | "fp8":
            return count + rows * _SCALE_BYTES
        case "int4":
            return -(-count // 2) + rows * _SCALE_BYTES
        case "int4_group":
            return -(-count // 2) + rows * -(-columns // params.group) * _SCALE_BYTES
        case "2:4":
            # of each four two numbers, and two bits of place for each
            fours, rest = divmod(columns, 4)
            return 2 * rows * (_KEPT_OF_FOUR * fours + rest) + -(-rows * fours * 2 * _KEPT_OF_FOUR // 8)
        case "low_rank":
            return 2 * min(params.rank, rows, columns) * (rows + columns)


def _scale(weights: Tensor, largest: float) -> Tensor:
    """(out, 1) scales; 1 for a row of zeros."""
    scale = weights.abs().amax(dim=1, keepdim=True) / largest
    return torch.where(scale > 0, scale, 1.0)


def _rounded(weights: Tensor, largest: int) -> Tensor:
    scale = _scale(weights, largest)
    return (weights / scale).round() * scale


def _two_of_four(weights: Tensor) -> Tensor:
    """The two largest of each four columns, the first of equal ones; columns that fill no four stay."""
    fours = weights.shape[1] // 4
    head = weights[:, : 4 * fours].reshape(weights.shape[0], fours, 4)
    order = head.abs().sort(dim=2, descending=True, stable=True).indices
    kept = torch.zeros_like(head, dtype=torch.bool).scatter_(2, order[:, :, :_KEPT_OF_FOUR], True)
    return torch.cat([(head * kept).flatten(1), weights[:, 4 * fours :]], dim=1)
