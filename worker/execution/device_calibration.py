"""Device calibration: the machine's speed, measured once and kept in the model store, a file for each device.

A file that cannot be read, or that another machine wrote, is measured again. Jobs with users of their own only read the
store; for them a worker measures ahead of time, by a process that runs no job's code:

    python -P -m worker.execution.device_calibration --store DIR --scratch DIR --threads N
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from engine.memory.device_speed import DeviceSpeed, measure_speed
from worker.execution.computing_environment import computing_device, processor

FORMAT = "kronoscope-pace/2"
"""The first was of products of zeros, and of at most 1024 rows on a GPU: it is measured again."""
_FOLDER = "pace"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The stored pace of one machine."""

    store: Path
    """The model store."""
    device: torch.device
    scratch: Path
    """The place that factors wait in: its disk is the one that counts."""
    log: Callable[[str, str], None]

    @property
    def machine(self) -> dict[str, Any]:
        """Identity of the machine that a pace belongs to: measured on any other it would be foreign."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else processor()
        return {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}

    @property
    def path(self) -> Path:
        """Its file."""
        key = hashlib.sha256(json.dumps(self.machine, sort_keys=True).encode()).hexdigest()[:16]
        return self.store / _FOLDER / f"{key}.json"

    def read(self) -> DeviceSpeed | None:
        """Return the pace measured earlier; None where there is none, or the file is not this machine's."""
        try:
            found = json.loads(self.path.read_bytes())
            figures = {field.name: found["pace"][field.name] for field in fields(DeviceSpeed)}
            if found["format"] != FORMAT or found["machine"] != self.machine:
                return None
        except (OSError, ValueError, TypeError, KeyError):
            return None
        whole = all(type(each) in (int, float) and 0 < each < math.inf for each in figures.values())
        return DeviceSpeed(**figures) if whole else None

    def measure(self) -> DeviceSpeed | None:
        """Measure it now, and keep it where the store can be written; None where it cannot be measured.

        A job does without: what is usual is taken then.
        """
        self.log("info", "measuring what this machine does in a second: once, for all jobs on it")
        try:
            near = next((each for each in (self.scratch, *self.scratch.parents) if each.is_dir()), None)
            pace = measure_speed(self.device, near)
        except OSError as error:
            self.log("warning", f"the usual pace is taken, as the disk cannot be measured: {error.strerror or error}")
            return None
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w") as file:
                json.dump({"format": FORMAT, "machine": self.machine, "pace": asdict(pace)}, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self.log("debug", f"the pace is measured again next time, as it cannot be kept: {error.strerror}")
        return pace


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the device that this process sees, unless its pace is there already."""
    parser = argparse.ArgumentParser(prog="worker.execution.device_calibration", description="Measure a device once.")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    def log(level: str, message: str) -> None:
        sys.stderr.write(f"{level}: {message}\n")

    calibration = Calibration(store=options.store, device=computing_device(None), scratch=options.scratch, log=log)
    if calibration.read() is None:
        calibration.measure()
    return 0 if calibration.read() is not None else 1


if __name__ == "__main__":
    sys.exit(main())
