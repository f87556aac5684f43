"""The Agent: owns this process's slots, and claims jobs for them in fair-share order.

A wake-up says no more than that there is something in the queue: the database decides which job is
next. Every agent hears it; without a free slot it is dropped: the job stands in the database, where
another agent, or the next poll, finds it. So a worker deaf to its broker costs seconds, never a job.
"""

import contextlib
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence

import structlog
from sqlalchemy import Engine

from jobs.devices.leases import Place, free_drained
from jobs.errors import LedgerUnavailable
from jobs.queue.claims import claim
from jobs.records import Claim
from jobs.scheduling.placement import has_future_work, next_places, reserve
from jobs.scheduling.waiting_reason import readable
from jobs.tenancy.shared_workers import ALLOWED_WITHOUT, REMEDY, has_second_tenant, keeps_tenants_apart, missing_walls
from worker.agent.registration import Registration
from worker.agent.worker_locks import WorkerLock
from worker.devices import DeviceHealth
from worker.disk.free_space import free_bytes
from worker.lifetime import DRAIN_SECONDS
from worker.process.child_process import EXECUTION
from worker.process.guardian import node_seconds
from worker.process.process_group import group_lives
from worker.settings import WorkerSettings
from worker.supervision.child_launch import spare_child
from worker.supervision.supervisor import Supervisor

_CLAIM_TRIES = 3
_READ_BEATS = 2
"""Heartbeats within which others' memory on a device without a job was read."""
_GRACE_POLLS = 2
"""A job is left so long to a smaller device: its worker has looked into the queue by then."""
_RETRY_SECONDS = 3.0
"""A look that failed is repeated so soon, however rare the others are: it may have been for a wake-up."""


