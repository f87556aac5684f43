"""The last use of a key: noted without the ledger, written at most once a minute, and listed without the key."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from jobs.errors import LedgerUnavailable
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, reading, writing
from jobs.schema.tables import api_keys
from jobs.tenancy.api_keys import create_key, main, revoke_key
from jobs.tenancy.key_uses import KeyUses, list_keys

SECRET = "a secret of the server"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def prefix(key: str) -> str:
    return key.split("_")[1]


def last_use(ledger: Engine, key: str) -> tuple[datetime | None, str | None]:
    columns = select(api_keys.c.last_used_at, api_keys.c.last_used_from)
    with reading(ledger) as connection:
        row = connection.execute(columns.where(api_keys.c.prefix == prefix(key))).one()
    return row.last_used_at, row.last_used_from


def test_many_uses_within_a_minute_are_one_write(ledger: Engine) -> None:
    key, clock = create_key(ledger, SECRET, "acme"), Clock()
    uses = KeyUses(clock)
    assert last_use(ledger, key) == (None, None)
    for number in range(1000):
        uses.note(prefix(key), f"192.0.2.{number % 10}")
    assert uses.write(ledger) == 1
    first, client = last_use(ledger, key)
    assert client == "192.0.2.9"
    for _ in range(59):
        clock.now += 1
        uses.note(prefix(key), "192.0.2.77")
        assert uses.write(ledger) == 0
    assert last_use(ledger, key) == (first, client)
    clock.now += 1
    assert uses.write(ledger) == 1  # though it was not used again in this second
    assert uses.write(ledger) == 0


def test_two_processes_write_one_use_of_a_minute(ledger: Engine) -> None:
    key = create_key(ledger, SECRET, "acme")
    for client in ("192.0.2.1", "192.0.2.2"):
        uses = KeyUses()
        uses.note(prefix(key), client)
        uses.write(ledger)
    assert last_use(ledger, key)[1] == "192.0.2.1"
    with writing(ledger) as connection:
        connection.execute(update(api_keys).values(last_used_at=ledger_now(-61)))
    uses = KeyUses()
    uses.note(prefix(key), "192.0.2.3")
    uses.write(ledger)
    used_at, client = last_use(ledger, key)
    assert client == "192.0.2.3"
    assert used_at is not None
    assert abs(used_at - datetime.now(UTC)) < timedelta(minutes=5)


def test_a_process_that_ends_writes_what_it_has_noted(ledger: Engine) -> None:
    key, uses = create_key(ledger, SECRET, "acme"), KeyUses()
    for client in ("192.0.2.1", "192.0.2.2"):
        uses.note(prefix(key), client)
        uses.write(ledger, every=True)
    assert last_use(ledger, key)[1] == "192.0.2.2"


def test_a_use_outlives_a_database_that_is_away(ledger: Engine) -> None:
    key, uses = create_key(ledger, SECRET, "acme"), KeyUses()
    uses.note(prefix(key), "192.0.2.1")
    away = open_database("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(LedgerUnavailable):
        uses.write(away)
    away.dispose()
    assert uses.write(ledger) == 1
    assert last_use(ledger, key)[1] == "192.0.2.1"


def test_the_list_says_who_may_what_until_when_and_since_when_unused(ledger: Engine) -> None:
    used, ended, revoked = (create_key(ledger, SECRET, "acme", ("read",)) for _ in range(3))
    other = create_key(ledger, SECRET, "other", ("read", "submit"))
    revoke_key(ledger, revoked)
    with writing(ledger) as connection:
        connection.execute(update(api_keys).where(api_keys.c.prefix == prefix(ended)).values(expires_at=ledger_now(-1)))
    uses = KeyUses()
    uses.note(prefix(used), "2001:db8::/64")
    uses.write(ledger)
    listed = {each.key: each for each in list_keys(ledger)}
    states = {prefix(used): "valid", prefix(ended): "expired", prefix(revoked): "revoked", prefix(other): "valid"}
    assert {key: each.state for key, each in listed.items()} == states
    assert listed[prefix(used)].last_used_from == "2001:db8::/64"
    assert listed[prefix(other)].last_used_at is None
    assert listed[prefix(other)].scopes == ("read", "submit")
    assert [each.key for each in list_keys(ledger, "other")] == [prefix(other)]


def test_the_command_lists_keys_and_never_what_opens(
    ledger: Engine, ledger_url: str, monkeypatch: Any, capfd: Any
) -> None:
    monkeypatch.setenv("KRONOSCOPE_DATABASE_URL", ledger_url)
    key, uses = create_key(ledger, SECRET, "acme"), KeyUses()
    unused = create_key(ledger, SECRET, "acme")
    uses.note(prefix(key), "192.0.2.1")
    uses.write(ledger)
    assert main(["list"]) == 0
    table = capfd.readouterr().out
    assert main(["list", "--json", "--tenant", "acme"]) == 0
    document = capfd.readouterr().out
    first, second = json.loads(document)
    assert (first["key"], first["last_used_from"], first["state"]) == (prefix(key), "192.0.2.1", "valid")
    assert first["last_used_at"].endswith("Z")
    assert (second["key"], second["last_used_at"]) == (prefix(unused), None)
    assert table.splitlines()[1].split() == [
        prefix(key), "acme", "read,submit", "valid", first["created_at"], "never", first["last_used_at"], "192.0.2.1",
    ]  # fmt: skip
    with reading(ledger) as connection:
        digests = connection.execute(select(api_keys.c.hmac)).scalars().all()
    for secret in (*digests, key.split("_")[2], unused.split("_")[2]):
        assert secret not in table + document
