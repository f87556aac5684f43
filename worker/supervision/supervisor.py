"""The supervisor: one job from its claim to its end.

It starts the child, has its frames written (``worker.supervision.frame_writer``) under the eyes of the clock
(``worker.supervision.lease_monitor``), and decides what the attempt's end means for the job::

    last frame   finished            -> succeeded
                 divided             -> waiting for its pieces (``jobs.queue.division``)
                 failed              -> failed, or queued again where transient
    stopped for  cancel              -> cancelled
                 drain               -> queued again, uncounted
                 deadline, too long  -> failed
    no last word, silent for too long,
    a device that failed             -> crash: queued again; the same crash twice in a row -> failed
    misplaced by its plan            -> queued again, uncounted, for a device that holds it
    never begun: its process cannot
    be started, its device not used  -> queued again, uncounted, for another worker (``worker.devices``)
    lease lost                       -> nothing is written
"""

import contextlib
import errno
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sqlalchemy import Engine

from catalog.frame_bounds import FrameBeyond
from catalog.frames import Divided, Failed, Finished, Frame
from catalog.requests.assignment import Assignment
from jobs.devices.leases import note_guardian, release
from jobs.devices.registry import count_slots
from jobs.errors import ArtifactDamaged, DiskTooSmall, LeaseLost, LedgerUnavailable, QuotaExceeded
from jobs.lifecycle import TERMINAL, State
from jobs.objects.artifacts import open_artifacts
from jobs.objects.object_store import ObjectStore
from jobs.objects.scratch import open_scratch
from jobs.queue import attempt_endings
from jobs.queue.crash_signatures import record_crash
from jobs.queue.division import divide
from jobs.records import Claim
from worker.devices import DeviceHealth
from worker.process.attended_child import AttendedChild, row_name
from worker.process.child_process import EXECUTION, Child, MalformedFrame
from worker.process.crash import (
    DEVICE_LOST,
    LOST_PARTS,
    Signature,
    ending,
    failure_frame,
    never_ran,
    silence_failure,
)
from worker.process.spare_child import SpareChild
from worker.settings import WorkerSettings
from worker.supervision import child_launch
from worker.supervision.attempt_failures import (
    LEASE_TOO_SMALL,
    for_callers,
    full_disk_failure,
    how_it_broke,
    layout_failure,
    pause_after,
    stop_failure,
    unkept_failure,
    with_detail,
    within_disk,
)
from worker.supervision.checkpoint_upload import ScratchMirror
from worker.supervision.child_launch import ChildOutput, job_logger, train_builtin
from worker.supervision.frame_writer import LedgerSink, Misplaced
from worker.supervision.job_reproduction import with_original
from worker.supervision.lease_monitor import LeaseWatch, StopReason
from worker.supervision.retrying_object_store import Interrupted, RetryingObjectStore
from worker.supervision.staging import DAMAGED, FactorsUnavailable, lay_out

_OUTPUT_LINE_BYTES = 1_000
_SICK_PAUSE_SECONDS = 10.0
"""For a job whose device did not come up: a worker of many such devices is not to go through them all at once."""


