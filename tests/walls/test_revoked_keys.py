"""A revoked key reads and writes no more, not even by a request that was accepted before."""

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from sqlalchemy import func, select

from api.problem_details import Refusal
from api.requests import auth
from api.requests.auth import KeyInUse
from api.routes.results import _download
from catalog.frames import LogLine
from jobs.objects.artifacts import ArtifactFolder
from jobs.queue import attempt_endings, attempt_writes
from jobs.repository.store import read_job
from jobs.schema.database import reading
from jobs.schema.tables import jobs
from jobs.tenancy.api_keys import create_key, key_id, revoke_key, verify_key
from tests.api import seeding
from tests.api.conftest import Keyed
from tests.api.connections.sockets import received
from tests.api.server import KEY_SECRET, METRICS_TOKEN
from tests.api.streaming import events


def note(keyed: Keyed, claim: object, message: str) -> None:
    attempt_writes.write_log_line(keyed.engine, claim, LogLine(level="info", message=message))


def test_an_open_stream_tells_nothing_that_comes_after(keyed: Keyed) -> None:
    key = create_key(keyed.engine, KEY_SECRET, "ours", ("read",))
    caller = verify_key(keyed.engine, KEY_SECRET, key)
    assert caller is not None
    claim = seeding.running(keyed.engine, caller.tenant_id)
    with (
        keyed.server.client(key) as client,
        client.stream("GET", f"/v1/jobs/{claim.job_id}/events", timeout=60) as answer,
    ):
        told = events(answer)
        note(keyed, claim, "before")
        assert next(each for each in told if each["type"] == "log")["data"]["message"] == "before"
        assert revoke_key(keyed.engine, key)
        note(keyed, claim, "secret")
        attempt_endings.finish(keyed.engine, claim)
        began = time.monotonic()
        assert list(told) == []  # the stream ends, and says nothing more
        assert time.monotonic() - began < 30


def test_a_long_poll_is_refused_when_its_key_is_revoked_meanwhile(keyed: Keyed) -> None:
    key = create_key(keyed.engine, KEY_SECRET, "ours", ("read",))
    caller = verify_key(keyed.engine, KEY_SECRET, key)
    assert caller is not None
    claim = seeding.running(keyed.engine, caller.tenant_id)
    job = read_job(keyed.engine, caller.tenant_id, claim.job_id)
    assert job is not None
    answers = []
    with keyed.server.client(key) as client:

        def ask() -> None:
            answers.append(client.get(f"/v1/jobs/{claim.job_id}?wait=20", timeout=60))

        asking = threading.Thread(target=ask)
        asking.start()
        keyed.server.await_long_polls(1, METRICS_TOKEN)
        assert revoke_key(keyed.engine, str(key_id(key)))
        attempt_endings.finish(keyed.engine, claim)
        asking.join(60)
    (answer,) = answers
    assert answer.status_code == 401
    assert claim.job_id not in answer.text


@contextlib.contextmanager
def begun(keyed: Keyed, key: str, request: str, body: bytes = b"") -> Iterator[socket.socket]:
    """A request with a part of its body, of which all has come that was sent; its reader takes little at a time."""
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        line.settimeout(60)
        line.connect(("127.0.0.1", keyed.server.port))
        head = f"{request} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        line.sendall(f"{head}{length}\r\n".encode() + body[: len(body) // 2])
        time.sleep(0.5)  # it is authenticated, and waits for the rest
        assert revoke_key(keyed.engine, key)
        yield line


