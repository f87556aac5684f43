"""Pace: how fast a device multiplies, moves and decomposes; measured once for a machine, in a second or two.

Durations are flops over throughput and bytes over bandwidth. Where nothing was measured, what is
usual is taken, so that the same job makes the same choice.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

_SIDE = 2048
_EIGEN_SIDES = (256, 512, 1024)
_EIGEN_OPERATIONS = 9
"""Times n³: what LAPACK's divide and conquer takes with vectors."""
_DISK_BYTES = 2**25


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What one device does in a second."""

    operations_per_second: float
    """Floating-point operations of a large float32 product."""
    bytes_per_second: float
    """From the device into pinned memory, and added there."""
    held_bytes_per_second: float
    """Read or written where the sums stand."""
    eigen_operations_per_second: float
    """Of a float64 eigendecomposition, 9 n³ of them."""
    disk_bytes_per_second: float
    """Written to the scratch place, and there for good."""
    seconds_an_operation: float
    """To begin one, however small."""


def usual_pace(device: torch.device) -> Pace:
    """What is taken where nothing was measured."""
    if device.type == "cuda":
        return Pace(
            operations_per_second=2e13,
            bytes_per_second=1e10,
            held_bytes_per_second=1e12,
            eigen_operations_per_second=2e11,
            disk_bytes_per_second=1e9,
            seconds_an_operation=1e-5,
        )
    return Pace(
        operations_per_second=1e11,
        bytes_per_second=5e9,
        held_bytes_per_second=1e10,
        eigen_operations_per_second=1e10,
        disk_bytes_per_second=5e8,
        seconds_an_operation=1e-5,
    )


def measured_pace(device: torch.device, scratch: Path | None = None) -> Pace:
    """Measure ``device``, each figure once more after a first time to warm up.

    Args:
        device: What computes.
        scratch: A folder on the disk that factors wait on; the system's own for such files where there is none.

    Memory:
        72 MiB on the device, 64 MiB on the host, 32 MiB on the disk.
    """
    left, product = (torch.zeros(_SIDE, _SIDE, device=device) for _ in range(2))
    arrived = torch.empty(_SIDE, _SIDE, pin_memory=device.type == "cuda")
    total = torch.zeros(_SIDE, _SIDE)

    def move() -> None:
        arrived.copy_(left)
        total.add_(arrived)

    multiplied = _seconds(device, lambda: torch.matmul(left, left, out=product))
    moved = _seconds(device, move)
    added = _seconds(device, lambda: product.add_(left))
    begun = _seconds(device, lambda: _begin_many(device)) / 1000
    # the larger the matrix the better the rate, up to a bound: the largest stands nearest to what takes time
    matrices = [_symmetric(side, device) for side in _EIGEN_SIDES]
    rates = [
        _EIGEN_OPERATIONS * matrix.shape[0] ** 3 / _seconds(device, partial(torch.linalg.eigh, matrix))
        for matrix in matrices
    ]
    return Pace(
        operations_per_second=2 * _SIDE**3 / multiplied,
        bytes_per_second=left.nbytes / moved,
        held_bytes_per_second=3 * left.nbytes / added,
        eigen_operations_per_second=max(rates),
        disk_bytes_per_second=_DISK_BYTES / _written_seconds(scratch),
        seconds_an_operation=begun,
    )


def _begin_many(device: torch.device) -> None:
    one = torch.zeros(8, device=device)
    for _ in range(1000):
        one.add_(1)


def _symmetric(side: int, device: torch.device) -> torch.Tensor:
    drawn = torch.randn(side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(side))
    return (drawn @ drawn.T).to(device)


def _written_seconds(folder: Path | None) -> float:
    begun = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_DISK_BYTES))
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return times[-1]
