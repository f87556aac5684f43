"""Uploads over HTTP: what is declared comes in parts, is proved by its digest, and nothing else is kept."""

import asyncio
import hashlib
import io
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, select, update
from starlette.requests import Request

from api.problem_details import Refusal
from api.requests.auth import KeyInUse
from api.routes.uploads import receive_part, write_whole
from catalog.requests.uploads import UploadDocument, is_read
from jobs.codec import parse_document, parse_record, sha256_of
from jobs.errors import DocumentRefused
from jobs.objects.artifacts import ArtifactFolder, object_key
from jobs.objects.uploads import Uploads, sweep_uploads
from jobs.repository.submission import submit
from jobs.retention.object_sweep import sweep_objects
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, reading, writing
from jobs.schema.tables import upload_files
from jobs.tenancy.api_keys import create_key, verify_key
from jobs.tenancy.quotas import set_quota, usage
from kronoscope.client import Client
from tests.api.conftest import Keyed
from tests.api.connections.sockets import received as read_to_end
from tests.api.connections.test_audit_trail import lines
from tests.api.expect import pointers, problem
from tests.api.seeding import DOCUMENT, raw
from tests.api.server import KEY_SECRET, serve
from tests.conftest import Databases
from tests.kronoscope.test_stored_run import ADDED, RUN
from tests.machine.stopwatch import until

CONTENT = os.urandom(300_000)
DAY = 86_400


def declared(name: str = "weights.safetensors", content: bytes = CONTENT, **changes: Any) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    return {"name": name, "size_bytes": len(content), "sha256": digest} | changes


def document(*files: dict[str, Any], kind: str = "data") -> dict[str, Any]:
    return {"kind": kind, "files": list(files)}


def part(first: int, content: bytes, size: int = len(CONTENT)) -> dict[str, Any]:
    return {"content": content, "headers": {"content-range": f"bytes {first}-{first + len(content) - 1}/{size}"}}


@pytest.fixture
def fresh(ours: httpx.Client) -> Iterator[str]:
    """The address of an upload of which nothing has come; each test's has a name of its own, and so another id."""
    name = f"{os.urandom(6).hex()}.safetensors"
    made = ours.post("/v1/uploads", json=document(declared(name)))
    assert made.status_code == 201, made.text
    yield f"/v1/uploads/{made.json()['id']}"
    ours.delete(f"/v1/uploads/{made.json()['id']}")


def name_of(client: httpx.Client, address: str) -> str:
    return str(client.get(address).json()["files"][0]["name"])


def received(client: httpx.Client, address: str) -> int:
    return int(client.get(address).json()["files"][0]["received_bytes"])


def staged(keyed: Keyed) -> list[Path]:
    return [each for each in (keyed.artifacts / "uploads").rglob("*") if each.is_file()]


def test_a_file_in_parts_is_an_object_once_all_of_it_has_come(keyed: Keyed, ours: httpx.Client, fresh: str) -> None:
    file = f"{fresh}/{name_of(ours, fresh)}"
    for first in range(0, len(CONTENT), 100_000):
        sent = ours.put(file, **part(first, CONTENT[first : first + 100_000]))
        assert sent.status_code == 200, sent.text
        assert sent.json()["files"][0]["received_bytes"] == first + 100_000
    assert not staged(keyed)
    assert oct((keyed.artifacts / "uploads").stat().st_mode)[-3:] == "700"
    assert ours.post(f"{fresh}:complete").json()["complete"] is True
    tenant = tenant_of(keyed, keyed.key)
    kept = keyed.artifacts / object_key(tenant, hashlib.sha256(CONTENT).hexdigest())
    assert kept.read_bytes() == CONTENT
    # a replay changes nothing, and no sweep of unlisted objects takes it
    replayed = str(problem(ours.put(file, content=CONTENT), 409)["detail"])
    assert f"all {len(CONTENT):,} bytes of" in replayed
    assert f"POST {fresh}:complete" in replayed
    assert ours.post(f"{fresh}:complete").json()["complete"] is True
    sweep_objects(keyed.engine, ArtifactFolder(keyed.artifacts), -60)
    assert kept.exists()
    # the same declaration is the same upload; once deleted its bytes are free, and the object is swept
    again = ours.post("/v1/uploads", json=document(declared(file.rpartition("/")[2])))
    assert (again.json()["id"], again.json()["complete"]) == (fresh.rpartition("/")[2], True)
    before = {each.tenant: each.used_bytes for each in usage(keyed.engine)}["ours"]
    assert ours.delete(fresh).status_code == 204
    assert {each.tenant: each.used_bytes for each in usage(keyed.engine)}["ours"] == before - len(CONTENT)
    sweep_objects(keyed.engine, ArtifactFolder(keyed.artifacts), -60)
    assert not kept.exists()
    problem(ours.get(fresh), 404)


