"""What a tenant's files take is counted once each, and no file is kept that does not fit."""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import OperationalError

from catalog.frames import ArtifactWritten
from catalog.record import canonical_json
from catalog.requests.uploads import DeclaredFile, UploadDocument
from jobs.codec import parse_document
from jobs.errors import QueueFull, QuotaExceeded
from jobs.objects.artifacts import ArtifactFolder, object_key
from jobs.objects.uploads import Uploads
from jobs.queue.attempt_endings import finish
from jobs.queue.attempt_writes import write_artifact
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.store import delete_job, request_cancel
from jobs.repository.submission import submit
from jobs.schema.database import reading
from jobs.schema.tables import jobs, tenants
from jobs.tenancy.quotas import Usage, lock_usage, require_place, require_room, require_room_for, set_quota, usage
from jobs.tenancy.tenants import main, read_bytes
from tests.api.seeding import raw

SERIES = {
    "kind": ["spectrum"],
    "model": {"source": "directory", "path": "/models/a"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
    "series": {"model": ["/models/a", "/models/b", "/models/c"], "overlaps": False},
}
"""Four jobs."""


def listed(ledger: Engine, claim: Claim, name: str, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    frame = ArtifactWritten(name=name, sha256=digest, size_bytes=len(content), media_type="application/json")
    write_artifact(ledger, claim, frame, object_key(claim.tenant_id, digest))
    return digest


def test_equal_files_are_counted_once_and_deleting_frees_them(ledger: Engine, held: Any) -> None:
    first, second = held(), held()
    listed(ledger, first, "a.json", bytes(100))
    listed(ledger, first, "b.json", bytes(100))
    listed(ledger, second, "c.json", bytes(100))
    listed(ledger, second, "d.json", bytes(30))
    assert usage(ledger, "local") == (Usage(tenant="local", used_bytes=130, quota_bytes=None),)
    finish(ledger, second)
    delete_job(ledger, LOCAL_TENANT, second.job_id)
    assert usage(ledger)[0].used_bytes == 100


def test_equal_files_of_an_upload_count_each_until_they_are_stored(ledger: Engine, tmp_path: Path) -> None:
    content = bytes(100)
    digest = hashlib.sha256(content).hexdigest()
    names = ("model-1.safetensors", "model-2.safetensors")
    files = tuple(DeclaredFile(name=name, size_bytes=100, sha256=digest) for name in names)
    uploads = Uploads(ledger, ArtifactFolder(tmp_path), LOCAL_TENANT)
    with pytest.raises(QuotaExceeded, match="200 more do not fit"):
        uploads.declare(UploadDocument(kind="model", files=files), 199)
    upload_id = uploads.declare(UploadDocument(kind="model", files=files), 200)
    assert usage(ledger)[0].used_bytes == 200
    for name in names:
        with uploads.writer(upload_id, name) as part:
            part.write(content)
    found = uploads.find(upload_id)
    assert found is not None
    uploads.complete(found)
    assert usage(ledger)[0].used_bytes == 100


def test_what_fits_and_what_is_there_already_may_be_kept(ledger: Engine, held: Any) -> None:
    digest = listed(ledger, held(), "a.json", bytes(100))
    other = hashlib.sha256(b"other").hexdigest()
    assert set_quota(ledger, "local", 150)
    require_room(ledger, LOCAL_TENANT)
    require_room_for(ledger, LOCAL_TENANT, other, 50)
    require_room_for(ledger, LOCAL_TENANT, digest, 100)
    with pytest.raises(QuotaExceeded, match="take 100 of the 150 bytes that they may and 51 more do not fit"):
        require_room_for(ledger, LOCAL_TENANT, other, 51)
    assert set_quota(ledger, "local", 100)
    with pytest.raises(QuotaExceeded, match="take 100 of the 100 bytes"):
        require_room(ledger, LOCAL_TENANT)
    assert set_quota(ledger, "local", None)
    require_room(ledger, LOCAL_TENANT)
    require_room_for(ledger, LOCAL_TENANT, other, 10**15)


def test_the_command_sets_and_shows(
    ledger: Engine, ledger_url: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, held: Any
) -> None:
    monkeypatch.setenv("KRONOSCOPE_DATABASE_URL", ledger_url)
    listed(ledger, held(), "a.json", bytes(1500))
    assert main(["set", "local", "--bytes", "50GB"]) == 0
    assert capsys.readouterr().out == "local: 1,500 bytes, of 50,000,000,000 bytes; 0 device-seconds\n"
    assert main(["set", "local", "--no-bytes"]) == 0
    assert main(["show"]) == 0
    assert capsys.readouterr().out == "local: 1,500 bytes, no limit; 0 device-seconds\n" * 2
    for unknown in (["show", "nobody"], ["set", "nobody", "--bytes", "1"]):
        assert main(unknown) == 2
        assert "no tenant of that name" in capsys.readouterr().err


@pytest.mark.parametrize("dialect", ["postgresql"])  # SQLite has one lock
def test_a_declaration_holds_up_no_row_that_refers_to_the_tenant(dialect: str, ledger: Engine) -> None:
    """The lock that a foreign key takes is had at once, and that of another declaration is not."""
    row = select(tenants.c.id).where(tenants.c.id == LOCAL_TENANT)
    with ledger.begin() as declaring, ledger.connect() as other:
        lock_usage(declaring, LOCAL_TENANT, None)
        assert other.execute(row.with_for_update(read=True, key_share=True, nowait=True)).scalar_one() == LOCAL_TENANT
        with pytest.raises(OperationalError, match="could not obtain lock"):
            other.execute(row.with_for_update(key_share=True, nowait=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("1000", 1000), ("50GB", 50 * 10**9), ("1.5TiB", 3 * 2**39), ("10 MB", 10**7), ("0.25kB", 250)],
)
def test_bytes_are_read_as_they_are_written(text: str, expected: int) -> None:
    assert read_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "GB", "1e9", "1PB", "1.GB", "50 gigabytes", "ten", "1.2345GB"])
