"""Row-level security as the only filter: without the queries' own conditions on the tenant nothing crosses."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from alembic import command
from fastapi import FastAPI
from sqlalchemy import (
    Connection,
    Delete,
    Engine,
    Select,
    Update,
    event,
    make_url,
    select,
    text,
    true,
)
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression
from sqlalchemy.sql.schema import Column
from sqlalchemy.sql.visitors import replacement_traverse

from api.main import create_app
from api.settings import Settings
from jobs.codec import parse_document
from jobs.repository.submission import submit
from jobs.schema.database import (
    across_tenants,
    for_tenant,
    migration_config,
    open_database,
    reading,
    writing,
)
from jobs.schema.identifiers import new_id
from jobs.schema.tables import jobs, tenants
from jobs.settings import LedgerSettings, RoleSettings
from jobs.tenancy.api_keys import create_key, verify_key
from jobs.tenancy.key_uses import KeyUses, list_keys
from migrations.__main__ import migrate
from migrations.roles import API, WORKER
from tests import servers
from tests.api.requests.test_auth import OPEN, walk
from tests.api.seeding import DOCUMENT, finished, raw
from tests.api.server import KEY_SECRET, WEBHOOK_KEY

PASSWORDS = RoleSettings(
    migrate_password="for migrate",
    api_password="for api",
    worker_password="for worker",
    webhooks_password="for webhooks",
)
_INSTANCE = re.compile(r"urn:uuid:[0-9a-f-]+")


class Roles:
    """An upgraded database whose roles stand, with two tenants; ours has a finished and a queued job."""

    def __init__(self, admin_url: str, folder: Path) -> None:
        self.admin_url = admin_url
        self.artifacts = folder / "artifacts"
        admin = open_database(admin_url)
        with admin.begin() as connection:
            command.upgrade(migration_config(connection), "head")
        self.ours = create_key(admin, KEY_SECRET, "ours")
        self.theirs = create_key(admin, KEY_SECRET, "theirs")
        caller = verify_key(admin, KEY_SECRET, self.ours)
        assert caller is not None
        self.tenant = caller.tenant_id
        other = verify_key(admin, KEY_SECRET, self.theirs)
        assert other is not None
        self.other = other.tenant_id
        self.job = finished(admin, self.artifacts, self.tenant)
        self.queued = submit(admin, self.tenant, parse_document(raw())).job.id
        # as version 0.1 left it: filled, every table a superuser's
        with admin.begin() as connection:
            command.downgrade(migration_config(connection), "0011")
        admin.dispose()
        migrate(admin_url, PASSWORDS)
        self.worker = open_database(self.url(WORKER, "for worker"))

    def url(self, role: str, password: str) -> str:
        return make_url(self.admin_url).set(username=role, password=password).render_as_string(hide_password=False)

    def application(self, url: str) -> FastAPI:
        ledger = LedgerSettings(database_url=url, artifact_root=self.artifacts)
        settings = Settings(ledger=ledger, key_secret=KEY_SECRET, webhook_key=WEBHOOK_KEY, estimate_seconds=0)
        return create_app(settings)


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    with servers.private_postgres() as server:
        made = Roles(server.url, tmp_path_factory.mktemp("roles"))
        yield made
        made.worker.dispose()


def without_the_tenant(statement: Any) -> Any:
    """The statement without its conditions on the tenant."""

    def replace(element: Any, **_: object) -> Any:
        if isinstance(element, BinaryExpression) and element.operator is operators.eq:
            left = element.left
            if isinstance(left, Column) and (left.name == "tenant_id" or left is tenants.c.id):
                return true()
        return None

    return replacement_traverse(statement, {}, replace)


def unfiltered(engine: Engine) -> list[str]:
    """Take the conditions out of all that the engine executes from now on; returns what is filled with it."""
    changed: list[str] = []

    def rewrite(connection: Connection, statement: Any, multiparams: Any, params: Any, _: object) -> Any:
        if not isinstance(statement, (Select, Update, Delete)):
            return statement, multiparams, params
        stripped = without_the_tenant(statement)
        if "tenant_id =" in str(statement.compile(dialect=connection.dialect)):
            changed.append(str(stripped.compile(dialect=connection.dialect)))
        return stripped, multiparams, params

    event.listen(engine, "before_execute", rewrite, retval=True)
    return changed


def ask(application: FastAPI, key: str, requests: list[tuple[str, str, Any]]) -> list[tuple[int, str]]:
    """The answers of an API whose queries name no tenant."""

    async def answers() -> list[tuple[int, str]]:
        transport = httpx.ASGITransport(application)
        async with application.router.lifespan_context(application):
            changed = unfiltered(application.state.service.engine)
            headers = {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as client:
                got = [await client.request(method, url, json=body) for method, url, body in requests]
        assert changed
        assert not [each for each in changed if re.search(r"tenant_id = ", each.partition("WHERE")[2])]
        return [(each.status_code, _INSTANCE.sub("", each.text)) for each in got]

    return asyncio.run(answers())


def requests_about(application: FastAPI, job_id: str) -> list[tuple[str, str, Any]]:
    """Every route and method with this job's id in each place that takes one, the destructive ones last."""
    found = []
    for path, method, _ in walk(application.routes):
        if "{" in path and path not in OPEN:
            url = re.sub(r"{name[^}]*}", "factors/factors.index.json", re.sub(r"{(job|estimate)_id}", job_id, path))
            body = {"PUT": {"priority": 1}, "PATCH": {"note": "theirs", "labels": {"of": "theirs"}}}.get(method)
            found.append((method, re.sub(r"{[^}]*}", "0", url), body))
    factors = {key: value for key, value in DOCUMENT.items() if key not in ("model", "data", "task", "keep")}
    found.append(("POST", "/v1/jobs", factors | {"kind": "capacity", "factors": {"job": job_id}}))
    compared = {key: DOCUMENT[key] for key in ("model", "data", "task")} | {"kind": "compare_curvature"}
    found.append(("POST", "/v1/jobs", compared | {"compare_curvature": {"against": {"job": job_id}}}))
    return sorted(found, key=lambda each: ("GET", "HEAD", "PUT", "PATCH", "POST", "DELETE").index(each[0]))


