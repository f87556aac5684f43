"""API keys: what is stored cannot be used, what was changed is not accepted."""

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, update

from jobs.errors import SettingsInvalid
from jobs.records import LOCAL_TENANT
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import api_keys, tenants
from jobs.tenancy.api_keys import create_key, main, revoke_key, verify_key

SECRET = "a secret of the server"


def test_a_key_names_its_tenant_and_carries_its_scopes(ledger: Engine) -> None:
    caller = verify_key(ledger, SECRET, create_key(ledger, SECRET, "acme", ("read",)))
    assert caller is not None
    assert caller.may("read")
    assert not caller.may("submit")
    assert not caller.may("admin")
    admin = verify_key(ledger, SECRET, create_key(ledger, SECRET, "acme", ("admin",)))
    assert admin is not None
    assert admin.may("submit")
    assert admin.tenant_id == caller.tenant_id


def test_the_tenant_local_is_there_from_the_first_migration(ledger: Engine) -> None:
    caller = verify_key(ledger, SECRET, create_key(ledger, SECRET, "local"))
    assert caller is not None
    assert caller.tenant_id == LOCAL_TENANT


def test_two_keys_of_a_tenant_live_side_by_side_until_one_is_revoked(ledger: Engine) -> None:
    old, new = (create_key(ledger, SECRET, "acme") for _ in range(2))
    assert old != new
    first, second = (verify_key(ledger, SECRET, each) for each in (old, new))
    assert first is not None
    assert second is not None
    assert (first.tenant_id, first.scopes) == (second.tenant_id, second.scopes)
    assert first.key != second.key
    assert revoke_key(ledger, old)
    assert not revoke_key(ledger, old)
    assert verify_key(ledger, SECRET, old) is None
    assert verify_key(ledger, SECRET, new) is not None
    assert revoke_key(ledger, new.split("_")[1])
    assert verify_key(ledger, SECRET, new) is None


def test_the_database_holds_nothing_that_opens(ledger: Engine) -> None:
    key = create_key(ledger, SECRET, "acme")
    with reading(ledger) as connection:
        row = connection.execute(select(api_keys)).one()
    assert key.split("_")[2] not in repr(row)
    assert SECRET not in repr(row)
    assert re.fullmatch("[0-9a-f]{64}", row.hmac)
    assert verify_key(ledger, "another secret of the server", key) is None


def test_a_key_with_any_character_changed_is_nobodys(ledger: Engine) -> None:
    key = create_key(ledger, SECRET, "acme")
    for position, character in enumerate(key):
        changed = key[:position] + ("b" if character != "b" else "c") + key[position + 1 :]
        assert verify_key(ledger, SECRET, changed) is None


@pytest.mark.parametrize("presented", ["", "kron", "Basic abc", "kron__", "a\0b", "kron_" + "a" * 10_000, "é" * 61])
def test_what_is_no_key_is_nobodys(ledger: Engine, presented: str) -> None:
    assert verify_key(ledger, SECRET, presented) is None


def test_a_well_formed_key_that_was_never_made_is_nobodys(databases: Any, ledger: Engine) -> None:
    key = create_key(ledger, SECRET, "acme")
    with writing(ledger) as connection:
        connection.execute(api_keys.delete())
    assert verify_key(ledger, SECRET, key) is None


def test_surrounding_space_is_not_forgiven(ledger: Engine) -> None:
    key = create_key(ledger, SECRET, "acme")
    assert [verify_key(ledger, SECRET, text) for text in (f"{key} ", f" {key}", f"{key}\n", key.upper())] == [None] * 4


def test_a_key_expires_by_the_databases_clock(ledger: Engine) -> None:
    key = create_key(ledger, SECRET, "acme", expires_at=datetime.now(UTC) + timedelta(hours=1))
    assert verify_key(ledger, SECRET, key) is not None
    with writing(ledger) as connection:
        connection.execute(update(api_keys).values(expires_at=ledger_now(-0.01)))
    assert verify_key(ledger, SECRET, key) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret": "short"},
        {"tenant": ""},
        {"tenant": "two words"},
        {"scopes": ()},
        {"scopes": ("root",)},
        {"expires_at": datetime(2030, 1, 1)},  # noqa: DTZ001 - the missing zone is the fault
    ],
)
def test_a_key_that_makes_no_sense_is_not_made(ledger: Engine, wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsInvalid):
        create_key(ledger, **({"secret": SECRET, "tenant": "acme"} | wrong))
    with reading(ledger) as connection:
        assert connection.execute(select(func.count()).select_from(tenants)).scalar_one() == 1


