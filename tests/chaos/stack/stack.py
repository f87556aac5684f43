"""A whole service to break: PostgreSQL, Redis, an API and workers, each a real process that can be killed alone.

    with running_stack(folder, workers=2) as stack:
        job_id = stack.submit(document)
        stack.holder(job_id).kill()
        stack.await_end(job_id)

Everything listens on free ports of loopback; only processes that were started here are ended.
"""

import contextlib
import functools
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import redis
from sqlalchemy import Engine, event, make_url, select, update

from jobs.errors import LedgerUnavailable
from jobs.lifecycle import HELD, TERMINAL
from jobs.objects.artifacts import ArtifactFolder
from jobs.queue.wakeups import WakeupSender
from jobs.records import Artifact, Event
from jobs.repository.results import events_after, list_artifacts
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, reading, writing
from jobs.schema.tables import artifacts, job_events, jobs, layer_results
from jobs.tenancy.api_keys import create_key
from tests import servers
from tests.api.server import KEY_SECRET
from tests.chaos.stack.databases import migrated_database
from tests.chaos.stack.processes import Part, below, command_of
from tests.machine.stopwatch import Stopwatch, until

ROOT = Path(__file__).resolve().parents[3]
API = (sys.executable, "-P", "-m", "api")
WORKER = (sys.executable, "-P", "-m", "celery", "-A", "tests.chaos.stack.held_worker", "worker", "-P", "threads")
SHORT_LEASES = {
    "KRONOSCOPE_HEARTBEAT_SECONDS": "0.5",
    "KRONOSCOPE_LEASE_SECONDS": "3",
    "KRONOSCOPE_REAPER_SECONDS": "0.5",
    "KRONOSCOPE_POLL_SECONDS": "1",
    "KRONOSCOPE_CANCEL_SECONDS": "0.2",
}
"""Recovery in seconds; without them a stack runs with the defaults."""
LONG_LEASES = SHORT_LEASES | {"KRONOSCOPE_LEASE_SECONDS": "600"}
"""As quick, but that no process which stands still for some seconds is taken to be gone; `take_from` says who is."""
START_SECONDS = 180
_PATIENCE = "SET statement_timeout = 0; SET lock_timeout = 0; SET idle_in_transaction_session_timeout = 0"
"""Of the tests' own connections: whoever looks may stand still as well."""
DURABLE = {"synchronous_commit": "on", "log_min_messages": "fatal"}
"""What was answered must survive a kill -9 of PostgreSQL; it need not survive the machine's power."""


