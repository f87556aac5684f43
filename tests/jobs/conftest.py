"""Jobs in every state, and many hands at once."""

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, update

from catalog.frames import Failed, LayerDone
from catalog.requests.job import JobDocument
from jobs.codec import parse_document
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import after_queueing, writing
from jobs.schema.tables import jobs
from tests.conftest import Databases, Dialect

BODY: dict[str, Any] = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}

ON_BOTH = pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
POSTGRESQL_OFTEN = ("postgresql", pytest.param("sqlite", marks=pytest.mark.part(of=8, by=())))
"""Databases of tests whose statements other tests of their file, marked `ON_BOTH`, run on SQLite in each landing."""


@pytest.fixture
def ledger_url(databases: Databases, dialect: Dialect) -> Iterator[str]:
    """A ledger with nothing in it, on both databases: tests of this room leave nobody who still writes to theirs."""
    url = databases.recycled(dialect)
    yield url
    databases.recycle(url)


@pytest.fixture
def document() -> Callable[..., JobDocument]:
    """``document(labels={...})``: a job document with some fields replaced."""

    def make(**changes: Any) -> JobDocument:
        return parse_document(json.dumps(BODY | changes).encode())

    return make


@pytest.fixture
def queued(ledger: Engine, document: Callable[..., JobDocument]) -> Callable[..., str]:
    """``queued()``: the id of a new job."""

    def make(**changes: Any) -> str:
        return submit(ledger, LOCAL_TENANT, document(**changes)).job.id

    return make


@pytest.fixture
def woken(ledger: Engine) -> Callable[[], int]:
    """``woken()``: how many commits have queued work since it was last asked."""
    heard: list[int] = []
    after_queueing(ledger, lambda: heard.append(1))

    def ask() -> int:
        number = len(heard)
        heard.clear()
        return number

    return ask


@pytest.fixture
def held(ledger: Engine, queued: Callable[..., str]) -> Callable[..., Claim]:
    """``held()`` or ``held(job_id)``: a claim on a new or a queued job."""

    def make(job_id: str | None = None, **changes: Any) -> Claim:
        made = claim(ledger, job_id or queued(**changes), "worker-1", secrets.token_hex(8), 3600)
        assert made is not None
        return made

    return make


@pytest.fixture
def expire(ledger: Engine) -> Callable[[str], None]:
    """Let a job's lease run out, without waiting for it."""

    def now(job_id: str) -> None:
        with writing(ledger) as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(lease_expires_at=ledger_now(-1)))

    return now


@pytest.fixture
def at_once() -> Callable[..., list[Any]]:
    """``at_once(20, act)``: what twenty threads, let go together, got from ``act(number)`` or saw it raise."""

    def run(threads: int, act: Callable[[int], Any]) -> list[Any]:
        barrier = threading.Barrier(threads)

        def one(number: int) -> Any:
            barrier.wait(240)
            try:
                return act(number)
            except Exception as error:  # noqa: BLE001 - the error is the answer that the test looks at
                return error

        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(one, range(threads)))

    return run


@pytest.fixture
def layer_frame() -> Callable[..., LayerDone]:
    """``layer_frame(3, trace=0.5)``: the frame of a layer with that metric."""

    def make(ordinal: int = 0, kind: str = "capacity", **metrics: Any) -> LayerDone:
        return LayerDone(
            kind=kind,
            ordinal=ordinal,
            layer=f"features.{ordinal}",
            outcome={"kind": kind, "ordinal": ordinal, "layer": f"features.{ordinal}", "metrics": metrics or None},
            observed={"seconds": 0.25},
        )

    return make


@pytest.fixture
def failure() -> Callable[..., Failed]:
    """``failure("transient")``: a last frame."""

    def make(category: str = "fatal") -> Failed:
        return Failed(
            category=category,  # type: ignore[arg-type]
            code="out_of_memory",
            message="the plan needs 12 GiB, 8 GiB are free",
            pointer="/memory/device",
            layer=None,
            detail="Traceback with a path /srv/secret",
        )

    return make
