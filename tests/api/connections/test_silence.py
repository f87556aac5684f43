"""Clients that open connections and say little or nothing: the proxy drops them, and others are answered meanwhile."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.connections.descriptors import require_descriptors
from jobs.records import LOCAL_TENANT
from jobs.schema.database import open_database
from tests.api import seeding
from tests.api.connections.sockets import (
    ATTACKER,
    OTHER,
    answer,
    client,
    closed,
    connect,
    head,
    is_closed,
    received,
    seconds_of,
)
from tests.api.expect import problem
from tests.api.server import Server, environment, free_port, serve_behind_proxy
from tests.conftest import Databases
from tests.machine.stopwatch import until

BRIEF = {"KRONOSCOPE_EMBEDDED": "1", "KRONOSCOPE_BODY_SECONDS": "0.4", "KRONOSCOPE_STREAM_SECONDS": "1"}
IMPATIENT = {
    name: name.replace("10s", "400ms")
    for name in ("client_header_timeout 10s", "client_body_timeout 10s", "send_timeout 10s", "keepalive_timeout 10s")
}
FEW = {"KRONOSCOPE_EMBEDDED": "1", "KRONOSCOPE_CONNECTIONS": "40"}
NARROW = {
    "limit_conn connections 128": "limit_conn connections 15",
    "limit_conn requests 100": "limit_conn requests 10",
    "limit_conn all 900": "limit_conn all 38",
}


@pytest.fixture(scope="module")
def brief(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A service that waits for nobody, and a running job of its ledger with a large file."""
    url = databases.migrated("sqlite")
    folder = tmp_path_factory.mktemp("brief")
    engine = open_database(url)
    claim = seeding.running(engine, LOCAL_TENANT)
    seeding.artifact(engine, folder / "artifacts", claim, "large.safetensors", os.urandom(2**25), "application/x-any")
    engine.dispose()
    with serve_behind_proxy(url, folder, BRIEF, IMPATIENT) as server:
        yield server, claim.job_id


