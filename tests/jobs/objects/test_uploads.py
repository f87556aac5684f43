"""Uploads over each store: what one machine has taken in parts, another lays out for its jobs."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, update

from catalog.requests.uploads import DeclaredFile, UploadDocument, UploadView
from jobs.errors import UploadRefused
from jobs.objects.artifacts import ArtifactFolder, object_key
from jobs.objects.s3_store import S3Objects
from jobs.objects.uploads import Uploads, sweep_uploads
from jobs.queue.attempt_endings import finish
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.store import request_cancel
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.tables import upload_files
from worker.supervision.staging import FactorsUnavailable, lay_out_uploads

CONTENT = bytes(range(256)) * 500
FILES = {"config.json": b"{}", "1_Pooling/config.json": b"{ }", "model.safetensors": CONTENT}


@pytest.fixture(params=["folder", "bucket"])
def machines(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ArtifactFolder, ArtifactFolder]:
    """The artifacts as the API's machine has them and as a worker's does: one folder, or a bucket and two disks."""
    if request.param == "folder":
        return ArtifactFolder(tmp_path), ArtifactFolder(tmp_path)
    store = S3Objects(request.getfixturevalue("bucket"))
    return ArtifactFolder(tmp_path / "api", store), ArtifactFolder(tmp_path / "worker", store)


def named(claim: Claim, upload_id: str) -> Claim:
    fields = {**vars(claim), "document": {**claim.document, "model": {"source": "upload", "id": upload_id}}}
    return Claim(**fields)


def test_what_one_machine_took_another_lays_out(
    ledger: Engine, held: object, machines: tuple[ArtifactFolder, ...]
) -> None:
    api, worker = machines
    uploads = Uploads(ledger, api, LOCAL_TENANT)
    files = [
        DeclaredFile(name=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in FILES.items()
    ]
    upload_id = uploads.declare(UploadDocument(kind="model", files=tuple(files)), None)
    claim = named(held(), upload_id)  # type: ignore[operator] # the fixture's function
    needed: list[int] = []
    for name, content in FILES.items():
        with uploads.writer(upload_id, name) as part:
            part.write(content)
        uploads.declare(UploadDocument(kind="model", files=tuple(files)), None, needed.append)
    # all that has not come, and the largest file a second time
    assert [each - len(CONTENT) for each in needed] == [3 + len(CONTENT), len(CONTENT), 0]
    with pytest.raises(FactorsUnavailable, match="upload it again"):
        lay_out_uploads(ledger, worker, claim)
    found = uploads.find(upload_id)
    assert found is not None
    asked: list[int] = []
    uploads.complete(found, asked.append)
    assert sorted(asked) == sorted(map(len, FILES.values()))  # room for each that is still to be stored
    place = lay_out_uploads(ledger, worker, claim)["model_path"]
    assert {each.relative_to(place).as_posix(): each.read_bytes() for each in place.rglob("*.*")} == FILES
    with uploads.writer(upload_id, "config.json"), pytest.raises(UploadRefused, match="another request sends"):
        uploads.writer(upload_id, "config.json").__enter__()
    uploads.remove(upload_id)
    with pytest.raises(FactorsUnavailable, match="upload it again"):
        lay_out_uploads(ledger, worker, claim)


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone"])
def test_a_file_that_the_store_has_lost_is_sent_again(ledger: Engine, held: object, tmp_path: Path, harm: str) -> None:
    folder = ArtifactFolder(tmp_path)
    uploads = Uploads(ledger, folder, LOCAL_TENANT)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    files = [DeclaredFile(name=each, size_bytes=len(FILES[each]), sha256=digests[each]) for each in FILES]
    declaration = UploadDocument(kind="model", files=tuple(files))
    upload_id = uploads.declare(declaration, None)
    for name, content in FILES.items():
        with uploads.writer(upload_id, name) as part:
            part.write(content)
    uploads.complete(look(uploads, upload_id))
    claim = named(held(), upload_id)  # type: ignore[operator] # the fixture's function
    stored = tmp_path / object_key(LOCAL_TENANT, digests["model.safetensors"])
    stored.chmod(0o644)
    harmed = {"flipped": b"\xff" + CONTENT[1:], "cut": CONTENT[:-1], "gone": None}[harm]
    stored.unlink() if harmed is None else stored.write_bytes(harmed)
    with writing(ledger) as connection:
        connection.execute(update(upload_files).values(changed_at=ledger_now(-3 * 86_400)))
    with pytest.raises(FactorsUnavailable) as refused:
        lay_out_uploads(ledger, folder, claim)
    failure = refused.value.failure
    assert (failure.category, failure.code, failure.pointer) == ("fatal", "artifact_damaged", "/model/id")
    assert all(each in failure.message for each in ("model.safetensors", upload_id, "send it again"))
    # the same declaration finds it unfinished, with the other files as they are, and no sweep takes those
    assert uploads.declare(declaration, None) == upload_id
    uploads.recheck(upload_id)
    sweep_uploads(ledger, folder, 30)
    again = look(uploads, upload_id)
    come = {each.name: each.received_bytes for each in again.files}
    assert (again.complete, come) == (False, {**{name: len(FILES[name]) for name in FILES}, "model.safetensors": 0})
    with pytest.raises(UploadRefused, match=r"0 of the 128,000 bytes of model\.safetensors have come"):
        uploads.complete(again)
    with uploads.writer(upload_id, "model.safetensors") as part:
        part.write(CONTENT)
    uploads.complete(look(uploads, upload_id))
    assert (lay_out_uploads(ledger, folder, claim)["model_path"] / "model.safetensors").read_bytes() == CONTENT


def look(uploads: Uploads, upload_id: str) -> UploadView:
    found = uploads.find(upload_id)
    assert found is not None
    return found


def test_the_query_of_an_estimate_is_laid_out_and_what_is_gone_is_not_completed(
    ledger: Engine, held: object, tmp_path: Path
) -> None:
    folder = ArtifactFolder(tmp_path)
    uploads = Uploads(ledger, folder, LOCAL_TENANT)
    file = DeclaredFile(name="a.csv", size_bytes=7, sha256=hashlib.sha256(b"text\na\n").hexdigest())
    upload_id = uploads.declare(UploadDocument(kind="data", files=(file,)), None)
    staged = tmp_path / "uploads" / upload_id / "a.csv"
    for gone in (True, False):
        with uploads.writer(upload_id, "a.csv") as part:
            part.write(b"text\na\n")
        found = uploads.find(upload_id)
        assert found is not None
        if gone:  # swept since it was looked at
            staged.unlink()
            with pytest.raises(UploadRefused, match=r"what had come of a\.csv is gone"):
                uploads.complete(found)
        else:
            uploads.complete(found)
    claim = held()  # type: ignore[operator] # the fixture's function
    asked = {"kind": ["influence"], "influence": {"query": {"source": "upload", "id": upload_id}}}
    estimate = Claim(**{**vars(claim), "kinds": ("estimate",), "document": {**claim.document, **asked}})
    assert (lay_out_uploads(ledger, folder, estimate)["query_path"] / "a.csv").read_bytes() == b"text\na\n"


def test_the_model_of_a_chain_of_extensions_is_kept_while_one_of_them_is_open(
    ledger: Engine, held: Any, queued: Any, tmp_path: Path
) -> None:
    folder = ArtifactFolder(tmp_path)
    uploads = Uploads(ledger, folder, LOCAL_TENANT)
    file = DeclaredFile(name="config.json", size_bytes=2, sha256=hashlib.sha256(b"{}").hexdigest())
    upload_id = uploads.declare(UploadDocument(kind="model", files=(file,)), None)
    with uploads.writer(upload_id, "config.json") as part:
        part.write(b"{}")
    found = uploads.find(upload_id)
    assert found is not None
    uploads.complete(found)
    with writing(ledger) as connection:
        connection.execute(update(upload_files).values(changed_at=ledger_now(-3 * 86_400)))
    first = held(model={"source": "upload", "id": upload_id})
    bare = {"kind": ["factors"], "model": None, "task": None}
    second = held(**bare, extends={"job": first.job_id})
    for each in (first, second):
        finish(ledger, each)
    third = queued(**bare, extends={"job": second.job_id})
    sweep_uploads(ledger, folder, 2)
    assert uploads.find(upload_id) is not None
    request_cancel(ledger, LOCAL_TENANT, third)
    assert sweep_uploads(ledger, folder, 2) == 1
    assert uploads.find(upload_id) is None
