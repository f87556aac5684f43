"""Clients that open connections and say little or nothing: they are dropped, and others are answered meanwhile."""

import contextlib
import json
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
from tests.api.server import Server, environment, free_port, serve
from tests.conftest import Databases
from tests.machine.stopwatch import until

BRIEF = {
    "KRONOSCOPE_EMBEDDED": "1",
    "KRONOSCOPE_HEADER_SECONDS": "0.4",
    "KRONOSCOPE_BODY_SECONDS": "0.4",
    "KRONOSCOPE_STREAM_WRITE_SECONDS": "0.4",
    "KRONOSCOPE_IDLE_SECONDS": "1",
    "KRONOSCOPE_METRICS_SECONDS": "0",
}
FEW = {
    "KRONOSCOPE_EMBEDDED": "1",
    "KRONOSCOPE_CONNECTIONS": "40",
    "KRONOSCOPE_CONNECTIONS_PER_CLIENT": "10",
    "KRONOSCOPE_METRICS_SECONDS": "0",
    "KRONOSCOPE_TRUSTED_PROXIES": "127.0.0.1",
}


@pytest.fixture(scope="module")
def brief(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """An API that waits for nobody, and a running job of its ledger."""
    url = databases.migrated("sqlite")
    engine = open_database(url)
    job_id = seeding.running(engine, LOCAL_TENANT).job_id
    engine.dispose()
    with serve(url, tmp_path_factory.mktemp("brief"), BRIEF) as server:
        yield server, job_id


@pytest.fixture(scope="module")
def few(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An API that takes few connections, which may be silent for as long as the defaults say."""
    with serve(databases.migrated("sqlite"), tmp_path_factory.mktemp("few"), FEW) as server:
        yield server


def opened(stack: contextlib.ExitStack, server: Server, number: int, source: str = ATTACKER) -> list[socket.socket]:
    return [stack.enter_context(connect(server, source)) for _ in range(number)]


def ended(server: Server, reason: str) -> int:
    with client(server) as asking:
        line = f'kronoscope_http_connections_ended_total{{reason="{reason}"}} '
        text = asking.get("/metrics").text
    return int(float(text.partition(line)[2].partition("\n")[0]))


def test_silent_and_dripping_sockets_are_dropped(brief: tuple[Server, str]) -> None:
    server, _ = brief
    before = ended(server, "headers")
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

        until(all_dropped)
    assert ended(server, "headers") == before + 90


def test_a_header_that_does_not_end_is_answered(brief: tuple[Server, str]) -> None:
    server, _ = brief
    with connect(server) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
        refused = received(connection)
    assert refused.startswith(b"HTTP/1.1 408 ")
    assert json.loads(refused.partition(b"\r\n\r\n")[2])["type"] == "urn:kronoscope:problem:header-timeout"


def test_a_second_request_has_a_deadline_too(brief: tuple[Server, str]) -> None:
    server, _ = brief
    with connect(server) as connection:
        connection.sendall(head(server, "GET /livez HTTP/1.1"))
        assert answer(connection).status == 200
        connection.sendall(b"GET /livez")
        assert received(connection).startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_is_closed(brief: tuple[Server, str]) -> None:
    server, _ = brief
    with connect(server) as connection:
        connection.sendall(head(server, "GET /livez HTTP/1.1"))
        assert answer(connection).status == 200
        assert received(connection) == b""


@pytest.mark.parametrize("path", ["/v1/jobs/{}/events", "/v1/jobs/{}?wait=30"])
def test_a_body_that_does_not_end_is_cut_where_nobody_reads_it(brief: tuple[Server, str], path: str) -> None:
    server, job_id = brief
    with connect(server) as connection:
        connection.sendall(head(server, f"GET {path.format(job_id)} HTTP/1.1", "Content-Length: 100000"))

        def is_cut() -> bool:
            with contextlib.suppress(OSError):
                connection.sendall(b"a")
            return is_closed(connection)

        until(is_cut)


def test_a_reader_of_any_answer_that_takes_nothing_is_cut(brief: tuple[Server, str]) -> None:
    server, _ = brief
    before = ended(server, "reader")
    with socket.socket() as stubborn:
        stubborn.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stubborn.connect(("127.0.0.1", server.port))
        # answers of 15 kB, asked for again and again without taking any
        stubborn.settimeout(5)
        with contextlib.suppress(OSError):
            for _ in range(3000):
                stubborn.sendall(head(server, "GET /v1/analyses HTTP/1.1"))
        until(lambda: ended(server, "reader") > before)


def test_a_client_has_its_share_of_connections_and_no_more(few: Server) -> None:
    with contextlib.ExitStack() as stack, client(few, OTHER) as other:
        silent = opened(stack, few, 25)
        until(lambda: closed(silent) == 15)
        # those that waited longest have given way, and the newest is served
        assert not is_closed(silent[-1])
        silent[-1].sendall(head(few, "GET /livez HTTP/1.1"))
        assert answer(silent[-1]).status == 200
        assert other.get("/livez").status_code == 200


def test_where_every_connection_of_a_client_is_being_answered_it_is_refused_another(few: Server) -> None:
    with contextlib.ExitStack() as stack:
        job_id = stored_job(few, stack)
        waiting = opened(stack, few, 10, "127.0.0.4")
        for connection in waiting:
            connection.sendall(head(few, f"GET /v1/jobs/{job_id}?wait=30 HTTP/1.1"))
        few.await_long_polls(10)
        with connect(few, "127.0.0.4") as one_more:
            refused = received(one_more)
    assert refused.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nretry-after: " in refused
    assert ended(few, "refused") == 1


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
        for number in range(10, 20):
            opened(stack, few, 8, f"127.0.0.{number}")
        for _ in range(5):
            assert other.get("/livez").status_code == 200
        with connect(few, "127.0.0.20") as newest:
            newest.sendall(head(few, "GET /readyz HTTP/1.1"))
            assert answer(newest).status == 200


def test_a_proxy_is_many_clients_and_each_has_its_share(few: Server) -> None:
    """This machine's own address is a named proxy's here; by default nobody is believed."""
    with contextlib.ExitStack() as stack:
        job_id = stored_job(few, stack)
        through = opened(stack, few, 12, "127.0.0.1")
        for connection in through:
            line = f"GET /v1/jobs/{job_id}?wait=30 HTTP/1.1"
            connection.sendall(head(few, line, "X-Forwarded-For: 6.6.6.6, 198.51.100.7", "X-Forwarded-For: 127.0.0.1"))
        few.await_long_polls(10)  # the eleventh and twelfth were refused

        def asked(*headers: str) -> bytes:
            with connect(few, "127.0.0.1") as connection:
                connection.sendall(head(few, "GET /livez HTTP/1.1", "Connection: close", *headers))
                return received(connection)

        refused = asked("X-Forwarded-For: 198.51.100.7")
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: " in refused
        # what a client writes into the header itself is not believed, other clients and the proxy's own probes go on
        assert asked("X-Forwarded-For: 198.51.100.7, 198.51.100.8").startswith(b"HTTP/1.1 200 ")
        assert asked().startswith(b"HTTP/1.1 200 ")


def test_after_an_early_refusal_the_body_is_not_read(brief: tuple[Server, str]) -> None:
    server, _ = brief
    sent = 0
    with connect(server) as connection:
        connection.settimeout(2)
        line = "POST /v1/nothing HTTP/1.1"
        connection.sendall(head(server, line, "Content-Type: application/json", "Transfer-Encoding: chunked"))
        chunk = b"10000\r\n" + b"a" * 65_536 + b"\r\n"
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while sent < 2**31 and time.monotonic() - began < 10:
                connection.sendall(chunk)
                sent += 65_536
    assert sent < 16 * 2**20  # what the kernel's buffers hold, and no more than a body's size was read


def test_a_client_that_sends_on_sees_why_it_is_refused(brief: tuple[Server, str]) -> None:
    server, _ = brief
    with client(server) as honest:
        for _ in range(20):
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
