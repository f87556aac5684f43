"""API keys: shown once, stored as a keyed hash, compared in constant time.

``kron_<prefix>_<secret><checksum>``: the prefix finds the row, 160 random bits are the secret, and
the checksum (CRC-32 of what stands before it) lets a mistyped key, or a scanner of leaked ones,
be detected without the database.

    python -P -m jobs.tenancy.api_keys create --tenant NAME [--scope SCOPE]... [--expires 2030-01-01T00:00:00Z]
    python -P -m jobs.tenancy.api_keys revoke PREFIX
    python -P -m jobs.tenancy.api_keys list [--tenant NAME] [--json]
"""

import argparse
import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import sys
import zlib
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, Engine, insert, or_, select, update

from catalog.record import plain
from jobs.environment import secret as read_secret
from jobs.errors import LedgerError, SettingsInvalid, TransientError
from jobs.records import Caller, Scope
from jobs.schema.clock import ledger_now
from jobs.schema.database import current_database, insert_into, reading, writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import api_keys, tenants
from jobs.service_log import configure_logging, write_audit_line
from jobs.settings import LedgerSettings
from jobs.tenancy.key_uses import KeyRecord, list_keys

SCOPES: tuple[Scope, ...] = ("read", "submit", "admin")
MIN_SECRET_CHARACTERS = 16
_KEY = re.compile(r"kron_([a-z2-7]{16})_([a-z2-7]{32})([0-9a-f]{8})")
_PREFIX = re.compile(r"[a-z2-7]{16}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def create_key(
    engine: Engine,
    secret: str,
    tenant: str,
    scopes: tuple[Scope, ...] = ("read", "submit"),
    expires_at: datetime | None = None,
) -> str:
    """Create a key for the tenant of that name, and the tenant where there is none yet."""
    check_secret(secret)
    if not _NAME.fullmatch(tenant):
        raise SettingsInvalid("a tenant's name is 1 to 100 letters, digits or ._- and starts with a letter or digit")
    if not scopes or not set(scopes) <= set(SCOPES):
        raise SettingsInvalid(f"scopes are one or several of {', '.join(SCOPES)}")
    if expires_at is not None and expires_at.tzinfo is None:
        raise SettingsInvalid("the expiry has no time zone; write it as 2030-01-01T00:00:00Z")
    prefix = _base32(10)
    body = f"kron_{prefix}_{_base32(20)}"
    key = body + _checksum(body)
    with writing(engine) as connection:
        connection.execute(
            insert(api_keys).values(
                id=new_id(),
                tenant_id=_tenant_id(connection, tenant),
                prefix=prefix,
                hmac=_digest(secret, key),
                scopes=" ".join(scope for scope in SCOPES if scope in scopes),
                created_at=ledger_now(),
                expires_at=expires_at,
            )
        )
    return key


def verify_key(engine: Engine, secret: str, presented: str) -> Caller | None:
    """Return the caller who presents a key.

    Args:
        secret: The server's secret, under which digests of keys are stored.
        presented: The text of the request.

    Returns:
        The caller; None if the key is malformed, unknown, revoked or expired, without a sign which.

    Raises:
        SettingsInvalid: If the secret is too short.
    """
    check_secret(secret)
    match = _KEY.fullmatch(presented)
    if match is None or not hmac.compare_digest(_checksum(presented[:-8]), match[3]):
        return None
    with reading(engine) as connection:
        row = connection.execute(
            select(api_keys.c.hmac, api_keys.c.tenant_id, api_keys.c.scopes).where(*_unrevoked(match[1]))
        ).one_or_none()
    # an unknown prefix is compared too, with what no digest equals: both ways take the same time
    stored = "-" * 64 if row is None else row.hmac
    if not hmac.compare_digest(stored, _digest(secret, presented)) or row is None:
        return None
    return Caller(tenant_id=row.tenant_id, scopes=frozenset(row.scopes.split(" ")), key=match[1])


def is_valid(engine: Engine, prefix: str) -> bool:
    """Return whether a key, named by its prefix, that was verified before is neither revoked nor expired."""
    with reading(engine) as connection:
        return connection.execute(select(api_keys.c.prefix).where(*_unrevoked(prefix))).one_or_none() is not None


def _unrevoked(prefix: str) -> tuple[ColumnElement[bool], ...]:
    unexpired = or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > ledger_now())
    return api_keys.c.prefix == prefix, api_keys.c.revoked_at.is_(None), unexpired


def key_id(presented_or_prefix: str) -> str | None:
    """Return the public part of a key."""
    match = _KEY.fullmatch(presented_or_prefix)
    prefix = presented_or_prefix if match is None else match[1]
    return prefix if _PREFIX.fullmatch(prefix) else None


def revoke_key(engine: Engine, presented_or_prefix: str) -> bool:
    """Revoke a key."""
    with writing(engine) as connection:
        found = connection.execute(
            update(api_keys)
            .where(api_keys.c.prefix == key_id(presented_or_prefix), api_keys.c.revoked_at.is_(None))
            .values(revoked_at=ledger_now())
        )
    return found.rowcount == 1