class Stack:
    """A running stack; ``running_stack`` makes one."""

    def __init__(
        self,
        folder: Path,
        postgres: servers.PrivateServer,
        broker: servers.PrivateServer,
        workers: int,
        settings: Mapping[str, str],
        own: Mapping[str, Mapping[str, str]],
        preload: Sequence[Path] = (),
    ) -> None:
        self._preload = preload
        self._own = own
        self.folder = folder
        self.artifacts = folder / "artifacts"
        self.postgres = postgres
        self.redis = broker
        self.database_url = migrated_database(postgres.url)
        patient = make_url(self.database_url).update_query_dict({"connect_timeout": "120"})
        self.engine: Engine = open_database(patient.render_as_string(hide_password=False))
        event.listen(self.engine, "connect", _be_patient)
        self.key = create_key(self.engine, KEY_SECRET, "chaos")
        self._port = servers.hold_port()
        self.url = f"http://127.0.0.1:{self._port.getsockname()[1]}"
        self.environment = {**_inherited(), **self._settings(), **settings}
        self.api = Part("api", API, {**self.environment, **own.get("api", {})}, folder)
        (folder / "gates").mkdir(exist_ok=True)
        self.workers = [self._worker(f"worker{number}") for number in range(workers)]

    @property
    def parts(self) -> list[Part]:
        return [self.api, *self.workers]

    def start(self) -> None:
        """Start API and workers and wait until all are ready; the workers are those of ``held_worker``."""
        for part in self.parts:
            part.start()
        self.await_ready(*self.parts)

    def add_worker(self, name: str, **more: str) -> Part:
        """One more worker, started, with ``more`` in its environment; it is not waited for."""
        worker = self._worker(name, **more)
        self.workers.append(worker)
        worker.start()
        return worker

    def await_ready(self, *parts: Part) -> None:
        """Wait until each answers, or takes jobs."""
        for part in parts:
            what = functools.partial(_is_ready, part)
            until(lambda part=part: self._ready(part), START_SECONDS, what)

    def revive(self) -> None:
        """Start again whatever was killed, wake whatever sleeps, and wait until all of it answers."""
        for server in (self.postgres, self.redis):
            if not server.alive:
                server.restart()
        for part in self.parts:
            part.resume()
            if not part.alive:
                part.start()
        self.await_ready(*self.parts)

    def client(self, timeout: float = 40) -> httpx.Client:
        """A client of the API with a key."""
        return httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {self.key}"},
            trust_env=False,
            timeout=timeout,
            verify=False,  # nothing here is encrypted, and reading the certificates takes 60 ms of a core
        )

    def submit(self, document: Mapping[str, Any], key: str | None = None) -> str:
        """The id of an accepted job."""
        headers = {"idempotency-key": key or secrets.token_hex()}
        answer = self._insist(lambda client: client.post("/v1/jobs", json=dict(document), headers=headers))
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def cancel(self, job_id: str) -> None:
        """Ask for it, and be heard."""
        answer = self._insist(lambda client: client.post(f"/v1/jobs/{job_id}:cancel"))
        assert answer.status_code in (200, 202), answer.text

    def _insist(self, send: Callable[[httpx.Client], httpx.Response]) -> httpx.Response:
        """Ask, and again as clients do where the service is not there for a moment: both may be asked twice."""

        def answered() -> httpx.Response | None:
            with contextlib.suppress(httpx.TransportError):
                answer = send(client)
                return None if answer.status_code in (408, 409, 429) or answer.status_code >= 500 else answer
            return None

        with self.client() as client:
            found = until(answered, 200, "the API takes what it is asked")
        assert found is not None
        return found

    def row(self, job_id: str) -> Any:
        """The job as the database has it."""
        with reading(self.engine) as connection:
            return connection.execute(select(jobs).where(jobs.c.id == job_id)).one()

    def row_or_none(self, job_id: str) -> Any | None:
        """The same; None while the database does not answer."""
        try:
            return self.row(job_id)
        except LedgerUnavailable:
            return None

    def state(self, job_id: str) -> str:
        return str(self.row(job_id).state)

    def layers(self, job_id: str) -> list[Any]:
        """Rows of layers, in order."""
        order = (layer_results.c.kind, layer_results.c.ordinal)
        with reading(self.engine) as connection:
            return list(
                connection.execute(select(layer_results).where(layer_results.c.job_id == job_id).order_by(*order))
            )

    def listed(self, job_id: str) -> list[Artifact]:
        """The artifacts that have rows."""
        tenant = self.row(job_id).tenant_id
        return list(list_artifacts(self.engine, tenant, job_id))

    def verify_artifacts(self, job_id: str) -> int:
        """Read every listed artifact and compare its digest; how many there are."""
        folder = ArtifactFolder(self.artifacts)
        found = self.listed(job_id)
        for artifact in found:
            folder.verify(artifact)
        return len(found)

    def events(self, job_id: str, kind: str | None = None) -> list[Event]:
        """The job's history, oldest first."""
        tenant = self.row(job_id).tenant_id
        found: list[Event] = []
        while page := list(events_after(self.engine, tenant, job_id, found[-1].seq if found else 0)):
            found += page
        return [event for event in found if kind in (None, event.type)]

    def fingerprint(self, job_id: str, *, running: bool = False) -> tuple[Any, ...]:
        """Everything that the ledger and the store hold of a job, to be compared with later.

        Of a ``running`` one without the job's own row, which every heartbeat of its holder changes.
        """
        with reading(self.engine) as connection:
            tables = [
                [tuple(row) for row in connection.execute(select(table).where(column == job_id).order_by(*order))]
                for table, column, order in (
                    *(() if running else ((jobs, jobs.c.id, ()),)),
                    (layer_results, layer_results.c.job_id, (layer_results.c.kind, layer_results.c.ordinal)),
                    (artifacts, artifacts.c.job_id, (artifacts.c.name,)),
                    (job_events, job_events.c.job_id, (job_events.c.seq,)),
                )
            ]
        folder = ArtifactFolder(self.artifacts)
        listed = []
        for each in self.listed(job_id):
            with folder.open(each) as file:
                listed.append((each.name, file.read()))
        return repr(tables), listed

    def holder(self, job_id: str) -> Part | None:
        """The worker that has the lease, if one of ours does."""
        owner = self.row(job_id).lease_owner
        return None if owner is None else self.part_of(int(str(owner).rpartition(":")[2]))

    def part_of(self, pid: int) -> Part | None:
        """The part that runs as this process."""
        return next((part for part in self.parts if part.started and part.pid == pid), None)

    def await_holder(self, job_id: str, seconds: float = 200) -> Part:
        """The worker that takes the job."""
        found = until(lambda: self.holder(job_id), seconds, lambda: f"{job_id} is taken; {self.describe(job_id)}")
        assert found is not None
        return found

    def take_from(self, worker: Part) -> None:
        """Have all that this worker holds, which is frozen or dead, taken away as if its leases had run out."""
        until(lambda: not self.age_leases(worker), 200, f"what {worker.name} held is taken away")

    def age_leases(self, worker: Part) -> int:
        """Make its leases run out now; how many there are.

        What it asked of the database before it froze or died may still be done after this.
        """
        with writing(self.engine) as connection:
            held = update(jobs).where(jobs.c.lease_owner.endswith(f":{worker.pid}"), jobs.c.state.in_(HELD))
            return connection.execute(held.values(lease_expires_at=ledger_now(-1))).rowcount

    def computing(self, worker: Part) -> list[int]:
        """The computing processes of a worker (not their guardians); each does one job."""
        found = [pid for pid in below(worker.pid) if "worker.execution" in command_of(pid)]
        return [pid for pid in found if "worker.process.guardian" not in command_of(pid)]

    def kill_process(self, pid: int) -> None:
        """kill -9 of one computing process."""
        assert any(pid in below(worker.pid) for worker in self.workers if worker.alive), f"{pid} is none of ours"
        os.kill(pid, signal.SIGKILL)

    def await_state(self, job_id: str, *states: str, seconds: float = 200) -> str:
        def reached() -> str | None:
            now = self.state(job_id)
            assert now in states or now not in TERMINAL, f"{job_id} is {now}: {self.row(job_id).failure}"
            return now if now in states else None

        found = until(reached, seconds, lambda: f"{job_id} is {' or '.join(states)}; {self.describe(job_id)}")
        assert found is not None
        return found

    def await_end(self, *job_ids: str, seconds: float = 300) -> list[str]:
        """The states in which they ended."""
        watch = Stopwatch()
        for job_id in job_ids:
            left = max(0.0, seconds - watch.seconds())
            what = functools.partial(self.describe, job_id)
            until(lambda job_id=job_id: self._ended(job_id), left, what)
        return [self.state(job_id) for job_id in job_ids]

    def describe(self, job_id: str) -> str:
        """For the message of a failed test."""
        row = self.row(job_id)
        told = [f"{event.seq} {event.type} {str(event.data)[:120]}" for event in self.events(job_id)[-12:]]
        said = f"{job_id} is {row.state}, attempt {row.attempt}, failures {row.failures}, {row.progress}"
        return "\n".join([said, *told])

    def broker(self) -> redis.Redis:
        """A client of Redis with every right."""
        return redis.Redis.from_url(self.redis.url)

    @functools.cached_property
    def channel(self) -> str:
        """The channel in Redis on which all workers hear wake-ups."""
        return f"/kronoscope.{WakeupSender(self.engine, self.redis.url).exchange.name}"

    def send_wakeup(self, times: int = 1) -> None:
        """Wake every worker."""
        with self.broker() as broker:
            for _ in range(times):
                broker.publish(self.channel, "")

    def close(self) -> None:
        """End everything that was started here."""
        for part in self.parts:
            part.close()
        self._port.close()
        self.engine.dispose()

    def _ready(self, part: Part) -> bool:
        assert part.alive, f"{part.name} ended with {part.code}:\n{part.tail()}"
        if part is not self.api:  # without a broker it never says so, and takes jobs all the same
            return bool(part.said(" ready." if self.redis.alive else "worker starts"))
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/livez", trust_env=False, timeout=30, verify=False).is_success
        return False

    def _ended(self, job_id: str) -> bool:
        return self.state(job_id) in TERMINAL

    def _worker(self, name: str, **more: str) -> Part:
        return Part(name, WORKER, {**self.environment, **self._own.get(name, {}), **more}, self.folder)

    def _settings(self) -> dict[str, str]:
        return {
            "KRONOSCOPE_DATABASE_URL": self.database_url,
            "KRONOSCOPE_REDIS_URL": self.redis.url,
            "KRONOSCOPE_ARTIFACTS": str(self.artifacts),
            "KRONOSCOPE_MODEL_STORE": str(self.folder / "store"),
            "KRONOSCOPE_KEY_SECRET": KEY_SECRET,
            "KRONOSCOPE_REQUESTS_PER_SECOND": "0",  # all clients share a key
            "KRONOSCOPE_PORT": self.url.rpartition(":")[2],
            "KRONOSCOPE_ALLOW_FACTORIES": "*",
            "KRONOSCOPE_FACTORY_PATH": str(Path(__file__).parents[1] / "factories"),
            "KRONOSCOPE_THREADS": "1",
            "CHAOS_GATES": str(self.folder / "gates"),
            "PYTHONPATH": os.pathsep.join(map(str, (*self._preload, ROOT))),
            "OMP_NUM_THREADS": "1",
        }