def test_a_file_that_the_store_has_lost_is_taken_again(keyed: Keyed, ours: httpx.Client, fresh: str) -> None:
    """As after a ledger is put back to a backup from before a sweep."""
    name, file = name_of(ours, fresh), f"{fresh}/{name_of(ours, fresh)}"
    ours.put(file, content=CONTENT)
    kept = keyed.artifacts / object_key(tenant_of(keyed, keyed.key), hashlib.sha256(CONTENT).hexdigest())
    lost: list[tuple[Any, ...]] = [
        ("POST", "/v1/uploads", 201),
        ("GET", fresh, 200),
        ("POST", f"{fresh}:complete", 409),
    ]
    for method, path, status in lost:
        assert ours.post(f"{fresh}:complete").json()["complete"] is True
        kept.unlink()
        body = document(declared(name)) if path == "/v1/uploads" else None
        answer = ours.request(method, path, json=body)
        assert answer.status_code == status, answer.text
        assert (received(ours, fresh), ours.get(fresh).json()["complete"]) == (0, False)
        assert ours.put(file, content=CONTENT).status_code == 200
        assert kept.read_bytes() == CONTENT
    kept.unlink()  # and without a question before
    assert ours.put(file, **part(0, CONTENT[:1000])).status_code == 200
    sweep_uploads(keyed.engine, ArtifactFolder(keyed.artifacts), None)
    assert ours.put(file, **part(1000, CONTENT[1000:])).status_code == 200
    assert (ours.post(f"{fresh}:complete").json()["complete"], kept.read_bytes()) == (True, CONTENT)


def tenant_of(keyed: Keyed, key: str) -> str:
    caller = verify_key(keyed.engine, KEY_SECRET, key)
    assert caller is not None
    return caller.tenant_id


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("share", [0, 1, 150_000, len(CONTENT) - 1])
def test_what_came_before_a_cut_is_kept_and_is_no_upload(
    keyed: Keyed, ours: httpx.Client, fresh: str, share: int
) -> None:
    name = name_of(ours, fresh)
    head = (
        f"PUT {fresh}/{name} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {keyed.key}\r\nContent-Length: {len(CONTENT)}"
    )
    with socket.create_connection(("127.0.0.1", keyed.server.port), timeout=60) as line:
        line.sendall(f"{head}\r\n\r\n".encode() + CONTENT[:share])
        until(lambda: received(ours, fresh) == share, what="all that was sent has come")
    refused = ours.post(f"{fresh}:complete")
    assert f"{share:,} of the {len(CONTENT):,} bytes of {name} have come" in str(problem(refused, 409)["detail"])
    named = DOCUMENT | {"data": {"source": "upload", "id": fresh.rpartition("/")[2]}}
    for path in ("/v1/jobs", "/v1/estimates"):
        unfinished = problem(ours.post(path, json=named), 422)
        assert pointers(unfinished) == {"/data/id"}
        assert "send the rest" in str(unfinished["errors"])

    def goes_on() -> bool:
        # until the request that was cut has let go of the file
        return ours.put(f"{fresh}/{name}", **part(share, CONTENT[share:])).status_code == 200

    until(goes_on, what="the rest is taken")
    assert ours.post(f"{fresh}:complete").json()["complete"] is True
    accepted = ours.post("/v1/jobs?validate_only=true", json=named)
    assert accepted.status_code == 200, accepted.text
    # as a model, or with options that its kind of file has no use for, it is refused
    as_model = DOCUMENT | {"model": {"source": "upload", "id": fresh.rpartition("/")[2]}}
    assert pointers(problem(ours.post("/v1/jobs", json=as_model), 422)) == {"/model/id"}
    keyed_columns = DOCUMENT | {"data": named["data"] | {"text_key": "premise"}}
    assert pointers(problem(ours.post("/v1/jobs", json=keyed_columns), 422)) == {"/data/text_key"}


