"""Ranks of a job meet where no other job comes to, and see whose process is at the other end of a connection."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from engine.distributed.peers import foreign_peers, own_sockets
from worker.execution.ranks.__main__ import launch
from worker.process.child_process import Child
from worker.process.confinement import Confinement

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may start processes of other users")

FOREIGN = 20_021
LISTENS = (
    "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True);"
    "c = s.accept(); time.sleep(60)"
)
# it joins what begins to listen on this machine, as early as it can, with the numbers that gloo's ranks say; what
# listened before is another test's
INTRUDER = """
import socket, struct
def listening():
    rows = [line.split() for line in open("/proc/net/tcp").read().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and row[1].startswith("0100007F") and row[7] == "0"}
before, met = listening(), 0
print("begun", flush=True)
while met < 200:
    for address in listening() - before:
        for number in range(4):
            try:
                c = socket.create_connection(("127.0.0.1", int(address.split(":")[1], 16)), 0.2)
                c.sendall(struct.pack("=q", number))
                met += 1
                print(met, flush=True)
            except OSError:
                pass
import time
time.sleep(600)
"""
RANK = """
import os, socket, sys, torch
from engine.distributed import group
from engine.errors import RankFailed, RankTimedOut
out = open(os.environ["OUT"] + os.environ["RANK"], "w")
# one that it had before, to a service of somebody else's
before = socket.create_connection(("127.0.0.1", int(os.environ["SERVICE"]))) if "SERVICE" in os.environ else None
try:
    ranks = group.start(torch.device("cpu"), float(os.environ["SECONDS"]))
    assert "MASTER_PORT" not in os.environ
    print(ranks.gather(int(os.environ["RANK"]) + 1, "numbers"), file=out, flush=True)
    group.stop()
except (RankFailed, RankTimedOut):
    print("refused", file=out, flush=True)
out.close()
os._exit(0)
"""


@contextmanager
def running(program: str, user: int) -> Iterator[Iterator[bytes]]:
    """A program of another user's, and what it prints."""
    command = ["/usr/bin/python3", "-c", program]
    with closing(Child.start({}, subprocess.PIPE, dict(os.environ), command, Confinement(user=user))) as child:
        yield child.output(1000)


def test_a_connection_to_another_users_process_is_told_apart() -> None:
    earlier = own_sockets()  # connections to the tests' servers among them
    assert foreign_peers(earlier) == []
    with running(LISTENS, FOREIGN) as said, socket.create_connection(("127.0.0.1", int(next(said)))):
        assert foreign_peers(earlier) == [f"user {FOREIGN}"]
        assert foreign_peers(own_sockets()) == []
    with socket.create_server(("127.0.0.1", 0)) as own, socket.create_connection(own.getsockname()), own.accept()[0]:
        assert foreign_peers(earlier) == []


def test_whoever_only_waits_with_the_answer_is_no_rank_either() -> None:
    earlier = own_sockets()
    with socket.create_server(("127.0.0.1", 0)) as own, socket.create_connection(own.getsockname()):
        assert foreign_peers(earlier) == ["somebody who does not take the connection"]


def test_ranks_that_somebody_else_tries_to_join_refuse_or_compute_what_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("SECONDS", "4")
    command, place = (sys.executable, "-P", "-c", RANK), tmp_path / "a folder #1?;%20"
    place.mkdir()
    with running(INTRUDER, FOREIGN) as said:
        assert next(said) == b"begun\n"
        launch(command, 2, place)
        assert next(said).strip().isdigit(), "it has met a rank"
    for rank in (0, 1):
        assert (tmp_path / f"out{rank}").read_text() in ("[1, 2]\n", "refused\n")


def test_what_a_rank_speaks_to_besides_is_its_own_affair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("SECONDS", "60")
    place = tmp_path / "a folder #1?;%20"
    place.mkdir()
    with running(LISTENS.replace("c = s.accept()", "c = [s.accept(), s.accept()]"), FOREIGN) as said:
        monkeypatch.setenv("SERVICE", next(said).decode().strip())
        assert launch((sys.executable, "-P", "-c", RANK), 2, place) == ({}, False)
    assert [(tmp_path / f"out{rank}").read_text() for rank in (0, 1)] == ["[1, 2]\n"] * 2
