"""Leftovers of a job in places that every user may write to are removed at its end, and nobody else's are."""

import os
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from catalog.file_rights import acting_as
from worker.process.child_process import Child
from worker.process.confinement import Confinement

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may start processes of other users")

USER, OTHER = 20_011, 20_012
LEAVES = """
for place in /dev/shm /tmp /var/tmp; do
    echo left > $place/kronoscope-left-$1
    mkdir -p $place/kronoscope-folder-$1/inner && echo left > $place/kronoscope-folder-$1/inner/file
    chmod 000 $place/kronoscope-folder-$1/inner $place/kronoscope-folder-$1
done
ipcmk -M 4096 -p 600; ipcmk -Q -p 600; ipcmk -S 1 -p 600
echo done
"""


def left_by(user: int) -> set[str]:
    """Files in those places, and what System V keeps."""
    found = set()
    for place in ("/dev/shm", "/tmp", "/var/tmp"):
        found |= {str(each) for each in Path(place).iterdir() if each.lstat().st_uid == user}
    for kind in ("shm", "sem", "msg"):
        heading, *rows = (line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines())
        found |= {f"{kind} {row[1]}" for row in rows if int(row[heading.index("uid")]) == user}
    return found


def leaving(user: int) -> Child:
    command = ["/bin/sh", "-c", LEAVES, "sh", str(user)]
    child = Child.start({}, subprocess.PIPE, {"PATH": os.defpath}, command, Confinement(user=user))
    assert list(child.output(1_000))[-1] == b"done\n"
    return child


def test_what_a_job_leaves_is_removed_and_its_neighbours_stays() -> None:
    with closing(leaving(OTHER)):
        theirs = left_by(OTHER)
        assert len(theirs) == 9
        with closing(leaving(USER)):
            assert len(left_by(USER)) == 9
        assert left_by(USER) == set()
        assert left_by(OTHER) == theirs
    assert left_by(OTHER) == set()


def test_acting_as_a_user_ends_with_the_block_and_concerns_one_thread(reachable: Path) -> None:
    reachable.chmod(0o777)
    with acting_as(USER):
        (reachable / "theirs").touch()
    (reachable / "ours").touch()
    assert (reachable / "theirs").stat().st_uid == USER
    assert (reachable / "ours").stat().st_uid == os.getuid()