@contextlib.contextmanager
def running_stack(
    folder: Path,
    *,
    workers: int = 2,
    settings: Mapping[str, str] | None = None,
    own: Mapping[str, Mapping[str, str]] | None = None,
    preload: Sequence[Path] = (),
    prepare: Callable[[Stack], object] = lambda _: None,
    postgres: servers.PrivateServer | None = None,
) -> Iterator[Stack]:
    """A stack with its own PostgreSQL, unless one is given, and its own Redis.

    Args:
        folder: Logs, artifacts and model store.
        workers: How many Celery workers.
        settings: KRONOSCOPE_* over the stack's own; ``SHORT_LEASES`` where recovery is to take seconds.
        own: The same for one part alone, by its name: `api`, `worker0`, `worker1` ….
        preload: Folders put first on PYTHONPATH of API and workers, such as one with a ``sitecustomize.py``.
        prepare: Called before API and workers are started.
        postgres: A server where this stack is to have a database of its own, beside those of others.
    """
    with contextlib.ExitStack() as held:
        database = postgres or held.enter_context(servers.private_postgres(**DURABLE))
        broker = held.enter_context(servers.private_redis())
        stack = Stack(folder, database, broker, workers, settings or {}, own or {}, preload)
        held.callback(stack.close)
        prepare(stack)
        stack.start()
        yield stack


def _is_ready(part: Part) -> str:
    return f"{part.name} is ready:\n{part.tail()}"


def _be_patient(connection: Any, _record: object) -> None:
    connection.execute(_PATIENCE)
    connection.commit()


def _inherited() -> dict[str, str]:
    ours = ("KRONOSCOPE_", "DATABASE_URL", "REDIS_URL")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
