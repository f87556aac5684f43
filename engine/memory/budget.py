"""The machine's budget: bytes a job may take, on the device and on the host.

Measured when the job begins, from what is free then: the smallest of the kernel's MemAvailable,
what the control groups leave and what the process's own limits leave, and on CUDA the driver's free bytes.

Limits that the kernel and the device's allocator hold, so that to exceed the budget is an error.

Without it a job that takes more than its share takes it from its neighbours, or is killed without a word. The host's
budget is held by ``RLIMIT_DATA``, which counts what the process maps privately and may write (heap, tensors, stacks)
and no file that is mapped to be read; the device's by torch's allocator.
"""

import ctypes
import functools
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from catalog.cgroups import free_group_bytes
from catalog.record import FieldError
from catalog.requests.memory import Memory, amount_bytes

_UNLIMITED = 2**62
_GROWING = "expandable_segments"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_TRIED_BYTES = 32 * 1024**2
"""More than the one page of 20 MiB in which a large block grows."""
_MAPPED_FROM = -3
"""``M_MMAP_THRESHOLD`` of malloc.h; a bound that is set is not raised any more."""


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes that may be held at once."""

    device_bytes: int
    host_bytes: int
    host_shared_by: int = 1
    """Jobs at a time that the host's bytes were divided among: of more than one, these are one's part."""
    context_bytes: int = 0
    """Bytes of the device that CUDA's context takes beside these; 0 where they are not known."""

    @classmethod
    def unlimited(cls) -> "MemoryBudget":
        """No limit, for notebooks and tests."""
        return cls(device_bytes=_UNLIMITED, host_bytes=_UNLIMITED)

    @classmethod
    def measure(cls, memory: Memory, device: torch.device, bounds: "MemoryBudget | None" = None) -> "MemoryBudget":
        """Return the budget of a job on this machine, from what is free now.

        What this process holds already is counted as free. Without a CUDA device there is no limit to device bytes.

        Args:
            memory: The job's amounts: bytes, fractions of what is free, or `auto`.
            device: Where the job computes.
            bounds: Upper limits of the job's part, such as a worker's slot; None sets none.

        Raises:
            FieldError: If an amount cannot be read.
        """
        # what this process holds already is part of its own peak, so it is part of what it may hold
        bounds = bounds or cls.unlimited()
        free_host = free_host_bytes() + resident_bytes()
        host = min(amount_bytes("host", memory.host, min(free_host, bounds.host_bytes)), bounds.host_bytes)
        # a budget that is less for another reason is not a share
        shared_by = bounds.host_shared_by if host < amount_bytes("host", memory.host, free_host) else 1
        if device.type != "cuda":
            return cls(device_bytes=_UNLIMITED, host_bytes=host, host_shared_by=shared_by)
        free, _ = torch.cuda.mem_get_info(device)
        on_device = min(amount_bytes("device", memory.device, min(free, bounds.device_bytes)), bounds.device_bytes)
        return cls(
            device_bytes=on_device, host_bytes=host, host_shared_by=shared_by, context_bytes=context_bytes(device)
        )

    @classmethod
    def named(cls, memory: Memory) -> "MemoryBudget":
        """Return the budget of a job that is planned here for a device of another machine.

        The device's amount must be bytes, as there is nothing to measure; the host's is taken from this machine's
        memory unless it is bytes.

        Raises:
            FieldError: If an amount cannot be read, or the device's is `auto` or a fraction.
        """
        if memory.device == "auto" or isinstance(memory.device, (int, float)):
            raise FieldError("device", f"is {memory.device}, and there is no device here to measure; name its bytes, "
                             'such as "80GiB"')  # fmt: skip
        on_device = amount_bytes("device", memory.device, 0)
        return cls(
            device_bytes=on_device, host_bytes=amount_bytes("host", memory.host, free_host_bytes() + resident_bytes())
        )

    @property
    def planned_context(self) -> dict[str, int]:
        """The line of a plan on the CUDA context, which no peak counts; none where its bytes are not known."""
        return {"context_bytes": self.context_bytes} if self.context_bytes else {}

    def remedy(self, place: Literal["device", "host"]) -> str:
        """Return the advice that gives a job more memory of a place; messages append ``to`` and a number of bytes.

        An imperative phrase; for a host shared by several slots, one that names them.
        """
        if place == "host" and self.host_shared_by > 1:
            return (
                f"the host's memory is shared by the worker's {self.host_shared_by} slots: it takes fewer of them "
                "(KRONOSCOPE_SLOTS) or more memory to raise a job's part"
            )
        return f"raise `memory.{place}`"


@functools.cache
def context_bytes(device: torch.device) -> int:
    """Return the bytes of a device that this process's CUDA context takes; the first call makes the context.

    A budget is what is free once the context is there, so they are part of no budget, and of no peak. Bytes are those
    in use afterwards and not before, as the driver's management library counts them; 0 on a CPU, where the context was
    there already, and where that library does not answer.
    """
    if device.type != "cuda":
        return 0
    before = _in_use(device)
    torch.cuda.synchronize(device)
    after = _in_use(device)
    return 0 if before is None or after is None else max(0, after - before)


def _in_use(device: torch.device) -> int | None:
    """Bytes of a device that all processes hold together, without making a context; None where it cannot be asked."""
    try:
        return int(torch.cuda.device_memory_used(device))
    except Exception:  # noqa: BLE001 - a fact that is nice to have, and the library's errors have no common type
        return None


