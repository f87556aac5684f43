"""Files are listed only as what they are, kept once, and never reached through anything but a plain path."""

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from catalog.frames import ArtifactWritten
from jobs.errors import ArtifactDamaged
from jobs.objects.artifacts import ArtifactFolder, object_key
from jobs.objects.local_store import LocalObjects
from jobs.objects.object_store import MARKS
from jobs.queue.attempt_endings import finish
from jobs.queue.attempt_writes import write_artifact
from jobs.records import LOCAL_TENANT, Artifact, Claim
from jobs.repository.results import list_artifacts
from jobs.repository.store import delete_job
from jobs.retention.object_sweep import delete_unlisted, sweep_attempts, sweep_objects
from jobs.schema.identifiers import new_id

BYTES = b"spectrum"
SHA256 = hashlib.sha256(BYTES).hexdigest()
GRACE = 3600


@pytest.fixture
def folder(tmp_path: Path) -> ArtifactFolder:
    return ArtifactFolder(tmp_path / "artifacts")


def staged(folder: ArtifactFolder, job_id: str, fence: int, name: str, content: bytes = BYTES) -> Path:
    path = folder.attempt_dir(job_id, fence) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def written(
    folder: ArtifactFolder, job_id: str, fence: int = 1, name: str = "spectra/0.json", tenant: str = LOCAL_TENANT
) -> Artifact:
    staged(folder, job_id, fence, name)
    uri = folder.publish(tenant, job_id, fence, name, sha256=SHA256, size_bytes=len(BYTES))
    return Artifact(
        job_id=job_id, name=name, sha256=SHA256, size_bytes=len(BYTES), media_type="application/json", uri=uri
    )


def listed(ledger: Engine, folder: ArtifactFolder, claim: Claim, name: str, content: bytes = BYTES) -> str:
    """Publish and list, as a worker does; returns the key."""
    staged(folder, claim.job_id, claim.fence, name, content)
    digest = hashlib.sha256(content).hexdigest()
    uri = folder.publish(claim.tenant_id, claim.job_id, claim.fence, name, sha256=digest, size_bytes=len(content))
    frame = ArtifactWritten(name=name, sha256=digest, size_bytes=len(content), media_type="application/json")
    write_artifact(ledger, claim, frame, uri)
    return uri


def age(folder: ArtifactFolder, key: str, seconds: float = 2 * GRACE) -> None:
    path = folder.root / key
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def keys(folder: ArtifactFolder) -> set[str]:
    return {each.key for each in folder.objects()}


def test_a_published_file_is_served_and_found_whole(folder: ArtifactFolder) -> None:
    artifact = written(folder, new_id())
    assert artifact.uri == f"objects/{LOCAL_TENANT}/{SHA256[:2]}/{SHA256}"
    with folder.open(artifact) as file:
        assert file.read() == BYTES
    with folder.open(artifact, 4) as file:
        assert file.read() == BYTES[4:]
    folder.verify(artifact)


def test_equal_bytes_are_kept_once_for_each_tenant(folder: ArtifactFolder) -> None:
    first, second = written(folder, new_id()), written(folder, new_id(), 3, "other.json")
    foreign = written(folder, new_id(), tenant="another")
    assert first.uri == second.uri != foreign.uri
    assert keys(folder) == {first.uri, foreign.uri}
    assert next(iter(folder.objects())).size_bytes == len(BYTES)


def test_what_was_staged_goes_and_what_was_published_stays(folder: ArtifactFolder) -> None:
    artifact = written(folder, new_id())
    folder.clear_attempt(artifact.job_id, 1)
    assert not (folder.root / artifact.job_id).exists()
    folder.verify(artifact)


def test_attempts_never_share_a_folder(folder: ArtifactFolder) -> None:
    job_id = new_id()
    assert folder.attempt_dir(job_id, 1) != folder.attempt_dir(job_id, 2)


@pytest.mark.parametrize(
    ("sha256", "size"),
    [("0" * 64, len(BYTES)), (SHA256, len(BYTES) + 1), (SHA256, 0)],
    ids=["digest", "longer", "empty"],
)
def test_a_file_that_is_not_as_declared_is_not_kept(folder: ArtifactFolder, sha256: str, size: int) -> None:
    job_id = new_id()
    staged(folder, job_id, 1, "spectra/0.json")
    with pytest.raises(ArtifactDamaged):
        folder.publish(LOCAL_TENANT, job_id, 1, "spectra/0.json", sha256=sha256, size_bytes=size)
    assert keys(folder) == set()


def test_a_declared_digest_that_is_none_leads_nowhere(folder: ArtifactFolder) -> None:
    for digest in ("", "../../../etc", SHA256.upper(), f"{SHA256}/x"):
        with pytest.raises(ArtifactDamaged):
            object_key(LOCAL_TENANT, digest)
    with pytest.raises(ArtifactDamaged):
        object_key("../local", SHA256)


