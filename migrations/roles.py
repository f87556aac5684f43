"""The database's roles on PostgreSQL: one that owns the tables, and four that log in and own none.

::

    kronoscope_owner     owns the tables; cannot log in
    kronoscope_migrate   may become the owner, and does so to migrate
    kronoscope_api       reads and writes the rows of the tenant that a transaction declares, with its proof
    kronoscope_worker    reads and writes the rows of all tenants, but no API keys, and no secret of a webhook
    kronoscope_webhooks  reads webhooks and their deliveries, and writes what came of these

`prepare_roles` runs before a migration and `grant_rights` after it, each time: what stands already is left, and a
database of an earlier version, whose tables belong to a superuser, is taken over.
"""

from collections.abc import Mapping
from typing import Any

from psycopg import sql
from sqlalchemy import Connection, delete, insert, text

from jobs.schema.tables import proof_keys
from jobs.schema.tenant_declaration import secret_of

OWNER = "kronoscope_owner"
MIGRATE, API, WORKER, WEBHOOKS = LOGINS = (
    *("kronoscope_migrate", "kronoscope_api"),
    *("kronoscope_worker", "kronoscope_webhooks"),
)
_SENDING = {"alembic_version": "SELECT", "webhooks": "SELECT", "webhook_deliveries": "SELECT, UPDATE, DELETE"}

_ROLES_LOCK = 0x6B726F6F
"""Advisory lock: roles belong to the whole server, on which other databases may be prepared at the same time."""
_OWNED = (
    "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'"
)
_SEQUENCES = _OWNED.replace("'r'", "'S'")
_VIEWS = _OWNED.replace("'r'", "'v'")
_LARGE_OBJECTS = (
    "SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace"
    " AND proname IN ('lo_creat', 'lo_create', 'lo_from_bytea', 'lo_open', 'lo_put', 'lowrite')"
)
_SECURED = f"{_OWNED} AND c.relrowsecurity ORDER BY 1"


def prepare_roles(connection: Connection, passwords: Mapping[str, str]) -> None:
    """Make the roles, set their passwords, and hand the tables that stand to their owner."""
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ROLES_LOCK})
    present = set(connection.execute(text("SELECT rolname FROM pg_roles WHERE rolname LIKE 'kronoscope%'")).scalars())
    for role in (OWNER, *LOGINS):
        if role not in present:
            _run(connection, "CREATE ROLE {} NOINHERIT", role)
    _run(connection, "ALTER ROLE {} NOLOGIN", OWNER)
    for role in LOGINS:
        _run(connection, "ALTER ROLE {} LOGIN NOINHERIT NOCREATEDB NOCREATEROLE", role)
        _set_password(connection, role, passwords[role])
    _run(connection, "GRANT {} TO {}", OWNER, MIGRATE)
    database = connection.execute(text("SELECT current_database()")).scalar_one()
    _run(connection, "GRANT CONNECT ON DATABASE {} TO {}, {}, {}, {}", database, *LOGINS)
    _run(connection, "GRANT USAGE, CREATE ON SCHEMA public TO {}", OWNER)
    _run(connection, "GRANT USAGE ON SCHEMA public TO {}, {}, {}, {}", *LOGINS)
    connection.execute(text("REVOKE CREATE ON SCHEMA public FROM PUBLIC"))
    _close_storage(connection, database)
    for query in (_OWNED, _VIEWS):
        for table in connection.execute(text(query)).scalars().all():
            _run(connection, "ALTER TABLE {} OWNER TO {}", table, OWNER)


def _close_storage(connection: Connection, database: str) -> None:
    """Revoke the rights to keep other bytes: neither temporary tables nor large objects are needed."""
    _run(connection, "REVOKE TEMPORARY ON DATABASE {} FROM PUBLIC", database)
    if not connection.execute(text("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")).scalar_one():
        return  # whose functions these are
    for function in connection.execute(text(_LARGE_OBJECTS)).scalars().all():
        connection.execute(text(f"REVOKE EXECUTE ON FUNCTION {function} FROM PUBLIC"))


def grant_rights(connection: Connection, api_password: str) -> None:
    """Give API, worker and sender their rights on the tables, as the tables' owner."""
    connection.execute(delete(proof_keys))
    connection.execute(insert(proof_keys).values(role=API, secret=secret_of(api_password)))
    for table in connection.execute(text(_OWNED)).scalars().all():
        if table == proof_keys.name:
            continue
        rights = "SELECT" if table == "alembic_version" else "SELECT, INSERT, UPDATE, DELETE"
        _run(connection, f"GRANT {rights} ON {{}} TO {{}}, {{}}", table, API, WORKER)
    _run(connection, "REVOKE ALL ON api_keys, webhooks FROM {}", WORKER)
    _run(connection, "GRANT SELECT (id, tenant_id) ON webhooks TO {}", WORKER)
    for table, rights in _SENDING.items():
        _run(connection, f"GRANT {rights} ON {{}} TO {{}}", table, WEBHOOKS)
    for sequence in connection.execute(text(_SEQUENCES)).scalars().all():
        _run(connection, "GRANT USAGE ON SEQUENCE {} TO {}", sequence, WORKER)
    for view in connection.execute(text(_VIEWS)).scalars().all():  # over all tenants' rows: not for the API
        _run(connection, "GRANT SELECT ON {} TO {}", view, WORKER)
    for table in connection.execute(text(_SECURED)).scalars().all():
        _run(connection, "DROP POLICY IF EXISTS worker_rows ON {}", table)
        _run(connection, "CREATE POLICY worker_rows ON {} TO {}, {} USING (true)", table, WORKER, WEBHOOKS)


def act_as_owner(connection: Connection) -> None:
    """Become the tables' owner until the transaction ends."""
    _run(connection, "SET LOCAL ROLE {}", OWNER)


def _run(connection: Connection, statement: str, *names: str) -> None:
    """Execute a statement that takes no parameters, with its names quoted."""
    composed = sql.SQL(statement).format(*map(sql.Identifier, names))
    connection.exec_driver_sql(composed.as_string(_driver(connection)))


def _set_password(connection: Connection, role: str, password: str) -> None:
    """Set a password by its hash, which is made here: logs of statements show no password."""
    driver = _driver(connection)
    hashed = driver.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
    composed = sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(hashed))
    connection.exec_driver_sql(composed.as_string(driver))


def _driver(connection: Connection) -> Any:  # noqa: ANN401 - SQLAlchemy does not say which driver it is
    return connection.connection.driver_connection
