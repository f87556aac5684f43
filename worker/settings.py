"""The worker's settings: read once from the environment, at the process's edge."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from catalog.memory import amount_bytes
from catalog.record import FieldError, record
from jobs.errors import SettingsInvalid
from jobs.settings import LedgerSettings, duration, seconds, secret
from worker.devices.discover import usual_slots
from worker.lifetime import Lifetime

_MOST_SLOTS = 64


@record
class WorkerSettings:
    """The operator's choice for one worker process."""

    ledger: LedgerSettings
    redis_url: str | None = field(default=None, repr=False)  # holds a password
    """The broker of the wake-ups; null in embedded mode."""
    slots: int = 1
    """Jobs at a time; the environment's default is one for each device that the host's memory has room beside."""
    threads: int | None = None
    """Computing threads of a job's first attempt; null shares the machine's cores among the slots."""
    poll_seconds: float = 3
    """Between two looks into the queue, for wake-ups that were lost."""
    reserve_seconds: float = 60
    """A job that waits longer than this for more than is free on a device has one kept for it."""
    cancel_seconds: float = 1
    """Between two looks whether a running job is to be cancelled."""
    disk_floor_bytes: int = 256 * 2**20
    """With less than this free where jobs write, none is taken."""
    disk_pause_seconds: float = 60
    """How long a job whose disk was full is left alone; twice as long after each further failure, at most 900."""
    checkpoint_seconds: float = 60
    """Between two checkpoints of a collection under way; 0 makes none."""
    no_progress_seconds: float = 7200
    """A child that sends no frame for this long is stopped, and its job tried again; 0 waits for ever."""
    attempt_seconds: float = 0
    """An attempt that takes longer ends its job; 0 sets no limit."""
    factories: tuple[str, ...] = ()
    """`package.module:callable` that jobs may name; `*` allows all."""
    directories: tuple[str, ...] = ()
    """Folders that jobs may read from; `*` allows all."""
    paths: tuple[str, ...] = ()
    """Where listed factories are looked for, after everything installed."""
    store: Path
    """The model store."""
    log_level: str = "INFO"
    pulse_file: Path | None = None
    """Touched at each look into the queue, so that a container can be asked cheaply whether its worker lives."""
    lifetime: Lifetime = Lifetime()
    """When it ends by itself."""
    node: str = field(default_factory=socket.gethostname)
    """What its machine is called in the ledger."""
    fake_gpus: tuple[int, ...] = ()
    """Capacities in bytes of GPUs that it pretends to have; jobs on them compute on the CPU, held to that many."""

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if not 1 <= self.slots <= _MOST_SLOTS:
            raise SettingsInvalid(f"KRONOSCOPE_SLOTS is {self.slots}; take 1 to {_MOST_SLOTS} jobs at a time")
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise SettingsInvalid(f"KRONOSCOPE_THREADS is {self.threads}; take 1 to 1024, or leave it out")
        for name in ("poll_seconds", "cancel_seconds"):
            if not 0.01 <= getattr(self, name) <= 3600:
                raise SettingsInvalid(f"{name} is {getattr(self, name)}; take 0.01 to 3600 seconds")
        if self.disk_floor_bytes < 0:
            raise SettingsInvalid(f"KRONOSCOPE_DISK_FLOOR_BYTES is {self.disk_floor_bytes}; take 0 or more bytes")
        if not 0 <= self.disk_pause_seconds <= 900:
            raise SettingsInvalid(
                f"KRONOSCOPE_DISK_PAUSE_SECONDS is {self.disk_pause_seconds:g}; take 0 to 900 seconds"
            )
        if not 0 <= self.reserve_seconds <= 86_400:
            raise SettingsInvalid(f"KRONOSCOPE_RESERVE_SECONDS is {self.reserve_seconds:g}; take 0 to 86400 seconds")
        if not 0 <= self.checkpoint_seconds <= 86_400:
            raise SettingsInvalid(
                f"KRONOSCOPE_CHECKPOINT_SECONDS is {self.checkpoint_seconds:g}; take 0 (none) to 86400 seconds"
            )
        if self.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise SettingsInvalid("KRONOSCOPE_LOG_LEVEL is none of DEBUG, INFO, WARNING, ERROR; take one of them")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], *, poll_seconds: float = 3) -> "WorkerSettings":
        """Read the settings; ``poll_seconds`` is what holds where the environment names none.

        Raises:
            SettingsInvalid: If one is missing or makes no sense.
        """
        floor = _count(environ, "KRONOSCOPE_DISK_FLOOR_BYTES")
        node = environ.get("KRONOSCOPE_NODE") or socket.gethostname()
        fake_gpus = tuple(map(_size, _listed(environ, "KRONOSCOPE_FAKE_GPUS")))
        slots = _count(environ, "KRONOSCOPE_SLOTS")
        return cls(
            ledger=LedgerSettings.from_environment(environ),
            redis_url=redis_url(environ),
            slots=min(_MOST_SLOTS, usual_slots(node, fake_gpus, environ)) if slots is None else slots,
            threads=_count(environ, "KRONOSCOPE_THREADS"),
            poll_seconds=seconds(environ, "KRONOSCOPE_POLL_SECONDS", poll_seconds),
            reserve_seconds=seconds(environ, "KRONOSCOPE_RESERVE_SECONDS", 60),
            cancel_seconds=seconds(environ, "KRONOSCOPE_CANCEL_SECONDS", 1),
            disk_floor_bytes=256 * 2**20 if floor is None else floor,
            disk_pause_seconds=seconds(environ, "KRONOSCOPE_DISK_PAUSE_SECONDS", 60),
            checkpoint_seconds=seconds(environ, "KRONOSCOPE_CHECKPOINT_SECONDS", 60),
            no_progress_seconds=_limit(environ, "KRONOSCOPE_NO_PROGRESS", cls.no_progress_seconds),
            attempt_seconds=_limit(environ, "KRONOSCOPE_ATTEMPT_LIMIT", cls.attempt_seconds),
            factories=_listed(environ, "KRONOSCOPE_ALLOW_FACTORIES"),
            directories=_listed(environ, "KRONOSCOPE_ALLOW_DIRECTORIES"),
            paths=tuple(path for path in environ.get("KRONOSCOPE_FACTORY_PATH", "").split(os.pathsep) if path),
            store=Path(environ.get("KRONOSCOPE_MODEL_STORE") or ".kronoscope/models").absolute(),
            log_level=environ.get("KRONOSCOPE_LOG_LEVEL") or "INFO",
            pulse_file=Path(pulse) if (pulse := environ.get("KRONOSCOPE_PULSE")) else None,
            lifetime=Lifetime.from_environment(environ, time.time()),
            node=node,
            fake_gpus=fake_gpus,
        )

    def computing_threads(self) -> int:
        """Threads for a first attempt."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.slots)


def redis_url(environ: Mapping[str, str]) -> str | None:
    """Return the broker's address, or None without one."""
    return secret(environ, "KRONOSCOPE_REDIS_URL") or secret(environ, "REDIS_URL")


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise SettingsInvalid(f"{name} is no whole number; write one, such as 1") from error


def _limit(environ: Mapping[str, str], name: str, default: float) -> float:
    if environ.get(name) == "0":
        return 0
    given = duration(environ, name)
    return default if given is None else given


def _listed(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in environ.get(name, "").split(",") if part.strip())


def _size(text: str) -> int:
    try:
        return amount_bytes("KRONOSCOPE_FAKE_GPUS", "" if text == "auto" else text, free_bytes=0)
    except FieldError as error:
        raise SettingsInvalid(f'KRONOSCOPE_FAKE_GPUS has {text[:40]!r}; write sizes such as "16GiB,80GiB"') from error
