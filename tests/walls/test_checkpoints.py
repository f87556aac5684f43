"""Of an attempt only its checkpoint stays: closed to other jobs, and counted for its tenant."""

import os
import secrets
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from catalog.file_rights import acting_as
from jobs.errors import QuotaExceeded
from jobs.objects import job_folders
from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.scratch import Scratch, sweep_scratch
from jobs.objects.scratch_store import MANIFEST
from jobs.queue.attempt_endings import hand_back
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT
from jobs.retention.object_sweep import sweep_attempts
from jobs.schema.database import reading
from jobs.schema.tables import jobs
from jobs.tenancy.quotas import require_room, set_quota, usage
from worker.process.child_process import Child
from worker.process.confinement import Confinement
from worker.supervision.supervisor import Supervisor

FIRST = 20_000
MEGABYTE = 2**20
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may start processes of other users")
# a checkpoint of 2 MiB, and beside it what no next attempt asks for
LEAVES = f"""
folder=$(grep -o '"scratch": "[^"]*"' | cut -d'"' -f4)
mkdir -p "$folder/checkpoint"
head -c {2 * MEGABYTE} /dev/urandom > "$folder/checkpoint/1.0.safetensors"
[ "$1" = torn ] || echo sums > "$folder/{MANIFEST}"
chmod 700 "$folder/checkpoint"
[ "$1" = torn ] && exit 4 || exit 3
"""


@pytest.fixture
def attempt(ledger: Engine, settings: Any, reachable: Path) -> Callable[..., None]:
    """``attempt(job_id, "torn")``: one that leaves 2 MiB and crashes, as a user of its own."""

    def run(job_id: str, how: str = "whole", **changes: Any) -> None:
        chosen = settings(**changes)
        chosen.ledger.artifact_root.mkdir(parents=True, exist_ok=True)
        held = claim(ledger, job_id, "worker", secrets.token_hex(8), 3600)
        assert held is not None
        say = 'echo "{\\"frame\\":\\"log\\",\\"level\\":\\"info\\",\\"message\\":\\"begun\\"}" >&$5; '
        Supervisor(ledger, held, chosen, ["/bin/bash", "-c", say + LEAVES, "child", how]).run()

    return run


def counted(ledger: Engine, job_id: str) -> int | None:
    with reading(ledger) as connection:
        size: int | None = connection.execute(select(jobs.c.checkpoint_bytes).where(jobs.c.id == job_id)).scalar_one()
        return size


def deep(folder: Path, levels: int) -> None:
    """Folders in each other, with a file in the last one; 1,000 are too many for a recursion, 2,048 for a path."""
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
    os.close(descriptor)


@as_root
@pytest.mark.parametrize(("user", "levels"), [(None, 1_200), (FIRST, 2_100)])
def test_folders_deeper_than_a_recursion_or_a_path_are_removed(reachable: Path, user: int | None, levels: int) -> None:
    folder = reachable / "attempt"
    folder.mkdir()
    if user is not None:
        job_folders.give(folder, user, written=True)
    with acting_as(user, user):
        (folder / "wide").mkdir()
        for number in range(40):
            (folder / "wide" / str(number)).mkdir()
            (folder / "wide" / str(number) / "file").touch()
        deep(folder, levels)
        (folder / "wide" / "7").chmod(0)
        (folder / "wide").chmod(0o500)
        (folder / "link").symlink_to(reachable)
    (reachable / "others").touch()
    job_folders.clear(folder)
    assert [each.name for each in reachable.iterdir()] == ["others"]


def test_one_jobs_deep_folders_do_not_keep_the_sweep_from_others(
    ledger: Engine, settings: Any, submitted: Callable[..., str]
) -> None:
    folder = ArtifactFolder(settings().ledger.artifact_root)
    evil, other = (folder.attempt_dir(submitted(), 1) for _ in range(2))
    deep(evil, 1_200)
    (other / "left").touch()
    for each in (evil, other, other / "left"):
        os.utime(each, (0, 0))
    assert sweep_attempts(ledger, folder, -3600) == 2
    assert not evil.exists()
    assert not other.exists()


