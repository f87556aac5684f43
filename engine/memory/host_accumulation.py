"""Host accumulation: sums that are kept on the host, while what is added to them is computed on the device.

A contribution is made panel by panel. Each is computed into one of two staging buffers on the
device, copied to its twin in pinned host memory on a side stream, and added there to the sum when
the buffer is wanted again: while one panel is on its way, the next is computed. On a CPU the same
is done in turn, without streams.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_PANEL = 2**24
"""Numbers in one staging buffer, where a single row is not longer: 64 MiB in float32."""
ROW_STAGING_NUMBERS = 2**22
"""Numbers in a staging buffer that only rows pass through: 16 MiB in float32."""


def staging_numbers(sides: Iterable[tuple[int, int]]) -> int:
    """Return how many numbers a staging buffer needs for factors, each of whose sums is (groups, rows, rows).

    The size of the largest factor, at most 16 Mi, but never less than one row of each of its groups.
    """
    known = list(sides)
    largest = max((groups * side * side for groups, side in known), default=1)
    longest = max((groups * side for groups, side in known), default=1)
    return max(min(largest, _PANEL), longest)


def pinned_bytes(size_bytes: int) -> int:
    """Return the bytes torch pins on the host for one buffer: the smallest power of two that is not less, or 0."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


@dataclass(eq=False)
class _Slot:
    """One staging buffer, and its twin on the host."""

    made: Tensor
    arrived: Tensor
    copied: torch.cuda.Event | None
    target: Tensor | None = None
    """The part of a sum that what is on its way belongs to."""
    adds: bool = True
    """Add the part on its way to the target, instead of replacing that byte for byte."""


class Staging:
    """Two buffers of ``numbers`` each on ``device``, and two on the host."""

    def __init__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.numbers = numbers
        self._device = device
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._slots = [
            _Slot(
                made=torch.empty(numbers, dtype=dtype, device=device),
                arrived=torch.empty(numbers, dtype=dtype, pin_memory=cuda),
                copied=torch.cuda.Event() if cuda else None,  # type: ignore[no-untyped-call]
            )
            for _ in range(2)
        ]

    def add_(self, target: Tensor, compute: Callable[[Tensor], object]) -> None:
        """Add a contribution to a sum on the host, at the next but one call or at ``settle``.

        ``target`` is a part of it, of any shape with at most ``numbers`` entries; ``compute`` writes the contribution
        into a tensor of that shape on the device.
        """
        slot = self._free()
        count = target.numel()
        made = slot.made[:count].view(target.shape)
        compute(made)
        self._send(slot, made, slot.arrived[:count].view(target.shape))
        slot.target, slot.adds = target, True

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Copy from the device to the host; the last part arrives at the next but one call or at ``settle``.

        Both are contiguous, of one shape and dtype, whatever these are.
        """
        read, written = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
        at_once = self.numbers * self._slots[0].made.element_size()
        for start in range(0, read.numel(), at_once):
            part = read[start : start + at_once]
            slot = self._free()
            made = slot.made.view(torch.uint8)[: part.numel()]
            made.copy_(part)
            self._send(slot, made, slot.arrived.view(torch.uint8)[: part.numel()])
            slot.target, slot.adds = written[start : start + at_once], False

    def _free(self) -> _Slot:
        """The slot that waits longest, what was on its way in it received."""
        slot = self._slots[0]
        self._slots.reverse()
        _receive(slot)
        return slot

    def _send(self, slot: _Slot, made: Tensor, arrived: Tensor) -> None:
        if self._stream is None or slot.copied is None:
            arrived.copy_(made)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                arrived.copy_(made, non_blocking=True)
                slot.copied.record(self._stream)

    def settle(self) -> None:
        """Add what is still on its way, in the order it was made."""
        for slot in self._slots:
            _receive(slot)


def _receive(slot: _Slot) -> None:
    if slot.target is None:
        return
    if slot.copied is not None:
        slot.copied.synchronize()
    if slot.adds:
        slot.target += slot.arrived[: slot.target.numel()].view(slot.target.shape)
    else:
        slot.target.copy_(slot.arrived.view(torch.uint8)[: slot.target.numel()])
    slot.target = None
