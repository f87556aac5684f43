"""Which device this worker will compute on, found out without importing torch."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from worker.devices.discover import gpus_given

_DEVICE_NODE = Path("/dev/nvidiactl")


def describe_device(environ: Mapping[str, str] = os.environ) -> str:
    """Describe the device that this worker computes on, for its first log line.

    Args:
        environ: The environment's variables; `CUDA_VISIBLE_DEVICES` and `PATH` are read.

    Returns:
        ``cpu (…)`` with the reason, or ``cuda (…)`` with the names of the GPUs.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return "cpu (CUDA_VISIBLE_DEVICES hides every GPU)"
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None:
        return "cuda (names unknown)" if _DEVICE_NODE.exists() else "cpu (no NVIDIA driver)"
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=True)  # noqa: S603 - a fixed command
    except (OSError, subprocess.SubprocessError):
        return f"{_kind(visible)} (nvidia-smi does not answer)"
    names = [line.split(" (UUID")[0].strip() for line in listing.stdout.splitlines() if line.startswith("GPU ")]
    return f"cuda ({'; '.join(names)})" if names else f"{_kind(visible)} (nvidia-smi lists no GPU)"


def _kind(visible: str | None) -> str:
    """One whose GPUs do not answer takes no job until one does, instead of computing elsewhere."""
    return "cuda" if gpus_given(visible) else "cpu"
