"""Both databases through the same functions: time, locks, and what a caller sees when one is away."""

import itertools
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, insert, literal, make_url, select, text, update
from sqlalchemy.exc import DBAPIError

from jobs.errors import LedgerUnavailable
from jobs.schema import database
from jobs.schema.clock import ShownMoment, ledger_now
from jobs.schema.database import open_database, reading, writing
from jobs.schema.tables import tenants


def test_a_moment_comes_back_in_utc_and_below_the_second(ledger: Engine) -> None:
    moment = datetime(2030, 2, 3, 4, 5, 6, 789_000, tzinfo=UTC)
    abroad = moment.astimezone(tz=None).astimezone(UTC)
    with writing(ledger) as connection:
        connection.execute(insert(tenants).values(id="t", name="t", created_at=abroad))
        read = connection.execute(select(tenants.c.created_at).where(tenants.c.id == "t")).scalar_one()
    assert read == moment
    assert read.utcoffset() == timedelta(0)


def test_the_databases_clock_is_now_and_steps_finely(ledger: Engine) -> None:
    with reading(ledger) as connection:
        before = datetime.now(UTC)
        seen = connection.execute(select(ledger_now())).scalar_one()
        later = connection.execute(select(ledger_now(90.5))).scalar_one()
        steps = {connection.execute(select(ledger_now())).scalar_one() for _ in range(200)}
    assert abs((seen - before).total_seconds()) < 60
    assert 90.5 <= (later - seen).total_seconds() < 150
    # however long this process stood still between some of them
    assert min(b - a for a, b in itertools.pairwise(sorted(steps))) < timedelta(milliseconds=100)
    assert any(step.microsecond for step in steps)


def test_a_moment_that_was_shown_divides_what_is_stored(ledger: Engine) -> None:
    with writing(ledger) as connection:
        for number in range(60):  # of doubles about every third is shown as a later moment than it is
            later = ledger_now(number * 1.37e-4)
            connection.execute(insert(tenants).values(id=str(number), name=str(number), created_at=later))
    at = tenants.c.created_at
    with reading(ledger) as connection:
        shown = {row.id: row.created_at for row in connection.execute(select(tenants.c.id, at))}
        for moment in {*shown.values(), datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)}:
            given = literal(moment, ShownMoment())
            before = connection.execute(select(tenants.c.id).where(at < given)).scalars().all()
            since = connection.execute(select(tenants.c.id).where(at >= given)).scalars().all()
            assert set(before) == {each for each in shown if shown[each] < moment}
            assert set(since) == shown.keys() - set(before)


