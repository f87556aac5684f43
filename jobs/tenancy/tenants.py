"""Tenants as their operator handles them: how much their files take and may take, and how long they have had devices.

python -P -m jobs.tenancy.tenants show [NAME]
python -P -m jobs.tenancy.tenants set NAME --bytes 50GB | --no-bytes
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence

from sqlalchemy import Engine, text

from jobs.errors import LedgerError, TransientError
from jobs.schema.database import current_database, reading
from jobs.settings import LedgerSettings
from jobs.tenancy.quotas import set_quota, usage

_SIZE = re.compile(r"(\d{1,15})(?:\.(\d{1,3}))? ?([kMGT]?)(i?)B?")
_APART = """
    SELECT row_security_active('jobs') AND NOT pg_has_role(tableowner, 'USAGE') FROM pg_tables
    WHERE schemaname = current_schema AND tablename = 'jobs'
"""
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}


def read_bytes(text: str) -> int:
    """Parse a size such as ``50GB``, ``1.5TiB`` or plain bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; write one like 50GB, 1.5TiB or 1000000")
    whole, part, power, binary = match.groups()
    unit: int = (1024 if binary else 1000) ** _POWERS[power]
    return int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)


def separation_of_tenants(engine: Engine) -> str:
    """Return what keeps one tenant from another's rows in this database.

    Returns:
        ``row_level_security`` beside the conditions of the queries, or ``queries`` where those alone do: on SQLite,
        and where the service logs in as a superuser or as the tables' owner.
    """
    if engine.dialect.name != "postgresql":
        return "queries"
    with reading(engine) as connection:
        return "row_level_security" if connection.execute(text(_APART)).scalar_one_or_none() else "queries"


def main(arguments: Sequence[str] | None = None) -> int:
    """Show or set quotas from the command line."""
    parser = argparse.ArgumentParser(prog="python -P -m jobs.tenancy.tenants", description="Show or limit tenants.")
    commands = parser.add_subparsers(dest="command", required=True)
    showing = commands.add_parser("show", help="what files take, and how much they may")
    showing.add_argument("name", nargs="?", help="one tenant; default: all")
    setting = commands.add_parser("set", help="limit what a tenant's files take")
    setting.add_argument("name")
    limit = setting.add_mutually_exclusive_group(required=True)
    limit.add_argument("--bytes", type=read_bytes, help="such as 50GB or 1.5TiB")
    limit.add_argument("--no-bytes", action="store_true", help="no limit")
    chosen = parser.parse_args(arguments)
    try:
        settings = LedgerSettings.from_environment(os.environ)
        with current_database(settings.database_url) as engine:
            known = chosen.command == "show" or set_quota(engine, chosen.name, chosen.bytes)
            found = usage(engine, chosen.name, settings.stored_bytes)
    except LedgerError as error:
        sys.stderr.write(f"{error}\n")
        return 3 if isinstance(error, TransientError) else 4
    if not known or (chosen.name is not None and not found):
        sys.stderr.write("there is no tenant of that name; `kronoscope keys create --tenant NAME` makes one\n")
        return 2
    for each in found:
        limit_text = "no limit" if each.quota_bytes is None else f"of {each.quota_bytes:,} bytes"
        sys.stdout.write(
            f"{each.tenant}: {each.used_bytes:,} bytes, {limit_text}; {each.device_seconds:,.0f} device-seconds\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