def check_secret(secret: str) -> None:
    """Refuse a server's secret that could be guessed: ``SettingsInvalid`` if it has fewer than 16 characters."""
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise SettingsInvalid(
            f"the key secret has {len(secret)} characters; "
            f"set KRONOSCOPE_KEY_SECRET to at least {MIN_SECRET_CHARACTERS}"
        )


def _tenant_id(connection: Connection, name: str) -> str:
    connection.execute(
        insert_into(connection, tenants)
        .values(id=new_id(), name=name, created_at=ledger_now())
        .on_conflict_do_nothing(index_elements=[tenants.c.name])
    )
    tenant_id: str = connection.execute(select(tenants.c.id).where(tenants.c.name == name)).scalar_one()
    return tenant_id


def _base32(size: int) -> str:
    return base64.b32encode(secrets.token_bytes(size)).decode().lower()


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _digest(secret: str, key: str) -> str:
    return hmac.new(secret.encode(), key.encode(), hashlib.sha256).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Create, revoke or list keys from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -P -m jobs.tenancy.api_keys", description="Make, end or list API keys."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    creating = commands.add_parser("create", help="make a key; it is shown once")
    creating.add_argument("--tenant", required=True, help="the key's tenant; created where there is none of that name")
    creating.add_argument("--scope", action="append", choices=SCOPES, help="default: read and submit")
    creating.add_argument("--expires", type=_moment, help="when it ends, e.g. 2030-01-01T00:00:00Z")
    revoking = commands.add_parser("revoke", help="end a key's life")
    revoking.add_argument("key", help="its prefix (the part between the underscores), or the whole key")
    listing = commands.add_parser("list", help="list keys with their last use; none is shown whole")
    listing.add_argument("--tenant", help="one tenant's; default: all")
    listing.add_argument("--json", action="store_true", help="as JSON")
    chosen = parser.parse_args(arguments)
    try:
        return {"create": _create, "revoke": _revoke, "list": _list}[chosen.command](chosen)
    except LedgerError as error:
        sys.stderr.write(f"{error}\n")
        return 3 if isinstance(error, TransientError) else 4


def _create(chosen: argparse.Namespace) -> int:
    pepper = read_secret(os.environ, "KRONOSCOPE_KEY_SECRET")
    if pepper is None:
        raise SettingsInvalid(
            "KRONOSCOPE_KEY_SECRET is not set; keys are kept under the secret that the API verifies with"
        )
    with current_database(LedgerSettings.from_environment(os.environ).database_url) as engine:
        _require_own_database(engine, chosen.tenant)
        key = create_key(engine, pepper, chosen.tenant, tuple(chosen.scope or ("read", "submit")), chosen.expires)
    write_audit_line(action="create_key", outcome="done", key=key_id(key))
    sys.stderr.write("keep this key now, it is shown only once:\n")
    sys.stdout.write(f"{key}\n")
    return 0


def _require_own_database(engine: Engine, tenant: str) -> None:
    """Refuse a second tenant on SQLite, which has neither roles nor row-level security."""
    if engine.dialect.name != "sqlite":
        return
    held = select(tenants.c.name).join(api_keys, api_keys.c.tenant_id == tenants.c.id).where(tenants.c.name != tenant)
    with reading(engine) as connection:
        other = connection.execute(held.limit(1)).scalar_one_or_none()
    if other is not None:
        raise SettingsInvalid(
            f"this database is SQLite, which keeps no tenants apart, and tenant `{other}` has keys in it; "
            f"make the key for `{other}`, or take PostgreSQL for several tenants"
        )


def _revoke(chosen: argparse.Namespace) -> int:
    with current_database(LedgerSettings.from_environment(os.environ).database_url) as engine:
        revoked = revoke_key(engine, chosen.key)
    write_audit_line(action="revoke_key", outcome="done" if revoked else "unknown", key=key_id(chosen.key))
    sys.stderr.write("revoked\n" if revoked else "there is no such key, or it was revoked earlier\n")
    return 0 if revoked else 2


def _list(chosen: argparse.Namespace) -> int:
    with current_database(LedgerSettings.from_environment(os.environ).database_url) as engine:
        keys = list_keys(engine, chosen.tenant)
    if chosen.json:
        sys.stdout.write(json.dumps([plain(each) for each in keys], indent=2, default=_iso) + "\n")
        return 0
    rows = [("KEY", "TENANT", "SCOPES", "STATE", "CREATED", "EXPIRES", "LAST USED", "FROM"), *map(_row, keys)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    return 0


def _row(key: KeyRecord) -> tuple[str, ...]:
    moments = (_iso(each) if each else "never" for each in (key.created_at, key.expires_at, key.last_used_at))
    return (key.key, key.tenant, ",".join(key.scopes), key.state, *moments, key.last_used_from or "–")


def _iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise argparse.ArgumentTypeError("has no time zone; write it as 2030-01-01T00:00:00Z")
    return moment


if __name__ == "__main__":
    configure_logging()  # the audit line of a change is all that is logged
    sys.exit(main())
