"""Device speed: how fast a device multiplies, moves and decomposes.

Durations are operations over throughput and bytes over bandwidth. A way to do a job is chosen by the figures that are
typical of its device, so that in the same budget it goes the same way on every machine; its seconds are foreseen by
what this machine does at this moment, measured in about a tenth of a second on a CPU.

On a CPU the eigenvalues of few rows are had at a lower rate than those of many, as a part of the work grows with n²:

    seconds(n) = operations / rate of 256 rows · (0.6 + 0.4 · 256 / n)
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

MEASURING_BYTES = 64 * 2**20
"""Most bytes that measuring holds, on the host and on a CPU."""
MEASURING_DEVICE_BYTES = 256 * 2**20
"""Most bytes that measuring holds on a GPU, cuBLAS's workspaces included."""

_PRODUCT_ROWS = {"cpu": 512, "cuda": 2048}
_EIGEN_ROWS = {"cpu": 256, "cuda": 1024}
_EIGEN_OPERATIONS = 9
"""Times n³: operations of LAPACK's divide and conquer with vectors."""
_SQUARE_SHARE = 0.4
"""Part of the decomposition of 256 rows on a CPU that grows with n² alone, as measured between 64 and 1,024 rows."""
_STARTED = 300
_HELD_NUMBERS = 2**21
_NEW_NUMBERS = 10 * 2**20
"""40 MiB in float32: more than the C library keeps for the next tensor, as most activations of a batch are."""
_DISK_BYTES = 2**23
_PARALLEL_ROWS = 256
_PARALLEL_SECONDS = 0.05
_BUSY = 1.25
"""Times that everything takes as long, from which on others use the machine too."""
_SHORTEST = 0.05
"""Seconds of a process's life before which the time that it waited for a core says little."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """The work that one device does in a second."""

    operations_per_second: float
    """Floating-point operations of a large float32 product."""
    bytes_per_second: float
    """Bytes between the device and pinned memory, and added there: the slower way."""
    held_bytes_per_second: float
    """Bytes read or written where the sums are."""
    new_bytes_per_second: float
    """Bytes of large tensors that are made anew: on a CPU the kernel clears their pages first."""
    eigen_operations_per_second: float
    """Operations of a float64 eigendecomposition of 256 rows (1,024 on a GPU), 9 n³ of them."""
    disk_bytes_per_second: float
    """Bytes written to the scratch place so that they stay, and read back."""
    seconds_an_operation: float
    """To begin one, however small."""
    contention: float = 1.0
    """Times that everything takes as long as on cores of its own; the figures above have it in them."""

    def eigen_seconds(self, operations: float, rows: int) -> float:
        """Return the seconds of decomposing a matrix of so many rows by so many floating-point operations."""
        return operations / self.eigen_operations_per_second * (1 + _SQUARE_SHARE * (256 / max(1, rows) - 1))

    def shared(self, contention: float) -> "DeviceSpeed":
        """Return the speed beside other programs, by which everything takes ``contention`` times longer."""
        slower = {
            each.name: getattr(self, each.name) / contention
            for each in fields(self)
            if each.name.endswith("_per_second") and each.name != "disk_bytes_per_second"
        }
        begun = self.seconds_an_operation * contention
        return replace(self, **slower, seconds_an_operation=begun, contention=self.contention * contention)

    @property
    def busy(self) -> bool:
        """Whether other programs use the same cores."""
        return self.contention > _BUSY


def typical_speed(device: torch.device) -> DeviceSpeed:
    """Return the figures that are assumed of a GPU or a CPU where nothing was measured, in round numbers."""
    if device.type == "cuda":
        return DeviceSpeed(
            operations_per_second=2e13,
            bytes_per_second=1e10,
            held_bytes_per_second=1e12,
            new_bytes_per_second=1e12,
            eigen_operations_per_second=2e11,
            disk_bytes_per_second=1e9,
            seconds_an_operation=1e-5,
        )
    return DeviceSpeed(
        operations_per_second=1e11,
        bytes_per_second=5e9,
        held_bytes_per_second=1e10,
        new_bytes_per_second=2e9,
        eigen_operations_per_second=2e10,
        disk_bytes_per_second=5e8,
        seconds_an_operation=5e-6,
    )


def measure_speed(device: torch.device, scratch: Path | None = None) -> DeviceSpeed:
    """Measure a device at this moment, each figure once more after a first time to warm up.

    The rates are positive, with what other programs leave of the cores. ``scratch`` is a folder on the disk that
    factors are spilled to; None takes the typical speed of a disk.

    Memory:
        256 MiB on a GPU, 64 MiB on the host, 8 MiB on the disk.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    rows, eigen_rows = _PRODUCT_ROWS[kind], _EIGEN_ROWS[kind]
    one = torch.zeros(8, device=device)

    def start_many() -> None:
        for _ in range(_STARTED):
            one.add_(1)

    begun = _seconds(device, start_many) / _STARTED
    left = _random(device, rows)
    product = torch.empty_like(left)
    multiplied = _seconds(device, lambda: torch.matmul(left, left, out=product))
    drawn = _random(device, eigen_rows, torch.float64)
    matrix = drawn @ drawn.T
    decomposed = _seconds(device, lambda: torch.linalg.eigh(matrix))
    held = torch.ones(_HELD_NUMBERS, device=device)
    beside = torch.zeros_like(held)
    added = _seconds(device, lambda: beside.add_(held))
    made = _seconds(device, lambda: torch.ones(_NEW_NUMBERS, device=device), warm=kind == "cuda")
    found = DeviceSpeed(
        operations_per_second=2 * rows**3 / multiplied,
        bytes_per_second=held.nbytes / _moving_seconds(device, held),
        held_bytes_per_second=3 * held.nbytes / added,
        new_bytes_per_second=4 * _NEW_NUMBERS / made,
        eigen_operations_per_second=_EIGEN_OPERATIONS * eigen_rows**3 / decomposed,
        disk_bytes_per_second=typical_speed(device).disk_bytes_per_second
        if scratch is None
        else 2 * _DISK_BYTES / _disk_seconds(scratch),
        seconds_an_operation=begun,
    )
    if kind == "cuda":
        del one, left, product, drawn, matrix, held, beside
        # else a stage of the job that comes next would be seen to hold them
        torch.cuda.empty_cache()
        return found
    return found.shared(max(1.0, waiting_share(), _parallel_loss()))


