"""Parameter slices: strided windows that tell views of a parameter apart, and parts of layers' matrices."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.activation_memory import storage_of


@dataclass(frozen=True, kw_only=True)
class Place:
    """A strided window onto one parameter."""

    parameter: str
    """Qualified name."""
    offset: int
    """Numbers of the parameter's storage before the first one shown."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """Numbers shown."""
        return math.prod(self.shape)

    def mark_(self, seen: Tensor) -> None:
        """Count one more use of each number shown.

        Args:
            seen: Counts, shape (numbers of the parameter,), changed in place.
        """
        seen.as_strided(self.shape, self.strides, self.offset).add_(1)

    def moved(self, numbers: int) -> "Place":
        """Move the window.

        Args:
            numbers: Numbers of the parameter's storage to move it by.

        Returns:
            A window of the same shape and strides.
        """
        return Place(parameter=self.parameter, offset=self.offset + numbers, shape=self.shape, strides=self.strides)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Part of a layer's matrix (out_dim, in_dim) as numbers of one parameter, which are counted row by row.

    Entry (i, j) of the part, at place ``t = i · width + j`` of its rows joined, is the parameter's number
    ``offset + Σ_k d_k · strides[k]``, where d are the digits of t in the mixed base ``shape``.
    """

    parameter: str
    """Qualified name, the first under which ``named_parameters()`` lists it."""
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    top: int
    """First row of the part within the layer's matrix."""
    left: int
    """First column."""
    height: int
    """Rows of the part."""
    width: int
    """Columns of the part."""

    @property
    def last(self) -> int:
        """The largest number of the parameter that the window shows, counted from 0."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


Places = frozenset[tuple[Place | None, Place | None]]
"""Places of weights and their biases in parameters."""


def place_of(view: Tensor, parameter: Tensor, name: str) -> Place | None:
    """Find the place of a view in a parameter.

    Args:
        view: A tensor of any shape.
        parameter: A strided parameter of any shape.
        name: The parameter's qualified name.

    Returns:
        The place; None where ``view`` is not a view of the parameter, or shows it in another dtype.
    """
    if view.dtype != parameter.dtype or view.layout != torch.strided or storage_of(view) != storage_of(parameter):
        return None
    # a stride of a dimension of one says nothing
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(view.shape, view.stride(), strict=True))
    offset = int(view.storage_offset()) - int(parameter.storage_offset())
    return Place(parameter=name, offset=offset, shape=tuple(view.shape), strides=strides)


def slices_of(place: Place, parameter: Tensor) -> int | None:
    """Count the slices of a parameter that are like a place.

    Args:
        place: A place in the parameter.
        parameter: The parameter, shape (n, …).

    Returns:
        n, where the place is one whole slice along the first dimension, transposed or not, and each slice is a span
        of the parameter's storage; else None.
    """
    return parameter.shape[0] if _has_shape_of_slice(place, parameter) and _is_run(place, parameter) else None


def label_of(place: Place, parameter: Tensor) -> str:
    """Name a place: the parameter's name, and which part of it this is.

    Args:
        place: A place in the parameter.
        parameter: The parameter, of any shape.

    Returns:
        ``name`` of the whole, ``name[i]`` of a slice, ``name[i:j]`` of several, ``name[offset+shape]`` of anything
        else. A place with the offset and as many numbers as whole slices have, which shows others, is named by its
        subscripts, as ``name[:, i:j]`` or ``name[i:j:step]``; ``name[offset+shape by strides]`` where it has none.
    """
    if place.count == parameter.numel():
        return place.parameter
    each = parameter.numel() // max(parameter.shape[0], 1)
    first, at = divmod(place.offset, each)
    shape = "x".join(map(str, place.shape))
    is_slice = _has_shape_of_slice(place, parameter)
    if not is_slice and (at or place.count % each or len(place.shape) != parameter.ndim):
        return f"{place.parameter}[{place.offset}+{shape}]"
    if _is_run(place, parameter):
        part = f"{first}" if is_slice else f"{first}:{first + place.count // each}"
    else:
        part = _subscripts_of(place, parameter) or f"{place.offset}+{shape} by {'x'.join(map(str, place.strides))}"
    return f"{place.parameter}[{part}]"


def _has_shape_of_slice(place: Place, parameter: Tensor) -> bool:
    """Whether a place has the shape of one slice along the first dimension, and an offset that such a slice may have.

    Its strides are not looked at.
    """
    alike = sorted(place.shape) == sorted(parameter.shape[1:]) and place.offset % max(place.count, 1) == 0
    return alike and len(place.shape) == parameter.ndim - 1


def _is_run(place: Place, parameter: Tensor) -> bool:
    """Whether a place shows all numbers of a span of storage, in any order, and each slice of the parameter is a span.

    Slices are those along the first dimension; each may be stored transposed.
    """
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(place.shape, place.strides, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    rows = parameter.shape[0]
    return rows == 1 or parameter.stride(0) == parameter.numel() // max(rows, 1)


def _subscripts_of(place: Place, parameter: Tensor) -> str | None:
    """Write a place as subscripts of the parameter, transposed or not; None where it has none.

    A dimension that is shown in full is ``:``, and left out at the end.
    """
    rest = place.offset
    steps = sorted(((s, n) for n, s in zip(place.shape, place.strides, strict=True) if n > 1), reverse=True)
    subscripts = [":"] * parameter.ndim
    # a step within one dimension is shorter than the stride of the dimension outside of it
    for dim in sorted(range(parameter.ndim), key=parameter.stride, reverse=True):
        whole, unit = parameter.shape[dim], parameter.stride(dim)
        if whole == 1:
            continue
        start, rest = divmod(rest, unit)
        size = step = 1
        if steps and steps[0][0] >= unit:
            stride, size = steps.pop(0)
            step, odd = divmod(stride, unit)
            if odd:
                return None
        if start + (size - 1) * step >= whole:
            return None
        if size == 1:
            subscripts[dim] = f"{start}:{start + 1}" if len(place.shape) == parameter.ndim else f"{start}"
        elif size < whole:
            stop = min(start + size * step, whole)
            subscripts[dim] = f"{start}:{stop}" if step == 1 else f"{start}:{stop}:{step}"
    while subscripts and subscripts[-1] == ":":
        subscripts.pop()
    return ", ".join(subscripts) if subscripts and not steps else None