@pytest.fixture(scope="module")
def few(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service that takes few connections, which may be silent for as long as its proxy says."""
    with serve_behind_proxy(databases.migrated("sqlite"), tmp_path_factory.mktemp("few"), FEW, NARROW) as server:
        yield server


def opened(stack: contextlib.ExitStack, server: Server, number: int, source: str = ATTACKER) -> list[socket.socket]:
    return [stack.enter_context(connect(server, source)) for _ in range(number)]


def api_connections(server: Server) -> int:
    """The connections that the API has now, without the one that asks."""
    with client(server) as asking:
        text = asking.get("/metrics").text
    return int(float(text.partition("\nkronoscope_http_connections ")[2].partition("\n")[0])) - 1


def test_silent_and_dripping_sockets_are_dropped(brief: tuple[Server, str]) -> None:
    server, _ = brief
    with contextlib.ExitStack() as stack, client(server) as other:
        silent, dripping = opened(stack, server, 60), opened(stack, server, 30)
        for connection in dripping:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nX-A: ")

        def all_dropped() -> bool:
            for connection in dripping:
                with contextlib.suppress(OSError):  # closed already
                    connection.sendall(b"a")
            assert seconds_of(other, "/livez") < 5
            return closed(silent) == 60 and closed(dripping) == 30

        assert api_connections(server) == 0
        until(all_dropped)


def test_a_header_that_does_not_end_is_cut(brief: tuple[Server, str]) -> None:
    server, _ = brief
    with connect(server) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
        assert received(connection) == b""


def test_a_second_request_has_a_deadline_too(brief: tuple[Server, str]) -> None:
    server, _ = brief
    with connect(server) as connection:
        connection.sendall(head(server, "GET /livez HTTP/1.1"))
        assert answer(connection).status == 200
        connection.sendall(b"GET /livez")
        assert received(connection) == b""


def test_an_idle_connection_is_closed(brief: tuple[Server, str]) -> None:
    server, _ = brief
    with connect(server) as connection:
        connection.sendall(head(server, "GET /livez HTTP/1.1"))
        assert answer(connection).status == 200
        assert received(connection) == b""


@pytest.mark.parametrize("path", ["/v1/jobs/{}/events", "/v1/jobs/{}?wait=1"])
def test_a_body_that_does_not_end_holds_no_connection_beyond_the_answer(brief: tuple[Server, str], path: str) -> None:
    server, job_id = brief
    with connect(server) as silent, connect(server) as dripping:
        for connection in (silent, dripping):
            connection.sendall(head(server, f"GET {path.format(job_id)} HTTP/1.1", "Content-Length: 100000"))

        def are_cut() -> bool:
            with contextlib.suppress(OSError):
                dripping.sendall(b"a")
            return is_closed(silent) and is_closed(dripping)

        until(are_cut)
    until(lambda: api_connections(server) == 0)


def test_a_reader_of_any_answer_that_takes_nothing_is_cut(brief: tuple[Server, str]) -> None:
    server, job_id = brief
    with socket.socket() as stubborn:
        stubborn.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stubborn.connect(("127.0.0.1", server.port))
        stubborn.sendall(head(server, f"GET /v1/jobs/{job_id}/artifacts/large.safetensors HTTP/1.1"))
        until(lambda: api_connections(server) == 1)
        until(lambda: api_connections(server) == 0)
        # what was under way comes, and no more
        assert len(received(stubborn)) < 2**24


def test_a_client_has_its_share_of_connections_and_no_more(few: Server) -> None:
    with contextlib.ExitStack() as stack, client(few, OTHER) as other:
        silent = opened(stack, few, 25)
        until(lambda: closed(silent) == 10)
        # those that came first are served, also where they say nothing yet
        assert not is_closed(silent[0])
        silent[0].sendall(head(few, "GET /livez HTTP/1.1"))
        assert answer(silent[0]).status == 200
        assert other.get("/livez").status_code == 200


def test_where_every_connection_of_a_client_is_being_answered_it_is_refused_another(few: Server) -> None:
    with contextlib.ExitStack() as stack:
        job_id = stored_job(few, stack)
        waiting = opened(stack, few, 10, "127.0.0.4")
        for connection in waiting:
            connection.sendall(head(few, f"GET /v1/jobs/{job_id}?wait=30 HTTP/1.1"))
        few.await_long_polls(10)

        def asked(source: str, *headers: str) -> bytes:
            with connect(few, source) as connection:
                connection.sendall(head(few, "GET /livez HTTP/1.1", "Connection: close", *headers))
                return received(connection)

        # what a client writes about its address is not passed on; others and this machine's own probes go on
        for headers in (
            (),
            ("X-Forwarded-For: 198.51.100.8",),
            ("X-Forwarded-For: 127.0.0.1", "Forwarded: for=127.0.0.1"),
        ):
            refused = asked("127.0.0.4", *headers)
            assert refused.startswith(b"HTTP/1.1 429 ")
            assert b"\r\nretry-after: 5\r\n" in refused.lower()
            assert b'"type":"urn:kronoscope:problem:too-many-connections"' in refused
        assert asked("127.0.0.5", "X-Forwarded-For: 127.0.0.4").startswith(b"HTTP/1.1 200 ")
        assert asked("127.0.0.1").startswith(b"HTTP/1.1 200 ")


def stored_job(server: Server, stack: contextlib.ExitStack) -> str:
    asking = stack.enter_context(client(server))
    return str(asking.post("/v1/jobs", json=seeding.DOCUMENT).json()["id"])


def test_streams_and_long_polls_of_this_machine_leave_room_for_its_page(few: Server) -> None:
    with contextlib.ExitStack() as stack:
        job_id = stored_job(few, stack)
        streams = opened(stack, few, 21, "127.0.0.1")
        for connection in streams:
            connection.sendall(head(few, f"GET /v1/jobs/{job_id}/events HTTP/1.1"))
        statuses = sorted(connection.recv(12) for connection in streams)
        assert statuses == [b"HTTP/1.1 200"] * 20 + [b"HTTP/1.1 503"]
        polls = opened(stack, few, 11, "127.0.0.1")
        for connection in polls:
            connection.sendall(head(few, f"GET /v1/jobs/{job_id}?wait=30 HTTP/1.1"))
        few.await_long_polls(10)
        for path in ("/", f"/v1/jobs/{job_id}"):
            with connect(few, "127.0.0.1") as page:
                page.sendall(head(few, f"GET {path} HTTP/1.1", "Connection: close"))
                assert received(page).startswith(b"HTTP/1.1 200 "), path
    few.await_long_polls(0)


def test_many_addresses_do_not_take_all_connections(few: Server) -> None:
    with contextlib.ExitStack() as stack, client(few, OTHER) as other:
        for number in range(10, 60):
            opened(stack, few, 12, f"127.0.0.{number}")
        for _ in range(5):
            assert other.get("/livez").status_code == 200
        with connect(few, "127.0.0.70") as newest:
            newest.sendall(head(few, "GET /readyz HTTP/1.1"))
            assert answer(newest).status == 200
        assert api_connections(few) == 0  # what says nothing does not come to it


def test_after_an_early_refusal_the_body_is_not_read(brief: tuple[Server, str]) -> None:
    server, _ = brief
    cut = False
    with connect(server) as connection:
        connection.settimeout(2)
        line = "POST /v1/nothing HTTP/1.1"
        connection.sendall(head(server, line, "Content-Type: application/json", "Transfer-Encoding: chunked"))
        chunk = b"10000\r\n" + b"a" * 65_536 + b"\r\n"
        began = time.monotonic()
        while not cut and time.monotonic() - began < 10:  # the proxy reads on for a second, so that the answer is seen
            try:
                connection.sendall(chunk)
            except OSError:
                cut = True
    assert cut
    until(lambda: api_connections(server) == 0)


def test_a_refusal_reaches_a_client_in_the_middle_of_its_body(brief: tuple[Server, str]) -> None:
    server, _ = brief
    with connect(server) as connection:
        line = "POST /v1/jobs HTTP/1.1"
        connection.sendall(head(server, line, "Content-Type: text/plain", "Content-Length: 300000"))
        for _ in range(4):
            connection.sendall(b"x" * 1000)
            time.sleep(0.1)
        assert answer(connection).status == 415


def test_a_client_that_sends_on_sees_why_it_is_refused(brief: tuple[Server, str]) -> None:
    server, _ = brief
    for _ in range(20):
        # one that waits for its next request is closed soon, which a busy machine takes for the refusal's end
        with client(server) as honest:
            # larger than a packet, so that the refusal comes before the end of the body
            refused = honest.post("/v1/jobs", content=b"x" * 200_000, headers={"content-type": "text/plain"})
        problem(refused, 415)


def test_too_few_descriptors_are_one_sentence_at_the_start(databases: Databases, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "api"],
        env=environment(databases.migrated("sqlite"), tmp_path, free_port(), {"KRONOSCOPE_EMBEDDED": "1"}),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 4
    assert "1,640 open files" in done.stderr
    assert "may have 1,024" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_soft_limit_on_descriptors_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    try:
        require_descriptors(1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1640
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
