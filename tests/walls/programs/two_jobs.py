"""A worker that runs the neighbour and, beside it, the attacks; prints what either has told, and what is left.

    python two_jobs.py PLACE FIRST ATTACKS_AS SECRET

PLACE is a folder of the worker's; FIRST + 1 is the neighbour's user, and ATTACKS_AS the attacks'.
"""

# ruff: noqa: T201 - a program of its own, which speaks to its test

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from contextlib import closing
from pathlib import Path

import worker
from catalog.private_memory import hide_memory
from jobs.objects.artifacts import ArtifactFolder
from jobs.records import Artifact
from worker.process.child_process import Child, child_environment
from worker.process.confinement import Confinement
from worker.service import share_folders

root, first, attacks_as, secret = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
programs = Path(__file__).parent
hide_memory()
job, other = (f"01a00000-0000-7000-8000-00000000000{number}" for number in (1, 2))
share_folders(root / "artifacts", root / "models")
folder = ArtifactFolder(root / "artifacts")
theirs, own = folder.attempt_dir(other, 1, first + 1), folder.attempt_dir(job, 1, first)
(root / "closed").mkdir(mode=0o700)
(root / "closed" / "secret").write_text(secret)
(theirs / "table.json").write_text(secret)
sha256 = hashlib.sha256(secret.encode()).hexdigest()
uri = folder.publish("local", other, 1, "table.json", sha256=sha256, size_bytes=len(secret))
kept = Artifact(job_id=job, name="a", uri=uri, sha256=sha256, size_bytes=len(secret), media_type="text/plain")
given = own / "input" / "table.json"
given.parent.mkdir()
folder.fetch(kept, given)
done = theirs / "done"
told = {}


def start(user: int, program: str, *arguments: str) -> Child:
    """Start a program as a job's process."""
    command = [sys.executable, "-P", str(programs / program), *arguments]
    return Child.start({}, subprocess.PIPE, child_environment(os.environ), command, Confinement(user=user))


with closing(start(first + 1, "neighbour.py", secret, str(done))) as beside:
    lines = beside.output(10_000)
    facts = json.loads(next(lines)) | {
        "worker": os.getpid(),
        "guardian": beside.pid,
        "secret": secret,
        "packages": sysconfig.get_path("purelib"),
        "project": str(Path(worker.__file__).parents[1]),
        "root": str(folder.root),
        "folder": str(theirs),
        "file": str(theirs / "table.json"),
        "own": str(own),
        "object": str(folder.root / uri),
        "secret_file": str(root / "closed" / "secret"),
        "given": str(given),
        "models": str(root / "models"),
    }
    (root / "facts.json").write_text(json.dumps(facts))
    with closing(start(attacks_as, "attacks.py", str(root / "facts.json"))) as attacker:
        told["attacks"] = [line.decode() for line in attacker.output(100_000)]
    if attacks_as != first:
        # it has become its neighbour, who may never go on
        print(json.dumps(told), flush=True)
        os._exit(0)
    told["outlived"] = (own / "outlived").exists()
    done.touch()
    told["neighbour"] = json.loads(next(lines))
    told["neighbour's end"] = beside.wait(60)
told["running"] = [
    each.name
    for each in Path("/proc").glob("[0-9]*")
    if each.stat().st_uid in (first, first + 1) and "State:\tZ" not in (each / "status").read_text()
]
told["kept"] = [path.read_text() for path in (folder.root / uri, theirs / "table.json", given)]
print(json.dumps(told))