def test_what_is_no_number_of_bytes_is_said(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write one like 50GB"):
        read_bytes(text)


def test_queued_jobs_are_capped_by_number_and_by_the_text_of_their_documents(ledger: Engine) -> None:
    document = parse_document(raw())
    job = submit(ledger, LOCAL_TENANT, document, most=(1, 1)).job
    text = len(canonical_json(job.document))
    with reading(ledger) as connection:
        require_place(connection, LOCAL_TENANT, (2, 2 * text))
        require_place(connection, "another tenant", (1, 1))
        with pytest.raises(QueueFull, match="1 of your jobs wait, of 1 that may"):
            require_place(connection, LOCAL_TENANT, (1, 2 * text))
        with pytest.raises(QueueFull, match=f"have {text:,} bytes, of {text:,} that"):
            require_place(connection, LOCAL_TENANT, (2, text))
    request_cancel(ledger, LOCAL_TENANT, job.id)
    with reading(ledger) as connection:
        require_place(connection, LOCAL_TENANT, (1, 1))


@pytest.mark.parametrize("many", [1, 4])
def test_places_are_taken_once_however_many_submit_at_once(ledger: Engine, at_once: Any, many: int) -> None:
    """Each saw the places free that the others took: eight series at once stored eight times what may wait."""
    asked = raw() if many == 1 else json.dumps(SERIES).encode()

    def act(_: int) -> Any:
        return submit(ledger, LOCAL_TENANT, parse_document(asked), most=(2 * many, 10**9))

    answers = at_once(8, act)
    assert sorted(type(each).__name__ for each in answers) == ["QueueFull"] * 6 + ["Submitted"] * 2
    with reading(ledger) as connection:
        assert connection.execute(select(func.count()).select_from(jobs)).scalar_one() == 2 * many


def test_repeated_requests_at_once_get_the_job_that_took_the_last_place(ledger: Engine, at_once: Any) -> None:
    document = parse_document(raw())
    answers = at_once(6, lambda _: submit(ledger, LOCAL_TENANT, document, "key", most=(1, 10**9)))
    assert len({each.job.id for each in answers}) == 1
    assert sum(each.created for each in answers) == 1
    assert submit(ledger, LOCAL_TENANT, document, estimate=True, most=(2, 10**9)).created
    with pytest.raises(QueueFull, match="2 of your jobs wait, of 2 that may"):
        submit(ledger, LOCAL_TENANT, document, estimate=True, most=(2, 10**9))
