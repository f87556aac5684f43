"""Environment of a job: versions, device, threads, platform. The manifest's part that the child knows."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from engine.memory.budget import context_bytes
from worker.execution.refusal import Refusal, Unavailable
from worker.process.crash import DEVICE_LOST

_PACKAGES = ("kronoscope", "torch", "numpy", "scipy", "safetensors", "transformers", "tokenizers", "datasets")


def computing_device(leased: str | None) -> torch.device:
    """Choose the device: the GPU, if this process sees one and it answers, else the CPU; of a rank, its own GPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", _own_gpu(leased)) if "LOCAL_RANK" in os.environ else torch.device("cuda")
        # one that does not answer ends it here
        context_bytes(device)
        return device
    if leased == "cuda":
        message = (
            f"a GPU was leased for this job, and CUDA does not come up in its process (torch {torch.__version__}): it "
            "has failed, or its driver is too old for this build of torch; mend it, or start the worker with an empty "
            "CUDA_VISIBLE_DEVICES, and it computes on the host"
        )
        raise Unavailable(message, code=DEVICE_LOST)
    return torch.device("cpu")


def _own_gpu(leased: str | None) -> int:
    """The number of this rank's GPU among those that the process sees."""
    own, ranks, gpus = int(os.environ["LOCAL_RANK"]), int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.device_count()
    if own < gpus:
        return own
    message = f"asks for {ranks} ranks, each with a GPU of its own, and {gpus} can be seen here; "
    if leased is not None:
        raise Unavailable(message + "one of those that were leased does not come up", code=DEVICE_LOST)
    raise Refusal(
        message + f"take `world_size: {gpus}`, or an empty CUDA_VISIBLE_DEVICES, and the ranks compute on the CPU",
        pointer="/world_size",
        code="no_device",
    )


def computing_environment(device: torch.device) -> dict[str, Any]:
    """Return the facts on which digests depend, and nothing about the machine's owner."""
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