def free_device_bytes(device: torch.device) -> int:
    """Return the bytes that this process could still take on a CUDA device."""
    free, _ = torch.cuda.mem_get_info(device)
    allocated, reserved = device_bytes(device)
    return int(free) + (reserved or 0) - (allocated or 0)


def free_host_bytes() -> int:
    """Bytes this process could still take on the host: the kernel's, its control groups' and its own limits."""
    limits = [_UNLIMITED]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = meminfo.read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if (left := free_group_bytes()) is not None:
        limits.append(left)
    for limit, counted in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft - status_bytes(counted))
    return max(min(limits), 0)


def status_bytes(entry: str) -> int:
    """Return one entry of the kernel's account of this process."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:")), 0)


def resident_bytes() -> int:
    """Resident set of this process; 0 where the platform does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_bytes(device: torch.device) -> int:
    """Return the highest memory use so far."""
    if device.type == "cuda":
        return _counted("reserved_bytes", "peak", device)
    # not ru_maxrss first: that one remembers the parent's peak from before this program was loaded
    return status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def begin_peak(device: torch.device) -> bool:
    """Reset the peaks that ``peak_bytes`` returns."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def highest_bytes(device: torch.device) -> tuple[int | None, int]:
    """Return the highest memory use since ``begin_peak``."""
    reserved = _counted("reserved_bytes", "peak", device) if device.type == "cuda" else None
    return reserved, peak_bytes(torch.device("cpu"))


def highest_allocated_bytes(device: torch.device) -> int | None:
    """Return the most bytes that tensors held on the device since ``begin_peak``; None on a CPU.

    Unlike what is reserved, it holds nothing of an earlier peak that the allocator has kept.
    """
    return _counted("allocated_bytes", "peak", device) if device.type == "cuda" else None


def give_back_host_memory() -> None:
    """Return what was freed to the system; glibc keeps it otherwise, and a later peak adds to it.

    Without effect where the C library has no ``malloc_trim``. What torch keeps of pinned blocks goes too.
    """
    unpin = getattr(torch._C, "_host_emptyCache", None)  # noqa: SLF001 - its only name, of builds for CUDA alone
    if unpin is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        unpin()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def map_large_blocks() -> None:
    """Let blocks of 1 MiB and more return to the system as soon as they are freed.

    glibc maps a block by itself from a bound on that it raises up to 32 MiB as such blocks are freed. Below it, what
    was freed between two blocks in use stays resident: a training planned with 750 MiB held 930, and ended at the
    kernel's limit of 900. Without effect where the C library has no ``mallopt``.
    """
    options = getattr(ctypes.CDLL(None), "mallopt", None)
    if options is not None:
        options(_MAPPED_FROM, 2**20)


def device_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Return the bytes allocated to tensors and those reserved by torch's allocator now; None for both on a CPU."""
    if device.type != "cuda":
        return None, None
    return _counted("allocated_bytes", "current", device), _counted("reserved_bytes", "current", device)


def _counted(series: str, when: str, device: torch.device) -> int:
    """Read a counter of the device's allocator; 0 before anything was allocated.

    ``torch.cuda.memory_allocated`` flattens and sorts all counters for the sake of one.
    """
    counters = torch.cuda.memory_stats_as_nested_dict(device)
    return int(counters[series]["all"][when]) if counters else 0


_WARM_SIDE = 256
_STACKS = 8
"""Threads that libraries may still start: the kernel counts their stacks whole, though hardly any of it is used."""
_STACK_BYTES = 8 * 2**20


def hold_host(budget: MemoryBudget) -> int:
    """Limit this process's data to its host budget from now on.

    Call it once libraries are loaded and warm: their threads and buffers are then part of what is held already.
    """
    warm_up()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = status_bytes("VmData") + max(0, budget.host_bytes - resident_bytes()) + _STACKS * _STACK_BYTES
    for other in (soft, hard):
        limit = limit if other == resource.RLIM_INFINITY else min(limit, other)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit


def hold_device(budget: MemoryBudget, device: torch.device) -> None:
    """Limit torch's allocator to the device budget; memory that other libraries allocate is not limited.

    Nothing is done on a CPU.
    """
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    # a device without an index is the current one everywhere in torch but here, where it is an error
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget.device_bytes / total), device.index)


def grow_segments(device: torch.device) -> bool:
    """Let the blocks that torch's allocator takes from a CUDA device grow in place, where one tensor shows that it can.

    ``hold_device`` counts blocks whole: what lies idle between tensors of other sizes would end a job below its plan.
    A driver may refuse, or a wall around this process; where torch's variables are set, they decide. Call it before the
    first tensor on the device; nothing is done on a CPU. Returned is whether blocks grow because of this call.
    """
    settle = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001 - its only name
    own = any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES)
    if device.type != "cuda" or settle is None or own:
        return False
    settle(f"{_GROWING}:True")
    try:
        tried = torch.ones(_TRIED_BYTES, dtype=torch.uint8, device=device)
        tried.sum().item()
        blocks: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        grows = any(block.get("is_expandable") for block in blocks)
    except RuntimeError:
        settle(f"{_GROWING}:False")
        return False
    del tried
    torch.cuda.empty_cache()
    return grows


def warm_up() -> None:
    """Start what torch starts at its first product, decomposition and backward pass: threads and their buffers."""
    matrix = torch.eye(_WARM_SIDE, requires_grad=True)
    torch.linalg.eigvalsh((matrix @ matrix).detach().to(torch.float64))
    torch.autograd.backward((matrix @ matrix).sum())
