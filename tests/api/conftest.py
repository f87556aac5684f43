"""Running APIs for the tests of this room: with keys on both databases, and embedded on SQLite."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine

from jobs.schema.database import open_database
from jobs.tenancy.api_keys import create_key
from tests.api.server import KEY_SECRET, METRICS_TOKEN, WEBHOOK_KEY, Server, serve
from tests.conftest import POSTGRESQL_FIRST, Databases, Dialect


@pytest.fixture(params=POSTGRESQL_FIRST)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """PostgreSQL; SQLite as well, of which a landing has a part."""
    chosen: Dialect = request.param
    return chosen


@pytest.fixture
def ledger_url(databases: Databases, dialect: Dialect) -> Iterator[str]:
    """A ledger with nothing in it; what a test leaves to nobody else is emptied for the next."""
    url = databases.recycled(dialect)
    yield url
    databases.recycle(url)


class Keyed:
    """An API with keys, its ledger, and two tenants."""

    def __init__(self, server: Server, engine: Engine, artifacts: Path) -> None:
        self.server = server
        self.engine = engine
        self.artifacts = artifacts
        self.key = create_key(engine, KEY_SECRET, "ours", ("read", "submit"))
        self.reading_key = create_key(engine, KEY_SECRET, "ours", ("read",))
        self.other_key = create_key(engine, KEY_SECRET, "theirs", ("read", "submit"))


@pytest.fixture(scope="module", params=POSTGRESQL_FIRST)
def keyed(
    request: pytest.FixtureRequest, databases: Databases, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Keyed]:
    """An API that asks for keys, on PostgreSQL; on SQLite as well, of which a landing has a part."""
    folder = tmp_path_factory.mktemp("keyed")
    url = databases.migrated(request.param)
    more = {
        "KRONOSCOPE_KEY_SECRET": KEY_SECRET,
        "KRONOSCOPE_TRUSTED_PROXIES": "127.0.0.1",
        "KRONOSCOPE_METRICS_TOKEN": METRICS_TOKEN,
        "KRONOSCOPE_WEBHOOK_KEY": WEBHOOK_KEY,
        "KRONOSCOPE_METRICS_SECONDS": "0",
        "KRONOSCOPE_ESTIMATE_SECONDS": "0.5",
        "KRONOSCOPE_REAPER_SECONDS": "1",
        # a reader who leaves and comes again may be there before it is seen that he left
        "KRONOSCOPE_STREAMS_PER_KEY": "20",
    }
    engine = open_database(url)
    try:
        with serve(url, folder, more) as server:
            yield Keyed(server, engine, folder / "artifacts")
    finally:
        engine.dispose()


@pytest.fixture
def ours(keyed: Keyed) -> Iterator[httpx.Client]:
    """A client with a key that reads and submits."""
    with keyed.server.client(keyed.key) as client:
        yield client


@pytest.fixture
def theirs(keyed: Keyed) -> Iterator[httpx.Client]:
    """A client of another tenant."""
    with keyed.server.client(keyed.other_key) as client:
        yield client


class Embedded:
    """An API without keys, on loopback."""

    def __init__(self, server: Server, engine: Engine, artifacts: Path) -> None:
        self.server = server
        self.engine = engine
        self.artifacts = artifacts


@pytest.fixture(scope="module")
def embedded(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    """An API in embedded mode."""
    folder = tmp_path_factory.mktemp("embedded")
    url = databases.migrated("sqlite")
    engine = open_database(url)
    try:
        with serve(url, folder, {"KRONOSCOPE_EMBEDDED": "1"}) as server:
            yield Embedded(server, engine, folder / "artifacts")
    finally:
        engine.dispose()