class Agent:
    """One per worker process."""

    def __init__(
        self,
        engine: Engine,
        settings: WorkerSettings,
        command: Sequence[str] = EXECUTION,
        isolation: tuple[str, ...] = (),
    ) -> None:
        self.idle = threading.Event()
        """Set where the worker is to end with nothing left to do, and nothing is: it takes no job any more."""
        self._engine = engine
        self._settings = settings
        self._command = command
        self._spare = spare_child(settings, command)
        self._device_health = DeviceHealth()
        self.isolation = (*isolation, ALLOWED_WITHOUT) if settings.shared_without_walls else isolation
        """The walls that hold here, and whether its operator allows several tenants without them."""
        self._registration = Registration(engine, settings, device_health=self._device_health, isolation=self.isolation)
        self._lock_file = WorkerLock(settings.ledger.artifact_root, self._registration.worker.id)
        self._owner = f"{socket.gethostname()}:{os.getpid()}"
        self._slots = threading.Semaphore(settings.slots)
        self._supervisors: set[Supervisor] = set()
        self._lock = threading.Lock()
        self._unanswered: tuple[Place, str] | None = None
        """A claim that may have been made, since no reply came; asked for again before any other."""
        self._draining = False
        self._room = True
        self._apart = True
        # of all that wakes a thread this alone may be used by a signal handler that interrupts its use
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._poller = threading.Thread(target=self._poll, name="poller", daemon=True)
        self._log = structlog.get_logger("kronoscope.worker")

    def start(self) -> None:
        """Be known to the others, and begin to look for work."""
        self._lock_file.hold()
        self._registration.start()
        self._poller.start()

    def wake(self) -> None:
        """Look into the queue now, if a slot is free; one that becomes free is a reason by itself."""
        if len(self._supervisors) < self._settings.slots:
            self._wakeups.put(None)

    def take(self) -> bool:
        """Claim the next job in fair-share order if a slot is free; return whether. Nothing is held where it raises."""
        if self._draining or not self._may_take() or not self._slots.acquire(blocking=False):
            return False
        taken = False
        try:
            asked = node_seconds()  # the lease runs from the first try on, whichever was the one that was answered
            held = self._claim_next()
            if held is not None:
                self._supervise(held, asked)
                taken = True
        finally:
            if not taken:
                self._slots.release()
        return taken

    def _may_take(self) -> bool:
        """Whether this worker could begin a job now, whichever it is; jobs that wait say why it could not."""
        reason = self._reason_to_pause()
        self._registration.pause(reason)
        return reason is None

    def _reason_to_pause(self) -> str | None:
        if self._device_health.resting():
            return "no process can be started there; it tries again within a minute"
        if (full := self._full_disk()) is not None:
            return full
        return None if self._keeps_tenants_apart() else "it does not keep the jobs of several tenants apart"

    def _keeps_tenants_apart(self) -> bool:
        """Whether there is one tenant, or walls between several; the claim asks again, in its transaction."""
        apart = keeps_tenants_apart(self.isolation) or not has_second_tenant(self._engine)
        if apart != self._apart:
            self._apart = apart
            if apart:
                self._log.info("one tenant is left; jobs are taken")
            else:
                missing = missing_walls(self.isolation)
                self._log.error("there are several tenants; no job is taken", missing_walls=missing, remedy=REMEDY)
        return apart

    def _full_disk(self) -> str | None:
        """A clause on a disk below its floor, where the next job would only fail, and be counted; else None."""
        free, floor = free_bytes(self._settings.ledger.artifact_root), self._settings.disk_floor_bytes
        room = free >= floor
        if room != self._room:
            self._room = room
            if room:
                self._log.info("there is room on the disk again; jobs are taken", free_bytes=free)
            else:
                self._log.warning("the disk is too full to take jobs", free_bytes=free, floor_bytes=floor)
        return None if room else f"its disk has {readable(free)} free, and it takes jobs from {readable(floor)} on"

    def begin_drain(self) -> None:
        """Take no more jobs and have the running ones stop; a second call changes nothing."""
        if not self._draining:
            self._draining = True
            self._wakeups.put(None)

    def drain(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Hand every running job back, its attempt uncounted; return whether all have ended within the seconds."""
        self.begin_drain()
        deadline = time.monotonic() + seconds
        self._stop_all()
        free = [self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in range(self._settings.slots)]
        for taken in free:
            if taken:
                self._slots.release()  # it is no longer taken, and draining twice finds the same
        if self._poller.is_alive():  # its last look may be under way, and the caller is about to close the database
            self._poller.join(max(0.0, deadline - time.monotonic()))
        if self._spare is not None:
            self._spare.close()
        self._registration.end()
        if all(free):  # else something may be left, and the others take it back when this process has ended
            self._lock_file.release()
        return all(free)

    def _nothing_to_do(self) -> bool:
        """Asked by the thread that takes jobs. What runs here is looked at first: as it ends it may join the queue."""
        with self._lock:
            running = bool(self._supervisors)
        if not self._apart:
            return not running
        beats = _READ_BEATS * self._settings.ledger.heartbeat_seconds
        return not running and not has_future_work(self._engine, self._registration.worker.id, beats)

    def _claim_next(self) -> Claim | None:
        """The first in fair-share order that no other worker was quicker to take."""
        self._registration.ensure()
        if self._unanswered is not None:
            place, token = self._unanswered
            held = self._claim(place, token)
            self._unanswered = None
            if held is not None:
                return held
        grace, most = _GRACE_POLLS * self._settings.poll_seconds, self._settings.ledger.running_jobs
        for place in next_places(self._engine, self._registration.worker.id, grace, most):
            held = self._claim(place, secrets.token_hex(16))
            if held is not None:
                return held
        return None

    def _claim(self, place: Place, token: str) -> Claim | None:
        """Claim; one token for all tries, the next look's too, so that a claim whose reply was lost is recognised."""
        for tries_left in reversed(range(_CLAIM_TRIES)):
            try:
                lease_seconds = self._settings.ledger.lease_seconds
                return claim(self._engine, place.job_id, self._owner, token, lease_seconds, place=place)
            except LedgerUnavailable:
                if not tries_left:
                    self._unanswered = place, token
                    raise
                time.sleep(0.2)
        return None

    def _supervise(self, held: Claim, held_since: float) -> None:
        supervisor = Supervisor(
            *(self._engine, held, self._settings, self._command, self._device_health),
            lock=self._lock_file.descriptor,
            spare=self._spare,
        )
        with self._lock:
            self._supervisors.add(supervisor)
        # a daemon: where a drain is cut short the process may end, and the lifeline ends the child
        try:
            run = threading.Thread(
                target=self._run, args=(supervisor, held_since), name=f"job-{held.job_id}", daemon=True
            )
            run.start()
        except RuntimeError as error:  # no thread is to be had
            with self._lock:
                self._supervisors.discard(supervisor)
            supervisor.give_up(str(error))
            raise
        if self._draining:
            supervisor.stop("drain")

    def _run(self, supervisor: Supervisor, held_since: float) -> None:
        try:
            supervisor.run(held_since)
        finally:
            with self._lock:
                self._supervisors.discard(supervisor)
            self._slots.release()
            self._wakeups.put(None)

    def _look_after_devices(self) -> None:
        """Free what nothing runs on any more, and keep room for jobs that wait long for it."""
        self._registration.ensure()
        worker = self._registration.worker
        with self._lock:
            running = {each.held for each in self._supervisors}
        freed = free_drained(self._engine, worker.id, worker.process_space, running, group_lives)
        if freed:
            self._log.info("devices are free again", leases=freed)
        if self._may_take():  # what this worker does not take now is not to be kept from others
            most = self._settings.ledger.running_jobs
            reserve(self._engine, worker.id, self._settings.reserve_seconds, most)

    def _stop_all(self) -> None:
        with self._lock:
            running = list(self._supervisors)
        for supervisor in running:
            supervisor.stop("drain")

    def _beat(self) -> None:
        """Show that jobs are being looked for; a broker that is gone, or a silent database, is not its fault."""
        self._lock_file.touch()
        if self._settings.pulse_file is not None:
            try:
                self._settings.pulse_file.touch()
            except OSError as error:
                self._log.warning("the pulse file cannot be touched", why=str(error))

    def _poll(self) -> None:
        while True:
            while not self._wakeups.empty():
                self._wakeups.get()
            if self._draining:  # looked at after the wake-ups, of which one may have been for this
                break
            self._beat()
            pause = min(self._settings.poll_seconds, _RETRY_SECONDS)
            try:
                self._look_after_devices()
                while self.take():  # each is looked for anew: the one before has changed the fair-share order
                    pass
                if self._settings.lifetime.until_idle and self._nothing_to_do():
                    self._draining = True
                    self.idle.set()
                pause = self._settings.poll_seconds
            except LedgerUnavailable:
                self._log.warning("the database does not answer; the queue is looked into again")
            except Exception:  # noqa: BLE001 - what makes lost wake-ups harmless outlives whatever happens
                self._log.exception("looking into the queue failed")
            with contextlib.suppress(queue.Empty):
                self._wakeups.get(timeout=pause)
        self._stop_all()