def test_one_flipped_byte_is_found_and_mended_by_the_next_to_publish_it(folder: ArtifactFolder) -> None:
    artifact = written(folder, new_id())
    folder.clear_attempt(artifact.job_id, 1)
    (folder.root / artifact.uri).write_bytes(b"spectruM")
    with pytest.raises(ArtifactDamaged, match="SHA-256"):
        folder.verify(artifact)
    target = folder.root / "fetched"
    with pytest.raises(ArtifactDamaged, match="SHA-256"):
        folder.fetch(artifact, target)
    assert not target.exists()
    written(folder, new_id())
    folder.verify(artifact)
    folder.fetch(artifact, target)
    assert target.read_bytes() == BYTES


def test_a_cut_file_is_not_served(folder: ArtifactFolder) -> None:
    artifact = written(folder, new_id())
    (folder.root / artifact.uri).write_bytes(BYTES[:3])
    with pytest.raises(ArtifactDamaged, match="3 bytes, 8 were declared"):
        folder.open(artifact)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/etc/passwd", "a/../b", "a//b", "a\\b", ".hidden", "a\0b", "a/" * 9 + "b", "é", "a\n"],
)
def test_names_that_are_no_plain_paths_are_refused(folder: ArtifactFolder, name: str) -> None:
    with pytest.raises(ArtifactDamaged, match="plain path"):
        folder.publish(LOCAL_TENANT, new_id(), 1, name, sha256=SHA256, size_bytes=8)


def test_links_pipes_and_folders_are_no_artifacts(folder: ArtifactFolder, tmp_path: Path) -> None:
    job_id = new_id()
    here = folder.attempt_dir(job_id, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(BYTES)
    (here / "link").symlink_to(outside / "file")
    (here / "linked").symlink_to(outside)
    os.mkfifo(here / "pipe")
    (here / "folder").mkdir()
    for name in ("link", "linked/file", "pipe", "folder", "absent"):
        with pytest.raises(ArtifactDamaged):
            folder.publish(LOCAL_TENANT, job_id, 1, name, sha256=SHA256, size_bytes=8)
    assert keys(folder) == set()
    assert (outside / "file").read_bytes() == BYTES


def test_a_link_in_the_store_is_not_followed(folder: ArtifactFolder, tmp_path: Path) -> None:
    artifact = written(folder, new_id())
    (tmp_path / "elsewhere").write_bytes(BYTES)
    (folder.root / artifact.uri).unlink()
    (folder.root / artifact.uri).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactDamaged, match="link"):
        folder.open(artifact)


def test_removing_a_job_removes_all_that_it_staged_and_no_other(folder: ArtifactFolder) -> None:
    gone, kept = new_id(), new_id()
    for fence in (1, 2):
        staged(folder, gone, fence, "a.json")
    stays = staged(folder, kept, 1, "a.json")
    folder.remove(gone)
    folder.remove(gone)
    assert not (folder.root / gone).exists()
    assert stays.exists()
    with pytest.raises(ArtifactDamaged):
        folder.remove("..")


def test_a_root_behind_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    folder = ArtifactFolder(tmp_path / "linked")
    folder.verify(written(folder, new_id()))


def test_what_an_attempt_was_given_goes_with_it(ledger: Engine, folder: ArtifactFolder, held: Any) -> None:
    claim = held()
    for clear in (folder.clear_attempt, lambda *_: finish(ledger, claim) and sweep_attempts(ledger, folder, -1)):
        folder.attempt_dir(claim.job_id, claim.fence)
        (folder.new_view(claim.job_id, claim.fence, None) / "factors").mkdir()
        # another question
        assert list(folder.new_view(claim.job_id, claim.fence, None).iterdir()) == []
        clear(claim.job_id, claim.fence)
        assert not (folder.root / claim.job_id).exists()


def test_a_row_of_an_earlier_version_stays_readable(ledger: Engine, folder: ArtifactFolder, held: Any) -> None:
    claim = held()
    path = staged(folder, claim.job_id, claim.fence, "old.json")
    stray = staged(folder, claim.job_id, claim.fence, "stray.json")
    uri = path.relative_to(folder.root).as_posix()
    frame = ArtifactWritten(name="old.json", sha256=SHA256, size_bytes=len(BYTES), media_type="application/json")
    write_artifact(ledger, claim, frame, uri)
    finish(ledger, claim)
    (artifact,) = list_artifacts(ledger, LOCAL_TENANT, claim.job_id)
    assert sweep_attempts(ledger, folder, -1) == 1
    assert not stray.exists()
    folder.verify(artifact)
    deleted = delete_job(ledger, LOCAL_TENANT, claim.job_id)
    folder.remove(claim.job_id)
    assert delete_unlisted(ledger, folder, deleted, GRACE) == 0
    assert not path.exists()