class Supervisor:
    """Runs one claim; ``run`` returns when nothing of the attempt is left on this machine."""

    def __init__(
        self,
        engine: Engine,
        claim: Claim,
        settings: WorkerSettings,
        command: Sequence[str] = EXECUTION,
        device_health: DeviceHealth | None = None,
        lock: int | None = None,
        spare: SpareChild | None = None,
    ) -> None:
        self._engine = engine
        self._device_health = device_health or DeviceHealth()
        self._claim, self._settings = claim, settings
        self._command, self._spare = command, spare
        self._log = job_logger(job=claim.job_id, attempt=claim.attempt, fence=claim.fence)
        self._watch = LeaseWatch(engine, claim, settings, self._log, lock)
        self._folder = open_artifacts(settings.ledger, self._retrying)
        self._scratch = open_scratch(settings.ledger, self._retrying)
        self._copies = open_scratch(settings.ledger).copies
        self._child: Child | None = None
        self._sink = LedgerSink(engine, claim, settings, self._folder, self._watch, self._log)
        self._attended = AttendedChild(self._sink.take, row_name(*claim.completed[-1]) if claim.completed else None)

    def _retrying(self, store: ObjectStore) -> RetryingObjectStore:
        return RetryingObjectStore(store, self._claim, self._watch)

    @property
    def held(self) -> tuple[str, int]:
        """Job and fence."""
        return self._claim.job_id, self._claim.fence

    def stop(self, reason: StopReason) -> None:
        """End the attempt early, for a reason of which `drain` hands the job back."""
        self._watch.stop(reason)

    def run(self, held_since: float | None = None) -> None:
        """Run the attempt to its end, held since `node_seconds` from before its claim was asked for; None means now."""
        threads, _ = child_launch.computing_threads(self._claim, self._settings)
        self._log.info("job claimed", kinds=self._claim.kinds, threads=threads)
        try:
            self._watch.start(held_since)
        except RuntimeError as error:
            self.give_up(str(error))
            return
        try:
            self._attempt()
        except LeaseLost as error:
            self._log.warning("nothing more is written", why=str(error))
        except Exception:  # noqa: BLE001 - one job's fault must not end the worker
            # the lease runs out and the reaper counts a failure: the honest end of a fault of ours
            self._log.exception("the supervisor failed")
        finally:
            self._watch.end()
            self._release()
            # listed files are in the store by now, and no other attempt has this folder
            self._folder.clear_attempt(self._claim.job_id, self._claim.fence)

    def give_up(self, why: str) -> None:
        """Hand the job back before anything was begun, since no thread can be started to look after it.

        The lease is not renewed meanwhile, so it is tried once: if the database does not answer, the lease runs out.
        """
        self._rest(why)
        try:
            attempt_endings.decline(self._engine, self._claim, code="not_started")
        except (LeaseLost, LedgerUnavailable) as error:
            self._log.warning("the job could not be handed back; its lease runs out", why=str(error))
        self._release()

    def _release(self) -> None:
        """Give the device back, as nothing of the attempt runs; if that is unknown now, the Agent frees it later."""
        if self._claim.lease is None or (self._child is not None and self._child.left_something()):
            return
        try:
            release(self._engine, self._claim.job_id, self._claim.fence)
        except LedgerUnavailable:
            self._log.warning("the database does not answer; the device is given back later")

    def _attempt(self) -> None:
        if self._claim.cancel_requested_at is not None:
            self._watch.stop("cancel")
        told = self._lay_out()
        started = self._launch(told) if isinstance(told, Assignment) else told
        if isinstance(started, tuple):
            self._attend(*started)
            return
        self._watch.settle()
        if started is None:
            self._end(None, None)
        elif isinstance(started, OSError):
            self._not_started(str(started.strerror or started))
        else:
            self._fail(started, None, retry_later=True)

    def _attend(self, child: Child, output: ChildOutput) -> None:
        """Write what it sends, and end the attempt as it ended."""
        with contextlib.closing(child), self._mirroring():
            self._watch.guard(child)
            last, fault = self._hear(child, output)
            code = child.wait()
            tail = output.tail()
        self._log.info("child ended", code=code, last=None if last is None else last.frame)
        if self._watch.is_lost():
            raise LeaseLost(self._claim.job_id, self._claim.fence)
        self._watch.settle()
        died = None if last is not None else fault or (ending(code) if self._watch.reason is None else None)
        if died is not None and fault is None and not self._attended.begun and never_ran(code):
            self._not_started(tail or died)
        elif died is not None:
            self._crash(self._attended.signature(died), self._attended.crash(died, tail))
        else:
            self._end(last, tail)

    def _hear(self, child: Child, output: ChildOutput) -> tuple[Frame | None, str | None]:
        """Its last frame, or what is to stand in its place; else what was wrong with what it sent."""
        try:
            self._note(child)
            last = self._attended.follow(child, self._heard)
            return within_disk(child, last, self._sink.planned_disk_bytes), None
        except (LeaseLost, LedgerUnavailable):
            child.kill()
            output.tail()  # its thread reads from descriptors that are about to be others'
            raise
        except (ArtifactDamaged, DiskTooSmall, FrameBeyond, QuotaExceeded) as error:
            child.kill()
            return unkept_failure(error), None
        except Misplaced:
            self._watch.stop("misplaced")
            child.kill()  # nothing was computed yet, and what it would say next is of no interest
            return None, None
        except Interrupted:
            child.kill()
            return None, None
        except Exception as error:  # noqa: BLE001 - whatever the child sent, this job's fault ends with this job
            self._log.warning("the child sent what cannot be written", exc_info=True)
            child.kill()
            malformed = isinstance(error, MalformedFrame)
            full = full_disk_failure(error)
            return full, None if full else "malformed frame" if malformed else f"unwritable {type(error).__name__}"

    def _lay_out(self) -> Assignment | Failed | None:
        """The child's assignment, and all that it names in its place; or why not, None where it was asked to stop."""
        try:
            told = self._sink.write(self._assignment)
        except Interrupted:
            return None
        except FactorsUnavailable as error:
            return error.failure
        except ArtifactDamaged as error:
            return failure_frame("fatal", DAMAGED, f"{error}; an earlier part of this job wrote it: submit it again")
        except OSError as error:
            return layout_failure(error)
        return told if self._watch.reason is None else None

    def _launch(self, told: Assignment) -> tuple[Child, ChildOutput] | OSError | Failed:
        """The child; an OSError where this worker can start none, whatever the job."""
        try:
            self._child = child = child_launch.start(
                told, self._claim, self._settings, self._command, self._watch.hold, self._slots, self._spare
            )
        except OSError as error:
            return full_disk_failure(error) or error
        try:
            return child, ChildOutput(child.output(_OUTPUT_LINE_BYTES), self._log)
        except RuntimeError as error:  # no thread is to be had
            child.close()
            return OSError(errno.EAGAIN, str(error))

    def _note(self, child: Child) -> None:
        """Note the guardian before anything is computed: a leased device must show who is on it."""
        if self._claim.lease is not None:
            self._sink.write(lambda: note_guardian(self._engine, *self.held, child.pid, child.began))

    def _assignment(self) -> Assignment:
        place = self._folder.attempt_dir(*self.held, self._settings.confinement(self._claim.user_number).user)
        staged = lay_out(self._engine, self._folder, self._claim)
        self._devices = int(staged.get("devices", 1))
        self._slots = 1 if self._copies is not None else count_slots(self._engine)
        if self._watch.reason is None:  # else no child will read it
            self._bring_scratch()
            train_builtin(self._engine, self._claim, self._settings, self._watch)
        return replace(child_launch.assignment(self._claim, self._settings, place, self._scratch), **staged)

    def _bring_scratch(self) -> None:
        """From the machine of an earlier attempt; what is damaged is collected again."""
        try:
            self._scratch.fetch(self._claim.job_id, self._claim.fence)
        except ArtifactDamaged as error:
            self._log.warning("the checkpoint of an earlier attempt is not used", why=str(error))

    @contextlib.contextmanager
    def _mirroring(self) -> Iterator[None]:
        """Have the child's checkpoints copied to the bucket, where there is one."""
        if self._copies is None:
            yield
            return
        with ScratchMirror(self._copies, self._claim, self._scratch.attempt_folder(*self.held), self._watch, self._log):
            yield

    def _heard(self) -> None:
        self._device_health.started()
        self._watch.progressed()

    def _end(self, last: Frame | None, tail: str | None) -> None:
        reason = self._watch.reason
        if isinstance(last, Finished):
            finished = self._sink.write(lambda: with_original(self._engine, self._folder, self._claim, last))
            state = self._sink.write(lambda: attempt_endings.finish(self._engine, self._claim, finished))
        elif isinstance(last, Divided):
            state = self._sink.write(lambda: divide(self._engine, self._claim, last, self._devices))
        elif isinstance(last, Failed) and last.code in LOST_PARTS:
            state = self._lose_part(with_detail(last, tail))
        elif isinstance(last, Failed):
            state = self._fail(last, tail)
        elif reason == "no_progress":
            signature = self._attended.signature("no progress")
            state = self._crash(signature, silence_failure(signature, self._settings.no_progress_seconds, tail))
        elif reason == "misplaced":
            state = self._sink.write(lambda: attempt_endings.hand_back(self._engine, self._claim, LEASE_TOO_SMALL))
        elif reason in ("cancel", "drain"):
            state = self._sink.write(lambda: attempt_endings.hand_back(self._engine, self._claim))
        else:
            state = self._fail(*stop_failure(reason, self._settings.attempt_seconds, tail))
        self._clear(state)
        self._log.info("attempt ended", state=state, reason=reason)

    def _not_started(self, why: str) -> None:
        """Leave the job to others: it stays queued, uncounted, however often, since it was never looked at.

        What is wrong shows in this worker's log, in the job's events and among the operator's failed attempts.
        """
        self._rest(why)
        state = self._sink.write(lambda: attempt_endings.decline(self._engine, self._claim, code="not_started"))
        self._clear(state)
        self._log.info("attempt ended", state=state, reason="not_started")

    def _rest(self, why: str) -> None:
        self._log.warning(
            "no computing process can be started here; the job is handed back, and none is taken for some seconds: "
            "raise the limit of processes (WORKER_PIDS), or mend the installation",
            why=why,
            seconds=round(self._device_health.not_started(), 1),
        )

    def _lose_part(self, failure: Failed) -> State:
        """End the attempt as a crash; one whose device did not even come up for it is left to others, uncounted."""
        if self._attended.begun or failure.code != DEVICE_LOST:
            return self._crash(self._attended.signature(how_it_broke(failure)), failure)
        leased = self._claim.lease
        self._log.warning(
            "the device did not come up; the job is handed back, and the device not offered for some minutes: mend it, "
            "its driver or the build of torch, or start the worker with a CUDA_VISIBLE_DEVICES that leaves it out",
            devices=None if leased is None else leased.device_uuids,
            seconds=None if leased is None else max(map(self._device_health.withhold, leased.device_uuids)),
            why=f"{failure.message}\n{failure.detail or ''}",
        )
        return self._sink.write(
            lambda: attempt_endings.decline(self._engine, self._claim, failure.code, _SICK_PAUSE_SECONDS)
        )

    def _clear(self, state: State) -> None:
        """Keep what the next attempt goes on with, for as long as there may be one."""
        self._scratch.prune(*self.held)
        if state in TERMINAL:
            self._watch.wind_up()
            with contextlib.suppress(Interrupted, LeaseLost):  # the clean-up removes it later
                self._scratch.clear(self._claim.job_id)

    def _crash(self, signature: Signature, failure: Failed) -> State:
        """End the attempt with ``failure``; what ended the attempt before in the same way and place is poison."""
        repeated = self._sink.write(lambda: record_crash(self._engine, self._claim, signature.as_json()))
        state = self._fail(replace(failure, category="fatal") if repeated else failure, None)
        self._log.warning("child crashed", state=state, poison=repeated, **signature.as_json())
        return state

    def _fail(self, failure: Failed, tail: str | None, *, retry_later: bool = False) -> State:
        said = with_detail(failure, tail)
        failure = self._sink.write(lambda: with_original(self._engine, self._folder, self._claim, said))
        self._log.warning("attempt failed", **{name: value for name, value in vars(failure).items() if name != "frame"})
        waits = self._settings.disk_pause_seconds * 2**self._claim.failures
        pause = pause_after(failure, waits, retry_later=retry_later)
        state = self._sink.write(lambda: attempt_endings.fail(self._engine, self._claim, for_callers(failure), pause))
        self._clear(state)
        return state
