"""Requests that are not HTTP/1.1, at the proxy: each a problem, and the API gets none that others read otherwise."""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from jobs.schema.database import open_database
from jobs.tenancy.api_keys import create_key
from tests.api.connections.sockets import ATTACKER, client, connect, head, received
from tests.api.expect import MEMBERS, problem
from tests.api.server import KEY_SECRET, Server, serve_behind_proxy
from tests.conftest import Databases
from tests.machine.stopwatch import Stopwatch
from tests.servers import proxy

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
GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HIDDEN = GET + b"X-A: canary\r\n\r\n"
AMBIGUOUS = {
    "chunks and length": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "length and chunks, other letters": POST
    + b"tRANSFER-eNCODING: chunked\r\ncONTENT-lENGTH: 0\r\n\r\n0\r\n\r\n"
    + HIDDEN,
    "the same length twice": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}" + HIDDEN,
    "a list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}" + HIDDEN,
    "length with a plus": POST + b"Content-Length: +2\r\n\r\n{}" + HIDDEN,
    "length in hex": POST + b"Content-Length: 0x2\r\n\r\n{}" + HIDDEN,
    "length with an underscore": POST + b"Content-Length: 1_0\r\n\r\n{}" + HIDDEN,
    "no length": POST + b"Content-Length: \r\n\r\n" + HIDDEN,
    "space before the length's colon": POST + b"Content-Length : 2\r\n\r\n{}" + HIDDEN,
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\n" + HIDDEN,
    "chunked, identity": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a control character before chunked": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "folded length": POST + b"Content-Length:\r\n 2\r\n\r\n{}" + HIDDEN,
    "folded coding": POST + b"X-A: b\r\n\tTransfer-Encoding: chunked\r\n\r\n" + HIDDEN,
    "lines that end in LF": b"GET /livez HTTP/1.1\nHost: x\n\n",
    "one line that ends in LF": b"GET /livez HTTP/1.1\r\nHost: x\nX-A: b\r\n\r\n",
    "an end in LF": b"GET /livez HTTP/1.1\r\nHost: x\r\n\n" + HIDDEN,
    "lines that end in CR": b"GET /livez HTTP/1.1\rHost: x\r\r",
    "CR in a value": b"GET /livez HTTP/1.1\r\nHost: x\r\nX-A: b\rContent-Length: 5\r\n\r\n",
    "10,000 headers": GET + b"a: b\r\n" * 10_000 + b"\r\n",
    "101 headers": GET + b"a: b\r\n" * 100 + b"\r\n",
    "102 headers without an end": GET + b"a: b\r\n" * 101,
    "33 KiB of headers": GET + b"a: " + b"b" * 33 * 1024 + b"\r\n\r\n",
    "100 KiB of request line": b"GET /" + b"a" * 100 * 1024 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a chunk of 2^64": CHUNKED + b"ffffffffffffffff\r\n",
    "a chunk of 2^68": CHUNKED + b"fffffffffffffffff\r\n",
    "a chunk beyond the body's limit": CHUNKED + b"40001\r\n",
    "a second chunk of 2^64": CHUNKED + b"1\r\n{\r\nffffffffffffffff\r\n",
    "a negative chunk": CHUNKED + b"-1\r\n",
    "a chunk with a plus": CHUNKED + b"+2\r\n{}\r\n0\r\n\r\n",
    "a chunk in hex": CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk's header that ends in LF": CHUNKED + b"2\n{}\r\n0\r\n\r\n",
    "CR in an extension": CHUNKED + b"2;a\rb\r\n{}\r\n0\r\n\r\n",
    "LF in an extension": CHUNKED + b"2;a\nb\r\n{}\r\n0\r\n\r\n",
    "an extension without end": CHUNKED + b"2;" + b"a" * 20_000,
    "a chunk without its end": CHUNKED + b"2\r\n{}0\r\n\r\n" + HIDDEN,
    "1,000 trailers": CHUNKED + b"0\r\n" + b"a: b\r\n" * 1_000 + b"\r\n",
    "a folded trailer": CHUNKED + b"0\r\na: b\r\n c\r\n\r\n" + HIDDEN,
}
MALFORMED |= AMBIGUOUS
LENIENT = {
    "lines that end in LF": [200],
    "one line that ends in LF": [200],
    "an end in LF": [200, 200],
    "a chunk's header that ends in LF": [422],
    "a chunk beyond the body's limit": [408],
    "an extension without end": [408],
    "1,000 trailers": [422],
    "a folded trailer": [422, 200],
}
"""Requests that the proxy reads in one way, and writes anew; a body without an end has the body's time."""
UNENDED = "102 headers without an end"
STATUS = {
    "unknown coding": 501,
    "identity": 501,
    "chunked, identity": 501,
    "a control character before chunked": 501,
    **dict.fromkeys(
        (
            "header too large", "10,000 headers", "101 headers", "33 KiB of headers", "100 KiB of request line",
        ),
        431,
    ),
}  # fmt: skip
ALLOWED = {
    "100 headers": GET + b"a: b\r\n" * 98 + b"Connection: close\r\n\r\n",
    "31 KiB of headers": GET + b"Connection: close\r\na: " + b"b" * 31 * 1024 + b"\r\n\r\n",
    "two requests": GET + b"\r\n" + GET + b"Connection: close\r\n\r\n",
    "blank lines within a body": GET + b"Content-Length: 4\r\nConnection: close\r\n\r\n\n\n\r\n",
    "an extension and a trailer": GET + b"Connection: close\r\nTransfer-Encoding: Chunked\r\n\r\n"
    b'2;a="b"\r\n{}\r\n00\r\nX-A: b\r\n\r\n',
}  # fmt: skip


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
    more = {"KRONOSCOPE_KEY_SECRET": KEY_SECRET, "KRONOSCOPE_BODY_SECONDS": "0.5"}
    changes = {"keepalive_timeout 10s": "keepalive_timeout 400ms"}
    with serve_behind_proxy(database_url, tmp_path_factory.mktemp("malformed"), more, changes) as started:
        yield started


