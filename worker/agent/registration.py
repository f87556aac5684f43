"""Registration, the worker's entry in the ledger: made when it begins, renewed while it lives, removed when it ends.

A worker that is not known takes no job: what it offers stands in its entry. One that was silent for so long that the
entry is gone makes it again. One whose devices have all failed stays known, and offers nothing until one answers.
"""

import importlib.metadata
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

import structlog
from sqlalchemy import Engine

from jobs.devices.registry import Device, Worker, forget_silent, leased_devices, pause, register, remove, renew
from jobs.errors import LedgerUnavailable
from jobs.rounds import Rounds
from jobs.schema.identifiers import new_id
from worker.devices import DeviceHealth, Provider, devices_of, process_space
from worker.settings import WorkerSettings

_FORGET_SECONDS = 300


class Registration:
    """One per worker process."""

    def __init__(
        self,
        engine: Engine,
        settings: WorkerSettings,
        provider: Provider | None = None,
        device_health: DeviceHealth | None = None,
        isolation: tuple[str, ...] = (),
    ) -> None:
        self._engine = engine
        self._device_health = device_health or DeviceHealth()
        self._expiry = settings.ledger.lease_seconds
        self._provider = provider or devices_of(settings.node, settings.fake_gpus)
        self._known = False
        self._offered: set[str] = set()
        self._lock = threading.Lock()
        self._ended = False
        self._log = structlog.get_logger("kronoscope.worker")
        self._rounds = Rounds(
            "registration",
            [
                ("renewal of the worker's entry", settings.ledger.heartbeat_seconds, self._keep),
                ("forgotten workers", _FORGET_SECONDS, lambda: forget_silent(engine)),
            ],
            self._log,
        )
        self.worker = Worker(
            id=new_id(),
            node=settings.node,
            process_space=process_space(settings.node),
            version=importlib.metadata.version("kronoscope"),
            slots=settings.slots,
            factories=settings.factories_of_any(),
            isolation=isolation,
            machine_id=settings.machine,
        )

    def start(self) -> None:
        """Be known from now on, as soon as the database answers."""
        self._rounds.start()

    def ensure(self) -> None:
        """Be known, at the latest now, and with no device that did not come up."""
        with self._lock:
            sick = self._offered & self._device_health.withheld()
            if (sick or not self._known) and not self._ended:
                leased = leased_devices(self._engine)
                self._register(self._device_health.well(self._provider()), leased)

    def pause(self, reason: str | None) -> None:
        """Have the ledger say why this worker takes no jobs at the moment; None: it does."""
        with self._lock:
            if reason != self.worker.paused:
                if self._known:
                    pause(self._engine, self.worker.id, reason)
                self.worker = replace(self.worker, paused=reason)

    def end(self) -> None:
        """Take the entry off; a worker that cannot is known to be silent soon enough."""
        self._ended = True
        self._rounds.stop(5)
        with self._lock:
            if self._known:
                self._known = False
                try:
                    remove(self._engine, self.worker.id)
                except LedgerUnavailable:
                    self._log.warning("the database does not answer; the worker's entry runs out by itself")

    def _keep(self) -> None:
        leased = leased_devices(self._engine)  # before it is read what they hold: a job may end in between
        read = self._provider()
        used = {device.uuid: device.used_bytes for device in read if device.uuid not in leased}
        with self._lock:
            offered = self._device_health.well(read)  # looked at last: one may have failed since it was read
            if self._known and {each.uuid for each in offered} != self._offered:
                self._register(offered, leased)  # one has failed, or is well again
            elif self._known:
                self._known = renew(self._engine, self.worker.id, used, self._expiry)
        self.ensure()

    def _register(self, offered: Sequence[Device], leased: Collection[str]) -> None:
        """Make the worker known with what it offers; one that never saw a device is known when it does."""
        if not offered:
            self._log.warning("no device answers; no job is taken until one does")
            if not self._known:
                return
        register(self._engine, self.worker, offered, self._expiry, leased)
        self._known, self._offered = True, {each.uuid for each in offered}
        for each in offered:
            self._log.info("device", uuid=each.uuid, name=each.name, bytes=each.capacity_bytes)
        if len(offered) > self.worker.slots:
            self._log.info("fewer slots than devices", slots=self.worker.slots, devices=len(offered))
