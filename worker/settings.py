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
from worker.devices.discover import usual_slots
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
    """Jobs that a worker computes at a time. By default one for each GPU that it sees when it starts, but no more than
    its host memory has 4 GiB for each; without a GPU 1 ([sizing](#sizing))."""
    threads: Annotated[int | None, Variables(("KRONOSCOPE_THREADS",), shown="the cores, divided by the slots")] = Field(
        None, ge=1, le=1024
    )
    """Computing threads of each job's first attempt."""
    poll_seconds: float = Field(3, ge=0.01, le=3600)
    """Seconds between two polls of the queue by a worker, with or without a wake-up; embedded 1."""
    reserve_seconds: float = Field(60, ge=0, le=86_400)
    """A job that waits longer for more than is free on a device has one kept for it ([devices](#devices))."""
    cancel_seconds: float = Field(1, ge=0.01, le=3600)
    """Seconds between two looks of a worker whether its job was cancelled or has another deadline."""
    disk_pause_seconds: float = Field(60, ge=0, le=900)
    """How long a job whose disk was full is left alone; twice as long after each further failure, 900 at most."""
    checkpoint_seconds: float = Field(60, ge=0, le=86_400)
    """Seconds between two checkpoints of a collection under way; 0 makes none."""
    decompose_round: DecomposeRound = "auto"
    """Whether the decompositions of a job with `shards` are divided over pieces too: `auto` where that takes less time
    by the plan, `always`, or `never`."""
    no_progress_seconds: Annotated[Limit, Variables(("KRONOSCOPE_NO_PROGRESS",), shown="2h")] = 7200
    """A job of which nothing is heard for this long is stopped and tried again (a number with its unit); 0 waits for
    ever."""
    attempt_seconds: Annotated[Limit, Variables(("KRONOSCOPE_ATTEMPT_LIMIT",))] = 0
    """A job whose attempt takes longer ends with `timeout`: `24h`; 0 sets no limit."""
    paths: Annotated[tuple[str, ...], BeforeValidator(_split_paths), Variables(("KRONOSCOPE_FACTORY_PATH",))] = ()
    """Colon list of folders in which a worker looks for factories, after everything that is installed."""
    child_user: int | None = Field(None, ge=1, le=2**31 - 1)
    """First of 40,000 user numbers that jobs run as, each as one of its own (under Compose 20000); the worker then
    needs the capabilities SETUID, SETGID and KILL. Nobody else may have one of them. Without it jobs run as the
    worker's user."""
    shared_without_walls: Flag = False
    """1: a worker takes jobs although there are several tenants and not every wall between them holds
    ([isolation of jobs](#isolation-of-jobs)); it then trusts each tenant's code with the files of all."""
    child_namespaces: Flag = False
    """1: each job gets namespaces of its own, so it sees no process and no folder of another, writes to its own folders
    alone, and has no network ([namespaces](#namespaces)). Where the kernel refuses, the worker logs why, and jobs run
    without."""
    child_files: int = Field(4096, ge=64, le=2**20)
    """Files that the process of a job may have open."""
    child_file_bytes: int = Field(2**40, ge=2**20, le=2**62)
    """Bytes of the largest file that a job may write."""
    child_disk_bytes: int | None = Field(None, ge=2**20, le=2**62)
    """Bytes that an attempt may have on the disk while it writes, checkpoint and libraries' caches among them; a job
    whose plan says more is refused. Without it a job is held to its part of what is free once the disk runs short
    ([limits of the disk](#day-by-day))."""
    child_disk_files: int = Field(2**17, ge=1024, le=2**31)
    """Files and folders that an attempt may have. A job writes a few for each layer; the number bounds how long it
    takes to count them."""
    child_processes: int = Field(4096, ge=16, le=2**22)
    """Processes and threads of a job, where `KRONOSCOPE_CHILD_USER` gives it a user of its own; no more than its slot's
    part of what the container may have."""
    spare_child: Literal["auto", "always", "never"] = "auto"
    """Whether a worker keeps a process that has imported what the next job needs, and begins it two seconds sooner:
    `auto` where it has a GPU and 4 GiB of host memory are free, `always` where they are free, or `never`."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe lines that a worker logs: `DEBUG`, `INFO`, `WARNING` or `ERROR`."""
    pulse_file: Annotated[Path | None, Variables(("KRONOSCOPE_PULSE",))] = None
    """File that a worker touches at each look into the queue; the container's health check asks for its age."""
    lifetime: Annotated[Lifetime, Variables()] = Lifetime()
    """When it ends by itself."""
    node: Annotated[str, Variables(("KRONOSCOPE_NODE",), shown="host name")] = Field(default_factory=socket.gethostname)
    """Name of the machine among the devices."""
    machine: str | None = Field(None, pattern=r"^[0-9a-f-]{36}$")
    """Set by `kronoscope autoscale` for the workers that it starts: which of its machines this is."""
    fake_gpus: Annotated[tuple[int, ...], BeforeValidator(_sizes)] = ()
    """Made-up GPUs, such as `16GiB,80GiB`, on which jobs compute on the CPU, planned within so much."""

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
        """Return what the children of a job are held to.

        Args:
            number: Which of the users for jobs it has (`Claim.user_number`).
            ranks: The job's ranks, each of which has a slot's part of the processes that the container may have.
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