@as_root
def test_of_an_attempt_its_checkpoint_alone_stays_and_no_other_job_comes_to_it(
    settings: Any, submitted: Callable[..., str], attempt: Callable[..., None]
) -> None:
    whole, torn = submitted(), submitted()
    scratch = Scratch(settings().ledger.artifact_root)
    attempt(whole, child_user=FIRST)
    attempt(torn, "torn", child_user=FIRST)
    folder = scratch.attempt_folder(whole, 1)
    assert sorted(each.name for each in (folder / "checkpoint").iterdir()) == ["1.0.safetensors", "checkpoint.json"]
    assert [each.name for each in folder.parent.parent.iterdir()] == [".waiting"]
    assert not scratch.attempt_folder(torn, 1).exists()
    tries = f"cat {folder}/{MANIFEST}; ls {folder} {folder.parent} {folder.parent.parent}; echo x > {folder}/new"
    with closing(
        Child.start({}, subprocess.PIPE, {"PATH": os.defpath}, ["/bin/sh", "-c", tries], Confinement(user=FIRST + 7))
    ) as other:
        said = [line.decode() for line in other.output(1_000)]
    assert len(said) == 5
    assert [line for line in said if "denied" not in line] == []


def test_of_an_attempt_whose_worker_was_killed_the_sweep_leaves_the_checkpoint_alone(
    ledger: Engine, settings: Any, submitted: Callable[..., str]
) -> None:
    held, between = submitted(), submitted()
    scratch = Scratch(settings().ledger.artifact_root)
    for job_id in (held, between):
        for fence in (1, 2, 3):
            (scratch.attempt_folder(job_id, fence) / "checkpoint").mkdir(parents=True)
            (scratch.attempt_folder(job_id, fence) / "junk").touch()
        (scratch.attempt_folder(job_id, 1) / MANIFEST).touch()
        (scratch.attempt_folder(job_id, 2) / MANIFEST).touch()
        for _ in range(3):
            claimed = claim(ledger, job_id, "worker", secrets.token_hex(8), 3600)
            assert claimed is not None
            if (claimed.fence, job_id) != (3, held):
                hand_back(ledger, claimed)
    assert sweep_scratch(ledger, scratch) == 0
    assert [each.name for each in scratch.before(held, 4)] == ["3", "2", "1"]
    assert [each.name for each in scratch.before(between, 4)] == ["2"]


def test_a_checkpoint_counts_for_its_tenant_until_the_next_attempt_begins(
    ledger: Engine, settings: Any, submitted: Callable[..., str], attempt: Callable[..., None]
) -> None:
    changes = {"child_user": FIRST} if os.getuid() == 0 else {}
    job_id = submitted()
    scratch = Scratch(settings().ledger.artifact_root)
    attempt(job_id, **changes)
    assert counted(ledger, job_id) is None
    sweep_scratch(ledger, scratch)
    assert 2 * MEGABYTE <= (counted(ledger, job_id) or 0) <= 2.1 * MEGABYTE
    assert usage(ledger)[0].used_bytes == counted(ledger, job_id)
    set_quota(ledger, "local", 2 * MEGABYTE)
    with pytest.raises(QuotaExceeded):
        require_room(ledger, LOCAL_TENANT)
    attempt(job_id, "torn", **changes)
    assert (counted(ledger, job_id), usage(ledger)[0].used_bytes) == (None, 0)
    sweep_scratch(ledger, scratch)
    assert (counted(ledger, job_id) or 0) >= 2 * MEGABYTE  # the first attempt's, which the second has not replaced


def test_checkpoints_of_ranks_are_checkpoints(tmp_path: Path) -> None:
    job_id = "01a00000-0000-7000-8000-000000000001"
    scratch = Scratch(tmp_path)
    for fence in (1, 2, 3):
        scratch.attempt_folder(job_id, fence).mkdir(parents=True)
    for rank in (0, 1):
        manifest = scratch.attempt_folder(job_id, 2) / f"rank-{rank}" / MANIFEST
        manifest.parent.mkdir(parents=True)
        manifest.touch()
    scratch.prune(job_id, 3)
    assert [each.name for each in scratch.before(job_id, 4)] == ["2"]
    assert len(list(scratch.before(job_id, 4)[0].rglob(MANIFEST))) == 2
