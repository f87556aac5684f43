"""The settings of a worker."""

import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import override

from catalog.cgroups import process_limit
from catalog.record import FieldError
from catalog.requests.memory import amount_bytes
from catalog.requests.pieces import DecomposeRound
from jobs.environment import Flag, Limit, Variables, split_list
from jobs.errors import SettingsInvalid
from jobs.settings import ServiceSettings
from worker.devices import usual_slots
from worker.lifetime import Lifetime, LifetimeSettings
from worker.process.confinement import Confinement

_MOST_SLOTS = 64
_OWN_PROCESSES = 64
"""Threads of the worker itself and of guardians, which no job may take from it."""
_FEWEST_PROCESSES = 64


def _sizes(value: object) -> object:
    return tuple(map(_size, split_list(value))) if isinstance(value, str) else value


def _size(text: str) -> int:
    try:
        return amount_bytes("KRONOSCOPE_FAKE_GPUS", "" if text == "auto" else text, free_bytes=0)
    except FieldError as error:
        raise SettingsInvalid(f'KRONOSCOPE_FAKE_GPUS has {text[:40]!r}; write sizes such as "16GiB,80GiB"') from error


def _split_paths(value: object) -> object:
    return tuple(path for path in value.split(os.pathsep) if path) if isinstance(value, str) else value


class WorkerSettings(ServiceSettings):
    """The operator's choice for one worker process."""

    slots: Annotated[int, Variables(("KRONOSCOPE_SLOTS",), shown="one for each GPU")] = Field(1, ge=1, le=_MOST_SLOTS)
    """Concurrent jobs of a worker. By default one per GPU as far as host memory has 4 GiB for each, without a GPU 1
    ([sizing](#sizing))."""
    threads: Annotated[int | None, Variables(("KRONOSCOPE_THREADS",), shown="the cores, divided by the slots")] = Field(
        None, ge=1, le=1024
    )
    """Computing threads of each job's first attempt."""
    poll_seconds: float = Field(3, ge=0.01, le=3600)
    """Seconds between a worker's polls of the queue; embedded 1."""
    reserve_seconds: float = Field(60, ge=0, le=86_400)
    """A job that waits longer for more memory than is free gets a device reserved."""
    cancel_seconds: float = Field(1, ge=0.01, le=3600)
    """Seconds between a worker's checks for a cancel or a new deadline."""
    disk_pause_seconds: float = Field(60, ge=0, le=900)
    """Pause of a job after a full disk; doubled after each further failure, up to 900."""
    checkpoint_seconds: float = Field(60, ge=0, le=86_400)
    """Seconds between checkpoints of a collection; 0 makes none."""
    decompose_round: DecomposeRound = "auto"
    """Whether pieces share the decompositions of a job with `shards`: `auto` (if the plan is faster), `always` or
    `never`."""
    no_progress_seconds: Annotated[Limit, Variables(("KRONOSCOPE_NO_PROGRESS",), shown="2h")] = 7200
    """A job without a message for this long is stopped and retried (a number with its unit); 0 waits for ever."""
    attempt_seconds: Annotated[Limit, Variables(("KRONOSCOPE_ATTEMPT_LIMIT",))] = 0
    """A longer attempt ends its job with `timeout`: `24h`; 0: no limit."""
    paths: Annotated[tuple[str, ...], BeforeValidator(_split_paths), Variables(("KRONOSCOPE_FACTORY_PATH",))] = ()
    """Colon list of folders with factories, searched after installed packages."""
    child_user: int | None = Field(None, ge=1, le=2**31 - 1)
    """First of 40,000 unused user numbers, one for each job (in Compose 20000); the worker needs the capabilities
    SETUID, SETGID and KILL. By default jobs run as the worker's user."""
    shared_without_walls: Flag = False
    """1: a worker takes jobs of several tenants without walls between them ([isolation of jobs](#isolation-of-jobs));
    each tenant's code is trusted with the files of all."""
    child_namespaces: Flag = False
    """1: each job gets [namespaces](#namespaces): its own processes and folders, no network. If the kernel refuses, the
    worker logs why, and jobs run without."""
    child_files: int = Field(4096, ge=64, le=2**20)
    """Open files of a job's process."""
    child_file_bytes: int = Field(2**40, ge=2**20, le=2**62)
    """Bytes of a job's largest file."""
    child_disk_bytes: int | None = Field(None, ge=2**20, le=2**62)
    """Bytes of an attempt on the disk, checkpoint and libraries' caches included; larger plans are refused. By default
    its share of the free space applies once the disk runs short ([disk of a job](#day-by-day))."""
    child_disk_files: int = Field(2**17, ge=1024, le=2**31)
    """Files and folders of an attempt. A job writes a few for each layer; the limit bounds the time to count them."""
    child_processes: int = Field(4096, ge=16, le=2**22)
    """Processes and threads of a job with a user of its own (`KRONOSCOPE_CHILD_USER`); at most its slot's share of the
    container's."""
    spare_child: Literal["auto", "always", "never"] = "auto"
    """Whether a worker keeps a process with imports done for the next job: `auto` (with a GPU and 4 GiB of free host
    memory), `always` (with these 4 GiB) or `never`."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Level of the worker's log: `DEBUG`, `INFO`, `WARNING` or `ERROR`."""
    pulse_file: Annotated[Path | None, Variables(("KRONOSCOPE_PULSE",))] = None
    """File that a worker touches at each poll, for the container's health check."""
    lifetime: Annotated[Lifetime, Variables()] = Lifetime()
    """When it ends by itself."""
    node: Annotated[str, Variables(("KRONOSCOPE_NODE",), shown="host name")] = Field(default_factory=socket.gethostname)
    """Name of the machine among the devices."""
    machine: str | None = Field(None, pattern=r"^[0-9a-f-]{36}$")
    """Set by `kronoscope autoscale`: which of its machines this is."""
    fake_gpus: Annotated[tuple[int, ...], BeforeValidator(_sizes)] = ()
    """Simulated GPUs, such as `16GiB,80GiB`: jobs compute on the CPU with plans for these."""

    @override
    @classmethod
    def read_values(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        # read these settings, the ledger's and the lifetime's; count the slots where none are named
        values = super().read_values(environ)
        if "slots" not in values:
            node = values.get("node") or socket.gethostname()
            fake_gpus = tuple(map(_size, split_list(values.get("fake_gpus", ""))))
            values["slots"] = min(_MOST_SLOTS, usual_slots(node, fake_gpus, environ))
        values["lifetime"] = LifetimeSettings.from_environment(environ).lifetime(time.time())
        return values

    def confinement(self, number: int = 0, ranks: int = 1) -> Confinement:
        """Return what the children of a job are held to, as the user for jobs of this number (`Claim.user_number`).

        Each of its ranks has a slot's part of the processes that the container may have.
        """
        allowed = process_limit()
        part = math.inf if allowed is None else max(_FEWEST_PROCESSES, allowed - _OWN_PROCESSES) // self.slots * ranks
        return Confinement(
            user=None if self.child_user is None else self.child_user + number,
            files=self.child_files,
            file_bytes=self.child_file_bytes,
            processes=int(min(self.child_processes, part)),
        )

    def computing_threads(self) -> int:
        """Return the threads of a first attempt."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.slots)
