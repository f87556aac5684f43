"""Device speed: how fast a device multiplies, moves and decomposes; measured once for a machine, in a few seconds.

Durations are flops over throughput and bytes over bandwidth. Where nothing was measured, what is
usual is taken, so that the same job makes the same choice.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

MEASURING_BYTES = 192 * 2**20
"""Most bytes that measuring holds, on the host and on a CPU."""
MEASURING_DEVICE_BYTES = 896 * 2**20
"""Most bytes that measuring holds on a GPU: six float64 matrices of the largest side, and cuBLAS's workspaces."""
MEASURING_SECONDS = 4.0
"""Time that measuring may take; a slow machine is measured at smaller sizes."""

_SIDES = (512, 1024, 2048)
_EIGEN_SIDES = {"cpu": (256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096)}
"""A GPU decomposes 1024 rows at a fraction of the rate at which it decomposes 4096."""
_EIGEN_OPERATIONS = 9
"""Times n³: what LAPACK's divide and conquer takes with vectors."""
_DISK_BYTES = 2**25


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """The work that one device does in a second."""

    operations_per_second: float
    """Floating-point operations of a large float32 product."""
    bytes_per_second: float
    """Bytes between the device and pinned memory, and added there: the slower way."""
    held_bytes_per_second: float
    """Bytes read or written where the sums are."""
    eigen_operations_per_second: float
    """Operations of a float64 eigendecomposition, 9 n³ of them."""
    disk_bytes_per_second: float
    """Bytes written to the scratch place so that they stay, and read back."""
    seconds_an_operation: float
    """To begin one, however small."""


def typical_speed(device: torch.device) -> DeviceSpeed:
    """Return the figures that are assumed where nothing was measured.

    Args:
        device: What computes; only its type counts.

    Returns:
        Round numbers for a GPU or a CPU.
    """
    if device.type == "cuda":
        return DeviceSpeed(
            operations_per_second=2e13,
            bytes_per_second=1e10,
            held_bytes_per_second=1e12,
            eigen_operations_per_second=2e11,
            disk_bytes_per_second=1e9,
            seconds_an_operation=1e-5,
        )
    return DeviceSpeed(
        operations_per_second=1e11,
        bytes_per_second=5e9,
        held_bytes_per_second=1e10,
        eigen_operations_per_second=1e10,
        disk_bytes_per_second=5e8,
        seconds_an_operation=1e-5,
    )


def measure_speed(device: torch.device, scratch: Path | None = None, seconds: float = MEASURING_SECONDS) -> DeviceSpeed:
    """Measure a device, each figure once more after a first time to warm up.

    Args:
        device: What computes.
        scratch: A folder on the disk that factors are spilled to; None is the system's own for temporary files.
        seconds: Limit of the whole measurement; a slow machine is measured at smaller sizes.

    Returns:
        The rates found, all positive.

    Memory:
        72 MiB on the device (on a GPU 768 MiB, which are given back), 96 MiB on the host, 32 MiB on the disk.
    """
    end = time.perf_counter() + seconds
    begun = _seconds(device, lambda: _begin_many(device)) / 1000
    # the larger the matrix the better the rate, up to a bound: the largest stands nearest to what takes time
    multiplied = _rate(device, _SIDES, 2, end - seconds * 2 / 3, partial(_product, device))
    decomposed = _rate(device, _EIGEN_SIDES[device.type], _EIGEN_OPERATIONS, end, partial(_decomposition, device))
    if device.type == "cuda":
        # else a stage of the job that comes next would be seen to hold them
        torch.cuda.empty_cache()
    left, total = _random(device, _SIDES[-1]), torch.zeros(_SIDES[-1], _SIDES[-1])
    pinned = torch.empty(_SIDES[-1], _SIDES[-1], pin_memory=device.type == "cuda")

    def leave() -> None:
        pinned.copy_(left)
        total.add_(pinned)

    moved = max(_seconds(device, leave), _seconds(device, lambda: left.copy_(pinned)))
    other = torch.zeros_like(left)
    added = _seconds(device, lambda: other.add_(left))
    return DeviceSpeed(
        operations_per_second=multiplied,
        bytes_per_second=left.nbytes / moved,
        held_bytes_per_second=3 * left.nbytes / added,
        eigen_operations_per_second=decomposed,
        disk_bytes_per_second=2 * _DISK_BYTES / _disk_seconds(scratch),
        seconds_an_operation=begun,
    )


def _rate(
    device: torch.device, sides: Sequence[int], operations: int, end: float, work: Callable[[int], Callable[[], object]]
) -> float:
    """The best of the rates at ``sides``; the next is left out where it would not be done by ``end``."""
    best = 0.0
    for side in sides:
        if best and time.perf_counter() + 2 * operations * side**3 / best > end:
            break
        best = max(best, operations * side**3 / _seconds(device, work(side)))
    return best


def _product(device: torch.device, side: int) -> Callable[[], object]:
    left, product = _random(device, side), torch.empty(side, side, device=device)
    return lambda: torch.matmul(left, left, out=product)


def _decomposition(device: torch.device, side: int) -> Callable[[], object]:
    drawn = _random(device, side, torch.float64)
    matrix = drawn @ drawn.T
    return lambda: torch.linalg.eigh(matrix)


def _random(device: torch.device, side: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a square matrix of normal numbers: products of zeros draw less power, and are faster than any job's."""
    return torch.randn(side, side, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(side))


def _begin_many(device: torch.device) -> None:
    one = torch.zeros(8, device=device)
    for _ in range(1000):
        one.add_(1)


def _disk_seconds(folder: Path | None) -> float:
    begun = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_DISK_BYTES))
        file.flush()
        os.fsync(file.fileno())
        # from the disk, and not from what the kernel remembers of it
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        file.read()
    return time.perf_counter() - begun


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The second time that ``work`` is done: never nothing, whatever the clock's step."""
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return max(times[-1], 1e-9)
