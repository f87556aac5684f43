"""When the service starts, for whom it answers, and what its probes and its maintenance thread do."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psycopg
import pytest
import redis
from psycopg import sql
from sqlalchemy import make_url, update

from api.settings import Settings
from jobs.codec import parse_document
from jobs.errors import SettingsInvalid
from jobs.queue import claims
from jobs.queue.wakeups import WakeupSender
from jobs.records import LOCAL_TENANT
from jobs.repository.store import read_job
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, writing
from jobs.schema.tables import jobs
from jobs.tenancy.api_keys import create_key
from tests.api import seeding
from tests.api.conftest import Embedded
from tests.api.expect import problem
from tests.api.seeding import DOCUMENT
from tests.api.server import KEY_SECRET, environment, free_port, ready, serve
from tests.conftest import Databases, Dialect
from tests.machine.stopwatch import until
from tests.machine.template.pasted import PASTED


def start(url: str, folder: Path, more: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "api"],
        env=environment(url, folder, free_port(), more),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.real_programs
def test_an_outdated_schema_is_one_sentence(databases: Databases, dialect: Dialect, tmp_path: Path) -> None:
    done = start(databases.empty(dialect), tmp_path, {"KRONOSCOPE_KEY_SECRET": KEY_SECRET})
    assert done.returncode == 4
    assert "migrations" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_silent_database_is_one_sentence(tmp_path: Path) -> None:
    url = f"postgresql://nobody:secret-5f1e@127.0.0.1:{free_port()}/none"
    done = start(url, tmp_path, {"KRONOSCOPE_KEY_SECRET": KEY_SECRET})
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "secret-5f1e" not in done.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"KRONOSCOPE_EMBEDDED": "1", "KRONOSCOPE_HOST": "0.0.0.0"}, "127.0.0.1"),
        ({"KRONOSCOPE_EMBEDDED": "1", "KRONOSCOPE_HOST": "example.org"}, "127.0.0.1"),
        ({}, "KRONOSCOPE_KEY_SECRET"),
        ({"KRONOSCOPE_KEY_SECRET": "short"}, "16"),
        ({"KRONOSCOPE_EMBEDDED": "yes"}, "neither 0 nor 1"),
        ({"KRONOSCOPE_EMBEDDED": "1", "KRONOSCOPE_PORT": "70000"}, "65535"),
        ({"KRONOSCOPE_EMBEDDED": "1", "KRONOSCOPE_PORT": "x"}, "whole number"),
    ],
)
def test_settings_that_would_be_unsafe(more: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsInvalid, match=said):
        Settings.from_environment({"KRONOSCOPE_DATABASE_URL": "sqlite:////tmp/none.db", **more})


def test_secrets_are_in_no_representation() -> None:
    settings = Settings.from_environment(
        {
            "KRONOSCOPE_DATABASE_URL": "postgresql://u:canary-1@h/d",
            "KRONOSCOPE_KEY_SECRET": "canary-2-canary-2-canary",
            "KRONOSCOPE_REDIS_URL": "redis://:canary-3@h",
        }
    )
    assert "canary" not in repr(settings)


def test_uvicorn_finds_the_application_by_name(databases: Databases, tmp_path: Path) -> None:
    script = "import api.main, fastapi; assert isinstance(api.main.app, fastapi.FastAPI)"
    env = environment(databases.migrated("sqlite"), tmp_path, free_port(), {"KRONOSCOPE_EMBEDDED": "1"})
    subprocess.run([*PASTED, script], env=env, timeout=300, check=True)


def test_embedded_mode_answers_to_itself_alone(embedded: Embedded) -> None:
    with embedded.server.client() as client:
        own = embedded.server.url
        assert client.get("/v1/jobs").status_code == 200
        assert client.get("/v1/jobs", headers={"origin": own}).status_code == 200
        assert client.get("/v1/jobs", headers={"host": f"localhost:{embedded.server.port}"}).status_code == 200
        assert client.get("/v1/jobs", headers={"host": f"[::1]:{embedded.server.port}"}).status_code == 200
        # another name that resolves here (DNS rebinding), and another page that posts here
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
            problem(client.get("/v1/jobs", headers={"host": host}), 421)
        job = client.post("/v1/jobs", json=DOCUMENT).json()["id"]
        for origin in ("https://evil.example", "null", "http://localhost:1"):
            problem(client.post(f"/v1/jobs/{job}:cancel", headers={"origin": origin}), 403)
        assert client.get(f"/v1/jobs/{job}").json()["state"] == "queued"


def test_a_probe_says_what_fails(databases: Databases, tmp_path: Path) -> None:
    url = databases.migrated("postgresql")
    more = {"KRONOSCOPE_KEY_SECRET": KEY_SECRET, "KRONOSCOPE_REDIS_URL": f"redis://127.0.0.1:{free_port()}"}
    engine = open_database(url)
    key = create_key(engine, KEY_SECRET, "ours")
    engine.dispose()
    with serve(url, tmp_path, more) as server, server.client(key) as client:
        # Redis is silent: jobs are taken all the same
        ready(client, "degraded")
        assert client.post("/v1/jobs", json=DOCUMENT).status_code == 202
        name = str(make_url(url).database)
        postgres = make_url(url).set(drivername="postgresql", database="postgres").render_as_string(hide_password=False)
        with psycopg.connect(postgres, autocommit=True) as connection:
            connection.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(name)))
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
            answer = client.get("/v1/jobs")
            problem(answer, 503)
            assert int(answer.headers["retry-after"]) > 0
            time.sleep(1.1)  # the probe keeps its last answer for a second
            body = problem(client.get("/readyz"), 503)
            assert "database" in str(body["detail"])
            assert client.get("/livez").json() == {"status": "alive"}
            connection.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(sql.Identifier(name)))
        assert client.get("/v1/jobs").status_code == 200


def test_little_disk_is_not_ready(databases: Databases, tmp_path: Path) -> None:
    more = {"KRONOSCOPE_EMBEDDED": "1", "KRONOSCOPE_DISK_FLOOR_BYTES": str(2**60)}
    with serve(databases.migrated("sqlite"), tmp_path, more) as server, server.client() as client:
        body = problem(client.get("/readyz"), 503)
        assert "floor" in str(body["detail"])


def test_a_full_process_answers_its_probes_and_says_why_it_serves_nothing_else(
    databases: Databases, tmp_path: Path
) -> None:
    more = {"KRONOSCOPE_EMBEDDED": "1", "KRONOSCOPE_CONNECTIONS": "4"}
    with serve(databases.migrated("sqlite"), tmp_path, more) as server, server.client() as client:
        ready(client)
        with contextlib.ExitStack() as held:
            for _ in range(5):
                held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            assert client.get("/livez").status_code == 200
            assert "4 connections are open" in str(problem(client.get("/v1/jobs"), 503)["detail"])
        assert client.get("/v1/jobs").status_code == 200


def test_a_submission_rings_at_once(databases: Databases, redis_url: str, tmp_path: Path) -> None:
    url = databases.migrated("postgresql")
    engine = open_database(url)
    key = create_key(engine, KEY_SECRET, "ours")
    channel = f"/kronoscope.{WakeupSender(engine, redis_url).exchange.name}"
    engine.dispose()
    more = {"KRONOSCOPE_KEY_SECRET": KEY_SECRET, "KRONOSCOPE_REDIS_URL": redis_url}
    with redis.Redis.from_url(redis_url) as broker, broker.pubsub() as heard:

        def hears() -> bool:
            message = heard.get_message(timeout=1)
            return message is not None and message["type"] == "message"

        heard.subscribe(channel)
        with serve(url, tmp_path, more) as server, server.client(key) as client:
            ready(client)
            until(hears, what="the first wake-up, which shows that the broker answers")
            assert not hears()
            client.post("/v1/jobs", json=DOCUMENT).raise_for_status()
            until(hears, what="the wake-up is sent")


def test_the_reaper_runs_in_the_api(databases: Databases, tmp_path: Path) -> None:
    url = databases.migrated("sqlite")
    engine = open_database(url)
    try:
        claim = seeding.running(engine, LOCAL_TENANT)
        claims.heartbeat(engine, claim, 0.1)
        overdue = submit(engine, LOCAL_TENANT, parse_document(seeding.raw())).job.id
        with writing(engine) as connection:
            connection.execute(update(jobs).where(jobs.c.id == overdue).values(deadline_at=ledger_now(-1)))
        more = {"KRONOSCOPE_EMBEDDED": "1", "KRONOSCOPE_REAPER_SECONDS": "0.2"}
        with serve(url, tmp_path, more):

            def found() -> list[tuple[str, int, object]]:
                read = [read_job(engine, LOCAL_TENANT, each) for each in (claim.job_id, overdue)]
                return [(each.state, each.failures, (each.failure or {}).get("code")) for each in read if each]

            reaped = [("queued", 1, None), ("failed", 0, "deadline_exceeded")]
            until(lambda: found() == reaped, what=found)
    finally:
        engine.dispose()


@pytest.mark.real_programs
def test_it_ends_promptly_with_a_poll_under_way(databases: Databases, tmp_path: Path) -> None:
    with serve(databases.migrated("sqlite"), tmp_path, {"KRONOSCOPE_EMBEDDED": "1"}) as server:
        with server.client() as client:
            job = client.post("/v1/jobs", json=DOCUMENT).json()["id"]
            poll = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import urllib.request as r; r.urlopen('{server.url}/v1/jobs/{job}?wait=30').read()",
                ],
                env={**os.environ, "no_proxy": "*"},
            )
        server.await_long_polls(1)
        server.process.terminate()
        assert server.process.wait(timeout=300) in (0, -15)
        # whom it does not answer the server waits ten seconds for, and then cuts off
        assert poll.wait(timeout=300) == 0
