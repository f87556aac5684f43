"""Limits that the kernel and the device's allocator hold, so that to exceed the budget is an error.

Without it a job that takes more than its share takes it from its neighbours, or is killed without a word. The host's
budget is held by ``RLIMIT_DATA``, which counts what the process maps privately and may write (heap, tensors, stacks)
and no file that is mapped to be read; the device's by torch's allocator.
"""

import resource

import torch

from engine.memory.budget import MemoryBudget, resident_bytes, status_bytes

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

    Args:
        budget: Its device bytes.
        device: Where the job computes; nothing is done on a CPU.
    """
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    # a device without an index is the current one everywhere in torch but here, where it is an error
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget.device_bytes / total), device.index)


def warm_up() -> None:
    """Start what torch starts at its first product, decomposition and backward pass: threads and their buffers."""
    matrix = torch.eye(_WARM_SIDE, requires_grad=True)
    torch.linalg.eigvalsh((matrix @ matrix).detach().to(torch.float64))
    torch.autograd.backward((matrix @ matrix).sum())
