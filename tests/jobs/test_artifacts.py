"""Files are listed only as what they are, and never reached through anything but a plain path."""

import hashlib
import os
from pathlib import Path

import pytest

from jobs.artifacts import ArtifactFolder
from jobs.errors import ArtifactDamaged
from jobs.identifiers import new_id
from jobs.records import Artifact

BYTES = b"spectrum"
SHA256 = hashlib.sha256(BYTES).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> ArtifactFolder:
    return ArtifactFolder(tmp_path / "artifacts")


def written(folder: ArtifactFolder, job_id: str, fence: int = 1, name: str = "spectra/0.json") -> Artifact:
    path = folder.attempt_dir(job_id, fence) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(BYTES)
    uri = folder.publish(job_id, fence, name, sha256=SHA256, size_bytes=len(BYTES))
    return Artifact(
        job_id=job_id, name=name, sha256=SHA256, size_bytes=len(BYTES), media_type="application/json", uri=uri
    )


def test_a_published_file_is_served_and_found_whole(folder: ArtifactFolder) -> None:
    artifact = written(folder, new_id())
    assert artifact.uri == f"{artifact.job_id}/1/spectra/0.json"
    with folder.open(artifact) as file:
        assert file.read() == BYTES
    folder.verify(artifact)


def test_attempts_never_share_a_folder(folder: ArtifactFolder) -> None:
    job_id = new_id()
    assert folder.attempt_dir(job_id, 1) != folder.attempt_dir(job_id, 2)


@pytest.mark.parametrize(
    ("sha256", "size"),
    [("0" * 64, len(BYTES)), (SHA256, len(BYTES) + 1), (SHA256, 0)],
    ids=["digest", "longer", "empty"],
)
def test_a_file_that_is_not_as_declared_is_not_published(folder: ArtifactFolder, sha256: str, size: int) -> None:
    job_id = new_id()
    written(folder, job_id)
    with pytest.raises(ArtifactDamaged):
        folder.publish(job_id, 1, "spectra/0.json", sha256=sha256, size_bytes=size)


def test_one_flipped_byte_is_found(folder: ArtifactFolder) -> None:
    artifact = written(folder, new_id())
    (folder.root / artifact.uri).write_bytes(b"spectruM")
    with pytest.raises(ArtifactDamaged, match="SHA-256"):
        folder.verify(artifact)


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
        folder.publish(new_id(), 1, name, sha256=SHA256, size_bytes=8)


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
            folder.publish(job_id, 1, name, sha256=SHA256, size_bytes=8)


def test_removing_a_job_removes_all_its_attempts_and_no_other(folder: ArtifactFolder) -> None:
    gone, kept = new_id(), new_id()
    written(folder, gone, 1)
    written(folder, gone, 2)
    stays = written(folder, kept)
    folder.remove(gone)
    folder.remove(gone)
    assert [path.name for path in folder.root.iterdir()] == [kept]
    folder.verify(stays)
    with pytest.raises(ArtifactDamaged):
        folder.remove("..")


def test_a_root_behind_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    folder = ArtifactFolder(tmp_path / "linked")
    folder.verify(written(folder, new_id()))
