"""Copied checkpoints: the newest whole one is found, whatever was going on when its machine was lost."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.analyses.spectra import search_checkpoints
from engine.collection import checkpoints
from jobs.errors import ArtifactDamaged, StoreUnavailable
from jobs.objects.local_store import LocalObjects
from jobs.objects.object_store import ObjectStore
from jobs.objects.s3_store import S3Objects
from jobs.objects.scratch import Scratch
from jobs.objects.scratch_store import MANIFEST, MANIFESTS, ScratchStore
from jobs.schema.identifiers import new_id
from worker.execution import attempt

JOB = new_id()


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "folder":
        return LocalObjects(tmp_path / "store")
    return S3Objects(request.getfixturevalue("bucket"))


def checkpoint(folder: Path, serial: int, **files: bytes) -> None:
    """As the engine writes one: new files, the manifest in place of the one before, and then the old files go."""
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    old = [path for path in (folder / "checkpoint").iterdir() if path.suffix == ".safetensors"]
    for name, content in files.items():
        (folder / "checkpoint" / f"{serial}.{name}.safetensors").write_bytes(content)
    part = folder / "checkpoint" / ".part-manifest"
    part.write_text(json.dumps({"serial": serial}))
    part.replace(folder / MANIFEST)
    for path in old:
        path.unlink()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_manifests_are_those_that_the_engine_writes_and_a_later_attempt_adopts() -> None:
    assert MANIFEST == checkpoints.MANIFEST
    assert MANIFESTS == (MANIFEST, *search_checkpoints.MANIFESTS) == attempt.MANIFESTS


def test_the_newest_checkpoint_comes_back_and_the_one_before_is_dropped(store: ObjectStore, tmp_path: Path) -> None:
    here, copies = tmp_path / "here", ScratchStore(store)
    assert not copies.save(JOB, 1, here)
    (here / "waiting").mkdir(parents=True)
    (here / "waiting" / "0.G").write_bytes(b"waits all along")
    (here / "waiting" / ".part-torn").write_bytes(b"torn")
    for serial in (1, 2):
        checkpoint(here, serial, a=b"sums %d" % serial, b=bytes(10))
        assert copies.save(JOB, 1, here)
    # index, manifest, what waits, two files of sums
    assert len(list(store.listing("scratch/"))) == 5
    expected = contents(here)
    del expected["waiting/.part-torn"]
    assert copies.newest(JOB, 2) == 1
    copies.fetch(JOB, 1, tmp_path / "there")
    assert contents(tmp_path / "there") == expected
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".part-")] == []


def test_a_link_in_a_jobs_folder_is_not_copied(store: ObjectStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"password of the database")
    here, copies = tmp_path / "here", ScratchStore(store)
    checkpoint(here, 1, a=b"sums")
    expected = contents(here)
    (here / "link").symlink_to(secret)
    (here / "checkpoint" / "link.safetensors").symlink_to(secret)
    (here / "folder").symlink_to(tmp_path)
    os.mkfifo(here / "pipe")
    assert copies.save(JOB, 1, here)
    copies.fetch(JOB, 1, tmp_path / "there")
    assert contents(tmp_path / "there") == expected
    for each in store.listing("scratch/"):
        with store.open(each.key, each.size_bytes) as file:
            assert b"password" not in file.read()


class CutOff:
    """A store whose writer is lost after so many requests that change something."""

    def __init__(self, store: ObjectStore, after: int) -> None:
        self._store = store
        self._left = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, source: Path, *, sha256: str, size_bytes: int) -> None:
        self._count()
        self._store.put(key, source, sha256=sha256, size_bytes=size_bytes)

    def delete(self, key: str) -> bool:
        self._count()
        return self._store.delete(key)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise StoreUnavailable("the machine is gone")


def test_wherever_a_copy_is_cut_off_a_whole_one_stands(store: ObjectStore, tmp_path: Path) -> None:
    here = tmp_path / "here"
    checkpoint(here, 1, a=b"first")
    ScratchStore(store).save(JOB, 1, here)
    first = contents(here)
    checkpoint(here, 2, a=b"second", b=b"more")
    second = contents(here)
    seen = []
    for after in range(6):
        lost: Any = CutOff(store, after)
        with contextlib.suppress(StoreUnavailable):
            ScratchStore(lost).save(JOB, 1, here)
        ScratchStore(store).fetch(JOB, 1, tmp_path / "there")
        found = contents(tmp_path / "there")
        assert found in (first, second)
        seen.append(found == second)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (False, True)


def test_damage_is_found_and_nothing_is_brought(store: ObjectStore, tmp_path: Path) -> None:
    here = tmp_path / "here"
    checkpoint(here, 1, a=b"sums")
    copies = ScratchStore(store)
    copies.save(JOB, 1, here)
    for each in store.listing("scratch/"):
        if not each.key.endswith("index.json"):
            store.delete(each.key)
    with pytest.raises(ArtifactDamaged):
        copies.fetch(JOB, 1, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_later_attempt_replaces_an_earlier_ones_copy_and_clearing_leaves_nothing(
    store: ObjectStore, tmp_path: Path
) -> None:
    other = new_id()
    for job_id, fence in ((JOB, 1), (JOB, 3), (other, 1)):
        checkpoint(tmp_path / "here", fence, a=b"of %d" % fence)
        ScratchStore(store).save(job_id, fence, tmp_path / "here")
    copies = ScratchStore(store)
    assert (copies.newest(JOB, 9), copies.newest(JOB, 3), copies.newest(JOB, 1)) == (3, None, None)
    assert copies.jobs() == {JOB, other}
    copies.clear(JOB)
    assert copies.jobs() == {other}


def test_what_is_here_is_not_brought_and_what_is_later_elsewhere_is(store: ObjectStore, tmp_path: Path) -> None:
    first, second = (Scratch(tmp_path / name, ScratchStore(store)) for name in ("first", "second"))
    checkpoint(first.attempt_folder(JOB, 1), 1, a=b"copied")
    ScratchStore(store).save(JOB, 1, first.attempt_folder(JOB, 1))
    checkpoint(first.attempt_folder(JOB, 1), 2, a=b"later than its copy")
    first.fetch(JOB, 2)
    assert (first.attempt_folder(JOB, 1) / "checkpoint" / "2.a.safetensors").exists()
    second.fetch(JOB, 2)
    assert [path.name for path in second.before(JOB, 2)] == ["1"]
    assert (second.attempt_folder(JOB, 1) / "checkpoint" / "1.a.safetensors").read_bytes() == b"copied"
    second.clear(JOB)
    assert (second.jobs(), first.jobs()) == ([], [JOB])
    assert list(store.listing("scratch/")) == []
