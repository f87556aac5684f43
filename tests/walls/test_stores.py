"""Stores of the service are closed to jobs: objects, their lock, and builtin models."""

import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from torch import nn

from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.local_store import LOCKS
from jobs.records import LOCAL_TENANT, Artifact
from jobs.schema.identifiers import new_id
from worker.execution.models import builtin
from worker.process.child_process import Child
from worker.process.confinement import Confinement
from worker.service import share_folders

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may start processes of other users")

CONTENT = b"what was computed"
OF_A_JOB = 20_000


@pytest.fixture
def folder(reachable: Path) -> Iterator[ArtifactFolder]:
    """Artifacts as a worker has them whose jobs have users of their own."""
    before = os.umask(0o022)
    share_folders(reachable / "artifacts", reachable / "models")
    yield ArtifactFolder(reachable / "artifacts")
    os.umask(before)


def published(folder: ArtifactFolder, job: str, content: bytes = CONTENT) -> Artifact:
    (folder.attempt_dir(job, 1) / "table.json").write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    uri = folder.publish(LOCAL_TENANT, job, 1, "table.json", sha256=sha256, size_bytes=len(content))
    return Artifact(
        job_id=job, name="table.json", uri=uri, sha256=sha256, size_bytes=len(content), media_type="application/json"
    )


def attacked(program: str, user: int = OF_A_JOB) -> list[bytes]:
    """Return the lines of a program of the shell, which runs as a job's user."""
    child = Child.start({}, subprocess.PIPE, {"PATH": os.defpath}, ["/bin/bash", "-c", program], Confinement(user=user))
    with closing(child):
        return [line.strip() for line in child.output(1_000)]


def test_a_job_neither_reads_nor_changes_nor_removes_objects(folder: ArtifactFolder) -> None:
    kept = published(folder, new_id())
    path = folder.root / kept.uri
    program = f"""
cat {path} 2>/dev/null && echo read
echo x 2>/dev/null >> {path} && echo written
rm -f {path} 2>/dev/null && echo removed
mv {path} {path}.2 2>/dev/null && echo moved
mv {folder.root}/objects {folder.root}/other 2>/dev/null && echo "folder moved"
ls {folder.root}/objects 2>/dev/null && echo listed
echo tried
"""
    assert attacked(program) == [b"tried"]
    assert path.read_bytes() == CONTENT


def test_a_job_cannot_hold_the_lock_that_publishing_waits_for(folder: ArtifactFolder) -> None:
    published(folder, new_id())
    lock = folder.root / LOCKS / "lock"
    assert lock.exists()
    program = f"exec 9<{lock} && flock -n -x 9 && echo held; exec 8>>{lock} && flock -n -x 8 && echo held; echo tried"
    assert b"held" not in attacked(f"({program}) 2>/dev/null; echo tried")


def test_by_a_second_name_a_job_reads_an_object_and_does_not_write_to_it(folder: ArtifactFolder) -> None:
    kept = published(folder, new_id())
    place = folder.attempt_dir(new_id(), 1) / "input"
    place.mkdir()
    target = place / "table.json"
    folder.fetch(kept, target)
    assert target.stat().st_ino == (folder.root / kept.uri).stat().st_ino
    # the job may enter and write the folder, as its own
    for each in (place, place.parent, place.parent.parent):
        each.chmod(0o777)
    program = f"cat {target} && echo; echo x 2>/dev/null >> {target} && echo written; chmod 777 {target} 2>/dev/null"
    assert attacked(program) == [CONTENT]
    assert (folder.root / kept.uri).read_bytes() == CONTENT


def test_an_object_of_an_earlier_version_is_copied_for_a_job(folder: ArtifactFolder) -> None:
    kept = published(folder, new_id())
    path = folder.root / kept.uri
    # such versions linked what a job had written, by a user of the same group
    os.chown(path, 10_002, -1)
    path.chmod(0o660)
    target = folder.attempt_dir(new_id(), 1) / "table.json"
    folder.fetch(kept, target)
    assert target.stat().st_ino != path.stat().st_ino
    assert target.read_bytes() == CONTENT


def test_a_builtin_model_that_one_job_has_trained_serves_the_next_ones_user(folder: ArtifactFolder) -> None:
    store = folder.root.parent / "models"
    before = os.umask(0o007)  # as a job's process has it
    try:
        builtin._store("digits_mlp", nn.Linear(2, 2), store / "builtin", {})
    finally:
        os.umask(before)
    for each in (store, store / "builtin"):
        each.chmod(0o775)
    files = sorted((store / "builtin").iterdir())
    assert len(files) == 2
    for path in files:
        assert attacked(f"head -c 1 {path} >/dev/null && echo read; echo x 2>/dev/null >> {path} || echo kept") == [
            b"read",
            b"kept",
        ]