def rows(engine: Engine, job_id: str) -> Any:
    with reading(engine) as connection:
        return connection.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()


@pytest.mark.parametrize("which", ["job", "queued"])
def test_every_route_answers_for_another_tenants_job_as_for_none(roles: Roles, which: str) -> None:
    job_id, random = getattr(roles, which), new_id()
    before = rows(roles.worker, job_id)
    application = roles.application(roles.url(API, "for api"))
    asked = requests_about(application, job_id)
    assert len(asked) > 12
    answers = ask(application, roles.theirs, [*asked, *requests_about(application, random), ("GET", "/v1/jobs", None)])
    *both, (status, listed) = answers
    about_ours, about_none = both[: len(asked)], both[len(asked) :]
    for request, got, wanted in zip(asked, about_ours, about_none, strict=True):
        assert (got[0], got[1].replace(job_id, random)) == wanted, request
        assert 400 <= got[0] < 500, request
    assert (status, json.loads(listed)["items"]) == (200, [])
    assert rows(roles.worker, job_id) == before


def test_without_row_level_security_the_same_requests_cross(roles: Roles) -> None:
    application = roles.application(roles.admin_url)  # a superuser, whom no policy binds
    ((status, text_),) = ask(application, roles.theirs, [("GET", f"/v1/jobs/{roles.job}", None)])
    assert (status, json.loads(text_)["id"]) == (200, roles.job)


def test_the_owner_of_a_job_sees_it(roles: Roles) -> None:
    application = roles.application(roles.url(API, "for api"))
    routes = ("", "/results", "/layers", "/log", "/artifacts", "/lineage")
    asked: list[tuple[str, str, Any]] = [("GET", f"/v1/jobs/{roles.job}{each}", None) for each in routes]
    answers = ask(application, roles.ours, [*asked, ("GET", "/v1/jobs", None), ("GET", "/readyz", None)])
    assert [status for status, _ in answers] == [200] * 8
    assert {each["id"] for each in json.loads(answers[6][1])["items"]} == {roles.job, roles.queued}
    assert json.loads(answers[7][1])["isolation"] == {
        "jobs": "no worker is known",
        "tenants": "row_level_security",
        "sharing": "several tenants, and no worker is known",
    }