def waiting_share() -> float:
    """Return how much longer this process has taken so far than on a core of its own; 1 where the kernel is silent."""
    try:
        ran, waited = (int(each) * 1e-9 for each in Path("/proc/self/schedstat").read_text().split()[:2])
    except (OSError, ValueError):
        return 1.0
    return (ran + waited) / ran if ran > _SHORTEST else 1.0


def parallel_products(seconds: float = _PARALLEL_SECONDS) -> tuple[float, float]:
    """Multiply matrices of 256 rows for a while, on as many threads as torch has.

    Where another program holds a core, each product waits for the thread that has lost it: two threads are then
    slower than one. Returned are operations per second, of all products and of the fastest one.
    """
    left = _random(torch.device("cpu"), _PARALLEL_ROWS)
    product = torch.empty_like(left)
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end or len(durations) < 3:
        torch.matmul(left, left, out=product)
        durations.append(time.perf_counter() - begun)
    operations = 2 * _PARALLEL_ROWS**3
    return operations * (len(durations) - 1) / sum(durations[1:]), operations / min(durations)


def _parallel_loss() -> float:
    """Return how much faster one thread, when nothing holds it up, is than all of them together; 1 where it is not."""
    threads = torch.get_num_threads()
    if threads == 1:
        return 1.0
    together, _ = parallel_products()
    torch.set_num_threads(1)
    _, alone = parallel_products(_PARALLEL_SECONDS / 5)
    torch.set_num_threads(threads)
    return alone / together


def fastest_threads(most: int) -> tuple[int, dict[int, float]]:
    """Measure on how many threads this machine computes fastest at this moment, and leave torch with them.

    Of ``most``, its half and one; with the operations per second of each.
    """
    found = {}
    for threads in sorted({most, max(1, most // 2), 1}, reverse=True):
        torch.set_num_threads(threads)
        found[threads] = parallel_products()[0]
    best = max(found, key=lambda threads: found[threads])
    torch.set_num_threads(best)
    return best, found


def _moving_seconds(device: torch.device, held: Tensor) -> float:
    """Return the seconds of the slower way between the device and pinned memory."""
    pinned = torch.empty(held.shape, pin_memory=device.type == "cuda")
    total = torch.zeros(held.shape)

    def leave() -> None:
        pinned.copy_(held)
        total.add_(pinned)

    return max(_seconds(device, leave), _seconds(device, lambda: held.copy_(pinned)))


def _random(device: torch.device, side: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a square matrix of normal numbers: products of zeros draw less power, and are faster than any job's."""
    return torch.randn(side, side, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(side))


def _disk_seconds(folder: Path) -> float:
    near = next(each for each in (folder, *folder.parents) if each.is_dir())
    begun = time.perf_counter()
    with tempfile.TemporaryFile(dir=near) as file:
        file.write(bytes(_DISK_BYTES))
        file.flush()
        os.fsync(file.fileno())
        # from the disk, and not from what the kernel remembers of it
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        file.read()
    return time.perf_counter() - begun


def _seconds(device: torch.device, work: Callable[[], object], *, warm: bool = True) -> float:
    """Return the second time that ``work`` takes, or the only one: never nothing, whatever the clock's step."""
    times = []
    for _ in range(2 if warm else 1):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return max(times[-1], 1e-9)
