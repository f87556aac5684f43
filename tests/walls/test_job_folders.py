"""Folders of jobs are closed to other jobs; the service still reads, publishes and removes what is in them."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.walls.interpreter import JOBS, PACKAGES, ROOT, WORKER, as_worker, environment, is_open

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not is_open(ROOT) or not is_open(PACKAGES),
    reason="only root may start a worker with these rights, on a project that every user may read",
)

JOB, OTHER = "01a00000-0000-7000-8000-000000000001", "01a00000-0000-7000-8000-000000000002"
# a worker that runs one command of the shell as each job says, and tells what it printed
PROGRAM = """
import hashlib, json, os, subprocess, sys
from contextlib import closing
from pathlib import Path
from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.scratch import Scratch
from jobs.objects.scratch_store import _snapshot
from worker.service import share_folders
from worker.process.child_process import Child, child_environment
from worker.process.confinement import Confinement

root, job, other, first = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])

def run(user, command):
    shell, given = ["/bin/sh", "-c", command], child_environment(os.environ)
    with closing(Child.start({}, subprocess.PIPE, given, shell, Confinement(user=user))) as child:
        return [line.decode().strip() for line in child.output(1000)]

share_folders(root / "artifacts", root / "models")
folder, scratch = ArtifactFolder(root / "artifacts"), Scratch(root / "artifacts")
place = folder.attempt_dir(job, 1, first)
scratch.give(job, 1, first)
waiting = scratch.attempt_folder(job, 1)
told = {}
told["groups"] = run(first, "id -G")
run(first, f"cd {place} && echo -n mine > table.json && mkdir -p factors && echo -n more > factors/0.bin"
    f" && mkdir {waiting}/checkpoint && echo -n sums > {waiting}/checkpoint/checkpoint.json")
folder.attempt_dir(other, 1, first + 1)
told["other"] = run(first + 1, f"cat {place}/table.json; ls {place} {place.parent}; echo x > {place}/new;"
    f" cat {waiting}/checkpoint/checkpoint.json; ln {place}/table.json {root}/artifacts/{other}/1/; true 2>&1")
told["names"] = sorted(each.name for each in place.iterdir())
key = folder.publish("local", job, 1, "table.json", sha256=hashlib.sha256(b"mine").hexdigest(), size_bytes=4)
told["published"] = (folder.root / key).read_text()
status = (folder.root / key).stat()
told["of"] = [status.st_uid, status.st_gid, status.st_mode & 0o777]
with _snapshot(waiting) as files:
    told["snapshot"] = sorted(files)
# the next attempt, which goes on with it
folder.attempt_dir(job, 2, first)
scratch.give(job, 2, first)
own, before = scratch.attempt_folder(job, 2), scratch.before(job, 2)[0]
told["resumed"] = run(first, f"cat {before}/checkpoint/checkpoint.json && echo y > {own}/own && echo on")
run(first, f"chmod 000 {place}/factors {waiting}/checkpoint {place}/table.json")
folder.clear_attempt(job, 1)
told["cleared"] = not place.exists()
scratch.clear(job)
folder.remove(job)
told["removed"] = not (folder.root / job).exists()
# what a version before has left: files of one user for all jobs, in the worker's group
old = scratch.attempt_folder(sys.argv[5], 1)
scratch.give(sys.argv[5], 2, first + 2)
folder.attempt_dir(sys.argv[5], 2, first + 2)
left = old / "checkpoint"
told["old"] = run(first + 2, f"cat {left}/checkpoint.json; echo; echo new > {left}/more && echo written")
told["old closed"] = run(first + 1, f"ls {old} {old.parent} {old.parent.parent}")
print(json.dumps(told))
"""
EARLIER = "01a00000-0000-7000-8000-000000000003"


def test_a_jobs_folders_are_its_own_and_the_service_works_with_them(reachable: Path, python: str) -> None:
    for name in ("artifacts", "models"):
        (reachable / name).mkdir()
        os.chown(reachable / name, WORKER, WORKER)
    left = reachable / "artifacts" / EARLIER
    (left / ".waiting" / "1" / "checkpoint").mkdir(parents=True)
    (left / ".waiting" / "1" / "checkpoint" / "checkpoint.json").write_text("left")
    os.chown(left, WORKER, WORKER)
    left.chmod(0o775)
    for each in left.rglob("*"):
        os.chown(each, WORKER + 1, WORKER)
        each.chmod(0o770 if each.is_dir() else 0o660)
    os.chown(left / ".waiting", WORKER, WORKER)
    command = as_worker(python, "-P", "-c", PROGRAM, str(reachable), JOB, OTHER, str(JOBS), EARLIER)
    done = subprocess.run(command, env=environment(python), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["groups"] == [str(JOBS)]
    assert [line for line in told["other"] if "denied" not in line] == []
    assert told["names"] == ["factors", "table.json"]
    assert told["published"] == "mine"
    assert told["of"] == [WORKER, WORKER, 0o444]
    assert told["snapshot"] == ["checkpoint/checkpoint.json"]
    assert told["resumed"] == ["sumson"]
    assert told["cleared"]
    assert told["removed"]
    assert told["old"] == ["left", "written"]
    assert [line for line in told["old closed"] if "denied" not in line] == []
