"""File reads: what many downloads share, and what they leave to others."""

import asyncio
import hashlib
import threading
import time
from pathlib import Path
from typing import BinaryIO

import pytest
from starlette.concurrency import run_in_threadpool

from api.requests import file_reads
from api.requests.file_reads import FileReads
from jobs.errors import ArtifactDamaged
from jobs.objects.artifacts import ArtifactFolder, object_key
from jobs.objects.local_store import require_digest
from jobs.records import Artifact

CONTENT = bytes(range(256)) * 100
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def stored(folder: Path) -> tuple[ArtifactFolder, Artifact]:
    artifacts = ArtifactFolder(folder / "artifacts")
    source = folder / "source"
    source.write_bytes(CONTENT)
    key = object_key("tenant", SHA256)
    artifacts.store.put(key, source, sha256=SHA256, size_bytes=len(CONTENT))
    return artifacts, Artifact(
        job_id="job", name="a", sha256=SHA256, size_bytes=len(CONTENT), media_type="application/octet-stream", uri=key
    )


def test_many_parts_of_a_file_take_no_thread_of_a_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts, artifact = stored(tmp_path)
    begun, ended, verified = threading.Event(), threading.Event(), []

    def slow(file: BinaryIO, sha256: str, *, called: str) -> None:
        verified.append(called)
        begun.set()
        assert ended.wait(30)
        require_digest(file, sha256, called=called)

    monkeypatch.setattr(file_reads, "require_digest", slow)

    async def ask() -> float:
        reads = FileReads(artifacts=artifacts)
        readers = [asyncio.create_task(reads.open_verified(artifact, first)) for first in range(100)]
        assert await asyncio.to_thread(begun.wait, 30)
        began = time.monotonic()
        await run_in_threadpool(lambda: None)
        waited = time.monotonic() - began
        ended.set()
        for first, reader in enumerate(readers):
            with await reader as file:
                assert await reads.read(file, 10, hashlib.sha256()) == CONTENT[first : first + 10]
        return waited

    assert asyncio.run(ask()) < 5
    assert len(verified) == 1


def test_a_damaged_file_is_refused_to_each_reader(tmp_path: Path) -> None:
    artifacts, artifact = stored(tmp_path)
    (path,) = (path for path in (tmp_path / "artifacts").rglob("*") if path.is_file() and path.stat().st_size)
    path.chmod(0o600)
    path.write_bytes(CONTENT[:-1] + b"x")

    async def ask() -> list[BinaryIO | BaseException]:
        reads = FileReads(artifacts=artifacts)
        return await asyncio.gather(*(reads.open_verified(artifact, 0) for _ in range(3)), return_exceptions=True)

    assert all(isinstance(found, ArtifactDamaged) for found in asyncio.run(ask()))
