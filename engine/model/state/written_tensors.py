"""Written tensors: the numbers of buffers and parameters, how a write to them is noticed, and how it is undone."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_WIDTH = 63
"""Words in a row; an odd number, so that a row whose numbers all change their signs has another sum."""
_SPREAD = 0x1E3779B97F4A7C15
"""An odd number whose multiples have no pattern among their bits."""


def bit_sum(tensor: Tensor) -> int:
    """Compute an exact checksum of a tensor's bytes, read as rows of 64-bit integers.

    Sums of rows and of columns are mixed with their places and summed. One number that changes changes one sum of each
    kind; a pattern of changes that leaves all of them as they were is not detected.

    Args:
        tensor: A tensor of any shape, dtype and device.

    Returns:
        64 bits with their sign; 0 for an empty tensor, and for what is not stored densely.
    """
    return bit_sums([tensor])[0]


def bit_sums(tensors: Iterable[Tensor]) -> list[int]:
    """Compute the ``bit_sum`` of each tensor, with one wait for each device that they stand on."""
    sums = [_bit_sum(each) for each in tensors]
    whole: dict[int, int] = {}
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        whole |= zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True)
    return [whole[place] for place in range(len(sums))]


def _bit_sum(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    # torch reads only what lies on a multiple of its size as a wider type
    aligned = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    words = aligned.view(torch.int64)
    square = words[: words.numel() // _WIDTH * _WIDTH].view(-1, _WIDTH)
    sums = torch.cat([square.sum(0), square.sum(1), words[square.numel() :], flat[whole:].to(torch.int64)])
    placed = sums + torch.arange(1, 1 + len(sums), device=sums.device) * _SPREAD
    # not linear, so that changes of two sums do not cancel
    return (placed >> 29).bitwise_xor_(placed).mul_(placed).sum()


_LOOKED_AT = 2**12
"""Numbers of a tensor that is compared before every forward pass, whatever its version says."""


class Contents:
    """The numbers of tensors, with a copy of them.

    Args:
        tensors: Strided tensors of any shapes.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [each for each in tensors if not each.is_meta]
        self._data = [each.data for each in self._tensors]
        self._copies = [each.detach().clone() for each in self._tensors]
        self._leaves = [each.is_leaf for each in self._tensors]
        small: dict[Any, list[int]] = {}
        for place, each in enumerate(self._tensors):
            if each.numel() <= _LOOKED_AT and each.is_contiguous():
                small.setdefault((each.dtype, each.device), []).append(place)
        self._looks = [
            ([self._data[place].view(-1) for place in own], torch.cat([self._copies[place].view(-1) for place in own]))
            for own in small.values()
        ]
        self._marks = self._marked()

    def are_there(self) -> bool:
        """Tell whether every tensor has the storage that it had."""
        return all(each.data_ptr() == mark[1] for each, mark in zip(self._tensors, self._marks, strict=True))

    def rewind(self) -> None:
        """Write the numbers back where they were written to since, in the precision that the tensors have now."""
        if self._marked() == self._marks and all(same_numbers(torch.cat(now), copy) for now, copy in self._looks):
            return
        for tensor, copy, leaf in zip(self._tensors, self._copies, self._leaves, strict=True):
            _detach_again(tensor, leaf=leaf)
            own = copy.to(tensor.dtype)
            if tensor.shape == copy.shape and not same_numbers(tensor.detach(), own):
                # autograd is to notice where the numbers were still needed
                tensor.detach().copy_(own)
        self._marks = self._marked()

    def put_back(self) -> None:
        """Give every tensor its own storage back, with its numbers."""
        for tensor, data, copy, leaf in zip(self._tensors, self._data, self._copies, self._leaves, strict=True):
            _detach_again(tensor, leaf=leaf)
            tensor.data = data
            if not same_numbers(data, copy):
                data.copy_(copy)

    def _marked(self) -> list[tuple[int, int]]:
        return [(version_of(each), each.data_ptr()) for each in self._tensors]


def _detach_again(tensor: Tensor, *, leaf: bool) -> None:
    """Take a tensor out of a graph that a write has made it a part of."""
    if leaf and not tensor.is_leaf:
        # a view cannot be; what it is a view of is
        with contextlib.suppress(RuntimeError):
            tensor.detach_()


class Watched:
    """A parameter, whose numbers must stay as they are: held against a copy, or against its checksum."""

    def __init__(self, name: str, parameter: nn.Parameter, checksum: int | None = None) -> None:
        self.name, self.parameter = name, parameter
        self._copy = parameter.detach().clone() if checksum is None else None
        self._sum = checksum
        self._version, self._dtype = version_of(parameter), parameter.dtype

    @classmethod
    def by_checksum(cls, parameters: Mapping[str, nn.Parameter]) -> "list[Watched]":
        """Watch some parameters, by name, without copies of them."""
        sums = bit_sums(parameters.values())
        return [cls(name, each, checksum) for (name, each), checksum in zip(parameters.items(), sums, strict=True)]

    def has_moved(self, *, whatever: bool, checksum: int | None = None) -> bool:
        """Tell whether the numbers differ, and put them back where there is a copy.

        Args:
            whatever: Look at the numbers even where nothing was written to the parameter.
            checksum: Its present ``bit_sum``, where that is known.
        """
        version = version_of(self.parameter)
        if (version == self._version and not whatever) or self.parameter.dtype != self._dtype:
            return False
        if self._copy is None:
            moved = (bit_sum(self.parameter) if checksum is None else checksum) != self._sum
        else:
            moved = not same_numbers(self.parameter.detach(), self._copy)
            if moved and self.parameter.shape == self._copy.shape:
                self.parameter.data.copy_(self._copy)
        if not moved or self._copy is not None:
            self._version = version_of(self.parameter)
        return moved


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place; 0 for one that was made for inference alone.

    Args:
        tensor: Any tensor.
    """
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - what autograd itself compares


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same numbers, NaN among them.

    Args:
        one: A tensor of any shape.
        other: Another of the same dtype.
    """
    return torch.equal(one, other) or (one.shape == other.shape and bit_sum(one) == bit_sum(other))
