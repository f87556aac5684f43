"""Bodies that are no job document: each a problem at once, without echo, and nothing is stored."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.api.conftest import Keyed
from tests.api.expect import pointers, problem
from tests.api.seeding import DOCUMENT
from tests.api.server import serve
from tests.conftest import Databases
from tests.machine.stopwatch import Stopwatch

CANARY = "canary-5f1e"
GOOD = json.dumps(DOCUMENT)


def changed(pointer: str, value: str) -> bytes:
    """The good document with one value replaced by raw JSON text."""
    document = json.loads(GOOD)
    *path, last = pointer.strip("/").split("/")
    place = document
    for step in path:
        place = place.setdefault(step, {})
    place[last] = "@@@"
    return json.dumps(document).replace('"@@@"', value).encode()


BODIES = {
    "empty": (b"", 422, ""),
    "brace": (b"{", 422, ""),
    "null": (b"null", 422, ""),
    "list": (b"[]", 422, ""),
    "string": (b'"x"', 422, ""),
    "utf16": (GOOD.encode("utf-16"), 422, ""),
    "bom": (b"\xef\xbb\xbf" + GOOD.encode(), 422, ""),
    "invalid utf8": (b'{"kind": "\xff"}', 422, ""),
    "nan": (changed("stabilisation/damping", "NaN"), 422, "/stabilisation/damping"),
    "infinity": (changed("stabilisation/damping", "Infinity"), 422, "/stabilisation/damping"),
    "1e999": (changed("stabilisation/damping", "1e999"), 422, "/stabilisation/damping"),
    "true for int": (changed("collection/batch_size", "true"), 422, "/collection/batch_size"),
    "string for int": (changed("collection/batch_size", '"12"'), 422, "/collection/batch_size"),
    "3.0 for int": (changed("collection/batch_size", "3.0"), 422, "/collection/batch_size"),
    "2^63": (changed("collection/seed", str(2**63)), 422, "/collection/seed"),
    "5000 digits": (changed("collection/seed", "9" * 5000), 422, "/collection/seed"),
    "nul": (changed("labels/a", '"\\u0000"'), 422, "/labels/a"),
    "unknown key": (changed("colour", f'"{CANARY}"'), 422, "/colour"),
    "unknown kind": (changed("kind", f'"{CANARY}"'), 422, "/kind"),
    "no model": (json.dumps({**DOCUMENT, "model": None}).encode(), 422, "/model"),
    "batch 0": (changed("collection/batch_size", "0"), 422, "/collection/batch_size"),
    "batch -1": (changed("collection/batch_size", "-1"), 422, "/collection/batch_size"),
    "batch 2^40": (changed("collection/batch_size", str(2**40)), 422, "/collection/batch_size"),
    "damping 0": (changed("stabilisation/damping", "0"), 422, "/stabilisation/damping"),
    "damping 1e308": (changed("stabilisation/damping", "1e308"), 422, "/stabilisation/damping"),
    "dtype": (changed("collection/dtype", f'"{CANARY}"'), 422, "/collection/dtype"),
    "depth 17": (b'{"a":' * 17 + b"1" + b"}" * 17, 422, ""),
    "depth 100000": (b"[" * 100_000, 422, ""),
    "10000 keys": (json.dumps({f"k{n}": n for n in range(10_000)}).encode(), 422, ""),
    "257 KiB": (json.dumps({"kind": "x" * 257 * 1024}).encode(), 413, None),
    "50 MB": (b'"' + b"x" * 50_000_000 + b'"', 413, None),
}


@pytest.fixture(scope="module")
def stored(keyed: Keyed) -> Iterator[None]:
    """However many bodies were refused, no job is stored."""
    yield
    with keyed.server.client(keyed.key) as client:
        assert client.get("/v1/jobs").json()["items"] == []
        # and the same process serves the next valid request
        assert client.post("/v1/jobs", json=DOCUMENT).status_code == 202


def processor_seconds(keyed: Keyed) -> float:
    """What the API has taken of the processors so far."""
    taken = psutil.Process(keyed.server.process.pid).cpu_times()
    return float(taken.user + taken.system)


@pytest.mark.parametrize("name", BODIES)
def test_bad_body(keyed: Keyed, ours: httpx.Client, stored: None, name: str) -> None:
    body, status, pointer = BODIES[name]
    watch, before = Stopwatch(), processor_seconds(keyed)
    try:
        answer = ours.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    except httpx.WriteError:
        # the answer came, and the connection closed, while the body was still being sent
        assert status == 413
        return
    assert min(watch.seconds(), processor_seconds(keyed) - before) < 4
    found = problem(answer, status)
    assert CANARY not in answer.text
    if pointer is not None:
        assert pointer in pointers(found)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {},
    ],
)
def test_wrong_media_types(ours: httpx.Client, stored: None, headers: dict[str, str]) -> None:
    problem(ours.post("/v1/jobs", content=GOOD.encode(), headers=headers), 415)


def test_an_endless_chunked_body_is_cut(ours: httpx.Client, stored: None) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(10_000):
            yield b" " * 10_000

    try:
        answer = ours.post("/v1/jobs", content=endless(), headers={"content-type": "application/json"})
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        return
    problem(answer, 413)


def test_a_half_sent_body_is_answered_after_the_deadline(databases: Databases, tmp_path: Path) -> None:
    # an API of its own: on a slow machine whole bodies may take longer to come
    more = {"KRONOSCOPE_EMBEDDED": "1", "KRONOSCOPE_BODY_SECONDS": "1.25"}
    with serve(databases.migrated("sqlite"), tmp_path, more) as server, server.client() as client:
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
            'Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"kind":'
        )
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as connection:
            began = time.monotonic()
            connection.sendall(head.encode())
            answer = b""
            while chunk := connection.recv(65_536):
                answer += chunk
        assert time.monotonic() - began >= 1.25
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"application/problem+json" in answer
        assert b"the body was not complete after 1.25 s" in answer
        assert client.get("/v1/jobs").json()["items"] == []
