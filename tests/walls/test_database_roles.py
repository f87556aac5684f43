"""Roles of the database keep nothing there but rows of the service's tables."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from jobs.schema.database import open_database
from migrations.__main__ import migrate
from migrations.roles import API, WEBHOOKS, WORKER
from tests.api.requests.test_tenant_rows import PASSWORDS, Roles, roles

__all__ = ["roles"]

KEPT = [
    "SELECT lo_from_bytea(0, 'x')",
    "SELECT lo_create(0)",
    "SELECT lo_creat(-1)",
    "CREATE TEMPORARY TABLE kept (a text)",
    "CREATE TABLE kept (a text)",
    "CREATE FUNCTION kept() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE SCHEMA kept",
]


@pytest.mark.part(of=16)
@pytest.mark.parametrize("statement", KEPT)
@pytest.mark.parametrize(("role", "password"), [(API, "for api"), (WORKER, "for worker"), (WEBHOOKS, "for webhooks")])
def test_no_role_keeps_bytes_of_its_own(roles: Roles, role: str, password: str, statement: str) -> None:
    engine = open_database(roles.url(role, password))
    try:
        with engine.connect() as connection, pytest.raises(DBAPIError, match="permission denied"):
            connection.execute(text(statement))
    finally:
        engine.dispose()


def test_rights_are_taken_again_and_the_service_goes_on(roles: Roles) -> None:
    migrate(roles.admin_url, PASSWORDS)
    with roles.worker.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM jobs")).scalar_one() >= 2
