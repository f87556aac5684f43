"""A job's events over HTTP: each once and in order, however often the reader is cut off; bounded on every side."""

import contextlib
import itertools
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from catalog.frames import LogLine
from jobs.queue import attempt_endings, attempt_writes, claims
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.events import read_history
from jobs.repository.store import delete_job, request_cancel
from jobs.schema.database import open_database
from jobs.schema.identifiers import new_id
from jobs.tenancy.api_keys import create_key, verify_key
from tests.api import seeding, streaming
from tests.api.conftest import Keyed
from tests.api.expect import problem
from tests.api.routes.test_jobs import tenant
from tests.api.server import KEY_SECRET, METRICS_TOKEN, Server, serve, serve_behind_proxy
from tests.conftest import Databases
from tests.machine.stopwatch import Stopwatch, until


def say(engine: Engine, claim: Claim, message: str) -> None:
    attempt_writes.write_log_line(engine, claim, LogLine(level="info", message=message))


def stored(engine: Engine, tenant_id: str, job_id: str) -> list[tuple[int, str, Any]]:
    """What the table has, page by page."""
    found: list[tuple[int, str, Any]] = []
    position = 0
    while (page := read_history(engine, tenant_id, job_id, position)) is not None:
        found += [(each.seq, each.type, dict(each.data)) for each in page.events]
        if not page.more:
            break
        position = page.through
    return found


def told(events: list[dict[str, Any]]) -> list[tuple[int, str, Any]]:
    return [(each["seq"], each["type"], each["data"]) for each in events]


def test_a_stream_tells_what_was_and_what_comes_and_ends_with_the_job(keyed: Keyed, ours: httpx.Client) -> None:
    claim = seeding.running(keyed.engine, tenant(keyed))
    for number in range(120):  # more than a page
        say(keyed.engine, claim, f"before {number}")
    address = f"/v1/jobs/{claim.job_id}/events"

    def go_on() -> None:
        for number in range(40):
            say(keyed.engine, claim, f'line {number}\r\nwith\u2028breaks, "quotes" and ümlauts')
            if number % 5 == 0:
                claims.heartbeat(keyed.engine, claim, 600)  # draws a number without an event
        attempt_endings.finish(keyed.engine, claim)

    with ours.stream("GET", address) as answer:
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-accel-buffering"] == "no"
        received = streaming.events(answer)
        seen = list(itertools.islice(received, 120))
        writer = threading.Thread(target=go_on)
        writer.start()
        seen += list(received)  # ends by itself
        writer.join()
    assert told(seen) == stored(keyed.engine, tenant(keyed), claim.job_id)
    assert seen[-1]["data"]["state"] == "succeeded"
    done = ours.get(address, headers={"last-event-id": str(seen[-1]["seq"])})
    assert (done.status_code, done.content) == (204, b"")
    # the header is newer than the address that a browser repeats with it
    with ours.stream("GET", f"{address}?after=3", headers={"last-event-id": str(seen[-3]["seq"])}) as answer:
        assert told(list(streaming.events(answer))) == told(seen[-2:])


def test_a_reader_that_is_cut_off_again_and_again_loses_nothing(keyed: Keyed, ours: httpx.Client) -> None:
    claim = seeding.running(keyed.engine, tenant(keyed))

    def write() -> None:
        for number in range(60):
            say(keyed.engine, claim, f"line {number}")
            time.sleep(0.02)
        attempt_endings.finish(keyed.engine, claim)

    writer = threading.Thread(target=write)
    writer.start()
    seen: list[dict[str, Any]] = []
    takes = itertools.cycle((1, 7, 2, 19))
    while not seen or seen[-1]["data"].get("state") != "succeeded":
        headers = {"last-event-id": str(seen[-1]["seq"])} if seen else {}
        with ours.stream("GET", f"/v1/jobs/{claim.job_id}/events", headers=headers) as answer:
            seen += itertools.islice(streaming.events(answer), next(takes))
    writer.join()
    assert told(seen) == stored(keyed.engine, tenant(keyed), claim.job_id)