def count_jobs(keyed: Keyed) -> int:
    with reading(keyed.engine) as connection:
        return int(connection.execute(select(func.count()).select_from(jobs)).scalar_one())


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/estimates", "/v1/uploads", "/v1/webhooks"])
def test_a_body_that_came_slowly_is_not_acted_upon(keyed: Keyed, path: str) -> None:
    key = create_key(keyed.engine, KEY_SECRET, "ours", ("read", "submit"))
    file = {"name": "late.csv", "size_bytes": 3, "sha256": hashlib.sha256(b"a\n1").hexdigest()}
    bodies = {"/v1/uploads": {"kind": "data", "files": [file]}, "/v1/webhooks": {"url": "https://example.com/late"}}
    body, before = json.dumps(bodies.get(path, seeding.DOCUMENT)).encode(), count_jobs(keyed)
    with begun(keyed, key, f"POST {path}", body) as line:
        line.sendall(body[len(body) // 2 :])
        assert received(line).startswith(b"HTTP/1.1 401 ")
    assert count_jobs(keyed) == before
    with keyed.server.client(keyed.key) as client:
        assert "late" not in client.get("/v1/webhooks").text
        again = client.post("/v1/uploads", json={"kind": "data", "files": [file]})
        assert client.delete(f"/v1/uploads/{again.json()['id']}").status_code == 204


def test_a_file_whose_rest_comes_later_is_not_stored(keyed: Keyed) -> None:
    key, content = create_key(keyed.engine, KEY_SECRET, "ours", ("read", "submit")), os.urandom(400_000)
    digest = hashlib.sha256(content).hexdigest()
    file = {"name": "late.csv", "size_bytes": len(content), "sha256": digest}
    with keyed.server.client(keyed.key) as client:
        upload = client.post("/v1/uploads", json={"kind": "data", "files": [file]}).json()["id"]
        with begun(keyed, key, f"PUT /v1/uploads/{upload}/late.csv", content) as line:
            line.sendall(content[len(content) // 2 :])
            assert received(line).startswith(b"HTTP/1.1 401 ")
        assert list(keyed.artifacts.rglob(digest)) == []
        # the tenant's other keys go on with what had come
        assert client.post(f"/v1/uploads/{upload}:complete").json()["complete"] is True
        assert client.delete(f"/v1/uploads/{upload}").status_code == 204


def test_a_download_ends_within_seconds(keyed: Keyed) -> None:
    caller = verify_key(keyed.engine, KEY_SECRET, keyed.key)
    assert caller is not None
    claim, size = seeding.claimed(keyed.engine, caller.tenant_id), 16 * 2**20
    seeding.artifact(keyed.engine, ArtifactFolder(keyed.artifacts), claim, "big.json", bytes(size), "application/json")
    attempt_endings.finish(keyed.engine, claim)
    key = create_key(keyed.engine, KEY_SECRET, "ours", ("read",))
    with begun(keyed, key, f"GET /v1/jobs/{claim.job_id}/artifacts/big.json") as line:
        time.sleep(auth._AGAIN_SECONDS)
        come = received(line)
    assert come.startswith(b"HTTP/1.1 200 ")
    assert len(come) < size


def test_a_stream_of_rows_ends_with_the_key(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_AGAIN_SECONDS", 0)
    key = create_key(keyed.engine, KEY_SECRET, "ours", ("read",))
    held = KeyInUse(SimpleNamespace(keys=keyed.engine), key_id(key))  # type: ignore[arg-type]
    answer, told = _download(held, iter(["first", "second", "third"]), "text/csv", "a.csv"), []

    async def read() -> None:
        async for chunk in answer.body_iterator:
            told.append(chunk)
            if len(told) == 2:
                assert revoke_key(keyed.engine, key)

    with pytest.raises(Refusal, match="revoked"):
        asyncio.run(read())
    assert told == ["first", "second"]


def test_other_keys_of_the_tenant_go_on(keyed: Keyed) -> None:
    caller = verify_key(keyed.engine, KEY_SECRET, keyed.key)
    assert caller is not None
    claim = seeding.running(keyed.engine, caller.tenant_id)
    with (
        keyed.server.client(keyed.key) as client,
        client.stream("GET", f"/v1/jobs/{claim.job_id}/events", timeout=60) as answer,
    ):
        told = events(answer)
        note(keyed, claim, "line")
        attempt_endings.finish(keyed.engine, claim)
        seen = list(told)
    assert "line" in [each["data"].get("message") for each in seen]
    assert seen[-1]["data"]["state"] == "succeeded"