def test_deleting_a_job_removes_what_no_other_job_lists(ledger: Engine, folder: ArtifactFolder, held: Any) -> None:
    first, second = held(), held()
    shared = listed(ledger, folder, first, "shared.json")
    assert listed(ledger, folder, second, "other-name.json") == shared
    own = listed(ledger, folder, first, "own.json", b"mine alone")
    young = listed(ledger, folder, first, "young.json", b"just put")
    for key in (shared, own):
        age(folder, key)
    finish(ledger, first)
    assert delete_unlisted(ledger, folder, delete_job(ledger, LOCAL_TENANT, first.job_id), GRACE) == 1
    assert keys(folder) == {shared, young}
    # it may be about to be listed by a job that put the same bytes: the sweep takes it once it is old
    assert sweep_objects(ledger, folder, GRACE) == 0
    age(folder, young)
    assert sweep_objects(ledger, folder, GRACE) == 1
    assert keys(folder) == {shared}


def test_publishing_what_is_about_to_be_removed_keeps_it(ledger: Engine, folder: ArtifactFolder, held: Any) -> None:
    """The sweep has seen it old and unlisted; before it removes it, an attempt publishes the same bytes."""

    class Overtaken(LocalObjects):
        def delete(self, key: str, *, older_than: float | None = None) -> bool:
            listed(ledger, folder, claim, "again.json")
            return super().delete(key, older_than=older_than)

    claim = held()
    key = written(folder, new_id()).uri
    age(folder, key)
    sweeping = ArtifactFolder(folder.root, Overtaken(folder.root))
    assert sweep_objects(ledger, sweeping, GRACE) == 0
    (artifact,) = list_artifacts(ledger, LOCAL_TENANT, claim.job_id)
    assert artifact.uri == key
    folder.verify(artifact)


def test_deletes_sweeps_and_publishers_of_the_same_bytes_lose_nothing(
    ledger: Engine, folder: ArtifactFolder, held: Any, at_once: Any
) -> None:
    claims = [held() for _ in range(3)]
    contents = [f"spectrum {number}".encode() for number in range(25)]
    for content in contents:
        digest = hashlib.sha256(content).hexdigest()
        staged(folder, claims[0].job_id, claims[0].fence, "old.json", content)
        age(folder, folder.publish(LOCAL_TENANT, claims[0].job_id, claims[0].fence, "old.json", sha256=digest,
                                   size_bytes=len(content)))  # fmt: skip
    published = threading.Event()

    def act(number: int) -> int:
        if number < len(claims):
            for place, content in enumerate(contents):
                listed(ledger, folder, claims[number], f"{place}.json", content)
            published.set()
            return 0
        removed = 0
        while not published.is_set():
            removed += sweep_objects(ledger, folder, GRACE)
        return removed

    answers = at_once(5, act)
    assert [each for each in answers if isinstance(each, Exception)] == []
    for claim in claims:
        kept = list_artifacts(ledger, LOCAL_TENANT, claim.job_id)
        assert len(kept) == len(contents)
        for artifact in kept:
            folder.verify(artifact)


def test_what_dead_attempts_staged_is_swept_and_what_a_living_one_stages_is_not(
    ledger: Engine, folder: ArtifactFolder, held: Any, expire: Any
) -> None:
    alive, ended = held(), held()
    places = {
        "alive": staged(folder, alive.job_id, alive.fence, "a.json"),
        "before": staged(folder, alive.job_id, alive.fence - 1, "a.json"),
        "ended": staged(folder, ended.job_id, ended.fence, "a.json"),
        "unknown": staged(folder, new_id(), 1, "a.json"),
    }
    torn = staged(folder, ended.job_id, ended.fence, ".part-torn")
    waiting = folder.root / ended.job_id / ".waiting" / "1" / "checkpoint"
    waiting.mkdir(parents=True)
    finish(ledger, ended)
    assert sweep_attempts(ledger, folder, GRACE) == 0
    assert sweep_attempts(ledger, folder, -1) == 3
    assert {name for name, path in places.items() if path.exists()} == {"alive"}
    assert not torn.exists()
    assert waiting.exists()
    assert not (folder.root / places["unknown"].parts[-3]).exists()


def test_a_file_left_under_a_temporary_name_is_swept_once_it_is_old(ledger: Engine, folder: ArtifactFolder) -> None:
    key = written(folder, new_id()).uri
    part = (folder.root / key).with_name(".part-left")
    part.write_bytes(b"torn")
    assert sweep_objects(ledger, folder, GRACE) == 0
    age(folder, part.relative_to(folder.root).as_posix())
    assert sweep_objects(ledger, folder, GRACE) == 1
    assert keys(folder) == {key}


def test_marks_that_a_store_was_left_with_are_swept_once_they_are_old(ledger: Engine, folder: ArtifactFolder) -> None:
    key = written(folder, new_id()).uri
    for name in ("old", "young"):
        path = folder.root / MARKS / "doomed" / key / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    age(folder, f"{MARKS}doomed/{key}/old")
    assert sweep_objects(ledger, folder, GRACE) == 0
    assert [each.key.rpartition("/")[2] for each in folder.store.listing(MARKS)] == ["young"]