def test_pages_of_json(keyed: Keyed, ours: httpx.Client) -> None:
    claim = seeding.running(keyed.engine, tenant(keyed))
    for number in range(10):
        say(keyed.engine, claim, f"line {number}")
    address, headers = f"/v1/jobs/{claim.job_id}/events", {"accept": "application/json"}
    seen: list[dict[str, Any]] = []
    position = 0
    while True:
        page = ours.get(address, params={"after": position, "limit": 5}, headers=headers).json()
        seen += page["items"]
        position = page["through"]
        if not page["more"]:
            break
    assert not page["ended"]
    assert told(seen) == stored(keyed.engine, tenant(keyed), claim.job_id)
    attempt_endings.finish(keyed.engine, claim)
    last = ours.get(address, params={"after": position}, headers=headers).json()
    assert last["ended"]
    assert [each["data"]["state"] for each in last["items"]] == ["succeeded"]
    assert ours.get(address, params={"after": last["through"]}, headers=headers).json()["items"] == []


def test_parameters_that_mean_nothing(keyed: Keyed, ours: httpx.Client) -> None:
    address = f"/v1/jobs/{seeding.running(keyed.engine, tenant(keyed)).job_id}/events"
    for query in ("after=-1", "after=x", f"after={2**63}"):
        problem(ours.get(f"{address}?{query}"), 422)
    for value in ("x", "-1", "1.5", "9" * 30, str(2**63)):
        problem(ours.get(address, headers={"last-event-id": value}), 422)
    problem(ours.get(f"{address}?limit=101", headers={"accept": "application/json"}), 422)
    for headers in ({}, {"accept": "application/json"}):
        problem(ours.get(f"/v1/jobs/{new_id()}/events", headers=headers), 404)


class Impatient:
    """An API that allows few streams and waits for no reader, and its ledger."""

    def __init__(self, server: Server, engine: Engine, url: str) -> None:
        self.server = server
        self.engine = engine
        self.url = url
        self.keys = [create_key(engine, KEY_SECRET, "ours") for _ in range(2)]
        caller = verify_key(engine, KEY_SECRET, self.keys[0])
        assert caller is not None
        self.tenant_id = caller.tenant_id


IMPATIENT = {
    "KRONOSCOPE_KEY_SECRET": KEY_SECRET,
    "KRONOSCOPE_METRICS_TOKEN": METRICS_TOKEN,
    "KRONOSCOPE_STREAMS": "4",
}


@pytest.fixture(scope="module")
def impatient(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Impatient]:
    """A service that allows few streams and waits for no reader."""
    url = databases.migrated("sqlite")
    engine = open_database(url)
    changes = {"send_timeout 10s": "send_timeout 500ms"}
    with serve_behind_proxy(url, tmp_path_factory.mktemp("impatient"), IMPATIENT, changes) as server:
        yield Impatient(server, engine, url)
    engine.dispose()


def test_a_stream_has_its_time_and_gives_signs_of_life(databases: Databases, tmp_path: Path) -> None:
    url = databases.migrated("sqlite")
    engine = open_database(url)
    claim = seeding.running(engine, LOCAL_TENANT)
    more = {
        "KRONOSCOPE_EMBEDDED": "1",
        "KRONOSCOPE_STREAM_SECONDS": "1.5",
        "KRONOSCOPE_STREAM_IDLE_SECONDS": "0.2",
    }
    with serve(url, tmp_path, more) as server, server.client() as client:

        def signs() -> int:
            began, watch = time.monotonic(), Stopwatch()
            with client.stream("GET", f"/v1/jobs/{claim.job_id}/events") as answer:
                lines = list(streaming.parsed(answer.iter_lines()))  # ends cleanly, or httpx says so
            assert time.monotonic() - began >= 1.5
            assert watch.seconds() < 100
            assert "retry" in lines[0]
            assert "retry" in lines[-1]
            assert told([each for each in lines if "seq" in each]) == stored(engine, LOCAL_TENANT, claim.job_id)
            return sum("comment" in each for each in lines)

        # a process that stands still gives none meanwhile
        until(lambda: signs() >= 3)
    engine.dispose()


