"""The kill matrix: one part killed at one point of a job's life, and what the job looked like afterwards."""

import math
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.lifecycle import TERMINAL
from tests.chaos import removals
from tests.chaos.stack.gated_jobs import GatedJob, outcomes
from tests.chaos.stack.processes import Part, gone
from tests.chaos.stack.stack import Stack, running_stack
from tests.machine.stopwatch import until

PARTS = ("api", "sender", "worker", "child", "redis", "postgres")
POINTS = ("before_claim", "mid_collection", "mid_layer", "write_to_settle", "cancelling")
ALL_CELLS = tuple((part, point) for part in PARTS for point in POINTS)


def matrix_stack(folder: Path, **more: Any) -> AbstractContextManager[Stack]:
    """Run a stack for cells; its third worker takes no job: of it, only what clears up can be missed."""
    held = removals.preload(folder / "changes", "held wake-ups")
    return running_stack(folder, workers=3, own={"worker2": {"CHAOS_IDLE": "1"}}, preload=held, **more)


ORPHAN_SECONDS = 2
"""A computing process must be gone this long after the kill -9 of its worker, on a machine that is there."""


@dataclass(frozen=True)
class Recovery:
    """What one cell took."""

    part: str
    point: str
    running_again: float
    """Seconds from the kill to the first write of a living holder, or to the end."""
    ended: float
    """Seconds from the kill to the job's end."""
    attempts: int


class Cell:
    """One part killed at one point, on a stack made with ``MATRIX``, with one job that is its own."""

    def __init__(self, stack: Stack, part: str, point: str, *, down: float, seconds: float, timed: bool) -> None:
        self.stack = stack
        self.part = part
        self.point = point
        self._down = down
        self._seconds = seconds
        self._timed = timed
        self._job = GatedJob(stack, f"{part}-{point}-{time.monotonic_ns()}")
        self._gates = self._job.gates
        self._stored: list[Any] = []
        """Rows that stood when the part was killed."""

    def run(self, undisturbed: list[tuple[Any, ...]]) -> Recovery:
        """Go there, kill, and see the job end as if nobody had disturbed it."""
        release = self._reach()
        victim = self._victim()
        before = self.stack.row(self._job.id)
        self._stored = self.stack.layers(self._job.id)
        killed_at = time.monotonic()
        revived = self._kill(victim)
        after = self.stack.row_or_none(self._job.id) or before  # a last heartbeat may have come just before the kill
        watched = _Watch(self.stack, self._job.id, before.fence, self._sequence(after), killed_at)
        release()
        watched.start()
        self.stack_answers(revived)
        ends = f"{self}: it ends"
        until(lambda: watched.ended is not None, self._seconds, lambda: f"{ends}; {self.stack.describe(self._job.id)}")
        ended = watched.stop()
        self._judge(undisturbed)
        return Recovery(self.part, self.point, *ended, attempts=self.stack.row(self._job.id).attempt)

    def __str__(self) -> str:
        return f"{self.part} killed {self.point}"

    def stack_answers(self, revived: threading.Thread | None) -> None:
        """Wait until what is started again stands."""
        if revived is not None:
            revived.join()

    def _sequence(self, row: Any) -> float:
        """Above this number an event is a living holder's; without a holder only another claim is a sign of life."""
        return math.inf if self.point == "before_claim" or self.part in ("worker", "child") else row.event_seq

    def _reach(self) -> Callable[[], None]:
        """Bring the job to the point; returns what lets it go on."""
        if self.point == "before_claim":
            return self._before_claim()
        if self.point == "write_to_settle":
            return self._settling()
        gate = {"mid_collection": "batch12", "mid_layer": "row1", "cancelling": "batch12"}[self.point]
        self._job.hold(gate)
        self._job.submit()
        self._job.await_at(gate, self._seconds)
        if self.point == "mid_layer":
            until(lambda: self.stack.layers(self._job.id), 200, "the row that was sent is stored")
        if self.point == "cancelling":
            self.stack.cancel(self._job.id)
            # who looks late finds that its child, which waits for longer than it may, was ended
            self.stack.await_state(self._job.id, "cancelling", "cancelled")
        return lambda: self._job.release(gate)

    def _before_claim(self) -> Callable[[], None]:
        """Nobody has claimed it yet; a computing process is killed as soon as there is one."""
        if self.part == "child":
            self._job.hold("start")
            self._job.submit()
            self._job.await_at("start", self._seconds)
            return lambda: self._job.release("start")
        point = "wakeup" if self.part == "sender" else "claim"
        for each in {"claim", point}:
            self._worker_gate(each).touch()
        self._job.submit()  # stored, and no worker was told
        until(lambda: self._waiting(point), 200, f"somebody comes to {point}")

        def release() -> None:
            for each in ("wakeup", "claim"):
                self._worker_gate(each).unlink(missing_ok=True)
                for seen in self._gates.glob(f"{each}.*.seen"):
                    seen.unlink(missing_ok=True)

        return release

    def _settling(self) -> Callable[[], None]:
        """Every row stands, the end does not; the computing process is caught before it says that it is done."""
        if self.part == "child":
            self._job.hold("row6")
            self._job.submit()
            self._job.await_at("row6", self._seconds)
            until(lambda: len(self.stack.layers(self._job.id)) == 6, 200, "every row that was sent is stored")
            return lambda: self._job.release("row6")
        gate = self._worker_gate("settle")
        gate.touch()
        self._job.submit()
        until(lambda: self._waiting("settle"), self._seconds, "a worker comes to settle")

        def release() -> None:
            gate.unlink()
            for seen in self._gates.glob("settle.*.seen"):
                seen.unlink(missing_ok=True)

        return release

    def _worker_gate(self, point: str) -> Path:
        return self._gates / f"{point}.hold"

    def _waiting(self, point: str) -> list[Part]:
        """The workers that wait there."""
        pids = [int(path.name.split(".")[1]) for path in self._gates.glob(f"{point}.*.seen")]
        return [part for pid in pids if (part := self.stack.part_of(pid)) is not None and part.alive]

    def _victim(self) -> Part | int | None:
        """The process to kill: the one that holds the job, where a worker is meant."""
        if self.part == "api":
            return self.stack.api
        if self.part == "sender":
            waiting = self._waiting("wakeup")
            assert self.point != "before_claim" or waiting == [self.stack.api]
            return waiting[0] if waiting else self.stack.workers[-1]
        if self.part == "worker" and self.point == "before_claim":
            return self._waiting("claim")[0]
        if self.part in ("worker", "child"):
            holder = self.stack.holder(self._job.id)
            assert holder is not None, self.stack.describe(self._job.id)
            if self.part == "worker":
                return holder
            (computing,) = self.stack.computing(holder)
            return computing
        return None

    def _kill(self, victim: Part | int | None) -> threading.Thread | None:
        """kill -9; API, Redis and PostgreSQL come back after a while, a worker does not until the job has ended."""
        if isinstance(victim, int):
            self.stack.kill_process(victim)
            return None
        if isinstance(victim, Part):
            computing = self.stack.computing(victim) if victim in self.stack.workers else []
            victim.kill()
            assert gone(computing, ORPHAN_SECONDS), f"{self}: {computing} outlive their worker"
            if not self._timed:
                self.stack.take_from(victim)
            return self._later(victim.start) if victim is self.stack.api else None
        server = self.stack.redis if self.part == "redis" else self.stack.postgres
        server.kill(signal.SIGKILL)
        return self._later(server.restart)

    def _later(self, start: Callable[[], None]) -> threading.Thread:
        def wait() -> None:
            time.sleep(self._down)
            start()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def _judge(self, undisturbed: list[tuple[Any, ...]]) -> None:
        job_id, stack = self._job.id, self.stack
        row = stack.row(job_id)
        wanted = "cancelled" if self.point == "cancelling" else "succeeded"
        assert row.state == wanted, f"{self}: {stack.describe(job_id)}; {row.failure}"
        told = [(event.data["kind"], event.data["ordinal"]) for event in stack.events(job_id, "layer")]
        stored = outcomes(stack, job_id)
        assert sorted(told) == [(kind, ordinal) for kind, ordinal, *_ in stored], f"{self}: rows were written twice"
        differing = {
            event.data.get("name", event.data.get("layer")) for event in stack.events(job_id, "digest_differs")
        }
        assert differing <= {"memory_curve.json"}, f"{self}: {differing} came out otherwise; the curve is a measurement"
        if wanted == "succeeded":
            assert stored == undisturbed, f"{self}: other digests than the undisturbed run's"
        assert all(row in stack.layers(job_id) for row in self._stored), f"{self}: a row that stood has changed"
        assert stack.verify_artifacts(job_id) == len(stack.events(job_id, "artifact"))


