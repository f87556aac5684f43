"""The database of the ledger, PostgreSQL or SQLite: its connection, transactions and schema version.

The same statements run on both. What differs stands here and in ``jobs.schema.clock``: above all how a
transaction takes its lock. SQLite takes the file's one write lock at BEGIN IMMEDIATE, so that two
writers queue up instead of failing halfway.

On PostgreSQL row-level security shows a transaction the rows of the tenant that it declares, or all rows where it
declares that it works for all (``jobs.schema.tenant_declaration``). Workers, migrations and operators' commands
declare that for their connections; the API, opened with ``tenants_apart``, declares it in each transaction, and one
that forgets to is refused on every database: seeing nothing by mistake would make a sweep delete what it does not see.
"""

import functools
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, ExceptionContext, Table, create_engine, event, exc, make_url, text
from sqlalchemy.dialects import postgresql, sqlite

from catalog.record import canonical_json
from jobs.errors import LedgerUnavailable, SchemaOutdated, SettingsInvalid
from jobs.schema.query_limits import LimitedConnection, connect_limited, limit_queries
from jobs.schema.tenant_declaration import ALL_TENANTS, DECLARE, Purpose, declaration

_READING = "kronoscope_reading"
_TENANT = "kronoscope_tenant"
_QUEUED = "kronoscope_queued"
_WAKE = "kronoscope_wake"
_BUSY_SECONDS = 15
_POSTGRES_OPTIONS = (
    "-c statement_timeout=30s -c lock_timeout=5s -c idle_in_transaction_session_timeout=10s -c timezone=UTC"
)
"""A session that is silent for 10 s within a transaction is frozen or gone, and must not keep a job's row locked for
longer than its lease: no other worker could take it."""
_POSTGRES_PATIENCE = {
    "connect_timeout": 3,
    # a machine that is gone closes nothing: what was sent is acknowledged within this time, or the connection is over
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
_GONE = ("25006", "28000")
"""PostgreSQL's words for a server that takes no writes for now (a standby after a failover, a full disk of a managed
one), and for a session whose password, and with it the proof of its tenants, was changed meanwhile."""
_DISK_FULL = "53100"
"""PostgreSQL's code for a full disk."""
_UPGRADE_LOCK = 0x6B726F6E
"""Advisory lock of PostgreSQL under which one process at a time migrates."""


def open_database(url: str, *, tenants_apart: bool = False) -> Engine:
    """Create an engine with a small pool; it connects on first use.

    Args:
        url: The database's URL. A `connect_timeout` in PostgreSQL's is kept.
        tenants_apart: Whether each transaction must declare its tenant, or `across_tenants`.

    Returns:
        The engine.

    Raises:
        SettingsInvalid: If the URL is neither PostgreSQL's nor that of an SQLite file.
    """
    parsed = _parse(url)
    options = {} if tenants_apart else {_TENANT: ALL_TENANTS}
    connect = functools.partial(
        create_engine,
        parsed,
        hide_parameters=True,  # an error that is logged quotes no row of a tenant
        json_serializer=canonical_json,
        pool_size=5,
        max_overflow=5,
        execution_options=options,
    )
    if parsed.get_backend_name() == "sqlite":
        engine: Engine = connect(pool_timeout=30)
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        event.listen(engine, "begin", _tenant_of)
        return engine
    patience = {name: value for name, value in _POSTGRES_PATIENCE.items() if name not in parsed.query}
    engine = connect(
        pool_timeout=5,
        pool_pre_ping=True,  # a connection that a restart has ended is noticed before it is used
        connect_args={"options": _POSTGRES_OPTIONS, **patience},
    )
    event.listen(engine, "do_connect", _connect_limited)
    event.listen(engine, "handle_error", _leave_readers)
    if tenants_apart:
        event.listen(engine, "begin", _declare_tenant)
    else:
        event.listen(engine, "connect", _declare_for_all)
    return engine


def _connect_limited(_dialect: object, _record: object, arguments: Any, named: Any) -> LimitedConnection:  # noqa: ANN401
    """Connect as the dialect would, so that no query waits for ever on a connection that is open and silent."""
    return connect_limited(*arguments, **named)


def across_tenants(engine: Engine) -> Engine:
    """Return the same database, on the same pool, for work on all tenants: maintenance and metrics."""
    return for_purpose(engine, ALL_TENANTS)


def for_purpose(engine: Engine, purpose: Purpose) -> Engine:
    """Return the same database, on the same pool, for one purpose that concerns all tenants.

    The purpose decides on the tables that can be read.
    """
    return for_tenant(engine, purpose)


def for_tenant(engine: Engine, tenant_id: str) -> Engine:
    """Return the same database as one tenant sees it: on the same pool, each transaction declares the tenant."""
    return engine.execution_options(**{_TENANT: tenant_id})


def after_queueing(engine: Engine, wake: Callable[[], object]) -> None:
    """Have ``wake`` be called after each commit that queues work, here and of engines that are derived from here on.

    Args:
        wake: Returns at once and raises nothing.
    """
    engine.update_execution_options(**{_WAKE: wake})


def note_queued(connection: Connection) -> None:
    """Note that a transaction of `writing` queues work."""
    connection.execution_options(**{_QUEUED: True})


def _tenant_of(connection: Connection) -> str:
    """The tenant that a transaction declares."""
    tenant: str | None = connection.get_execution_options().get(_TENANT)
    if tenant is None:
        raise RuntimeError("a transaction of the API declares no tenant; give `reading` or `writing` one")
    return tenant


def _declare_tenant(connection: Connection) -> None:
    driver_connection: Any = connection.connection.driver_connection
    connection.exec_driver_sql(DECLARE, declaration(driver_connection.info.password, _tenant_of(connection)))


def _declare_for_all(driver_connection: Any, _record: object) -> None:  # noqa: ANN401 - psycopg's connection
    declared = declaration(driver_connection.info.password, ALL_TENANTS, for_session=True)
    driver_connection.execute(DECLARE, declared)
    driver_connection.commit()


def _leave_readers(context: ExceptionContext) -> None:
    """Treat a server that refuses writes as gone, with every connection of the pool: new ones may find the primary."""
    if getattr(context.original_exception, "sqlstate", None) in _GONE:
        context.is_disconnect = True


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except exc.ArgumentError as error:
        raise SettingsInvalid(
            "the database's URL cannot be read; write postgresql://user:password@host/name or sqlite:////path"
        ) from error
    if parsed.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise SettingsInvalid("the ledger is shared by several processes; give SQLite a file: sqlite:////path")
        return parsed
    raise SettingsInvalid(f"`{parsed.drivername}` is not a database of the ledger; take postgresql or sqlite")


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where _begin_sqlite says, not where the driver guesses
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()
    # SQLite's own knows ASCII alone
    connection.create_function("lower", 1, lambda text: text if text is None else str(text).lower(), deterministic=True)


def _begin_sqlite(connection: Connection) -> None:
    reading = connection.get_execution_options().get(_READING, False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


@contextmanager
def writing(engine: Engine, tenant_id: str | None = None) -> Iterator[Connection]:
    """Open one short transaction that writes; it commits at the end and rolls back on any exception.

    Args:
        tenant_id: The tenant whose rows it sees; None: as the engine declares.

    Yields:
        The connection.

    Raises:
        LedgerUnavailable: If the database does not answer.
    """
    with _translated(), (engine if tenant_id is None else for_tenant(engine, tenant_id)).begin() as connection:
        yield connection
    options = connection.get_execution_options()
    if _WAKE in options and _QUEUED in options:
        options[_WAKE]()


@contextmanager
def reading(engine: Engine, tenant_id: str | None = None) -> Iterator[Connection]:
    """Open one short transaction that only reads, beside any writer; otherwise as `writing`."""
    with _translated(), engine.connect() as opened:
        declared = {} if tenant_id is None else {_TENANT: tenant_id}
        connection = opened.execution_options(**{_READING: True, **declared})
        with connection.begin():
            yield connection


@contextmanager
def _translated() -> Iterator[None]:
    """Raise `LedgerUnavailable` without the driver's message: it names hosts and statements, and stays in the cause."""
    try:
        yield
    except (exc.DBAPIError, exc.TimeoutError) as error:
        lost = isinstance(error, exc.DBAPIError) and error.connection_invalidated
        if not lost and not isinstance(error, (exc.OperationalError, exc.InterfaceError, exc.TimeoutError)):
            raise
        cause = error.orig if isinstance(error, exc.DBAPIError) else None
        code = getattr(cause, "sqlite_errorcode", None)
        # SQLite reports a faulty statement in the same class as a locked or unreadable file
        if code == sqlite3.SQLITE_ERROR:
            raise
        if code == sqlite3.SQLITE_FULL or getattr(cause, "sqlstate", None) == _DISK_FULL:
            message = "the disk of the ledger's database is full; try again later, or ask the service's operator"
            raise LedgerUnavailable(message) from error
        raise LedgerUnavailable("the ledger's database does not answer; try again in a moment") from error


def migration_config(connection: Connection | None = None) -> Config:
    """Return Alembic's configuration."""
    config = Config()
    config.set_main_option("script_location", "migrations:")  # the package, wherever it is installed
    config.attributes["connection"] = connection
    return config


def upgrade_schema(url: str, role: str | None = None) -> None:
    """Migrate the database to this code's schema; several processes may try at once.

    Args:
        url: The database's URL.
        role: PostgreSQL's role that owns the tables, which the URL's may become; None: the URL's own.

    Raises:
        SchemaOutdated: If the database belongs to newer code.
        LedgerUnavailable: If it does not answer, or another transaction held a table for too long.
    """
    engine = open_database(url)
    try:
        with limit_queries(math.inf), writing(engine) as connection:
            if connection.dialect.name == "postgresql":
                # another migration may be waited for; waiting for a table would hold up every query behind it
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text("SET LOCAL lock_timeout = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
                connection.execute(text("SET LOCAL lock_timeout = '5s'"))
                if role is not None:
                    connection.execute(text("SELECT set_config('role', :role, true)"), {"role": role})
            _check_known(connection)
            command.upgrade(migration_config(connection), "head")
    finally:
        engine.dispose()


@contextmanager
def current_database(url: str) -> Iterator[Engine]:
    """Open a database for a program, whose connections end with it; as `open_database` and `require_current_schema`."""
    engine = open_database(url)
    try:
        require_current_schema(engine)
        yield engine
    finally:
        engine.dispose()


def insert_into(connection: Connection, table: Table) -> Any:  # noqa: ANN401 - the two dialects' classes share no base
    """Begin an insertion that says what to do where a row is there already."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def require_current_schema(engine: Engine) -> None:
    """Raise ``SchemaOutdated``, with the command to run, if the database's schema is not this code's."""
    with reading(engine) as connection:
        _check_known(connection)
        present = MigrationContext.configure(connection).get_current_heads()
    wanted, _ = _revisions()
    if set(present) != wanted:
        raise SchemaOutdated(
            f"the database's schema is {_names(present)}, this version works on {_names(wanted)}; "
            "run `python -P -m migrations` with the same KRONOSCOPE_DATABASE_URL first"
        )


def _check_known(connection: Connection) -> None:
    present = MigrationContext.configure(connection).get_current_heads()
    unknown = set(present) - _revisions()[1]
    if unknown:
        raise SchemaOutdated(
            f"the database's schema is {_names(unknown)}, which this version does not know; "
            "install the version that made it, or a newer one"
        )


@functools.cache  # every probe of readiness asks, and reading the files takes 27 ms of a core
def _revisions() -> tuple[frozenset[str], frozenset[str]]:
    """Return the head revisions, and all that this code knows."""
    scripts = ScriptDirectory.from_config(migration_config())
    return frozenset(scripts.get_heads()), frozenset(script.revision for script in scripts.walk_revisions())


def _names(revisions: Iterable[str]) -> str:
    return ", ".join(sorted(revisions)) or "empty"
