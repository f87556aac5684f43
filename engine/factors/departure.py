"""Departure: factors leave the device as they are stored, hashed on their way.

A factor goes by panels of whole rows. Each of a few threads has a stream and pinned buffers of its own: the device
gathers the upper triangle of a panel, panel and triangle are copied, and while the next panel is on its way the thread
hashes the last one and puts its triangle where it is kept. Nothing is computed on the host but the digest.
"""

import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Self, TypeGuard

import torch
from torch import Tensor

from engine.factors.dense import as_operator
from engine.factors.kronecker_factors import Hashed, digest, packed
from engine.factors.low_rank import LowRank
from engine.linalg.linear_operator import Structured
from engine.memory.host_accumulation import pinned_bytes
from engine.memory.out_of_memory import free_memory, ran_out_of_memory

PANEL_NUMBERS = 2**19
"""Numbers of a panel, where a single row is not longer: 2 MiB in float32."""
THREADS = min(8, os.cpu_count() or 1)
"""Threads that take factors off a device."""


@dataclass(frozen=True, kw_only=True)
class Departed:
    """A factor that has left the device, or never stood there."""

    digest: str
    """SHA-256, as ``digest`` computes it."""
    stored: Tensor | Structured | None = None
    """As it is stored, on the host: (n(n+1)/2,) of a dense one, a diagonal (n,), or its rows; None where only the
    digest was asked for."""


_SMALL_BLOCK, _BLOCK = 2**20, 20 * 2**20
"""Bytes up to which torch's allocator has small blocks on a device, and of which the others are a multiple."""


def leaves(factor: Tensor | Structured, device: torch.device) -> TypeGuard[Tensor | LowRank]:
    """Return whether a factor stands on the ``device`` and is one that ``Departures`` can take off it."""
    held = factor.rows if isinstance(factor, LowRank) else factor
    return device.type != "cpu" and isinstance(held, Tensor) and held.device.type == device.type


def departing_bytes(numbers: int, itemsize: int) -> tuple[int, int]:
    """Compute what the departure of factors, the largest of so many numbers, holds besides what is kept.

    On the device a gathered panel of each thread and where its numbers stand; of pinned memory two panels of each
    thread and their triangles, each as torch rounds it.
    """
    panel = min(numbers, PANEL_NUMBERS)
    gathered = panel * (itemsize + 16)
    if gathered > _SMALL_BLOCK:
        # each thread has a stream, and each stream blocks of its own
        gathered = -(-gathered // _BLOCK) * _BLOCK
    return THREADS * gathered, THREADS * 4 * pinned_bytes(panel * itemsize)


class Departures:
    """Threads that take factors off the device."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="departure")
        self._own = threading.local()

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is under way; what has not begun is given up."""
        self._pool.shutdown(cancel_futures=True)

    def send(self, factor: Tensor | LowRank, *, packs: bool) -> Future[Departed]:
        """Let a factor leave once the device's present work is done.

        Args:
            factor: Symmetric, shape (n, n), a diagonal (n,), or rows that stand for G; nothing may write to it before
                it has left.
            packs: Whether it is stored, besides its digest.

        Returns:
            Its digest, and what is stored of it, when they are there.
        """
        ready, held = None, factor.rows if isinstance(factor, LowRank) else factor
        if held.is_cuda:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(held.device))
        return self._pool.submit(self._leave, factor, ready, packs)

    def hash(self, factor: Tensor) -> Future[Departed]:
        """Let the digest of a factor on the host be made."""
        return self._pool.submit(lambda: Departed(digest=digest(factor)))

    def _leave(self, factor: Tensor | LowRank, ready: torch.cuda.Event | None, packs: bool) -> Departed:
        try:
            return self._by_panels(factor, ready, packs=packs)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
        # outside of the except block, whose traceback holds what was allocated
        free_memory(factor.rows.device if isinstance(factor, LowRank) else factor.device)
        return _at_once(factor, packs=packs)

    def _by_panels(self, factor: Tensor | LowRank, ready: torch.cuda.Event | None, *, packs: bool) -> Departed:
        if isinstance(factor, LowRank):
            rows = self._buffers(factor.rows.device).take(factor.rows, ready, whole=True)
            side = factor.departed(rows.stored, rows.digest)
            return Departed(digest=side.digest(), stored=side if packs else None)
        if as_operator(factor).is_diagonal:
            if ready is not None:
                ready.synchronize()
            return _at_once(factor, packs=packs)
        found = self._buffers(factor.device).take(factor.detach(), ready, packs=packs)
        return Departed(digest=found.digest, stored=found.stored if packs else None)

    def _buffers(self, device: torch.device) -> "_Buffers":
        if not hasattr(self._own, "buffers"):
            self._own.buffers = _Buffers(device)
        return self._own.buffers  # type: ignore[no-any-return]


@dataclass(eq=False)
class _Panel:
    """Two buffers on the host, and what is on its way into them."""

    rows: Tensor
    triangle: Tensor
    arrived: torch.cuda.Event | None


