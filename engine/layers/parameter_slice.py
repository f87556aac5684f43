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
        n, where the place is one whole slice along the first dimension, transposed or not; else None.
    """
    alike = sorted(place.shape) == sorted(parameter.shape[1:]) and place.offset % max(place.count, 1) == 0
    return parameter.shape[0] if alike and len(place.shape) == parameter.ndim - 1 else None


def label_of(place: Place, parameter: Tensor) -> str:
    """Name a place: the parameter's name, and which part of it this is.

    Args:
        place: A place in the parameter.
        parameter: The parameter, of any shape.

    Returns:
        ``name`` of the whole, ``name[i]`` of a slice, ``name[i:j]`` of several, ``name[offset+shape]`` of anything
        else.
    """
    if place.count == parameter.numel():
        return place.parameter
    if slices_of(place, parameter) is not None:
        return f"{place.parameter}[{place.offset // place.count}]"
    each = parameter.numel() // max(parameter.shape[0], 1)
    first, at = divmod(place.offset, each)
    if at == 0 and place.count % each == 0 and len(place.shape) == parameter.ndim:
        return f"{place.parameter}[{first}:{first + place.count // each}]"
    return f"{place.parameter}[{place.offset}+{'x'.join(map(str, place.shape))}]"
