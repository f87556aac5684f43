"""The tests' own servers: real, private, and gone afterwards."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from tests import servers


@pytest.fixture
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("REDIS_URL", raising=False)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this test's servers alone; not pytest's, which their unprivileged user may not enter."""
    folder = Path(tempfile.mkdtemp(dir=servers.PARENT))
    folder.chmod(0o755)
    monkeypatch.setattr(servers, "PARENT", folder)
    yield folder
    shutil.rmtree(folder)


def test_both_answer_and_leave_nothing(nothing_given: None, parent: Path) -> None:
    with servers.postgres() as database_url, servers.redis() as redis_url:
        assert any(parent.iterdir())
        with psycopg.connect(database_url) as connection:
            answer = connection.execute(
                "SELECT current_setting('fsync'), current_setting('listen_addresses')"
            ).fetchone()
            assert answer == ("off", "127.0.0.1")
        with redis.Redis.from_url(redis_url) as client:
            assert client.set("key", "value")
            assert client.config_get("save") == {"save": ""}
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(database_url, connect_timeout=2)
    with redis.Redis.from_url(redis_url) as client, pytest.raises(redis.ConnectionError):
        client.ping()
    assert list(parent.iterdir()) == []


def test_a_port_that_is_held_is_listened_on_again_and_again_and_given_to_nobody() -> None:
    with servers.hold_port() as held:
        place = held.getsockname()
        for _ in range(2):
            with socket.create_server(place) as listener, socket.create_connection(place, timeout=60):
                listener.accept()[0].close()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(place)


def test_what_is_given_is_used_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://given")
    monkeypatch.setenv("REDIS_URL", "redis://given")
    with servers.postgres() as database_url, servers.redis() as redis_url:
        assert (database_url, redis_url) == ("postgresql://given", "redis://given")


def test_without_binaries_it_fails_loudly(nothing_given: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "find_postgres", lambda: None)
    monkeypatch.setattr(servers, "find_redis", lambda: None)
    for server in (servers.postgres, servers.redis):
        with pytest.raises(servers.ServerMissing, match=r"python -m tests\.servers install"), server():
            pass


def test_a_command_is_run_with_both(nothing_given: None, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--", "sh", "-c", 'echo "$DATABASE_URL $REDIS_URL"; exit 7']
    assert servers.main(words) == 7
    database_url, redis_url = capfd.readouterr().out.split()
    assert database_url.startswith("postgresql://kronoscope:")
    assert redis_url.startswith("redis://default:")
    assert "DATABASE_URL" not in os.environ