class _Buffers:
    """Stream and buffers by which one thread takes factors off the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._panels: list[_Panel] = []

    def take(
        self, factor: Tensor, ready: torch.cuda.Event | None, *, packs: bool = False, whole: bool = False
    ) -> "_Arrival":
        """Copy one factor panel by panel; hash each while the next is on its way.

        Args:
            factor: Shape (n, n), or rows (T, n).
            ready: When the device has made it.
            packs: Whether its triangle is kept.
            whole: Whether all of it is kept.
        """
        rows, size = factor.shape
        height = max(1, min(rows, PANEL_NUMBERS // max(size, 1)))
        slots = self._slots(height * size * factor.element_size())
        shape = (rows, size) if whole else (size * (size + 1) // 2 if packs else 0,)
        arrival = _Arrival(hashed=Hashed(factor), stored=torch.empty(shape, dtype=factor.dtype))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            factor = factor.contiguous()
            triangle = _Triangle(size, factor.device) if packs else None
            under_way: tuple[_Panel, Tensor, Tensor | None] | None = None
            for number, start in enumerate(range(0, rows, height)):
                panel, own = slots[number % 2], factor[start : start + height]
                arriving = _copy(panel.rows, own)
                kept = arriving if whole else None
                if triangle is not None:
                    kept = _copy(panel.triangle, triangle.of_rows(own, start))
                if panel.arrived is not None:
                    panel.arrived.record(self._stream)
                if under_way is not None:
                    arrival.take_in(*under_way)
                under_way = panel, arriving, kept
            if under_way is not None:
                arrival.take_in(*under_way)
        return arrival

    def _slots(self, size_bytes: int) -> list[_Panel]:
        if not self._panels or self._panels[0].rows.nbytes < size_bytes:
            cuda = self._stream is not None
            self._panels = [
                _Panel(
                    rows=torch.empty(size_bytes, dtype=torch.uint8, pin_memory=cuda),
                    triangle=torch.empty(size_bytes, dtype=torch.uint8, pin_memory=cuda),
                    arrived=torch.cuda.Event() if cuda else None,  # type: ignore[no-untyped-call]
                )
                for _ in range(2)
            ]
        return self._panels


class _Triangle:
    """The places of the upper triangle (size, size), on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._lengths = torch.arange(size, 0, -1, device=device)
        # the numbers of the matrix before those of a row in the triangle, less those of the triangle
        self._shifts = (
            torch.arange(size, device=device).mul_(size + 1).sub_(self._lengths.cumsum(0)).add_(self._lengths)
        )

    def of_rows(self, rows: Tensor, start: int) -> Tensor:
        """Return the numbers of the triangle in some ``rows`` (P, size), the first of which is the row ``start``."""
        stop = start + rows.shape[0]
        before, count = self._numbers(0, start), self._numbers(start, stop)
        shifts = self._shifts[start:stop] + (before - start * self._size)
        places = shifts.repeat_interleave(self._lengths[start:stop], output_size=count)
        places += torch.arange(count, device=rows.device)
        return rows.view(-1).index_select(0, places)

    def _numbers(self, start: int, stop: int) -> int:
        return (stop - start) * (2 * self._size - start - stop + 1) // 2


@dataclass(eq=False)
class _Arrival:
    """A factor as far as it has arrived."""

    hashed: Hashed
    stored: Tensor
    """The part that is kept; without any number where none is."""
    kept_bytes: int = 0

    @property
    def digest(self) -> str:
        """SHA-256 of all that has arrived."""
        return self.hashed.hexdigest()

    def take_in(self, panel: _Panel, rows: Tensor, kept: Tensor | None) -> None:
        """Take in a panel once it is there: hash its rows, and keep what is kept of them."""
        if panel.arrived is not None:
            panel.arrived.synchronize()
        self.hashed.add(rows.data_ptr(), rows.nbytes)
        if kept is not None:
            ctypes.memmove(self.stored.data_ptr() + self.kept_bytes, kept.data_ptr(), kept.nbytes)
            self.kept_bytes += kept.nbytes


def _at_once(factor: Tensor | LowRank, *, packs: bool) -> Departed:
    """Take a factor to the host whole, and make there what is stored of it."""
    if isinstance(factor, LowRank):
        rows = factor.rows.to("cpu")
        side = factor.departed(rows, digest(rows))
        return Departed(digest=side.digest(), stored=side if packs else None)
    host = factor.detach().to("cpu")
    return Departed(digest=digest(host), stored=packed(host) if packs else None)


def _copy(buffer: Tensor, numbers: Tensor) -> Tensor:
    """Begin to copy contiguous ``numbers`` into a buffer of bytes; return the part of it that they come to lie in."""
    own = buffer[: numbers.nbytes].view(numbers.dtype)
    return own.copy_(numbers.reshape(-1), non_blocking=True)
