"""Databases for stacks: migrated once on each server, and copied from then on."""

import contextlib
import secrets
import threading
from collections.abc import Callable

import psycopg
from sqlalchemy import make_url

from jobs.schema.database import upgrade_schema
from tests.machine.stopwatch import until

_TEMPLATES: dict[str, str] = {}
_MIGRATING = threading.Lock()


def migrated_database(server: str) -> str:
    """A new database; what was migrated once on this server is copied from then on."""
    with _MIGRATING:  # Alembic keeps its state in the module
        if server not in _TEMPLATES:
            template = _new_database(server, "template0")
            upgrade_schema(template)
            _TEMPLATES[server] = str(make_url(template).database)
        return _new_database(server, _TEMPLATES[server])


def copy_from(server: str, migrated: Callable[[], str]) -> None:
    """Have what this server is asked for copied from a database that is migrated already."""
    with _MIGRATING:
        if server not in _TEMPLATES:
            _TEMPLATES[server] = str(make_url(migrated()).database)


def _new_database(server: str, template: str) -> str:
    name = f"kronoscope_{secrets.token_hex(6)}"

    def made() -> bool:
        # whoever has migrated the template is gone, but the process that served it may not have seen that
        with contextlib.suppress(psycopg.errors.ObjectInUse), psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
            return True
        return False

    until(made, 120, f"{template} is nobody's")
    return make_url(server).set(database=name).render_as_string(hide_password=False)
