"""A model of the store that is another one than a tenant's earlier job has measured shows in the later job."""

import secrets
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, insert

from catalog.frames import Finished
from catalog.requests.job import JobDocument
from jobs.queue.attempt_endings import finish
from jobs.queue.claims import claim
from jobs.records import Claim
from jobs.repository.store import read_job
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.tables import tenants

Held = Callable[..., Claim]


def notices(ledger: Engine, mine: Claim, digest: str | None) -> list[str]:
    """What stands in the manifest of a job that has measured a model of this digest."""
    assert finish(ledger, mine, Finished(model_sha256=digest, notices=("its own",))) == "succeeded"
    job = read_job(ledger, mine.tenant_id, mine.job_id)
    assert job is not None
    assert job.manifest is not None
    own, *others = job.manifest["notices"]
    assert own == "its own"
    return list(others)


def test_a_model_that_was_exchanged_shows_once_with_both_digests(ledger: Engine, held: Held) -> None:
    first = held()
    assert notices(ledger, first, "a" * 64) == []
    assert notices(ledger, held(), "a" * 64) == []
    (told,) = notices(ledger, held(), "b" * 64)
    assert first.job_id in told
    assert "a" * 64 in told
    assert "b" * 64 in told
    # which is what stands in the store from now on
    assert notices(ledger, held(), "b" * 64) == []


def test_what_loads_other_weights_by_its_document_is_another_model(ledger: Engine, held: Held) -> None:
    assert notices(ledger, held(), "a" * 64) == []
    other = {"source": "builtin", "name": "digits_cnn"}
    assert notices(ledger, held(model=other), "b" * 64) == []
    assert notices(ledger, held(), None) == []


@pytest.mark.parametrize("model", [{"source": "factory", "factory": "a:b"}, {"source": "directory", "path": "/m"}])
def test_models_from_elsewhere_are_not_noted(ledger: Engine, held: Held, model: dict[str, str]) -> None:
    assert notices(ledger, held(model=model), "a" * 64) == []
    assert notices(ledger, held(model=model), "b" * 64) == []


def test_no_tenant_makes_the_model_of_another_look_exchanged(
    ledger: Engine, held: Held, document: Callable[..., JobDocument]
) -> None:
    with writing(ledger) as connection:
        connection.execute(insert(tenants).values(id="other", name="other", created_at=ledger_now()))
    theirs = submit(ledger, "other", document()).job.id
    evil = claim(ledger, theirs, "worker-1", secrets.token_hex(8), 3600)
    assert evil is not None
    assert notices(ledger, held(), "a" * 64) == []
    assert notices(ledger, evil, "b" * 64) == []
    assert notices(ledger, held(), "a" * 64) == []
