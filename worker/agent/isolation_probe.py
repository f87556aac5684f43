"""Isolation probe: the child that tries the walls between it and its worker, from inside.

    python -P -m worker.agent.isolation_probe PID UID OTHERS FILES FILE...     (prints as JSON the walls that hold)

It imports the standard library alone, since every worker that starts waits for it.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

WALLS = ("own_user", "neighbours", "files", "memory", "secret_files", "no_new_privileges", "system_calls")


def main(arguments: Sequence[str]) -> int:
    """Try each wall from inside a child, and print those that hold."""
    worker, user, others, count, *paths = arguments
    foreign, files = paths[: int(count)], paths[int(count) :]
    fields = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    walls = {
        "own_user": os.getuid() != int(user),
        "neighbours": others != "" and not any(map(_reaches, map(int, others.split(",")))),
        "files": bool(foreign) and not any(map(_comes_to, map(Path, foreign))),
        "memory": not _opens(f"/proc/{worker}/environ") and not _opens(f"/proc/{worker}/mem"),
        "secret_files": not any(map(_reads, files)),
        "no_new_privileges": fields.get("NoNewPrivs") == "1",
        "system_calls": fields.get("Seccomp") == "2",
    }
    sys.stdout.write(json.dumps([name for name in WALLS if walls[name]]) + "\n")
    return 0


def _reaches(process: int) -> bool:
    """Whether a process of another job can be looked into, or be signalled to end."""
    if _opens(f"/proc/{process}/environ") or _opens(f"/proc/{process}/mem"):
        return True
    try:
        os.kill(process, 0)
    except OSError as error:
        # where it has namespaces it sees no process of that number
        return error.errno not in (errno.EPERM, errno.ESRCH)
    return True


def _comes_to(file: Path) -> bool:
    """Whether a file of others can be read or written, or its folder be listed or filled."""
    attempts: tuple[Callable[[], object], ...] = (
        lambda: file.open("rb").close(),
        lambda: file.open("r+b").close(),
        lambda: next(file.parent.iterdir()),
        lambda: file.with_name("planted").touch(),
    )
    for attempt in attempts:
        with suppress(OSError):
            attempt()
            return True
    return False


def _reads(path: str) -> bool:
    """Whether anything of a file can be read: in a job's namespaces a closed one is empty."""
    try:
        with Path(path).open("rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


def _opens(path: str) -> bool:
    try:
        with Path(path).open("rb"):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    # the worker appends `--answers FD --frames FD`, which this child has no use for
    sys.exit(main(sys.argv[1 : sys.argv.index("--answers")]))