def test_a_transaction_of_the_api_that_declares_no_tenant_is_refused(roles: Roles) -> None:
    engine = open_database(roles.url(API, "for api"), tenants_apart=True)
    try:
        with pytest.raises(RuntimeError, match="declares no tenant"), reading(engine):
            pass
        with pytest.raises(RuntimeError, match="declares no tenant"), writing(engine):
            pass
        with reading(engine, "nobody") as connection:
            assert connection.execute(select(jobs.c.id)).all() == []
        with reading(engine, roles.tenant) as connection:
            assert len(connection.execute(select(jobs.c.id)).all()) == 2
        # what one transaction declared, the next one on the same connection does not inherit
        with for_tenant(engine, "nobody").begin() as connection:
            assert connection.execute(select(jobs.c.id)).all() == []
    finally:
        engine.dispose()


def test_the_api_s_role_writes_and_lists_uses_of_keys_of_all_tenants(roles: Roles) -> None:
    uses = KeyUses()
    engine = open_database(roles.url(API, "for api"), tenants_apart=True)
    try:
        for tenant in ("ours", "theirs"):
            key = create_key(across_tenants(engine), KEY_SECRET, tenant)
            uses.note(key.split("_")[1], "192.0.2.7")
        assert uses.write(across_tenants(engine)) == 2
        listed = list_keys(across_tenants(engine))
        assert {each.tenant for each in listed if each.last_used_from == "192.0.2.7"} == {"ours", "theirs"}
        assert {each.tenant for each in list_keys(for_tenant(engine, roles.tenant))} == {"ours"}
    finally:
        engine.dispose()


def test_rights_and_ownership_of_the_roles(roles: Roles) -> None:
    admin = open_database(roles.admin_url)
    try:
        with reading(admin) as connection:

            def ask_for(query: str) -> list[Any]:
                return list(connection.execute(text(query)).all())

            owners = ask_for("SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'public'")
            assert owners == [("kronoscope_owner",)]
            attributes = ask_for(
                "SELECT rolname, rolcanlogin FROM pg_roles WHERE rolname LIKE 'kronoscope_%' AND NOT rolsuper "
                "AND NOT rolbypassrls AND NOT rolcreaterole AND NOT rolcreatedb ORDER BY 1"
            )
            assert attributes == [
                ("kronoscope_api", True),
                ("kronoscope_migrate", True),
                ("kronoscope_owner", False),
                ("kronoscope_webhooks", True),
                ("kronoscope_worker", True),
            ]
            # a table with a tenant that a later migration adds has to be secured as well
            unsecured = ask_for(
                "SELECT c.relname FROM pg_class c JOIN pg_attribute a ON attrelid = c.oid AND attname = 'tenant_id' "
                "WHERE c.relkind = 'r' AND NOT (c.relrowsecurity AND c.relforcerowsecurity)"
            )
            assert unsecured == []
            # and to ask for the proof of what is declared
            believing = ask_for("SELECT tablename FROM pg_policies WHERE qual LIKE '%current_setting%'")
            assert believing == []
    finally:
        admin.dispose()
    with reading(roles.worker) as connection, pytest.raises(Exception, match="permission denied for table api_keys"):
        connection.execute(text("SELECT hmac FROM api_keys"))
    with pytest.raises(Exception, match="must be owner of table jobs"), writing(roles.worker) as connection:
        connection.execute(text("ALTER TABLE jobs DISABLE ROW LEVEL SECURITY"))


def test_lists_of_a_tenant_are_read_by_their_index(roles: Roles) -> None:
    engine = open_database(roles.url(API, "for api"), tenants_apart=True)
    try:
        with reading(engine, roles.tenant) as connection:
            connection.execute(text("SET LOCAL enable_seqscan = off"))
            query = f"EXPLAIN SELECT * FROM jobs WHERE tenant_id = '{roles.tenant}' ORDER BY id DESC LIMIT 21"
            plan = "\n".join(connection.execute(text(query)).scalars())
        assert "ix_jobs_tenant_id_id" in plan
    finally:
        engine.dispose()


def test_a_second_migration_changes_nothing_and_takes_new_passwords(roles: Roles) -> None:
    migrate(roles.admin_url, PASSWORDS)
    assert rows(roles.worker, roles.job) is not None