def test_other_bytes_than_declared_are_dropped_with_the_reason(keyed: Keyed, ours: httpx.Client, fresh: str) -> None:
    name = name_of(ours, fresh)
    flipped = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    refused = problem(ours.put(f"{fresh}/{name}", content=flipped), 422)
    assert f"{name} has another SHA-256 than was declared, and was dropped" in str(refused["detail"])
    assert (received(ours, fresh), staged(keyed)) == (0, [])
    assert ours.put(f"{fresh}/{name}", content=CONTENT).status_code == 200


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({}, CONTENT + b"x", 413),
        ({}, CONTENT[:-1], 413),
        ({}, b"", 413),
        ({"content-range": f"bytes 0-9/{len(CONTENT) + 1}"}, bytes(10), 413),
        ({"content-range": f"bytes 0-8/{len(CONTENT)}"}, bytes(10), 413),
        ({"content-range": f"bytes {len(CONTENT)}-{len(CONTENT) + 9}/{len(CONTENT)}"}, bytes(10), 413),
        ({"content-range": "bytes 0-9/*"}, bytes(10), 413),
        ({"content-range": f"bytes 1-10/{len(CONTENT)}"}, bytes(10), 409),
        ([("content-range", f"bytes {n}-{n + 9}/{len(CONTENT)}") for n in (0, 10)], bytes(10), 400),
        ({"content-encoding": "gzip"}, CONTENT, 415),
        ({"transfer-encoding": "chunked"}, iter([bytes(10)]), 411),
    ],
)
def test_a_part_that_is_none_leaves_nothing(
    keyed: Keyed, ours: httpx.Client, fresh: str, headers: Any, content: Any, status: int
) -> None:
    problem(ours.put(f"{fresh}/{name_of(ours, fresh)}", content=content, headers=headers), status)
    assert received(ours, fresh) == 0
    assert not [each for each in staged(keyed) if each.stat().st_size]