def answers(received: bytes) -> int:
    """The number of answers, of which a sentence that names HTTP/1.1 is none."""
    return len(re.findall(rb"HTTP/1\.1 \d{3} ", received))


@pytest.mark.parametrize("name", [each for each in MALFORMED if each not in (*LENIENT, UNENDED, "HTTP/0.9")])
def test_a_malformed_request_is_answered_by_a_problem(server: Server, name: str) -> None:
    with connect(server) as connection:
        watch = Stopwatch()
        connection.sendall(MALFORMED[name])
        answer = received(connection)
    assert watch.seconds() < 3
    assert answers(answer) == 1
    head_lines, _, body = answer.partition(b"\r\n\r\n")
    lines = head_lines.decode().lower().split("\r\n")
    assert lines[0].startswith(f"http/1.1 {STATUS.get(name, 400)} ")
    assert "content-type: application/problem+json" in lines
    assert "x-content-type-options: nosniff" in lines
    told = json.loads(body)
    assert set(told) == MEMBERS
    assert f"x-request-id: {told['instance'].removeprefix('urn:uuid:')}" in lines
    assert b"canary" not in answer
    assert "Traceback" not in server.log.read_text()
    with client(server, ATTACKER) as honest:
        assert honest.get("/livez").status_code == 200


def test_http_0_9_has_a_problem_without_a_header(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(MALFORMED["HTTP/0.9"])
        assert json.loads(received(connection))["status"] == 400


@pytest.mark.parametrize("name", LENIENT)
def test_what_the_proxy_reads_in_one_way_is_answered_so(server: Server, key: str, name: str) -> None:
    """Or it is refused, as later versions do with more of them."""
    lines = f"Host: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n".encode()
    with connect(server) as connection:
        connection.sendall(MALFORMED[name].replace(b"Host: x\r\n", lines))
        answer = received(connection)
    assert [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)] in (LENIENT[name], [400])
    assert "Traceback" not in server.log.read_text()


class Recorder:
    """A server in the API's place that keeps the header of each request, and answers 204."""

    def __init__(self) -> None:
        self.headers: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                received = b""
                while b"\r\n\r\n" not in received and (part := connection.recv(65_536)):
                    received += part
                self.headers.append(received.partition(b"\r\n\r\n")[0])
                with contextlib.suppress(OSError):
                    connection.sendall(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65_536):
                        pass

    def close(self) -> None:
        self._listener.close()


def test_the_api_gets_one_reading_of_every_request() -> None:
    """Each line that the proxy passes on is whole, also of ambiguous requests that it begins to pass on."""
    recorder = Recorder()
    brief = {name: name.replace("10s", "300ms") for name in ("keepalive_timeout 10s", "client_header_timeout 10s")}
    try:
        with proxy(recorder.port, brief) as door:
            for request in (*MALFORMED.values(), *ALLOWED.values()):
                with socket.create_connection(("127.0.0.1", door.port), timeout=60) as connection:
                    with contextlib.suppress(OSError):
                        connection.sendall(request)
                    received(connection)
    finally:
        recorder.close()
    assert len(recorder.headers) > 10
    for header in (each for each in recorder.headers if each.count(b"X-Forwarded-For: 127.0.0.1") == 1):
        lines = header.split(b"\r\n")
        assert not re.search(rb"[\r\n]", b"".join(lines))
        assert all(
            re.fullmatch(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\x00-\x08\x0a-\x1f\x7f]*", each) for each in lines[1:]
        )
        names = [each.partition(b":")[0].lower() for each in lines[1:]]
        assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
        assert names.count(b"host") == 1
    assert {each.count(b"X-Forwarded-For: 127.0.0.1") for each in recorder.headers} <= {0, 1}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_request_with_one_reading_is_answered(server: Server, name: str) -> None:
    with connect(server) as connection:
        connection.sendall(ALLOWED[name])
        answer = received(connection)
    assert answer.count(b"HTTP/1.1 200 ") == answers(answer) == ALLOWED[name].count(b"GET ")


@pytest.mark.parametrize("name", ["chunks and length", "101 headers", "CR in a value", "a chunk of 2^64"])
def test_bytes_that_drip_are_read_no_otherwise(server: Server, key: str, name: str) -> None:
    # a request that is well-formed as far as its body waits for the body only with a key
    lines = f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n".encode()
    drops = MALFORMED[name].partition(HIDDEN)[0].replace(CHUNKED, POST + lines + CHUNKED.removeprefix(POST))
    with connect(server) as connection:
        for byte in drops:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(bytes([byte]))
        answer = received(connection)
    assert answer.startswith(f"HTTP/1.1 {STATUS.get(name, 400)} ".encode())
    assert answers(answer) == 1


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
