"""Declarations of a tenant: what a statement that was smuggled into the API can and cannot do with its role."""

from typing import Any

import pytest
from sqlalchemy import Table, delete, select, text, update
from sqlalchemy.exc import DBAPIError

from jobs.errors import LedgerUnavailable
from jobs.schema.database import for_purpose, open_database, reading, writing
from jobs.schema.tables import jobs, metadata, tenants
from jobs.schema.tenant_declaration import EVENTS, FLEET, KEYS
from jobs.tenancy.key_uses import list_keys
from migrations.__main__ import migrate
from migrations.roles import API, WEBHOOKS, WORKER
from tests.api.requests.test_tenant_rows import PASSWORDS, Roles, roles

__all__ = ["roles"]

INJECTED = [
    "SELECT set_config('kronoscope.tenant', '{ours}', true)",
    "SELECT set_config('kronoscope.tenant', '*', true)",
    "SELECT set_config('kronoscope.tenant', '*fleet', true)",
    "SELECT set_config('kronoscope.tenant', '{ours}', false), set_config('kronoscope.proof', '', false)",
    "SELECT set_config('kronoscope.tenant', '', true)",
]


@pytest.mark.part(of=16)
@pytest.mark.parametrize("statement", INJECTED)
@pytest.mark.parametrize("table", ["jobs", "artifacts", "api_keys", "tenants", "job_events", "layer_results"])
def test_a_statement_that_declares_another_tenant_sees_nothing(roles: Roles, statement: str, table: str) -> None:
    first = statement.format(ours=roles.tenant)
    # the second is one expression within a query, evaluated before the rows are looked at
    within = f"WITH first AS MATERIALIZED ({first}) SELECT * FROM first, {table}"
    engine = open_database(roles.url(API, "for api"), tenants_apart=True)

    def ask_for(*statements: str) -> None:
        with reading(engine, roles.other) as connection:
            for each in statements:
                connection.execute(text(each))

    try:
        with reading(engine, roles.other) as connection:
            assert connection.execute(text("SELECT count(*) FROM jobs")).scalar_one() == 0
        with pytest.raises(LedgerUnavailable):
            ask_for(first, f"SELECT * FROM {table}")
        with pytest.raises(LedgerUnavailable):
            ask_for(within, f"SELECT * FROM {table}")
    finally:
        engine.dispose()


OUTSIDE = [
    "SELECT set_config('role', 'kronoscope_owner', true)",
    "SELECT set_config('session_authorization', 'kronoscope_worker', true)",
    "SELECT pg_read_file('PG_VERSION')",
    "COPY (SELECT 1) TO PROGRAM 'true'",
    "SELECT * FROM waiting_jobs",
    "SELECT rolpassword FROM pg_authid",
    "CREATE OR REPLACE FUNCTION declared_tenant() RETURNS text LANGUAGE sql AS 'SELECT 1'",
    "ALTER POLICY tenant_rows ON jobs USING (true)",
]


@pytest.mark.parametrize("statement", OUTSIDE)
def test_a_statement_leads_nowhere_but_to_the_tenants_rows(roles: Roles, statement: str) -> None:
    engine = open_database(roles.url(API, "for api"), tenants_apart=True)
    try:
        with pytest.raises(DBAPIError, match="InsufficientPrivilege"), reading(engine, roles.other) as asked:
            asked.execute(text(statement))
    finally:
        engine.dispose()


def test_statistics_and_other_sessions_show_no_values(roles: Roles) -> None:
    admin = open_database(roles.admin_url)
    with admin.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    admin.dispose()
    engine = open_database(roles.url(API, "for api"), tenants_apart=True)
    try:
        with reading(engine, roles.tenant) as ours, reading(engine, roles.other) as theirs:
            ours.execute(select(jobs.c.id).where(jobs.c.id == roles.job)).all()
            secured = ", ".join(f"'{table.name}'" for table in secured_tables())
            assert theirs.execute(text(f"SELECT * FROM pg_stats WHERE tablename IN ({secured})")).all() == []
            seen = theirs.execute(text("SELECT query FROM pg_stat_activity WHERE pid <> pg_backend_pid()")).scalars()
            assert not [each for each in seen if roles.tenant in each or roles.job in each]
    finally:
        engine.dispose()


def test_commands_of_operators_and_metrics_see_all_tenants_as_the_api_s_role(roles: Roles) -> None:
    engine = open_database(roles.url(API, "for api"))
    try:
        assert {"ours", "theirs"} <= {each.tenant for each in list_keys(engine)}
        with reading(engine) as connection:
            assert len(connection.execute(select(jobs.c.id)).all()) == 2
    finally:
        engine.dispose()


@pytest.mark.parametrize("statement", ["SELECT * FROM proof_keys", "UPDATE proof_keys SET secret = ''"])
@pytest.mark.parametrize(("role", "password"), [(API, "for api"), (WORKER, "for worker"), (WEBHOOKS, "for webhooks")])
def test_the_secret_behind_the_proofs_is_closed(roles: Roles, role: str, password: str, statement: str) -> None:
    engine = open_database(roles.url(role, password))
    try:
        with pytest.raises(Exception, match="permission denied for table proof_keys"), writing(engine) as connection:
            connection.execute(text(statement))
    finally:
        engine.dispose()


READ = {
    KEYS: {"api_keys"},
    EVENTS: {"jobs", "job_events"},
    FLEET: {"jobs", "device_leases", "tenants"},
}


@pytest.mark.parametrize("purpose", sorted(READ))
def test_a_purpose_of_requests_reads_its_tables_and_writes_none(roles: Roles, purpose: Any) -> None:
    engine = open_database(roles.url(API, "for api"), tenants_apart=True)
    try:
        with reading(roles.worker) as connection:
            held = {
                table.name
                for table in secured_tables()
                if table.name in ("api_keys", "webhooks")
                or connection.execute(select(table).limit(1)).first() is not None
            }
        with reading(for_purpose(engine, purpose)) as connection:
            seen = {
                table.name
                for table in secured_tables()
                if connection.execute(select(table).limit(1)).first() is not None
            }
        assert seen == READ[purpose] & held
        with writing(for_purpose(engine, purpose)) as connection:
            for table in secured_tables():
                column = table.c.id if table is tenants else table.c.tenant_id
                assert connection.execute(update(table).values({column: "x"})).rowcount == 0
                assert connection.execute(delete(table)).rowcount == 0
    finally:
        engine.dispose()


def secured_tables() -> list[Table]:
    return [table for table in metadata.sorted_tables if "tenant_id" in table.c or table is tenants]


def test_after_a_change_of_the_password_an_open_session_is_refused_until_it_logs_in_anew(roles: Roles) -> None:
    engine = open_database(roles.url(API, "for api"), tenants_apart=True)
    try:
        with reading(engine, roles.tenant) as connection:
            assert len(connection.execute(select(jobs.c.id)).all()) == 2
        migrate(roles.admin_url, PASSWORDS.model_copy(update={"api_password": "another"}))
        with pytest.raises(LedgerUnavailable), reading(engine, roles.tenant) as connection:
            connection.execute(select(jobs.c.id)).all()
        migrate(roles.admin_url, PASSWORDS)
        with reading(engine, roles.tenant) as connection:
            assert len(connection.execute(select(jobs.c.id)).all()) == 2
    finally:
        engine.dispose()
