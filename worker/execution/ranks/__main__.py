"""The launcher of a job of several ranks, below the guardian, in the place of one child.

    python -P -m worker.execution.ranks --frames FD        (the assignment comes on standard input)

It starts `worker.execution` once for each rank, with torch's variables RANK, LOCAL_RANK and WORLD_SIZE, and ends as one
child does: with one last frame and its exit code. It never starts a rank anew: what is to be tried again the ledger
says, with another attempt.

Ranks meet in a file that only their user can come to. torch's own launcher lets them meet at a port of the machine,
where every other job could join them, and unpickles what it receives there.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from catalog.cgroups import oom_kills
from catalog.frames import Failed, Finished
from worker.execution.frame_pipe import FramePipe
from worker.execution.ranks.rank_hub import ADDRESS, RankHub, last_frame
from worker.execution.ranks.rank_link import read_assignment_text
from worker.process.crash import OOM, RANK_LOST, exit_code

_STOP_SECONDS = 6
"""From SIGTERM to SIGKILL of the ranks, shorter than the parent's own patience with this process."""
_LOOK_SECONDS = 0.1
RANK = (sys.executable, "-P", "-m", "worker.execution", "--frames", "-1")
"""The program of a rank, which finds its link in the environment."""


def launch(command: Sequence[str], ranks: int, place: Path, answers: int | None = None) -> tuple[dict[int, int], bool]:
    """Run a command once for each rank until all have ended."""
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    shared = {**os.environ, "WORLD_SIZE": str(ranks), "KRONOSCOPE_RANK_STORE": str(place / "ranks")}
    passed = () if answers is None else (answers,)
    if answers is not None:
        command = [*command, "--answers", str(answers)]
    processes = [
        subprocess.Popen(  # noqa: S603 - our own
            command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, pass_fds=passed
        )
        for rank in range(ranks)
    ]
    try:
        while any(each.poll() is None for each in processes):
            if told.is_set() or any(each.returncode for each in processes):
                _end(processes)
            told.wait(_LOOK_SECONDS)
    finally:
        signal.signal(signal.SIGTERM, before)
    return {rank: each.returncode for rank, each in enumerate(processes) if each.returncode}, told.is_set()


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask those that run to end, and kill those that have not after some seconds."""
    for each in processes:
        each.terminate()
    until = time.monotonic() + _STOP_SECONDS
    for each in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.wait(max(0.0, until - time.monotonic()))
        each.kill()


def main(arguments: Sequence[str] | None = None, command: Sequence[str] = RANK) -> int:
    """Compute the job whose assignment stands on standard input with several ranks."""
    parser = argparse.ArgumentParser(prog="worker.execution.ranks", description="Compute one job with several ranks.")
    parser.add_argument("--frames", type=int, required=True, help="descriptor that frames are written to")
    parser.add_argument("--answers", type=int, help="descriptor that the parent's answers come from")
    options = parser.parse_args(arguments)
    assignment: dict[str, Any] = json.loads(read_assignment_text())
    ranks = int(assignment["document"]["world_size"])
    hub = RankHub(ranks, options.frames)
    os.environ[ADDRESS] = hub.address
    # ranks of one node speak over its own interface, whatever others it has and whatever its name resolves to
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    scratch, kills = assignment.get("scratch"), oom_kills()
    if scratch:
        Path(scratch).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="launcher-", dir=scratch or None, ignore_cleanup_errors=True) as place:
        codes, stopped = launch(command, ranks, Path(place), options.answers)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    last = last_frame(hub.close(codes), stopped=stopped, exhausted=oom_kills() > kills)
    pipe = FramePipe(options.frames)
    with contextlib.suppress(BrokenPipeError):
        if isinstance(last, Failed) and last.code in (RANK_LOST, OOM):
            pipe.log("warning", last.message)  # the attempt's failure is forgotten when the next one succeeds
        pipe.send(last)
    if isinstance(last, Finished) and scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    return exit_code(last)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
