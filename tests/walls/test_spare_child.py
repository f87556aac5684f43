"""A prepared child as in Compose, where a worker has no root and each job is a user of its own: what a job comes to."""

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.walls.compose import Compose
from tests.walls.interpreter import JOBS, PACKAGES, ROOT, is_open

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None or not is_open(ROOT) or not is_open(PACKAGES),
    reason="users are changed by root alone, and every user has to come to the project",
)

NAME = "kronoscope_test_sees"
SEES = """
import hashlib, json, os, resource, sys
from pathlib import Path
import torch
from torch import nn

FACTS = ("Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "SigBlk", "Umask")


def reach(path):
    try:
        return len(path.read_bytes())
    except OSError as error:
        return error.strerror


def model():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    family, pid = [], os.getppid()
    while pid > 1 and len(family) < 3:
        place = Path("/proc") / str(pid)
        family += [[reach(place / "environ"), reach(place / "mem"), len(list(place.glob("fd/*")))]]
        pid = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        try:
            os.kill(pid, 0)
            family[-1].append("may be ended")
        except PermissionError:
            pass
    # that of files follows from the room on the disk
    limits = [each for each in Path("/proc/self/limits").read_text().splitlines() if "file size" not in each]
    print("SEES " + json.dumps({
        "status": {name: status[name].split() for name in FACTS},
        "user": os.getuid(),
        "limits": hashlib.sha256("".join(limits).encode()).hexdigest()[:8],
        "file": resource.getrlimit(resource.RLIMIT_FSIZE)[0] < 2**40,
        "own": reach(Path("/proc/self/environ")) != 0,
        "home": Path.home().exists() and os.access(Path.home(), os.W_OK),
        "descriptors": len([each for each in Path("/proc/self/fd").iterdir() if each.exists()]),
        "family": family,
        "prepared": "worker.execution.spare" in " ".join(sys.orig_argv),
    }), flush=True)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
"""
DOCUMENT = {
    "kind": "factors",
    "model": {"source": "factory", "factory": f"{NAME}:model"},
    "data": {"source": "synthetic", "shape": [12], "examples": 64, "classes": 3},
    "task": {"type": "classification"},
    "collection": {"batch_size": 16},
    "cache": "off",
}


def seen(log: str) -> Iterator[dict[str, Any]]:
    """What each job's code saw, in order."""
    for line in log.splitlines():
        if found := re.search(r"SEES (\{.*\})", line):
            yield json.JSONDecoder().raw_decode(found[1].replace('\\"', '"'))[0]


def test_the_second_of_two_jobs_is_prepared_and_comes_to_nothing_more_than_the_first(compose: Compose) -> None:
    compose.factory(NAME, SEES)
    jobs = [compose.submit(DOCUMENT) for _ in range(2)]
    worker = compose.start(KRONOSCOPE_SPARE_CHILD="always", KRONOSCOPE_SLOTS="1", KRONOSCOPE_LOG_LEVEL="DEBUG")
    while not (waited := spares(compose)) and worker.poll() is None:
        time.sleep(0.05)
    assert waited
    log = compose.done(worker)
    assert [(compose.job(each).state, compose.job(each).failures) for each in jobs] == [("succeeded", 0)] * 2, log
    first, second = seen(log)
    assert (first.pop("prepared"), second.pop("prepared")) == (False, True)
    users = [each.pop("user") for each in (first, second)]
    assert JOBS <= users[0] < users[1]
    assert first["status"].pop("Gid") != second["status"].pop("Gid")
    # the process that waited stands between the guardian and the job, as closed as the guardian is
    closed = os.strerror(errno.EACCES)
    assert all(each == [closed, closed, 0] for each in (*first.pop("family"), *second.pop("family")))
    assert second == first
    assert compose.digests(jobs[0]) == compose.digests(jobs[1])
    assert not spares(compose)


def spares(compose: Compose) -> list[Path]:
    """Return the processes that wait for this service's jobs: other tests may have services of their own."""
    home = f"HOME={compose.place}".encode()
    return [
        each
        for each in Path("/proc").glob("[0-9]*")
        if b"worker.execution.spare" in content(each / "cmdline") and home in content(each / "environ").split(b"\0")
    ]


def content(path: Path) -> bytes:
    """Return what a file holds; nothing where its process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
