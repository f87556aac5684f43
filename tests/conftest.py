"""Real servers and fresh ledgers for every room's tests."""

import contextlib
import os
import secrets
import shutil
import sqlite3
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import psycopg
import pytest
import structlog
from psycopg import sql
from sqlalchemy import Engine, event, insert, make_url, text

from jobs.errors import LedgerUnavailable, SchemaOutdated
from jobs.records import LOCAL_TENANT
from jobs.s3_settings import S3Settings
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, require_current_schema, upgrade_schema, writing
from jobs.schema.tables import metadata, tenants
from tests import servers
from tests.machine import garbage, parts, suite_times
from tests.machine.file_order import pytest_xdist_make_scheduler, sort_by_seconds
from tests.machine.robbed import pytest_collection_modifyitems as mark_second_attempts
from tests.machine.robbed import pytest_runtest_logstart, pytest_sessionstart
from tests.machine.shared_rewriting import pytest_collection
from tests.machine.stopwatch import until
from tests.machine.template import client
from tests.machine.template.client import pytest_runtest_protocol

__all__ = [
    "pytest_collection",
    "pytest_report_header",
    "pytest_runtest_logstart",
    "pytest_runtest_protocol",
    "pytest_sessionstart",
    "pytest_xdist_make_scheduler",
]

Dialect = Literal["sqlite", "postgresql"]
POSTGRESQL_FIRST = ("postgresql", pytest.param("sqlite", marks=pytest.mark.part(of=16, by=(), per="file")))
"""Databases of rooms above the ledger, whose every statement the tests of `jobs` run on both."""
_GROWN_BYTES = 8 * 2**20
"""Bytes of a database's tables, of rows that are deleted as well, from which on they are made anew."""


pytest_report_header = parts.report_header


def pytest_configure(config: pytest.Config) -> None:
    """Count the seconds of a run, collect no garbage of imports, and log errors without the locals of each frame.

    Those are asked for their words, which may take a network's time, and are highlighted, which takes seconds.
    """
    structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback
    suite_times.register(config)
    garbage.register(config)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the options of a run."""
    suite_times.add_options(parser)
    parts.add_options(parser)
    client.add_options(parser)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the commit's part, say what may be tried again, and begin with the files that take long."""
    parts.deselect(config, items)
    mark_second_attempts(items)
    sort_by_seconds(items)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL server on which databases can be made."""
    with servers.postgres() as url:
        yield url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis server; the one of REDIS_URL may hold other people's keys, so flush nothing."""
    with servers.redis() as url:
        yield url


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """The address of an S3 store."""
    with servers.s3_server() as server:
        yield server.url


@pytest.fixture
def bucket(s3_url: str) -> S3Settings:
    """A new bucket, and a prefix in it."""
    return new_bucket(s3_url)


def new_bucket(s3_url: str) -> S3Settings:
    """A bucket that nothing is in, and a prefix."""
    name = f"test-{secrets.token_hex(6)}"
    with urllib.request.urlopen(urllib.request.Request(f"{s3_url}/{name}", method="PUT"), timeout=300):
        return S3Settings(
            bucket=name,
            prefix="kronoscope/",
            region="us-east-1",
            endpoint=s3_url,
            public_endpoint=s3_url,
            access_key_id="key",
            secret_access_key="secret",
        )


