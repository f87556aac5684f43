"""Requests that are not HTTP/1.1: each a problem, none with a traceback in the log, and the same server goes on."""

import json
import time
from collections.abc import Iterator

import pytest

from jobs.schema.database import open_database
from jobs.tenancy.api_keys import create_key
from tests.api.connections.sockets import ATTACKER, client, connect, head, received
from tests.api.expect import MEMBERS, problem
from tests.api.server import KEY_SECRET, Server, serve
from tests.conftest import Databases

MALFORMED = {
    "no HTTP": b"canary\r\n\r\n",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "HTTP/0.9": b"GET /livez\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /livez HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "space before colon": b"GET /livez HTTP/1.1\r\nHost : canary\r\n\r\n",
    "folded header": b"GET /livez HTTP/1.1\r\n Host: canary\r\n\r\n",
    "control character": b"GET /livez HTTP/1.1\r\nHost: x\r\nX-A: \x00canary\r\n\r\n",
    "space in the target": b"GET /livez canary HTTP/1.1\r\nHost: x\r\n\r\n",
    "not ASCII": "GET /café HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    "length and chunks": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\nTransfer-Encoding: chunked\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "negative length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "unknown coding": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "header too large": b"GET /livez HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 70_000,
    "bad chunk": b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\ncanary\r\n",
}
STATUS = {"HTTP/2 preface": 505, "unknown coding": 501, "header too large": 431}


@pytest.fixture(scope="module")
def database_url(databases: Databases) -> str:
    return databases.migrated("sqlite")


@pytest.fixture(scope="module")
def key(database_url: str) -> str:
    engine = open_database(database_url)
    try:
        return create_key(engine, KEY_SECRET, "ours")
    finally:
        engine.dispose()


@pytest.fixture(scope="module")
def server(database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    more = {"KRONOSCOPE_KEY_SECRET": KEY_SECRET}
    with serve(database_url, tmp_path_factory.mktemp("malformed"), more) as started:
        yield started


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_is_answered_by_a_problem(server: Server, name: str) -> None:
    with connect(server) as connection:
        connection.sendall(MALFORMED[name])
        answer = received(connection)
    head_lines, _, body = answer.partition(b"\r\n\r\n")
    lines = head_lines.decode().lower().split("\r\n")
    assert lines[0].startswith(f"http/1.1 {STATUS.get(name, 400)} ")
    assert "content-type: application/problem+json" in lines
    assert "connection: close" in lines
    assert "x-content-type-options: nosniff" in lines
    told = json.loads(body)
    assert set(told) == MEMBERS
    assert f"x-request-id: {told['instance'].removeprefix('urn:uuid:')}" in lines
    assert b"canary" not in answer
    assert "Traceback" not in server.log.read_text()
    with client(server, ATTACKER) as honest:
        assert honest.get("/livez").status_code == 200


def test_a_bad_chunk_after_a_refusal_leaves_no_traceback(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(head(server, "POST /v1/jobs HTTP/1.1", "Transfer-Encoding: chunked") + b"5\r\nhello\r\n")
        answer = connection.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 401 ")
        connection.sendall(b"no chunk at all\r\n")
        assert b"HTTP/1.1 400" not in received(connection)
    assert "Traceback" not in server.log.read_text()


def test_a_bad_chunk_while_the_body_is_read_leaves_no_traceback(server: Server, key: str) -> None:
    with connect(server) as connection:
        lines = ("Transfer-Encoding: chunked", f"Authorization: Bearer {key}", "Content-Type: application/json")
        connection.sendall(head(server, "POST /v1/jobs HTTP/1.1", *lines) + b"1\r\n{\r\n")
        time.sleep(0.2)  # until the route waits for more
        connection.sendall(b"no chunk at all\r\n")
        assert received(connection).startswith(b"HTTP/1.1 400 ")
    with client(server, ATTACKER) as honest:
        assert honest.get("/livez").status_code == 200
    assert "Traceback" not in server.log.read_text()


def test_an_upgrade_is_not_taken(server: Server) -> None:
    with connect(server) as connection:
        upgrade = (
            "Connection: Upgrade, close",
            "Upgrade: websocket",
            "Sec-WebSocket-Key: x",
            "Sec-WebSocket-Version: 13",
        )
        connection.sendall(head(server, "GET /v1/jobs HTTP/1.1", *upgrade))
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"application/problem+json" in answer


@pytest.mark.parametrize("order", [1, -1])
def test_two_keys_are_refused_whichever_comes_first(server: Server, key: str, order: int) -> None:
    keys = [("authorization", f"Bearer {key}"), ("authorization", "Bearer of another")][::order]
    with client(server, ATTACKER) as asking:
        problem(asking.get("/v1/jobs", headers=keys), 400)
        problem(asking.post("/v1/jobs", headers=[keys[0], ("idempotency-key", "a"), ("idempotency-key", "b")]), 400)