def test_a_tenant_made_by_many_at_once_is_one(ledger: Engine, at_once: Any) -> None:
    keys = at_once(8, lambda _: create_key(ledger, SECRET, "acme"))
    assert all(isinstance(key, str) for key in keys), keys
    callers = [verify_key(ledger, SECRET, key) for key in keys]
    assert len({caller.tenant_id for caller in callers if caller is not None}) == 1
    assert len({caller.key for caller in callers if caller is not None}) == 8


def test_the_command_makes_and_ends_keys(ledger: Engine, ledger_url: str, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setenv("KRONOSCOPE_DATABASE_URL", ledger_url)
    monkeypatch.setenv("KRONOSCOPE_KEY_SECRET", SECRET)
    created = main(["create", "--tenant", "acme", "--scope", "read", "--expires", "2130-01-01T00:00:00Z"])
    key = capfd.readouterr().out.strip()
    caller = verify_key(ledger, SECRET, key)
    assert created == 0
    assert caller is not None
    assert caller.scopes == {"read"}
    assert main(["revoke", key.split("_")[1]]) == 0
    assert main(["revoke", key]) == 2
    assert verify_key(ledger, SECRET, key) is None


def test_sqlite_is_for_one_tenant(ledger: Engine, ledger_url: str, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setenv("KRONOSCOPE_DATABASE_URL", ledger_url)
    monkeypatch.setenv("KRONOSCOPE_KEY_SECRET", SECRET)
    assert [main(["create", "--tenant", "acme"]) for _ in range(2)] == [0, 0]
    capfd.readouterr()
    second = main(["create", "--tenant", "other"])
    said = capfd.readouterr().err
    if ledger.dialect.name == "postgresql":
        assert second == 0
    else:
        assert second != 0
        assert "tenant `acme` has keys in it" in said
        assert "take PostgreSQL for several tenants" in said


def test_each_run_of_the_command_writes_an_audit_line_without_the_key(ledger_url: str, ledger: Engine) -> None:
    environ = {**os.environ, "KRONOSCOPE_DATABASE_URL": ledger_url, "KRONOSCOPE_KEY_SECRET": SECRET}

    def run(*words: str) -> tuple[str, dict[str, Any]]:
        command = [sys.executable, "-P", "-m", "jobs.tenancy.api_keys", *words]
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
        (line,) = [each for each in ended.stderr.splitlines() if each.startswith("{")]
        assert "kron_" not in line
        return ended.stdout.strip(), json.loads(line)

    key, created = run("create", "--tenant", "acme")
    _, revoked = run("revoke", key)
    _, unknown = run("revoke", "canary-7f3e9")
    prefix = key.split("_")[1]
    assert {each["logger"] for each in (created, revoked, unknown)} == {"kronoscope.audit"}
    assert [(each["action"], each["outcome"], each["key"]) for each in (created, revoked, unknown)] == [
        ("create_key", "done", prefix),
        ("revoke_key", "done", prefix),
        ("revoke_key", "unknown", None),
    ]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"KRONOSCOPE_KEY_SECRET": ""}, "KRONOSCOPE_KEY_SECRET is not set"),
        ({"KRONOSCOPE_KEY_SECRET": "short"}, "5 characters"),
        ({"KRONOSCOPE_DATABASE_URL": "mysql://host/name"}, "mysql"),
    ],
)
def test_the_command_says_what_is_missing(
    ledger: Engine, ledger_url: str, monkeypatch: Any, capfd: Any, environ: dict[str, str], said: str
) -> None:
    for name, value in ({"KRONOSCOPE_DATABASE_URL": ledger_url, "KRONOSCOPE_KEY_SECRET": SECRET} | environ).items():
        monkeypatch.setenv(name, value)
    assert main(["create", "--tenant", "acme"]) == 4
    told = capfd.readouterr()
    assert said in told.err
    assert told.out == ""


@pytest.mark.parametrize("expires", ["soon", "2030-01-01T00:00:00"])
def test_an_expiry_that_is_no_moment_is_a_usage_error(expires: str, capfd: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["create", "--tenant", "acme", "--expires", expires])
    assert ended.value.code == 2
