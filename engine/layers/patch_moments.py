"""Patches: the second moment of a convolution's windows, without ever writing all windows out.

The block (δ, δ′) of ``Σ patchᵀ patch``, δ and δ′ places of the kernel, is for stride 1 the
correlation of the padded image with itself at shift ``s = δ′ − δ``, over the window of positions
that δ sees. So each shift up to sign is one product over the whole image (13 of them for a 3×3
kernel, where one triangle of all windows is 45), of which every δ takes away what its window leaves
out: inclusion and exclusion over the axes of strips that are a few rows or columns wide.

Where the image ends in zeros that are at least as wide as the kernel reaches, a shift is a plain
offset of the flattened rows: what wraps around meets a zero. Missing zeros are appended.

For another stride, or where strips cost more than they save, windows are written out for a few
examples at a time. Which way is taken follows from shapes alone.

The order of rows is kernel before channels here, so that every block is contiguous;
``ConvolutionLayer.in_parameter_order_`` makes it the weight's own, channels before kernel.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from engine.linalg.gram import add_gram_, add_grams_
from engine.memory.host_accumulation import Staging

_AT_ONCE = 2**22
"""Numbers of windows written out at once."""

_Interval = tuple[int, int]
_Strip = tuple[tuple[_Interval, ...] | None, ...]
"""Per axis the positions of a correlation: intervals, or None for all of them."""


@dataclass(frozen=True, kw_only=True)
class _Rates:
    """The nanoseconds that a unit of work takes, as measured."""

    product: float
    """One multiplication and addition within a large product."""
    number: float
    """One number copied, or added to a matrix."""
    narrow: float
    """One number more, where few channels of a group lie together."""
    call: float
    """One operation, however small."""


_RATES = {
    "cpu": _Rates(product=0.013, number=0.6, narrow=2.5, call=5_000),
    "cuda": _Rates(product=4e-5, number=0.003, narrow=0.003, call=8_000),
}
_TRIANGLE = 0.65
"""Share of a product that its triangle takes in strips."""
_NARROW = 16
"""Channels of a group under which its products are small ones."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The shape of one call's windows."""

    examples: int
    channels: int
    groups: int
    extents: tuple[int, ...]
    """Sizes of the padded image."""
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    margins: tuple[_Interval, ...]
    """Zeros known to lie at both ends of each axis of the padded image."""

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows along each axis."""
        return tuple(
            (extent - dilation * (kernel - 1) - 1) // stride + 1
            for extent, kernel, stride, dilation in zip(
                self.extents, self.kernel, self.stride, self.dilation, strict=True
            )
        )

    @property
    def positions(self) -> int:
        """Windows of all examples."""
        return self.examples * math.prod(self.windows)

    @property
    def width(self) -> int:
        """Numbers in one group's window."""
        return self.channels // self.groups * math.prod(self.kernel)

    @property
    def missing(self) -> tuple[int, ...]:
        """Zeros to append to each axis so that nothing wraps around."""
        return tuple(
            max(0, dilation * (kernel - 1) - sum(margin))
            for kernel, dilation, margin in zip(self.kernel, self.dilation, self.margins, strict=True)
        )

    @property
    def flat(self) -> int:
        """Rows of the image with nothing missing."""
        return self.examples * math.prod(
            extent + missing for extent, missing in zip(self.extents, self.missing, strict=True)
        )

    def by_shifts(self, device: torch.device) -> bool:
        """Tell whether shifts are quicker than writing windows out."""
        if set(self.stride) != {1}:
            return False
        rates = _RATES["cuda" if device.type == "cuda" else "cpu"]
        return _shift_cost(self, rates) < _slice_cost(self, rates)

    def examples_at_once(self) -> int:
        """Return the number of examples whose windows are written out together."""
        each = math.prod(self.windows) * self.width * self.groups
        return min(self.examples, max(1, _AT_ONCE // max(each, 1)))

    def scratch(self, device: torch.device) -> int:
        """Count the numbers held at most besides the sums: the padded image, and what the way taken needs."""
        image = self.examples * math.prod(self.extents) * self.channels
        if not self.by_shifts(device):
            each = math.prod(self.windows) * self.width * self.groups
            return image + self.examples_at_once() * each
        block = self.groups * (self.channels // self.groups) ** 2
        products = max(len({strip for _, _, terms in pairs for _, strip in terms}) for _, pairs in _blocks(self))
        strips = max((_rows(self, shift, strip) for shift, strip in _strips(self)), default=0)
        # a depthwise product is written out before it is summed
        whole = self.flat * self.channels if self.channels == self.groups else 0
        appended = self.flat * self.channels if any(self.missing) else 0
        return image + appended + products * block + 2 * strips * self.channels + whole


@dataclass(frozen=True, kw_only=True)
class Patches:
    """The windows of one call."""

    image: Tensor
    """(N, *extents, C), padded, contiguous."""
    shape: Geometry

    def add_gram_(self, total: Tensor, staging: Staging | None = None) -> None:
        """Add ``Σ windowᵀ window`` to the upper triangle of a sum, in place.

        Args:
            total: The sum, shape (width, width), or (groups, width, width) for several groups; rows are kernel before
                channels.
            staging: Buffers through which blocks that are made on the device reach a sum on the host; None where both
                are on one device.

        Memory:
            As ``Geometry.scratch`` says.
        """
        block = self.shape.channels**2 // self.shape.groups
        if self.shape.by_shifts(self.image.device) and (staging is None or block <= staging.numbers):
            self._add_by_shifts_(total, staging)
        else:
            self._add_by_slices_(total, staging)

    def means(self) -> Tensor:
        """Average the windows of each example.

        Returns:
            Mean windows, shape (N, groups · width).
        """
        axes = tuple(range(1, 1 + len(self.shape.kernel)))
        means = torch.stack([seen.mean(axes) for seen in self._seen(self.image)], 1)
        return self._by_group(means)

    def sums(self) -> Tensor:
        """Sum all windows.

        Returns:
            Sums, shape (groups, width).
        """
        # all examples first: what remains is small
        image = self.image.sum(0, keepdim=True)
        axes = tuple(range(1, 1 + len(self.shape.kernel)))
        sums = torch.stack([seen.sum(axes) for seen in self._seen(image)], 1)
        return self._by_group(sums).view(self.shape.groups, -1)

    def _by_group(self, rows: Tensor) -> Tensor:
        """Arrange (N, k, C) as (N, groups · k · C/groups)."""
        return rows.view(*rows.shape[:2], self.shape.groups, -1).transpose(1, 2).reshape(rows.shape[0], -1)

    def _seen(self, image: Tensor) -> Iterator[Tensor]:
        """Yield the part of the image that each place of the kernel sees, (N, *windows, C)."""
        shape = self.shape
        for place in _places(shape.kernel):
            cuts = [
                slice(dilation * at, dilation * at + (windows - 1) * stride + 1, stride)
                for at, windows, stride, dilation in zip(
                    place, shape.windows, shape.stride, shape.dilation, strict=True
                )
            ]
            yield image[(slice(None), *cuts)]

    def _add_by_slices_(self, total: Tensor, staging: Staging | None = None) -> None:
        shape, steps = self.shape, self.image.stride()
        axes = range(len(shape.kernel))
        own = shape.channels // shape.groups
        along = [steps[1 + axis] * shape.stride[axis] for axis in axes]
        within = [steps[1 + axis] * shape.dilation[axis] for axis in axes]
        together = shape.examples_at_once()
        for start in range(0, shape.examples, together):
            count = min(together, shape.examples - start)
            windows = self.image.as_strided(
                (count, *shape.windows, shape.groups, *shape.kernel, own),
                (steps[0], *along, own, *within, 1),
                self.image.storage_offset() + start * steps[0],
            ).reshape(-1, shape.groups * shape.width)
            if total.ndim == 2:
                add_gram_(total, windows, staging)
            else:
                add_grams_(total, windows, staging)

    def _add_by_shifts_(self, total: Tensor, staging: Staging | None = None) -> None:
        shape = self.shape
        image = self.image
        if any(shape.missing):
            ends = [width for missing in reversed(shape.missing) for width in (0, missing)]
            image = functional.pad(image, [0, 0, *ends])
        own = shape.channels // shape.groups
        for shift, pairs in _blocks(shape):
            correlations: dict[_Strip, Tensor] = {}
            for row, column, terms in pairs:
                block = total[..., row * own : (row + 1) * own, column * own : (column + 1) * own]
                for _, strip in terms:
                    if strip not in correlations:
                        correlations[strip] = self._correlation(image, shift, strip)
                signed = [(sign, correlations[strip]) for sign, strip in terms]
                if staging is None:
                    _add_signed_(signed, block)
                else:
                    staging.add_(block, lambda made, signed=signed: _add_signed_(signed, made.zero_()))  # type: ignore[misc]

    def _correlation(self, image: Tensor, shift: tuple[int, ...], strip: _Strip) -> Tensor:
        """Compute ``Σ x[q]ᵀ x[q + s]`` over the positions q of ``strip``, ([groups,] own, own)."""
        shape = self.shape
        moved = [by * dilation for by, dilation in zip(shift, shape.dilation, strict=True)]
        still = not any(moved)
        if all(part is None for part in strip):
            rows = image.view(-1, shape.channels)
            offset = sum(by * step for by, step in zip(moved, image.stride()[1:-1], strict=True)) // shape.channels
            return _product(rows[: rows.shape[0] - offset], None if still else rows[offset:], shape.groups)
        ranges = _ranges(shape, shift)
        total: Tensor | None = None
        for intervals in itertools.product(
            *(part if part is not None else (whole,) for part, whole in zip(strip, ranges, strict=True))
        ):
            here = [slice(start, stop) for start, stop in intervals]
            there = [slice(start + by, stop + by) for (start, stop), by in zip(intervals, moved, strict=True)]
            left = image[(slice(None), *here)].reshape(-1, shape.channels)
            right = None if still else image[(slice(None), *there)].reshape(-1, shape.channels)
            product = _product(left, right, shape.groups)
            total = product if total is None else total.add_(product)
        if total is None:
            raise ValueError("a strip without positions has no correlation")
        return total


def _add_signed_(found: list[tuple[int, Tensor]], block: Tensor) -> None:
    for sign, product in found:
        block.add_(product, alpha=sign)


def _product(left: Tensor, other: Tensor | None, groups: int) -> Tensor:
    """Multiply ``leftᵀ other`` by groups of columns; without another ``left`` by itself, the upper triangle."""
    rows, channels = left.shape
    right = left if other is None else other
    if groups == 1:
        return left.T @ right if other is not None else add_gram_(left.new_zeros(channels, channels), left)
    if channels == groups:
        return (left * right).sum(0).view(groups, 1, 1)
    one, two = (part.view(rows, groups, -1) for part in (left, right))
    return torch.bmm(one.permute(1, 2, 0), two.permute(1, 0, 2))


def _places(kernel: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(size) for size in kernel))


def _ranges(shape: Geometry, shift: tuple[int, ...]) -> list[_Interval]:
    """Return for each axis the positions q such that neither q nor q + s is in a margin."""
    ranges = []
    for by, dilation, extent, (before, after) in zip(shift, shape.dilation, shape.extents, shape.margins, strict=True):
        first, last, moved = before, extent - after, by * dilation
        start = max(first, first - moved)
        ranges.append((start, max(start, min(last, last - moved))))
    return ranges


@lru_cache(maxsize=256)
def _blocks(
    shape: Geometry,
) -> tuple[tuple[tuple[int, ...], tuple[tuple[int, int, tuple[tuple[int, _Strip], ...]], ...]], ...]:
    """Each shift up to sign, with its blocks (row, column) and the correlations each of them is made of."""
    number = {place: at for at, place in enumerate(_places(shape.kernel))}
    blocks = []
    for shift in itertools.product(*(range(1 - size, size) for size in shape.kernel)):
        if shift < (0,) * len(shift):
            continue
        pairs = []
        for place, row in number.items():
            column = number.get(tuple(at + by for at, by in zip(place, shift, strict=True)))
            if column is not None:
                pairs.append((row, column, tuple(_terms(shape, shift, place))))
        blocks.append((shift, tuple(pairs)))
    return tuple(blocks)


def _terms(shape: Geometry, shift: tuple[int, ...], place: tuple[int, ...]) -> Iterator[tuple[int, _Strip]]:
    """Yield the whole less the strips outside the window of ``place``, plus where two of them cross, and so on."""
    outside: list[tuple[_Interval, ...]] = []
    for at, dilation, windows, (start, stop) in zip(
        place, shape.dilation, shape.windows, _ranges(shape, shift), strict=True
    ):
        before, after = (start, min(stop, dilation * at)), (max(start, dilation * at + windows), stop)
        outside.append(tuple((first, last) for first, last in (before, after) if first < last))
    for left_out in itertools.product((False, True), repeat=len(outside)):
        if all(part for part, out in zip(outside, left_out, strict=True) if out):
            strip = tuple(part if out else None for part, out in zip(outside, left_out, strict=True))
            yield -1 if sum(left_out) % 2 else 1, strip


def _strips(shape: Geometry) -> Iterator[tuple[tuple[int, ...], _Strip]]:
    """Yield every correlation over less than the whole image, once."""
    for shift, pairs in _blocks(shape):
        for strip in {strip for _, _, terms in pairs for _, strip in terms}:
            if any(part is not None for part in strip):
                yield shift, strip


def _rows(shape: Geometry, shift: tuple[int, ...], strip: _Strip) -> int:
    ranges = _ranges(shape, shift)
    along = (
        max(stop - start, 0) if part is None else sum(last - first for first, last in part)
        for part, (start, stop) in zip(strip, ranges, strict=True)
    )
    return shape.examples * math.prod(along)


@lru_cache(maxsize=256)
def _shift_cost(shape: Geometry, rates: _Rates) -> float:
    blocks = _blocks(shape)
    own = shape.channels // shape.groups
    square = shape.groups * own * own
    adds = sum(len(terms) for _, pairs in blocks for _, _, terms in pairs)
    rows = sum(_rows(shape, shift, strip) for shift, strip in _strips(shape))
    products = (len(blocks) - 1 + _TRIANGLE) * shape.flat + rows
    # a depthwise product reads and writes as much as it multiplies
    within = 2 * rates.number if own == 1 else rates.number / 2 + rates.product * own + _narrow(shape, rates)
    return (
        products * shape.channels * within
        + (2 * rows * shape.channels + adds * square) * rates.number
        + (adds + 4 * sum(1 for _ in _strips(shape)) + len(blocks)) * rates.call
    )


def _slice_cost(shape: Geometry, rates: _Rates) -> float:
    numbers = shape.positions * shape.width * shape.groups
    share = _TRIANGLE if shape.groups == 1 else 1.0
    each = 2 * rates.number + share * shape.width * rates.product + _narrow(shape, rates)
    return numbers * each + 8 * rates.call


def _narrow(shape: Geometry, rates: _Rates) -> float:
    return rates.narrow if shape.groups > 1 and shape.channels < _NARROW * shape.groups else 0.0