class KeptEngine:
    """An engine that goes from database to database of one server: what it has compiled and asked at first stays.

    It waits for locks and for connections as long as it takes. Where the machine stands still for some seconds, those
    who wait for this process's threads would give up. How soon a service does is tested on engines of `open_database`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine = open_database(url)
        pool: Any = self._engine.pool
        pool._timeout = 240
        event.listen(self._engine, "connect", _be_patient)
        event.listen(self._engine, "do_connect", self._lead)
        leading: Any = self._engine.dialect.dispatch
        leading.do_connect.listeners.rotate(1)  # before the one that connects, which would be the last otherwise

    def at(self, url: str) -> Engine:
        """An engine on a database, whose events and options end with it."""
        if url != self.url:
            self._engine.dispose()
            self.url = url
        derived = self._engine.execution_options()
        derived.url = make_url(url)
        return derived

    def rest(self) -> None:
        """Keep one connection at most, which the next test of the same database finds."""
        pool: Any = self._engine.pool
        if self._engine.name == "sqlite" or pool.checkedout() or pool.checkedin() > 1:
            self._engine.dispose()

    def close(self) -> None:
        self._engine.dispose()

    def _lead(self, _dialect: object, _record: object, arguments: list[Any], named: dict[str, Any]) -> None:
        database = make_url(self.url).database
        if self._engine.name == "sqlite":
            arguments[:] = [database]
        else:
            named["dbname"] = database


class Databases:
    """Makes databases, and drops those of PostgreSQL in the end.

    Migrated ones are copies of one that was migrated from empty, so each test can have its own.
    """

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self._made: list[str] = []
        self._emptied: list[str] = []
        self._engines: dict[str, list[KeptEngine]] = {}
        self._templates: dict[Dialect, str] = {}
        self._server: str | None = None

    def empty(self, dialect: Dialect) -> str:
        """The URL of a database without any table."""
        name = f"kronoscope_test_{secrets.token_hex(6)}"
        if dialect == "sqlite":
            return f"sqlite:///{self._folder / name}.db"
        return self._create(name, "template0")

    def migrated(self, dialect: Dialect) -> str:
        """The URL of a database with the current schema and nothing in it but the tenant `local`."""
        if dialect not in self._templates:
            self._templates[dialect] = self.empty(dialect)
            upgrade_schema(self._templates[dialect])
        template = make_url(self._templates[dialect])
        if dialect == "sqlite":
            url = self.empty("sqlite")
            shutil.copyfile(str(template.database), str(make_url(url).database))
            return url
        return self._create(f"kronoscope_test_{secrets.token_hex(6)}", str(template.database))

    def recycled(self, dialect: Dialect) -> str:
        """The URL of a migrated database: one that `recycle` has emptied, or a new one."""
        return self._emptied.pop() if dialect == "postgresql" and self._emptied else self.migrated(dialect)

    @contextlib.contextmanager
    def engine(self, url: str) -> Iterator[Engine]:
        """An engine that no other test has meanwhile."""
        server = make_url(url)
        free = self._engines.setdefault(
            "sqlite" if server.get_backend_name() == "sqlite" else f"{server.username}@{server.host}:{server.port}", []
        )
        kept = next((each for each in free if each.url == url), free[-1] if free else None) or KeptEngine(url)
        if kept in free:
            free.remove(kept)
        derived: Any = kept.at(url)
        try:
            yield derived
        finally:
            derived._proxied = open_database(url)  # a thread that was left behind stays with its own database
            kept.rest()
            free.append(kept)

    def recycle(self, url: str) -> None:
        """Empty a migrated database for the next test: that is quicker than to copy another and to remove both.

        One that somebody is still connected to, or whose schema is not the current one, is not used again.
        """
        if make_url(url).get_backend_name() != "postgresql":
            return
        others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        size = "SELECT sum(pg_table_size(oid)) FROM pg_class WHERE relnamespace = 'public'::regnamespace"
        names = [table.name for table in metadata.sorted_tables]
        with self.engine(url) as engine, contextlib.suppress(SchemaOutdated, LedgerUnavailable):
            require_current_schema(engine)
            with writing(engine) as connection:
                unused = connection.execute(text(others)).scalar_one() == 0
                if unused:
                    if connection.execute(text(size)).scalar_one() > _GROWN_BYTES:
                        connection.execute(text(f"TRUNCATE {', '.join(names)}"))
                    else:  # which makes no file anew, as TRUNCATE does for each table and index
                        connection.exec_driver_sql("; ".join(f"DELETE FROM {name}" for name in reversed(names)))
                    connection.execute(
                        insert(tenants).values(id=LOCAL_TENANT, name=LOCAL_TENANT, created_at=ledger_now())
                    )
            if unused:
                self._emptied.append(url)

    def close(self) -> None:
        """Let go of every database."""
        for each in (kept for free in self._engines.values() for kept in free):
            each.close()

    def drop_all(self) -> None:
        """Drop what was made on a server that stays, whoever still holds a connection."""
        for name in self._made if "DATABASE_URL" in os.environ else ():
            self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _create(self, name: str, template: str) -> str:
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))

        def made() -> bool:
            # whoever has migrated the template is gone, but the process that served it may not have seen that
            with contextlib.suppress(psycopg.errors.ObjectInUse):
                self._execute(statement)
                return True
            return False

        until(made, 120, f"{template} is nobody's")
        self._made.append(name)
        # on a machine that is taken away for seconds a test's own connection is no test of anything
        patient = make_url(self._postgres()).set(database=name).update_query_dict({"connect_timeout": "60"})
        return patient.render_as_string(hide_password=False)

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(self._postgres(), autocommit=True) as connection:
            connection.execute(statement)

    def _postgres(self) -> str:
        if self._server is None:  # tests on SQLite alone start no server
            given = str(self._request.getfixturevalue("postgres_url"))
            self._server = given.replace("+psycopg", "", 1)  # libpq knows no driver name in the scheme
        return self._server


@pytest.fixture(scope="session")
def databases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    made = Databases(request, tmp_path_factory.mktemp("databases"))
    yield made
    made.close()
    made.drop_all()


@pytest.fixture(params=["sqlite", "postgresql"])
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """Both databases: what asks for this runs twice."""
    chosen: Dialect = request.param
    return chosen


@pytest.fixture
def ledger_url(databases: Databases, dialect: Dialect) -> str:
    """A fresh ledger, migrated, on both databases."""
    return databases.migrated(dialect)


@pytest.fixture
def ledger(ledger_url: str, databases: Databases) -> Iterator[Engine]:
    """The engine of a fresh ledger, on both databases."""
    with databases.engine(ledger_url) as engine:
        yield engine


def _be_patient(connection: Any, _record: object) -> None:
    limits = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    on_sqlite = isinstance(connection, sqlite3.Connection)
    with contextlib.closing(connection.cursor()) as cursor:
        # as the PostgreSQL of the tests does: no test cuts the machine's power, and a disk may stall
        settings = ("PRAGMA busy_timeout = 240000", "PRAGMA synchronous = OFF")
        for statement in settings if on_sqlite else (f"SET {each} = '240s'" for each in limits):
            cursor.execute(statement)
    connection.commit()