def test_streams_are_capped_for_each_key_and_in_all_and_given_back(impatient: Impatient) -> None:
    address = f"/v1/jobs/{seeding.running(impatient.engine, impatient.tenant_id).job_id}/events"
    mine, other = (impatient.server.client(key) for key in impatient.keys)
    with mine, other:
        until(lambda: _opens(mine, address) and _opens(other, address))
        open_streams = [mine.stream("GET", address) for _ in range(3)]
        for stream in open_streams:
            assert stream.__enter__().status_code == 200
        full = problem(mine.get(address), 429)
        assert full["type"] == "urn:kronoscope:problem:too-many-streams"
        # what is no stream is not counted
        assert mine.get(address, headers={"accept": "application/json"}).status_code == 200
        with other.stream("GET", address) as fourth:
            assert fourth.status_code == 200
            answer = other.get(address)
            assert problem(answer, 503)["type"] == "urn:kronoscope:problem:streams-full"
            assert int(answer.headers["retry-after"]) > 0
        for stream in open_streams:
            stream.__exit__(None, None, None)
        until(lambda: _opens(mine, address))


def _opens(client: httpx.Client, address: str) -> bool:
    with client.stream("GET", address) as answer:
        return answer.status_code == 200


def test_a_reader_that_takes_nothing_is_cut_off(impatient: Impatient) -> None:
    claim = seeding.running(impatient.engine, impatient.tenant_id)
    for _ in range(200):
        say(impatient.engine, claim, "x" * 100_000)
    address = f"/v1/jobs/{claim.job_id}/events"
    with socket.socket() as stubborn:
        stubborn.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stubborn.connect(("127.0.0.1", impatient.server.port))
        lines = f"GET {address} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {impatient.keys[1]}\r\n\r\n"
        stubborn.sendall(lines.encode())
        with impatient.server.client(METRICS_TOKEN) as scraper:
            for streams in (1, 0):
                told = f"kronoscope_http_event_streams {streams}.0\n"
                until(lambda told=told: told in scraper.get("/metrics").text)
        stubborn.settimeout(300)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := stubborn.recv(2**20):  # what the kernel had taken already
                received += len(part)
    assert received < 15_000_000  # of twenty
    assert "without completing" not in impatient.server.log.read_text()


def test_a_stream_of_a_deleted_job_ends(impatient: Impatient) -> None:
    claim = seeding.running(impatient.engine, impatient.tenant_id)
    with (
        impatient.server.client(impatient.keys[0]) as client,
        client.stream("GET", f"/v1/jobs/{claim.job_id}/events") as answer,
    ):
        received = streaming.events(answer)
        next(received)
        request_cancel(impatient.engine, impatient.tenant_id, claim.job_id)
        attempt_endings.hand_back(impatient.engine, claim)
        delete_job(impatient.engine, impatient.tenant_id, claim.job_id)
        list(received)
        problem(client.get(f"/v1/jobs/{claim.job_id}/events"), 404)


def test_at_sigterm_streams_and_long_polls_end_at_once(databases: Databases, tmp_path: Path) -> None:
    url = databases.migrated("sqlite")
    engine = open_database(url)
    claim = seeding.running(engine, LOCAL_TENANT)
    address = f"/v1/jobs/{claim.job_id}"
    polled: list[httpx.Response] = []
    with serve(url, tmp_path, {"KRONOSCOPE_EMBEDDED": "1"}) as server, server.client() as client:
        poll = threading.Thread(target=lambda: polled.append(client.get(address, params={"wait": 30})))
        with client.stream("GET", f"{address}/events") as answer:
            received = streaming.parsed(answer.iter_lines())
            assert "retry" in next(received)
            poll.start()
            server.await_long_polls(1)
            server.process.send_signal(signal.SIGTERM)
            # uvicorn itself would wait for ten seconds, and then cut both off
            assert "retry" in list(received)[-1]
        poll.join()
        server.process.wait(300)
    assert polled[0].json()["state"] == "running"
    assert "Traceback" not in server.log.read_text()
    engine.dispose()
