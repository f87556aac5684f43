"""Places: which numbers of a parameter a view of it shows, and in what arrangement."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.tensor_storage import storage_of


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
        """Count one more sight of each number shown, in ``seen`` (numbers of the parameter,)."""
        seen.as_strided(self.shape, self.strides, self.offset).add_(1)

    def moved(self, numbers: int) -> "Place":
        """The same window, ``numbers`` further on."""
        return Place(parameter=self.parameter, offset=self.offset + numbers, shape=self.shape, strides=self.strides)


Places = frozenset[tuple[Place | None, Place | None]]
"""Of weights and their biases in parameters."""


def place_of(view: Tensor, parameter: Tensor, name: str) -> Place | None:
    """The place of ``view`` in ``parameter``; None where it is not a view of it."""
    if view.dtype != parameter.dtype or view.layout != torch.strided or storage_of(view) != storage_of(parameter):
        return None
    # a stride of a dimension of one says nothing
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(view.shape, view.stride(), strict=True))
    offset = int(view.storage_offset()) - int(parameter.storage_offset())
    return Place(parameter=name, offset=offset, shape=tuple(view.shape), strides=strides)


def slices_of(place: Place, parameter: Tensor) -> int | None:
    """How many slices like this one the parameter has; None where it is no slice along the first dimension."""
    alike = sorted(place.shape) == sorted(parameter.shape[1:]) and place.offset % max(place.count, 1) == 0
    return parameter.shape[0] if alike and len(place.shape) == parameter.ndim - 1 else None


def label_of(place: Place, parameter: Tensor) -> str:
    """The parameter's name, and which part of it this is."""
    if place.count == parameter.numel():
        return place.parameter
    if slices_of(place, parameter) is not None:
        return f"{place.parameter}[{place.offset // place.count}]"
    each = parameter.numel() // max(parameter.shape[0], 1)
    first, at = divmod(place.offset, each)
    if at == 0 and place.count % each == 0 and len(place.shape) == parameter.ndim:
        return f"{place.parameter}[{first}:{first + place.count // each}]"
    return f"{place.parameter}[{place.offset}+{'x'.join(map(str, place.shape))}]"
