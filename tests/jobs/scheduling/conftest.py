"""Workers that have joined a ledger, and jobs that wait in it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, update

from jobs.codec import parse_document
from jobs.devices.registry import Device, Worker, register
from jobs.records import LOCAL_TENANT
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import jobs
from jobs.tenancy.shared_workers import ALLOWED_WITHOUT
from tests.jobs.scheduling.claiming import GIB


@pytest.fixture
def joined(ledger: Engine) -> Callable[..., str]:
    """``joined(gpu("a", 16), slots=2)``: the id of a worker that offers this."""

    def make(*offered: Device, expiry: float = 600, **given: Any) -> str:
        chosen = {"node": "node", "process_space": "space", "version": "0", "slots": 1, "factories": ()}
        worker = Worker(id=new_id(), **(chosen | {"isolation": (ALLOWED_WITHOUT,)} | given))
        register(ledger, worker, offered, expiry)
        return worker.id

    return make


@pytest.fixture
def waiting(ledger: Engine) -> Callable[..., str]:
    """``waiting(40, age=70)``: the id of a job that needs 40 GiB and was queued 70 seconds ago."""

    def make(gib: float | None = None, age: float = 30, priority: int = 0, **changes: Any) -> str:
        body = {
            "kind": "capacity",
            "model": {"source": "builtin", "name": "digits_mlp"},
            "data": {"source": "builtin", "name": "digits"},
            "task": {"type": "classification"},
        }
        needs = None if gib is None else int(gib * GIB)
        job_id = submit(
            ledger, LOCAL_TENANT, parse_document(json.dumps(body | changes).encode()), needs_bytes=needs
        ).job.id
        with writing(ledger) as connection:
            connection.execute(
                update(jobs).where(jobs.c.id == job_id).values(queued_at=ledger_now(-age), priority=priority)
            )
        return job_id

    return make
