"""What a job computes with: versions, device, threads, platform. The manifest's part that the child knows."""

import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("kronoscope", "torch", "numpy", "scipy", "safetensors", "transformers", "tokenizers", "datasets")


def computing_environment(device: torch.device) -> dict[str, Any]:
    """Facts on which digests depend, and nothing about the machine's owner."""
    return {
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "platform": platform.platform(),
        "processor": processor(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The CPU's name where the kernel tells it."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