@pytest.mark.parametrize("path", [None, "/v1/jobs", "/livez"])
def test_a_body_of_two_lengths_is_refused_and_ends_its_connection(
    keyed: Keyed, ours: httpx.Client, fresh: str, path: str | None
) -> None:
    """Its chunks were taken whatever Content-Length declares, so that bytes without end counted for no quota."""
    head = (
        f"PUT {path or f'{fresh}/{name_of(ours, fresh)}'} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {keyed.key}\r\n"
        f"Content-Length: {len(CONTENT)}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", keyed.server.port), timeout=60) as line:
        line.sendall(head.encode() + b"0\r\n\r\nGET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = read_to_end(line)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"send one of them" in answer
    assert (received(ours, fresh), staged(keyed)) == (0, [])


@pytest.mark.parametrize("came", [0, 7])
def test_more_bytes_than_declared_are_dropped_with_the_rest_of_their_request(tmp_path: Path, came: int) -> None:
    """Whatever a server makes of a request's lengths: what came before stays."""
    chunks = iter([b"12345", b"678901", b"2"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": next(chunks), "more_body": True}

    embedded = KeyInUse(SimpleNamespace(keys=None), None)  # type: ignore[arg-type]
    path = tmp_path / "part"
    path.write_bytes(bytes(came))
    with path.open("ab", buffering=0) as part, pytest.raises(Refusal, match="more than its Content-Length of 11 bytes"):
        asyncio.run(receive_part(Request({"type": "http"}, receive), part, 11, 60, embedded))
    assert path.read_bytes() == bytes(came)


def test_of_two_writers_one_is_refused(keyed: Keyed, ours: httpx.Client, fresh: str) -> None:
    name, half = name_of(ours, fresh), 100_000
    head = (
        f"PUT {fresh}/{name} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {keyed.key}\r\nContent-Length: {len(CONTENT)}"
    )
    with socket.create_connection(("127.0.0.1", keyed.server.port), timeout=60) as line:
        line.sendall(f"{head}\r\n\r\n".encode() + CONTENT[:half])
        until(lambda: received(ours, fresh) == half, what="the first writer is at work")
        second = problem(ours.put(f"{fresh}/{name}", **part(half, CONTENT[half:])), 409)
        assert (second["type"], received(ours, fresh)) == ("urn:kronoscope:problem:upload-busy", half)
        line.sendall(CONTENT[half:])
        assert line.recv(20).startswith(b"HTTP/1.1 200")
    assert ours.post(f"{fresh}:complete").json()["complete"] is True


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(
    "name",
    [
        "../config.json", "/etc/config.json", "a/b.safetensors", "..", ".safetensors", "model.safetensors/..",
        "model.bin", "pytorch_model.pt", "model.pkl", "model.zip", "model.tar.gz", "data.npz", "data.npy", "code.py",
        "model．safetensors", "mоdel.safetensors", "model.safetensors\u200b", "model\u202esrotnesnefas.safetensors",
        "CONFIG.JSON", "con fig.safetensors", "a" * 200 + ".safetensors", "model.safetensors\n", "2_Pooling/a.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["model", "data"])
def test_names_that_no_loader_reads_are_refused_with_the_remedy(name: str, kind: str, keyed: Keyed) -> None:
    with keyed.server.client(keyed.key) as client:
        refused = problem(client.post("/v1/uploads", json=document(declared(name), kind=kind)), 422)
    assert pointers(refused) == {"/files"}
    said = str(refused["errors"])
    # with a suffix that is read it is the rest of the name that is at fault
    if name.endswith(".safetensors"):
        assert "call it by 1 to 128 of A-Z, a-z, 0-9, `_`, `.` and `-`" in said
        assert "not read" not in said
    else:
        assert "unpack archives, convert pickles to safetensors" in said


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (document(), "/files"),
        (document(declared("a.csv"), declared("b.csv")), "/files"),
        (document(declared("a.safetensors"), declared("a.safetensors"), kind="model"), "/files"),
        (document(declared(size_bytes=0)), "/files/0/size_bytes"),
        (document(declared(size_bytes=-1)), "/files/0/size_bytes"),
        (document(declared(size_bytes=2**60)), "/files/0/size_bytes"),
        (document(declared(sha256="0" * 63)), "/files/0/sha256"),
        (document(declared(sha256="A" * 64)), "/files/0/sha256"),
        (document(declared(), kind="code"), "/kind"),
        (document(declared(mode="0755")), "/files/0/mode"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused_by_its_field(
    ours: httpx.Client, body: dict[str, Any], pointer: str
) -> None:
    assert pointers(problem(ours.post("/v1/uploads", json=body), 422)) == {pointer}


def test_names_of_files_that_the_loaders_read_are_taken() -> None:
    names = ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "1_Pooling/config.json")
    assert all(is_read("model", each) for each in names)
    assert not any(is_read("data", each) for each in ("config.json", "train.json", "data.txt.gz"))
    assert is_read("run", f"artifacts/{'a' * 60}/{'b' * 52}.json")
    assert not is_read("run", f"artifacts/{'a' * 60}/{'b' * 53}.json")  # no column takes it
    assert all(is_read("data", each) for each in ("a.jsonl", "a.csv", "a.parquet", "a.txt", "a.safetensors"))


def test_another_tenants_upload_is_answered_as_none(
    keyed: Keyed, ours: httpx.Client, theirs: httpx.Client, fresh: str
) -> None:
    name, random = name_of(ours, fresh), f"/v1/uploads/{'0' * 32}"
    assert ours.put(f"{fresh}/{name}", content=CONTENT).status_code == 200
    ours.post(f"{fresh}:complete")

    def answers(address: str) -> list[tuple[int, Any]]:
        named = DOCUMENT | {"data": {"source": "upload", "id": address.rpartition("/")[2]}}
        asked = [
            theirs.get(address), theirs.head(address), theirs.put(f"{address}/{name}", content=CONTENT),
            theirs.post(f"{address}:complete"), theirs.post(f"{address}:import"),
            theirs.delete(address), theirs.post("/v1/jobs", json=named),
        ]  # fmt: skip
        return [(each.status_code, {**each.json(), "instance": ""} if each.content else None) for each in asked]

    assert answers(fresh) == answers(random)
    assert {status for status, _ in answers(fresh)} == {404, 422}
    assert ours.get(fresh).json()["complete"] is True
    # the same bytes are an upload, and an object, of their own
    other = theirs.post("/v1/uploads", json=document(declared(name))).json()
    assert (other["id"] == fresh.rpartition("/")[2], other["files"][0]["received_bytes"]) == (False, 0)
    with keyed.server.client(keyed.reading_key) as reader:
        assert reader.get(fresh).status_code == 200
        problem(reader.put(f"{fresh}/{name}", content=CONTENT), 403)
        problem(reader.delete(fresh), 403)


def test_bytes_are_reserved_before_any_is_stored(keyed: Keyed, ours: httpx.Client, fresh: str) -> None:
    used = {each.tenant: each.used_bytes for each in usage(keyed.engine)}["ours"]
    assert set_quota(keyed.engine, "ours", used + 1_000)
    try:
        more = document(declared("more.csv", bytes(1_001)))
        refused = problem(ours.post("/v1/uploads", json=more), 429)
        assert "1,001 more do not fit" in str(refused["detail"])
        with reading(keyed.engine) as connection:
            assert not connection.execute(select(upload_files).where(upload_files.c.name == "more.csv")).all()
        # what was reserved may still come
        assert ours.put(f"{fresh}/{name_of(ours, fresh)}", content=CONTENT).status_code == 200
        # of many at once that fit one by one, no more are listed than fit together
        answers: list[int] = []

        def declare(number: int) -> None:
            with keyed.server.client(keyed.key) as client:
                sent = client.post("/v1/uploads", json=document(declared(f"{number}.csv", bytes([number]) * 400)))
                answers.append(sent.status_code)

        threads = [threading.Thread(target=declare, args=(number,)) for number in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert sorted(answers) == [201] * 2 + [429] * 6
        assert {each.tenant: each.used_bytes for each in usage(keyed.engine)}["ours"] == used + 800
    finally:
        set_quota(keyed.engine, "ours", None)


def test_what_is_not_finished_within_a_day_is_swept(keyed: Keyed, ours: httpx.Client, fresh: str) -> None:
    name, upload_id = name_of(ours, fresh), fresh.rpartition("/")[2]
    assert ours.put(f"{fresh}/{name}", **part(0, CONTENT[:1000])).status_code == 200
    folder = ArtifactFolder(keyed.artifacts)
    sweep_uploads(keyed.engine, folder, None)
    assert received(ours, fresh) == 1000
    age(keyed.engine, upload_id, DAY + 60)
    assert sweep_uploads(keyed.engine, folder, None) >= 1
    problem(ours.get(fresh), 404)
    assert not (keyed.artifacts / "uploads" / upload_id).exists()


@pytest.mark.parametrize("block", ["data", "query"])
def test_complete_ones_stay_for_the_days_of_ended_jobs_and_while_a_job_names_them(
    keyed: Keyed, ours: httpx.Client, fresh: str, block: str
) -> None:
    name, upload_id = name_of(ours, fresh), fresh.rpartition("/")[2]
    ours.put(f"{fresh}/{name}", content=CONTENT)
    ours.post(f"{fresh}:complete")
    folder = ArtifactFolder(keyed.artifacts)
    age(keyed.engine, upload_id, 31 * DAY)
    sweep_uploads(keyed.engine, folder, None)
    assert ours.get(fresh).status_code == 200
    age(keyed.engine, upload_id, 31 * DAY)
    source = {"source": "upload", "id": upload_id}
    named = {**DOCUMENT, "data": source}
    if block == "query":
        named = {**DOCUMENT, "kind": "influence", "influence": {"query": source}}
    job = submit(keyed.engine, tenant_of(keyed, keyed.key), parse_document(raw(named)))
    sweep_uploads(keyed.engine, folder, 30)
    assert ours.get(fresh).status_code == 200
    ours.post(f"/v1/jobs/{job.job.id}:cancel")
    age(keyed.engine, upload_id, 31 * DAY)
    sweep_uploads(keyed.engine, folder, 30)
    problem(ours.get(fresh), 404)


def age(engine: Engine, upload_id: str, seconds: float) -> None:
    with writing(engine) as connection:
        mine = update(upload_files).where(upload_files.c.upload_id == upload_id)
        connection.execute(mine.values(changed_at=ledger_now(-seconds)))


def test_below_the_floor_of_the_disk_nothing_is_taken(databases: Databases, tmp_path: Path) -> None:
    url = databases.migrated("sqlite")
    free = shutil.disk_usage(tmp_path).free
    more = {"KRONOSCOPE_KEY_SECRET": KEY_SECRET, "KRONOSCOPE_DISK_FLOOR_BYTES": str(free * 2)}
    engine = open_database(url)
    try:
        key = create_key(engine, KEY_SECRET, "ours", ("read", "submit"))
        with serve(url, tmp_path, more) as server, server.client(key) as client:
            refused = problem(client.post("/v1/uploads", json=document(declared())), 507)
            assert "the disk of the service is full" in str(refused["detail"])
            assert usage(engine, "ours")[0].used_bytes == 0
            # one that was declared while there was room
            caller = verify_key(engine, KEY_SECRET, key)
            assert caller is not None
            uploads = Uploads(engine, ArtifactFolder(tmp_path / "artifacts"), caller.tenant_id)
            upload_id = uploads.declare(parsed(declared()), None)
            problem(client.put(f"/v1/uploads/{upload_id}/weights.safetensors", content=CONTENT), 507)
            assert received(client, f"/v1/uploads/{upload_id}") == 0
    finally:
        engine.dispose()


def test_a_declaration_needs_room_for_the_second_copy_of_its_largest_file(keyed: Keyed, ours: httpx.Client) -> None:
    free = shutil.disk_usage(keyed.artifacts).free
    refused = problem(ours.post("/v1/uploads", json=document(declared(size_bytes=int(free * 0.6)))), 507)
    assert "second copy" in str(refused["detail"])
    # two files are not copied at once
    halves = [declared(f"{each}.safetensors", size_bytes=int(free * 0.3)) for each in (1, 2)]
    taken = ours.post("/v1/uploads", json=document(*halves, declared("config.json", b"{}"), kind="model"))
    assert taken.status_code == 201, taken.text
    assert ours.delete(f"/v1/uploads/{taken.json()['id']}").status_code == 204


def parsed(*files: dict[str, Any]) -> UploadDocument:
    return parse_record(httpx.Request("POST", "http://x", json=document(*files)).content, UploadDocument)


def test_a_file_whose_sender_was_cut_at_its_end_is_stored_by_completing(keyed: Keyed, ours: httpx.Client) -> None:
    """All bytes are staged and no row says that they are stored, as after a kill between the two."""
    tenant = tenant_of(keyed, keyed.key)
    uploads = Uploads(keyed.engine, ArtifactFolder(keyed.artifacts), tenant)
    upload_id = uploads.declare(parsed(declared("cut.safetensors")), None)
    with uploads.writer(upload_id, "cut.safetensors") as file:
        file.write(CONTENT)
    assert ours.post(f"/v1/uploads/{upload_id}:complete").json()["complete"] is True
    assert (keyed.artifacts / object_key(tenant, declared()["sha256"])).read_bytes() == CONTENT
    with pytest.raises(DocumentRefused, match="leave other files out"):
        parsed(declared("cut.zip"))
    ours.delete(f"/v1/uploads/{upload_id}")


def test_declarations_without_end_are_refused(keyed: Keyed, theirs: httpx.Client) -> None:
    uploads = Uploads(keyed.engine, ArtifactFolder(keyed.artifacts), tenant_of(keyed, keyed.other_key))
    for number in range(10):
        files = [declared(f"{number}-{each}.safetensors", b"x") for each in range(499)]
        uploads.declare(
            parse_record(
                httpx.Request("POST", "http://x", json=document(*files, kind="model")).content, UploadDocument
            ),
            None,
        )
    more = document(*(declared(f"more-{each}.safetensors", b"x") for each in range(100)), kind="model")
    refused = problem(theirs.post("/v1/uploads", json=more), 409)
    assert "5,000 unfinished files; complete or delete some" in str(refused["detail"])
    with writing(keyed.engine) as connection:
        listed = select(upload_files.c.name).where(upload_files.c.name.startswith("more-"))
        assert not connection.execute(listed).all()
        connection.execute(upload_files.delete().where(upload_files.c.tenant_id == tenant_of(keyed, keyed.other_key)))


def test_an_imported_run_is_a_job_of_its_sender_alone(
    keyed: Keyed, ours: httpx.Client, theirs: httpx.Client, tmp_path: Path
) -> None:
    """The stored run of an earlier version, with what rows have since."""
    shutil.copytree(RUN, tmp_path / "run")
    results = json.loads((RUN / "results.json").read_text())
    for row in results["layers"]:
        row["record"] |= ADDED
        row["sha256"] = sha256_of({name: value for name, value in row.items() if name != "observed"})
    for each in results["summary"].values():
        each["coverage"]["parts"] = None
    (tmp_path / "run" / "results.json").write_text(json.dumps(results))
    before, used = len(lines(keyed.server.log)), {each.tenant: each.used_bytes for each in usage(keyed.engine)}["ours"]
    hook = ours.post("/v1/webhooks", json={"url": "https://example.com/hook"}).raise_for_status().json()["id"]
    with Client(keyed.server.url, keyed.key) as client:
        job = client.import_run(tmp_path / "run")
        assert (job.imported, job.state) == (True, "succeeded")
        assert len(list(client.layers(job.id))) == len(results["layers"])
        assert [each.type for each in client.events(job.id)] == ["state"]
        assert [each.imported for each in client.jobs() if each.id == job.id] == [True]
        (delivery,) = ours.get(f"/v1/webhooks/{hook}/deliveries").json()["items"]
        assert (delivery["job"], delivery["before"], delivery["after"]) == (job.id, None, "succeeded")
        ours.delete(f"/v1/webhooks/{hook}").raise_for_status()
    told = [(each["action"], each["outcome"], each["job"]) for each in lines(keyed.server.log)[before:]]
    assert ("import", "done", job.id) in told
    # what its rows were made of counts in the quota, as its files do
    sent = [*(tmp_path / "run").glob("*.json"), *(each for each in (tmp_path / "run" / "artifacts").rglob("*"))]
    size = {each.tenant: each.used_bytes for each in usage(keyed.engine)}["ours"] - used
    assert size == sum(each.stat().st_size for each in sent if each.is_file())
    problem(theirs.get(f"/v1/jobs/{job.id}"), 404)
    with reading(keyed.engine) as connection:
        left = connection.execute(select(upload_files.c.name).where(upload_files.c.kind == "run")).all()
        assert left == []


class Short(io.FileIO):
    """A file of which a call takes seven bytes at most, as one of a full or slow disk may."""

    def write(self, content: Any) -> int:
        return super().write(content[:7])


def test_a_chunk_that_is_written_in_part_is_written_on(tmp_path: Path) -> None:
    with Short(tmp_path / "a", "wb") as file:
        write_whole(file, CONTENT[:100])
    assert (tmp_path / "a").read_bytes() == CONTENT[:100]
