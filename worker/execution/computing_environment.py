"""Environment of a job: versions, device with its memory budget, threads, platform.

A plan may be asked for a device of another machine (`kronoscope plan --device cuda`). Nothing can be measured
then: the document names the device's bytes, and the plan says what was taken for granted.
"""

import importlib.metadata
import os
import platform
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from catalog.record import FieldError
from catalog.requests.assignment import Assignment
from catalog.requests.job import JobDocument
from engine.memory.budget import MemoryBudget, context_bytes, hold_device
from engine.memory.device_speed import fastest_threads
from engine.model.state.generators import fold_seed
from worker.execution.refusal import Refusal, Unavailable
from worker.process.crash import DEVICE_LOST

_PACKAGES = ("kronoscope", "torch", "numpy", "scipy", "safetensors", "transformers", "tokenizers", "datasets")
_UNMEASURED = (
    "what is free on the device: all of its budget is",
    "what CUDA takes for itself and its libraries (some hundred MiB of the device, and more of the host than here)",
    "the device's pace: that of a usual GPU",
    "its compute capability: units for bfloat16 and TF32, and the attention kernels of recent GPUs",
)


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


def settle_threads(assignment: Assignment) -> dict[str, Any]:
    """Set the threads that the job computes with: a later attempt has those of the first, whose digests hold for them.

    A first attempt that may choose takes those of which products are fastest at this moment. Ranks and pieces, whose
    numbers are added up, have as many as they are given. The plan's entries are the threads and, where some were tried,
    the operations per second of each.
    """
    earlier = (assignment.plan or {}).get("threads") if assignment.threads is None else None
    threads = earlier or assignment.threads
    if threads is not None:
        torch.set_num_threads(threads)
    alone = assignment.piece is None and assignment.document.get("shards") is None and "LOCAL_RANK" not in os.environ
    if not assignment.choose_threads or assignment.plan is not None or not alone or torch.get_num_threads() == 1:
        return {"threads": torch.get_num_threads()}
    chosen, speeds = fastest_threads(torch.get_num_threads())
    return {"threads": chosen, "thread_speeds": {str(tried): speed for tried, speed in speeds.items()}}


def process_begun() -> float:
    """Return the moment at which this process was made, by the monotonic clock."""
    now = time.monotonic()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return now - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError):
        return now


def settle_numerics(device: torch.device) -> None:
    """Set torch up for the same numbers on the same machine, before the first tensor."""
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        # not an error where an operation has no deterministic form: the record will tell
        torch.use_deterministic_algorithms(True, warn_only=True)


def seed_libraries(seed: int) -> None:
    """For models and data that draw; our own labels are keyed by counters and need none."""
    torch.manual_seed(fold_seed(seed))
    random.seed(seed)
    np.random.seed(fold_seed(seed) % 2**32)  # noqa: NPY002 - a caller's factory may use the global generator


def computing_budget(
    document: JobDocument, here: torch.device, bounds: Mapping[str, int], wanted: Literal["cpu", "cuda"] | None = None
) -> tuple[torch.device, MemoryBudget, tuple[str, ...]]:
    """Return the device that a document is computed on, or planned for, its measured budget, and a plan's assumptions.

    Call it before the model is there: the plan counts its weights. Only a device that is not here has assumptions.
    """
    device = here if wanted in (None, here.type) else torch.device(str(wanted))
    if device.type == "cuda" and here.type != "cuda":
        try:
            memory = MemoryBudget.named(document.memory)
        except FieldError as error:
            raise Refusal(error.message, pointer=f"/memory/{error.field}") from error
        host = () if document.memory.host != "auto" else ("the host's memory: what is free of this machine's",)
        return device, memory, (*_UNMEASURED, *host)
    memory = MemoryBudget.measure(document.memory, device, replace(MemoryBudget.unlimited(), **bounds))
    hold_device(memory, device)
    return device, memory, ()