def test_a_transaction_that_fails_leaves_nothing(ledger: Engine) -> None:
    def fail_halfway() -> None:
        with writing(ledger) as connection:
            connection.execute(insert(tenants).values(id="t", name="t", created_at=ledger_now()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    with reading(ledger) as connection:
        assert connection.execute(select(tenants.c.id)).scalars().all() == ["local"]


def test_readers_are_not_held_up_by_a_writer(ledger: Engine) -> None:
    with writing(ledger) as connection:
        connection.execute(update(tenants).values(name="changed"))
        names: list[Any] = []

        def read() -> None:
            with reading(ledger) as other:
                names.append(other.execute(select(tenants.c.name)).scalar_one())

        thread = threading.Thread(target=read)
        thread.start()
        thread.join(60)
        assert names == ["local"]


def test_a_patience_that_the_url_names_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def note(*_: Any, **parameters: Any) -> Any:
        given.append((parameters["connect_timeout"], parameters["tcp_user_timeout"]))
        raise psycopg.OperationalError

    monkeypatch.setattr(database, "connect_limited", note)
    for more in ("", "?connect_timeout=7"):
        engine = open_database(f"postgresql://nobody@127.0.0.1:1/none{more}")
        with pytest.raises(LedgerUnavailable), reading(engine):
            pass
    assert given == [(3, 10_000), ("7", 10_000)]


def test_a_database_that_is_away_is_a_transient_fault_without_its_address() -> None:
    engine = open_database("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(LedgerUnavailable) as seen, reading(engine):
        pass
    assert "127.0.0.1" not in str(seen.value)
    assert "127.0.0.1" in str(seen.value.__cause__)
    engine.dispose()


def test_an_sqlite_file_that_cannot_be_opened_is_a_transient_fault(tmp_path: Any) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'nowhere' / 'ledger.db'}")
    with pytest.raises(LedgerUnavailable), reading(engine):
        pass
    engine.dispose()


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_a_full_disk_is_a_transient_fault_that_says_so(ledger: Engine) -> None:
    def fill() -> None:
        with writing(ledger) as writer:
            if ledger.dialect.name == "postgresql":
                writer.execute(text("DO $$ BEGIN RAISE EXCEPTION 'no space' USING ERRCODE = 'disk_full'; END $$"))
            pages = writer.exec_driver_sql("PRAGMA page_count").scalar_one()
            writer.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            writer.execute(text("CREATE TABLE large (content BLOB)"))
            writer.execute(text("INSERT INTO large VALUES (zeroblob(10000000))"))

    with pytest.raises(LedgerUnavailable, match="the disk of the ledger's database is full"):
        fill()
    ledger.dispose()  # or a later test would have so many pages


def test_a_faulty_statement_is_our_fault_and_says_so(ledger: Engine) -> None:
    with pytest.raises(DBAPIError, match="no_such_table"), reading(ledger) as connection:
        connection.execute(text("SELECT * FROM no_such_table"))


def test_connections_killed_by_the_server_cost_at_most_one_call(databases: Any) -> None:
    url = databases.migrated("postgresql")
    engine, admin = open_database(url), open_database(url)

    def interrupted() -> None:
        with reading(engine) as connection:
            backend = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
            with writing(admin) as other:
                other.execute(text("SELECT pg_terminate_backend(:pid, 25000)"), {"pid": backend})
            connection.execute(text("SELECT 1"))

    with pytest.raises(LedgerUnavailable):
        interrupted()
    with reading(engine) as connection:  # one that waited in the pool
        waiting = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with writing(admin) as other:
        other.execute(text("SELECT pg_terminate_backend(:pid, 25000)"), {"pid": waiting})
    with reading(engine) as connection:
        assert connection.execute(text("SELECT pg_backend_pid()")).scalar_one() != waiting
    engine.dispose()
    admin.dispose()


def test_statements_and_locks_are_bounded_in_time_on_postgresql(databases: Any) -> None:
    engine = open_database(databases.migrated("postgresql"))
    with reading(engine) as connection:
        settings = {
            name: connection.execute(text(f"SHOW {name}")).scalar_one()
            for name in ("statement_timeout", "lock_timeout")
        }
    assert settings == {"statement_timeout": "30s", "lock_timeout": "5s"}
    engine.dispose()


def test_a_database_that_takes_no_writes_for_now_is_away(ledger: Engine) -> None:
    """A standby after a failover answers, and says so to whoever writes."""
    read_only = "SET TRANSACTION READ ONLY" if ledger.dialect.name == "postgresql" else "PRAGMA query_only = ON"

    def write() -> None:
        with writing(ledger) as connection:
            connection.execute(text(read_only))
            connection.execute(insert(tenants).values(id="t", name="t", created_at=ledger_now()))

    with pytest.raises(LedgerUnavailable):
        write()


def test_connections_to_a_standby_are_left_for_new_ones(databases: Any) -> None:
    """A failover leads a whole pool to a server that takes no writes; those opened later find the one that does."""
    url = databases.migrated("postgresql")
    own = make_url(url)
    engine, other = open_database(url), open_database(own.set(database="postgres").render_as_string(False))

    def write() -> None:
        with writing(engine) as connection:
            connection.execute(insert(tenants).values(id="t", name="t", created_at=ledger_now()))

    def standby(word: str) -> None:
        with other.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"ALTER DATABASE {own.database} SET default_transaction_read_only = {word}"))

    standby("on")
    with pytest.raises(LedgerUnavailable):
        write()
    standby("off")
    write()
    for each in (engine, other):
        each.dispose()
