"""Device versions: the card, its driver and the libraries that decide the bits of a GPU's results.

What cannot be asked is unknown, and nothing fails for it: CUDA may be linked into torch, or absent where a job is
planned.
"""

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

UNKNOWN = "unknown"
_MAPPED = Path("/proc/self/maps")
_DRIVER_LENGTH = 80
"""Bytes of the longest version of a driver, as NVML's header has it."""


def device_versions(device: torch.device) -> dict[str, Any]:
    """Read the card's name and multiprocessors, and the versions of driver, CUDA, cuBLAS, cuDNN and cuSOLVER.

    Args:
        device: A device of the class `cuda`, which need not be present.

    Returns:
        Values by the names of the fields of ``Numerics``: `multiprocessors` a number, the others strings; `unknown`
        where one cannot be asked.
    """
    present = torch.cuda.is_available()
    properties: Any = torch.cuda.get_device_properties(device) if present else None
    cudnn: Any = torch.backends.cudnn
    return {
        "device_name": str(properties.name) if present else UNKNOWN,
        "multiprocessors": int(properties.multi_processor_count) if present else UNKNOWN,
        "driver": _driver() if present else UNKNOWN,
        "cuda": str(torch.version.cuda or UNKNOWN),
        "cublas": _library_version("cublas") if present else UNKNOWN,
        "cudnn": str((cudnn.version() if present else None) or UNKNOWN),
        "cusolver": _library_version("cusolver") if present else UNKNOWN,
    }


@functools.cache
def _driver() -> str:
    """The driver's version, as NVML says it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        version = ctypes.create_string_buffer(_DRIVER_LENGTH)
        if library.nvmlInit_v2() != 0:
            return UNKNOWN
        failed = library.nvmlSystemGetDriverVersion(version, ctypes.c_uint(_DRIVER_LENGTH)) != 0
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return UNKNOWN
    return UNKNOWN if failed else version.value.decode(errors="replace")


@functools.cache
def _library_version(name: str) -> str:
    """The version that a library of CUDA's says of itself: `cublas` or `cusolver`."""
    numbers = [ctypes.c_int() for _ in range(3)]
    try:
        path = next(_paths(name), None)
        if path is None:
            return UNKNOWN
        ask = getattr(ctypes.CDLL(str(path)), f"{name}GetProperty")
        # major, minor and patch level
        failed = any(ask(place, ctypes.byref(number)) != 0 for place, number in enumerate(numbers))
    except (OSError, AttributeError):
        return UNKNOWN
    return UNKNOWN if failed else ".".join(str(number.value) for number in numbers)


def _paths(name: str) -> Iterator[Path]:
    """Yield the library that is loaded; then those that would be, as torch loads cuSOLVER at its first use."""
    file = f"lib{name}.so"
    lines = (line.split(maxsplit=5) for line in _MAPPED.read_text(errors="replace").splitlines())
    loaded = [Path(words[5]) for words in lines if len(words) > 5 and ".so" in words[5]]
    yield from (path for path in loaded if path.name.startswith(file))
    for path in loaded:
        if path.name.startswith("libcublas.so"):
            # all in one folder, or each in one of its own
            yield from sorted(path.parent.glob(f"{file}*"))
            yield from sorted(path.parent.parent.parent.glob(f"{name}/lib/{file}*"))
            return
