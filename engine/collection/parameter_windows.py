"""Parameter windows: where the numbers of a layer's matrix stand in the model's parameters.

The curvature of a layer is that of a matrix (out_dim, in_dim), the bias its last column; an operator on vectors of all
parameters must know which number of which parameter each entry is. A layer arranges its matrix as the parameter stores
it by a view (``TreatedLayer.as_stored``), so the view of a tensor without numbers shows the strides of the one in the
other, and they are inverted here.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from engine.factors.factor_set import ParameterShape
from engine.gradient_identity.completeness import Piece, pieces_of
from engine.layers.embedding import EmbeddingLayer
from engine.layers.layer import BlockLayer, TreatedLayer
from engine.layers.parameter_slice import Place, Window
from engine.layers.tied import TiedHeadLayer

Strided = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides."""


def list_parameters(model: nn.Module) -> tuple[ParameterShape, ...]:
    """List each parameter that requires a gradient by the caller's flags, once, in order of ``named_parameters()``."""
    return tuple(
        ParameterShape(name=name, shape=tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


_OWN = frozenset(vars(nn.Module()))


def list_unregistered(model: nn.Module) -> list[str]:
    """Name the tensors that require gradients and that lists, tuples and dictionaries of modules hold, or attributes.

    ``parameters()`` does not show them, and an optimiser that is given it does not move them.
    """
    known = set(map(id, (*model.parameters(), *model.buffers())))
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            for where, tensor in () if name in _OWN else _trainable(value, name):
                if id(tensor) not in known:
                    found.setdefault(id(tensor), f"{path}.{where}" if path else where)
    return list(found.values())


def _trainable(value: object, name: str, depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """Yield the leaves that require gradients within a value, by their places."""
    if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
        yield name, value
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{own}", each) for own, each in value.named_parameters() if each.requires_grad)
    elif depth and isinstance(value, (list, tuple, dict)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _trainable(each, f"{name}[{key!r}]", depth - 1)


def find_windows(layer: TreatedLayer, group: int, names: Mapping[int, str]) -> tuple[Window, ...] | None:
    """Find windows that together hold each entry of the matrix (out_dim, in_dim) of a covered layer's group once.

    Groups count from 0; ``names`` are those of the model's parameters by the identity of the tensor. None where a place
    in a parameter has no strides in the order that counts row by row.
    """
    found = []
    for piece in pieces_of(layer):
        name = names.get(id(piece.parameter))
        strided = None if name is None else _strided(layer, piece, group)
        if name is None or strided is None:
            return None
        offset, shape, strides = strided
        top, left, height, width = _part(layer, piece)
        if math.prod(shape) != height * width:
            return None
        found.append(
            Window(
                parameter=name,
                offset=offset,
                shape=shape,
                strides=strides,
                top=top,
                left=left,
                height=height,
                width=width,
            )
        )
    covered = sum(window.height * window.width for window in found)
    return tuple(found) if covered == layer.in_dim * layer.out_dim else None


def _part(layer: TreatedLayer, piece: Piece) -> tuple[int, int, int, int]:
    """First row, first column, rows and columns of a piece within the layer's matrix."""
    if layer.form == "diagonal_block":
        return 0, 0, piece.parameter.numel(), 1
    if isinstance(layer, BlockLayer):
        top = layer.fan_out if piece.kind == "bias" and layer.weight else 0
        return top, 0, layer.fan_out, 1
    if piece.kind == "bias":
        return 0, layer.in_dim - 1, layer.out_dim, 1
    return 0, 0, layer.out_dim, layer.fan_in


def _strided(layer: TreatedLayer, piece: Piece, group: int) -> Strided | None:
    """Offset, shape and strides of one group's share of a piece."""
    if piece.place is not None:
        return _of_place(piece.place, piece.parameter)
    numbers = piece.parameter.numel()
    each = numbers // layer.groups
    if piece.kind != "weight" or isinstance(layer, (BlockLayer, TiedHeadLayer)):
        return group * each, (each,), (1,)
    if isinstance(layer, EmbeddingLayer):
        return 0, (layer.fan_out, layer.fan_in), (1, layer.fan_out)
    return _of_group(_inverse(layer), layer.groups, group)


def _inverse(layer: TreatedLayer) -> tuple[list[int], list[int]]:
    """Shape of a weight in the order of the matrices (groups, out, in), and its strides in the parameter."""
    matrices = torch.empty(layer.groups, layer.out_dim, layer.fan_in, device="meta")
    stored = layer.as_stored(matrices)
    contiguous = torch.empty(stored.shape, device="meta").stride()
    dimensions = sorted(
        (
            (stride, size, own)
            for size, stride, own in zip(stored.shape, stored.stride(), contiguous, strict=True)
            if size > 1
        ),
        reverse=True,
    )
    return [size for _, size, _ in dimensions] or [1], [own for *_, own in dimensions] or [1]


def _of_group(whole: tuple[list[int], list[int]], groups: int, group: int) -> Strided | None:
    """One of equal parts along the first dimension."""
    shape, strides = whole
    if shape[0] % groups:
        return None
    each = shape[0] // groups
    return group * each * strides[0], (each, *shape[1:]), tuple(strides)


def _of_place(place: Place, parameter: Tensor) -> Strided | None:
    """A place in a parameter's storage, as numbers counted row by row."""
    if parameter.is_contiguous():
        return place.offset, place.shape, place.strides
    # numbers of the storage stand in another order than rows: each is asked where it belongs
    own = torch.arange(parameter.numel()).view(parameter.shape)
    laid = torch.empty_strided(parameter.shape, parameter.stride(), dtype=torch.int64).copy_(own)
    shown = laid.as_strided(place.shape, place.strides, place.offset)
    first = (0,) * shown.ndim
    strides = tuple(
        int(shown[(*first[:axis], 1, *first[axis + 1 :])] - shown[first]) if size > 1 else 0
        for axis, size in enumerate(shown.shape)
    )
    offset = int(shown[first])
    expected = torch.full(shown.shape, offset)
    for axis, (size, stride) in enumerate(zip(shown.shape, strides, strict=True)):
        expected += (torch.arange(size) * stride).view(-1, *(1,) * (shown.ndim - axis - 1))
    # a window that runs backwards cannot be made of strides
    if min(strides, default=0) < 0 or not torch.equal(shown, expected):
        return None
    return offset, tuple(shown.shape), strides
