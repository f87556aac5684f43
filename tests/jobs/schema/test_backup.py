"""A backup as docs/operations.md makes one, restored into another database and verified there."""

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from catalog.frames import ArtifactWritten
from jobs.errors import LeaseLost
from jobs.objects.artifacts import ArtifactFolder
from jobs.queue.attempt_endings import finish
from jobs.queue.attempt_writes import write_artifact, write_layer
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.results import list_artifacts
from jobs.repository.store import list_jobs, read_job
from jobs.schema.database import open_database, require_current_schema
from tests import servers

DOCUMENTED = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text()
RESTORE = ("--no-owner", "--single-transaction")
DIGESTS = "SELECT sha256, uri FROM artifacts"


@pytest.fixture
def dialect() -> str:
    """What is restored is a dump of PostgreSQL."""
    return "postgresql"


def program(name: str) -> str:
    """One of PostgreSQL's own, of the server's version where that is here."""
    server = servers.find_postgres()
    beside = None if server is None else server.with_name(name)
    found = str(beside) if beside is not None and beside.exists() else shutil.which(name)
    assert found is not None, f"{name} is missing: install PostgreSQL's client programs"
    return found


def run(*command: str, stdin: bytes = b"") -> bytes:
    return subprocess.run(command, input=stdin, capture_output=True, timeout=300, check=True).stdout


def plain_url(url: str) -> str:
    return url.replace("+psycopg", "", 1)


def verified(url: str, root: Path) -> tuple[int, str]:
    """Exit code and complaints of ``sha256sum``, fed with what the database says of every file."""
    listed = run(program("psql"), plain_url(url), "-At", "-F", "  ", "-c", DIGESTS)
    done = subprocess.run(
        ["sha256sum", "--check", "--quiet"], input=listed, cwd=root, capture_output=True, timeout=300, check=False
    )
    return done.returncode, done.stdout.decode()


def finished_job(ledger: Engine, folder: ArtifactFolder, held: Callable[..., Claim], layer_frame: Any) -> Claim:
    attempt = held()
    for ordinal in range(3):
        raw = f"spectrum {ordinal}".encode()
        name, digest = f"spectra/{ordinal}.json", hashlib.sha256(raw).hexdigest()
        path = folder.attempt_dir(attempt.job_id, attempt.fence) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)
        uri = folder.publish(attempt.tenant_id, attempt.job_id, attempt.fence, name, sha256=digest, size_bytes=len(raw))
        frame = ArtifactWritten(name=name, sha256=digest, size_bytes=len(raw), media_type="application/json")
        write_artifact(ledger, attempt, frame, uri)
        write_layer(ledger, attempt, layer_frame(ordinal, trace=0.5 + ordinal))
    finish(ledger, attempt)
    return attempt


def test_a_restored_backup_holds_every_job_and_proves_every_file(
    ledger: Engine,
    ledger_url: str,
    databases: Any,
    held: Callable[..., Claim],
    queued: Callable[..., str],
    layer_frame: Any,
    tmp_path: Path,
) -> None:
    folder = ArtifactFolder(tmp_path / "artifacts")
    done = finished_job(ledger, folder, held, layer_frame)
    waiting, under_way = queued(), held()
    before = list_jobs(ledger, LOCAL_TENANT).items

    dump = run(program("pg_dump"), "--format=custom", plain_url(ledger_url))
    copy = tmp_path / "copy"
    folder.clear_attempt(done.job_id, done.fence)
    shutil.copytree(folder.root, copy)

    restored_url = databases.empty("postgresql")
    run(program("pg_restore"), *RESTORE, "--dbname", plain_url(restored_url), stdin=dump)
    restored = open_database(restored_url)
    try:
        require_current_schema(restored)
        assert list_jobs(restored, LOCAL_TENANT).items == before
        for artifact in list_artifacts(restored, LOCAL_TENANT, done.job_id):
            ArtifactFolder(copy).verify(artifact)
        assert verified(restored_url, copy) == (0, "")

        assert claim(restored, waiting, "worker-2", "token", 45) is not None
        # who held a job when the dump was made holds it still: all workers are stopped before a restore
        write_layer(restored, under_way, layer_frame(0))
        finish(restored, under_way)
        assert read_job(restored, LOCAL_TENANT, under_way.job_id).state == "succeeded"  # type: ignore[union-attr]
        with pytest.raises(LeaseLost):
            write_layer(restored, under_way, layer_frame(1))
    finally:
        restored.dispose()

    files = [copy / artifact.uri for artifact in list_artifacts(ledger, LOCAL_TENANT, done.job_id)]
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"!")
    files[2].unlink()
    code, complaints = verified(restored_url, copy)
    assert code == 1
    assert complaints.count("FAILED") == 2
    assert f"{files[0].name}: FAILED\n" in complaints
    assert f"{files[2].name}: FAILED open or read\n" in complaints


def test_the_commands_tried_here_are_the_documented_ones() -> None:
    for words in (f'-At -F "  " -c "{DIGESTS}"', "sha256sum --check --quiet", " ".join(RESTORE), "--format=custom"):
        assert words in DOCUMENTED