class _Watch(threading.Thread):
    """Looks at the job until it has ended; a database that is down is asked again."""

    def __init__(self, stack: Stack, job_id: str, fence: int, seq: float, since: float) -> None:
        super().__init__(daemon=True)
        self.running_again: float | None = None
        self.ended: float | None = None
        self._stack, self._job_id, self._fence, self._seq, self._since = stack, job_id, fence, seq, since

    def run(self) -> None:
        while self.ended is None:
            row = self._stack.row_or_none(self._job_id)
            now = time.monotonic() - self._since
            if row is not None:
                held = row.state in ("running", "cancelling") and (row.fence > self._fence or row.event_seq > self._seq)
                if self.running_again is None and (held or row.state in TERMINAL):
                    self.running_again = now
                if row.state in TERMINAL:
                    self.ended = now
            time.sleep(0.05)

    def stop(self) -> tuple[float, float]:
        self.join()
        assert self.running_again is not None
        assert self.ended is not None
        return self.running_again, self.ended


def run_cell(
    stack: Stack,
    part: str,
    point: str,
    undisturbed: list[tuple[Any, ...]],
    *,
    down: float = 1.0,
    seconds: float = 300,
    timed: bool = False,
) -> Recovery:
    """Run one cell and leave the stack whole again.

    Unless it is ``timed``, what a killed worker held is taken away at once, in place of waiting for its lease.
    """
    try:
        return Cell(stack, part, point, down=down, seconds=seconds, timed=timed).run(undisturbed)
    finally:
        for hold in (stack.folder / "gates").glob("*.hold"):
            hold.unlink(missing_ok=True)
        stack.revive()
