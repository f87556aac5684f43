"""Memory exhaustion: how a failed allocation differs from every other failure, and what can be freed after one.

Torch has a type for a device's memory and none for the host's; its libraries each say it in their own
words. After an asynchronous fault of the device nothing more can be computed in the process, whatever is freed.
"""

import gc
import re

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
    "NVML_SUCCESS == ",  # torch's device allocator, where the driver does not say who else holds memory (a MIG slice)
    "could not create a memory",  # oneDNN
    "STATUS_NOT_INITIALIZED",  # what they say of a handle that was not made, for lack of memory as a rule
)
_HANDLE = re.compile(
    r"_(?:NOT_INITIALIZED|INTERNAL_ERROR|ALLOC_FAILED)\b.*`(?:cublas(?:Lt)?|cusolver(?:Dn|Sp)|cusparse|cudnn)Create\("
)
"""A handle of a device's library that was not made: it takes memory of its own, and no more is said than that."""
_RECOMPUTED: type[Exception] = getattr(checkpoint, "_StopRecomputationError", Unwinding)
_DEVICE_FAULT = (
    "illegal memory access",
    "illegal instruction",
    "invalid program counter",
    "device-side assert triggered",
    "launch failure",
    "launch timed out",
    "misaligned address",
    "hardware stack error",
    "global/shared address space",
    "ECC error",
    "NVLink error",
    "EXECUTION_FAILED",  # cuBLAS, cuSOLVER, cuDNN: a kernel of theirs
)
"""Words of faults that a context does not outlive."""
_OF_A_CALL = (
    "invalid argument",
    "invalid configuration argument",
    "invalid device function",
    "no kernel image",
    "not supported",
    "too many resources",
    "PTX",
    "device not ready",
    "_STATUS_",
)
"""Words of the device about a call that it has refused: the context is as it was."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports a failed allocation, on the device or the host.

    True for torch's and Python's own types and for the libraries' messages; not for a lost device.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    said = str(error)
    return any(text in said for text in _SAID) or _HANDLE.search(said) is not None


def lost_device(error: BaseException) -> bool:
    """Return whether the device's context is broken, so that only another process gets a new one.

    True for the accelerator's errors but failed allocations and calls that it refused.
    """
    if not isinstance(error, RuntimeError) or ran_out_of_memory(error):
        return False
    said = str(error)
    if any(text in said for text in _DEVICE_FAULT):
        return True
    # of an error that is not known the worst is thought
    kind = getattr(torch, "AcceleratorError", None)
    told = (kind is not None and isinstance(error, kind)) or "CUDA error" in said or "CUDA driver error" in said
    return told and not any(text in said for text in _OF_A_CALL)


def is_unexplained(error: BaseException) -> bool:
    """Return whether an error has no known cause here.

    False for the engine's own errors, a failed allocation, a lost device, and the exception by which torch ends the
    recomputation of a checkpointed part early.
    """
    ours = isinstance(error, (EngineError, Unwinding, _RECOMPUTED))
    return not (ours or ran_out_of_memory(error) or lost_device(error))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 300 characters; its type's name if there is no message."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def free_memory(device: torch.device) -> None:
    """Collect unreachable objects, and return what allocators keep of them to the device and the system.

    It is for fallbacks alone: a step that did so each time would allocate everything anew each time. Call it outside of
    any ``except`` block, whose traceback refers to every tensor of the frames it went through.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    give_back_host_memory()
