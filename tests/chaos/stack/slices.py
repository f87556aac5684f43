"""Directed pieces of a campaign, one for each protection: the fault that it is there for, and then the same checker.

Each is run as the service is, where nothing may be broken, and without the protection, where the
checker must say so.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from sqlalchemy import text

from jobs.schema.database import reading
from tests import servers
from tests.chaos import audit, removals
from tests.chaos.campaign import drain, put_proxy_before
from tests.chaos.checker import check
from tests.chaos.evidence import Evidence, gather
from tests.chaos.stack.clients import Customer, History
from tests.chaos.stack.documents import GATED, LABEL, Truth
from tests.chaos.stack.gated_jobs import GatedJob
from tests.chaos.stack.processes import Part, gone
from tests.chaos.stack.proxy import LossyProxy
from tests.chaos.stack.stack import LONG_LEASES, Stack, running_stack
from tests.chaos.violation import Violation
from tests.machine.stopwatch import until

_CHANGES = "changes"
_STALL_SECONDS = 240
"""Nothing has moved for so long; a machine that stands still is not to look like a job that is lost."""
_GIVEN_UP_SECONDS = 12
"""The same where a protection is missing, and jobs are to be lost."""
_DRAIN_SECONDS = 600
_SETTINGS = LONG_LEASES | {"KRONOSCOPE_CANCEL_SECONDS": LONG_LEASES["KRONOSCOPE_HEARTBEAT_SECONDS"]}
"""Looking for a cancellation as often as beating, the holder learns of its loss by the fence alone."""
_SERVED = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name AND datname = current_database()")


@dataclass
class Scene:
    """A stack, and one customer who keeps a history."""

    stack: Stack
    proxy: LossyProxy
    client: httpx.Client
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        self.customer = Customer(self.client, self.history, time.monotonic(), _DRAIN_SECONDS)

    def job(self, name: str) -> GatedJob:
        """A job that is not submitted yet."""
        return GatedJob(self.stack, name, labels={LABEL: name})

    def submit(self, job: GatedJob) -> str:
        """Submit it as a client does, whose requests get lost and are repeated."""
        job_id = self.customer.submit(job.name, job.document)
        assert job_id is not None, self.history.shown()
        job.id = job_id
        return job_id


@dataclass(frozen=True)
class Slice:
    """What is done to a stack, and how many workers that has at first."""

    workers: int
    act: Callable[[Scene], None]
    changes: tuple[str, ...] = ()
    """Of `removals`, in any case: what gives the fault a place to happen."""


@dataclass
class Verdict:
    """What the checker said, and what there was to see."""

    violations: list[Violation]
    evidence: Evidence
    refused: int
    unknown: int
    logs: Path

    @property
    def promises(self) -> set[str]:
        return {str(each.promise) for each in self.violations}

    def __str__(self) -> str:
        return "\n".join([*map(str, self.violations), *self.evidence.history.shown(), f"logs in {self.logs}"])


def run_slice(name: str, folder: Path, truth: Truth, postgres: servers.PrivateServer, *, removed: bool) -> Verdict:
    """Run one of ``SLICES`` and have it judged; with ``removed``, without the protection of that name."""
    with _scene(name, folder, postgres, removed=removed) as scene:
        SLICES[name].act(scene)
        drain(scene.stack.engine, _DRAIN_SECONDS, _GIVEN_UP_SECONDS if removed else _STALL_SECONDS)
        for key, ids in scene.history.accepted.items():
            for job_id in ids:
                scene.customer.look(key, job_id)
        evidence = gather(scene.stack.engine, scene.history, {GATED: truth}, scene.stack.artifacts)
        evidence.held.clear()  # what is freed of a killed worker's devices is freed a while later
        lines = [line for worker in scene.stack.workers for line in worker.lines()]
        refused = sum("no longer held under fence" in line for line in lines)
        return Verdict(check(evidence), evidence, refused, scene.proxy.lost, folder)


@contextlib.contextmanager
def _scene(name: str, folder: Path, postgres: servers.PrivateServer, *, removed: bool) -> Iterator[Scene]:
    proxies: list[LossyProxy] = []

    def prepare(stack: Stack) -> None:
        audit.install(stack.engine)
        proxies.append(put_proxy_before(stack, stack.api))

    with (
        running_stack(
            folder,
            workers=SLICES[name].workers,
            settings=_SETTINGS,
            preload=removals.preload(folder / _CHANGES, *SLICES[name].changes, *([name] if removed else [])),
            prepare=prepare,
            postgres=postgres,
        ) as stack,
        contextlib.closing(proxies[0]),
        stack.client() as client,
    ):
        yield Scene(stack, proxies[0], client)


def _zombie(scene: Scene) -> None:
    """A worker sleeps beyond its lease with a job half done, and wakes when another has just taken it.

    Its child went on meanwhile: everything that is left to write waits in the pipe.
    """
    job = scene.job("zombie")
    job.hold("row2")
    job_id = scene.submit(job)
    job.await_at("row2")
    holder = scene.stack.await_holder(job_id)
    child = scene.stack.computing(holder)
    fence = scene.stack.row(job_id).fence
    job.hold("start")
    holder.pause()
    job.release("row2")
    scene.stack.take_from(holder)
    until(lambda: scene.stack.row(job_id).fence > fence, 200, "another worker takes the job")
    assert gone(child, 200)
    holder.resume()
    ends = ("nothing more is written", "attempt ended", "the supervisor failed")
    until(lambda: any(map(holder.said, ends)), 200, lambda: f"the zombie is done:\n{holder.tail()}")
    job.release("start")


def _lost_wakeup(scene: Scene) -> None:
    """A job is submitted while the broker is gone; the worker is connected again, and nothing tells it of the job."""
    (worker,) = scene.stack.workers
    scene.stack.redis.kill()
    scene.submit(scene.job("unheard"))
    until(lambda: scene.stack.api.said("a round fails"), 200, "its wake-up is lost")
    scene.stack.redis.restart()
    with scene.stack.broker() as broker:
        until(lambda: broker.pubsub_numsub(scene.stack.channel)[0][1] == 1, 200, worker.tail)


def _killed_holder(scene: Scene) -> None:
    """kill -9 of a worker with a job half done; it is started again."""
    job = scene.job("orphan")
    job.hold("row2")
    job_id = scene.submit(job)
    job.await_at("row2")
    holder = scene.stack.await_holder(job_id)
    child = scene.stack.computing(holder)
    holder.kill()
    assert gone(child, 200)
    until(lambda: not _served(scene.stack, holder), 200, "nothing that it asked of the database is under way")
    scene.stack.age_leases(holder)
    job.release("row2")
    holder.start()
    scene.stack.await_ready(holder)


def _lost_reply(scene: Scene) -> None:
    """The job is stored, and the API never hears of it; its client asks again with the same key."""
    scene.proxy.lose_after(b"INSERT INTO jobs")
    scene.submit(scene.job("asked-twice"))
    assert scene.proxy.lost == 1
    assert scene.history.of("submit", "unknown")


def _torn_object(scene: Scene) -> None:
    """A worker dies while it writes an object that an earlier job has listed; its own job is cancelled then."""
    (worker,) = scene.stack.workers
    scene.stack.await_end(scene.submit(scene.job("reader")))
    (scene.stack.folder / _CHANGES / removals.DIE).touch()
    writer = scene.job("writer")
    job_id = scene.submit(writer)
    worker.ended(300)
    scene.customer.cancel(writer.name, job_id)
    scene.stack.take_from(worker)


def _served(stack: Stack, part: Part) -> int:
    """How many processes of the database still serve it."""
    with reading(stack.engine) as connection:
        return int(connection.execute(_SERVED, {"name": part.name}).scalar_one())


SLICES: Mapping[str, Slice] = {
    "fence": Slice(2, _zombie),
    "poll": Slice(1, _lost_wakeup),
    "reaper": Slice(1, _killed_holder),
    "idempotency": Slice(1, _lost_reply),
    "rename": Slice(1, _torn_object, ("mortal takes",)),
}
