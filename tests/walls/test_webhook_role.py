"""The sender's role of the database sees webhooks and their deliveries, and nothing of jobs and keys."""

from pathlib import Path
from typing import Any

import pytest
import trustme
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import DBAPIError

from jobs.codec import parse_document
from jobs.queue.claims import claim
from jobs.repository.submission import submit
from jobs.schema.database import across_tenants, open_database, reading, writing
from jobs.schema.tables import metadata
from jobs.schema.webhook_tables import webhook_deliveries
from jobs.webhooks.registry import create_webhook
from migrations.roles import API, WEBHOOKS
from tests.api.requests.test_tenant_rows import Roles, roles
from tests.api.seeding import raw
from tests.jobs.webhooks.receiver import KEY, Receiver, sending
from tests.machine.stopwatch import until

__all__ = ["roles"]

SEEN = {"webhooks", "webhook_deliveries"}


@pytest.mark.part(of=16)
@pytest.mark.parametrize("table", sorted(set(metadata.tables) - SEEN))
@pytest.mark.parametrize("statement", ["SELECT * FROM {}", "SELECT count(*) FROM {}", "DELETE FROM {}"])
def test_the_sender_reads_no_table_but_its_own(roles: Roles, table: str, statement: str) -> None:
    refused(roles.url(WEBHOOKS, "for webhooks"), statement.format(table))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE webhooks SET url = 'https://example.com'",
        "DELETE FROM webhooks",
        "INSERT INTO webhook_deliveries SELECT * FROM webhook_deliveries",
        "SELECT * FROM waiting_jobs",
        "SET ROLE kronoscope_owner",
    ],
)
def test_the_sender_changes_no_webhook_and_announces_nothing(roles: Roles, statement: str) -> None:
    refused(roles.url(WEBHOOKS, "for webhooks"), statement)


@pytest.mark.parametrize(
    "statement", ["SELECT secrets FROM webhooks", "SELECT url FROM webhooks", "DELETE FROM webhooks"]
)
def test_a_worker_reads_neither_secrets_nor_addresses(roles: Roles, statement: str) -> None:
    with pytest.raises(DBAPIError, match="permission denied"), writing(roles.worker) as connection:
        connection.execute(text(statement))


def refused(url: str, statement: str) -> None:
    engine = open_database(url)
    try:
        with pytest.raises(DBAPIError, match="permission denied"), writing(engine) as connection:
            connection.execute(text(statement))
    finally:
        engine.dispose()


def test_each_part_does_its_own_with_its_role(roles: Roles, tmp_path: Path) -> None:
    authority = trustme.CA()
    api = open_database(roles.url(API, "for api"), tenants_apart=True)

    def stored() -> list[Any]:
        with reading(across_tenants(api)) as connection:
            columns = (webhook_deliveries.c.tenant_id, webhook_deliveries.c.state, webhook_deliveries.c.outcome)
            return sorted(map(tuple, connection.execute(select(*columns)).all()))

    try:
        with Receiver(authority).running() as receiver:
            made = create_webhook(api, KEY, roles.tenant, receiver.url)
            job = submit(api, roles.tenant, parse_document(raw())).job
            submit(api, roles.other, parse_document(raw()))
            assert claim(roles.worker, job.id, "worker", "token", 60) is not None
            with sending(roles.url(WEBHOOKS, "for webhooks"), tmp_path, authority, hosts="127.0.0.1"):
                until(lambda: stored() == [(roles.tenant, "delivered", "answered 204")] * 2)
            assert len(receiver.got) == 2
        assert tenant_rows(api, roles.other) == []
        assert len(tenant_rows(api, roles.tenant)) == 2
        assert made.secret is not None
    finally:
        api.dispose()


def tenant_rows(engine: Engine, tenant: str) -> list[Any]:
    with reading(engine, tenant) as connection:
        return list(connection.execute(select(webhook_deliveries.c.id)).all())
