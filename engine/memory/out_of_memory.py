"""Exhaustion: telling a failed allocation from every other failure, and letting go of what can be let go of.

Torch has a type for a device's memory and none for the host's; its libraries each say it in their own
words. After an asynchronous fault of the device nothing more can be computed in the process, whatever is freed.
"""

import gc

import torch
from torch.utils import checkpoint

from engine.errors import EngineError, Unwinding
from engine.memory.budget import give_back_host_memory

_SAID = (
    "can't allocate memory",  # torch's host allocator
    "not enough memory",  # the same, in older words
    "Cannot allocate memory",  # the C library's ENOMEM
    "out of memory",  # CUDA runtime, cuDNN
    "ALLOC_FAILED",  # cuBLAS, cuSOLVER, cuDNN
    "could not create a memory",  # oneDNN
)
_RECOMPUTED: type[Exception] = getattr(checkpoint, "_StopRecomputationError", Unwinding)
_DEVICE_FAULT = ("CUDA error", "device-side assert", "CUDA driver error")


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` tells of an allocation that failed; not of a device that is lost."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in _SAID)


def lost_device(error: BaseException) -> bool:
    """Whether the device failed asynchronously: its context is broken, and only another process gets a new one."""
    kind = getattr(torch, "AcceleratorError", None)
    told = kind is not None and isinstance(error, kind)
    told = told or (isinstance(error, RuntimeError) and any(text in str(error) for text in _DEVICE_FAULT))
    return told and not ran_out_of_memory(error)


def is_unexplained(error: BaseException) -> bool:
    """Whether ``error`` is none of the engine's own, no failed allocation and no lost device.

    Nor what ends the second run of a checkpointed part early, once everything is there that the backward pass needs.
    """
    ours = isinstance(error, (EngineError, Unwinding, _RECOMPUTED))
    return not (ours or ran_out_of_memory(error) or lost_device(error))


def first_line(error: BaseException) -> str:
    """What an error says, short enough for a record."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def free_memory(device: torch.device) -> None:
    """Collect what nobody refers to, and return what allocators keep of it to the device and the system.

    For the ladder alone: a step that did so each time would allocate everything anew each time. Call it outside of
    any ``except`` block, whose traceback refers to every tensor of the frames it went through.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    give_back_host_memory()
