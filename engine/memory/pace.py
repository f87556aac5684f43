"""Pace: how fast a device multiplies, and how fast its results reach the host; measured, in milliseconds."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_SIDE = 2048


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What one device does in a second."""

    operations_per_second: float
    """Floating-point operations of a large float32 product."""
    bytes_per_second: float
    """From the device into pinned memory, and added there."""


def measured_pace(device: torch.device) -> Pace:
    """Measure ``device`` with one product and one copy, after one of each to warm up.

    Memory:
        48 MiB on the device, 32 MiB on the host.
    """
    left, product = (torch.zeros(_SIDE, _SIDE, device=device) for _ in range(2))
    arrived = torch.empty(_SIDE, _SIDE, pin_memory=device.type == "cuda")
    total = torch.zeros(_SIDE, _SIDE)

    def move() -> None:
        arrived.copy_(left)
        total.add_(arrived)

    multiplied = _seconds(device, lambda: torch.matmul(left, left, out=product))
    moved = _seconds(device, move)
    return Pace(operations_per_second=2 * _SIDE**3 / multiplied, bytes_per_second=left.nbytes / moved)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return times[-1]
