"""Which walls between a child and its worker hold here: measured by a child that tries, not read from settings.

::

    own_user           it runs as another user than the worker
    neighbours         memory and processes of another job are closed to it
    memory             the worker's environment and memory are closed to it
    secret_files       the files that hold the service's secrets are closed to it
    no_new_privileges  no program that it starts has more rights than it
    system_calls       a filter denies it what no computation needs

    python -P -m worker.agent.isolation PID UID OTHER [FILE]...     (the child: prints the list as JSON)
"""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from jobs.errors import SettingsInvalid
from jobs.objects.artifacts import OBJECTS
from jobs.objects.local_store import LOCKS
from worker.process.child_process import Child, child_environment
from worker.process.confinement import Confinement

WALLS = ("own_user", "neighbours", "memory", "secret_files", "no_new_privileges", "system_calls")
_SHARED_UMASK = 0o007
_TRAINED = "builtin"
_READ = (_TRAINED, "hub")
"""Folders of the model store that jobs read."""
_LINE_BYTES = 10_000
_PROBE_SECONDS = 60.0
_PROBE = (sys.executable, "-P", "-m", "worker.agent.isolation")
_NEIGHBOUR = (sys.executable, "-P", "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(120)")


def measure_isolation(
    confinement: Confinement, environ: Mapping[str, str], neighbour: Confinement | None = None
) -> tuple[str, ...]:
    """Start a child that tries what a hostile one would try, beside another one.

    Args:
        confinement: What the child of one job is held to.
        environ: The worker's environment, which names the files of its secrets.
        neighbour: What the child of another job is held to; None: to the same.

    Returns:
        The walls that hold, in the order of `WALLS`.

    Raises:
        SettingsInvalid: If children are to have a user of their own, and none can be started as that user.
    """
    files = [path for name, path in sorted(environ.items()) if name.endswith("_FILE") and _is_secret(name) and path]
    passed = child_environment(environ)
    held: tuple[str, ...] = ()
    said = b""
    with closing(Child.start({}, subprocess.PIPE, passed, _NEIGHBOUR, neighbour or confinement)) as beside:
        other = next(beside.output(_LINE_BYTES), b"0").strip().decode(errors="replace")
        told = [str(os.getpid()), str(os.getuid()), other if other.isdecimal() else "0", *files]
        with closing(Child.start({}, subprocess.PIPE, passed, (*_PROBE, *told), confinement)) as child:
            for line in child.output(_LINE_BYTES):
                said = line
            code = child.wait(_PROBE_SECONDS)
    if code == 0:
        held = tuple(str(each) for each in json.loads(said))
    if confinement.user is not None and "own_user" not in held:
        raise SettingsInvalid(
            f"KRONOSCOPE_CHILD_USER is {confinement.user}, and no process could be started as that user"
            f" ({said.decode(errors='replace').strip()[:200]}); give the worker the capabilities SETUID, SETGID and"
            " KILL, let that user read this installation, or leave the variable out"
        )
    return held


def share_folders(*roots: Path) -> None:
    """Let children of another user, but of this group, write where jobs write, and this process use what they wrote.

    Objects, and the lock beside them, are closed: no job goes there. Models are read and not written: builtin ones that
    jobs of an earlier version have trained are removed. What such a version wrote elsewhere gets the rights that new
    files have.

    Args:
        roots: The folder of artifacts, and those of models.
    """
    os.umask(_SHARED_UMASK)
    for closed in (roots[0] / OBJECTS.rstrip("/"), roots[0] / LOCKS):
        closed.mkdir(mode=0o700, parents=True, exist_ok=True)
        if closed.stat().st_uid == os.getuid():
            closed.chmod(0o700)
    for root in roots:
        root.mkdir(parents=True, exist_ok=True)
        if root.stat().st_uid == os.getuid():
            # what stands in it is moved and removed by who made it alone
            root.chmod(stat.S_IMODE(root.stat().st_mode) | stat.S_ISVTX)
        for place, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in (OBJECTS.rstrip("/"), LOCKS, *_READ)]
            for path in (Path(place), *(Path(place, name) for name in files)):
                with suppress(OSError):  # another worker may have removed it
                    _share(path)

    for store in roots[1:]:
        for name in _READ:
            _close_to_writers(store / name)


def _close_to_writers(folder: Path) -> None:
    """Let jobs read a folder of models; what one of theirs has written into it is no model of the service."""
    own = os.getuid()
    if folder.name == _TRAINED and any(
        each.lstat().st_uid != own for each in (folder, *folder.rglob("*")) if each.exists()
    ):
        trash = folder.with_name(f".trash-{uuid.uuid4().hex}")
        with suppress(OSError):
            folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for place, _, files in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in files)):
            with suppress(OSError):
                _share(path, stat.S_IRUSR | stat.S_IXUSR, without=stat.S_IWGRP | stat.S_IWOTH)


def _share(path: Path, rights: int = stat.S_IRWXU, *, without: int = 0) -> None:
    """Give the group those of an owner's rights, and take others away, where the owner is this process's user."""
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    shared = (mode | (mode & rights) >> 3) & ~without
    if status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode) and shared != mode:
        path.chmod(shared)


def _is_secret(name: str) -> bool:
    return name.startswith(("KRONOSCOPE_", "DATABASE_", "REDIS_", "AWS_"))


def main(arguments: Sequence[str]) -> int:
    """Try each wall from inside a child, and print those that hold.

    Args:
        arguments: The worker's process number and user, the number of another job's process, or 0, then the files of
            the worker's secrets.

    Returns:
        The exit code 0.
    """
    worker, user, other, *files = arguments
    fields = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    walls = {
        "own_user": os.getuid() != int(user),
        "neighbours": other != "0" and not _reaches(int(other)),
        "memory": not _opens(f"/proc/{worker}/environ") and not _opens(f"/proc/{worker}/mem"),
        "secret_files": not any(map(_opens, files)),
        "no_new_privileges": fields.get("NoNewPrivs") == "1",
        "system_calls": fields.get("Seccomp") == "2",
    }
    sys.stdout.write(json.dumps([name for name in WALLS if walls[name]]) + "\n")
    return 0


def _reaches(process: int) -> bool:
    """Whether a process of another job can be looked into, or be told to end."""
    if _opens(f"/proc/{process}/environ") or _opens(f"/proc/{process}/mem"):
        return True
    try:
        os.kill(process, 0)
    except OSError as error:
        return error.errno != errno.EPERM
    return True


def _opens(path: str) -> bool:
    try:
        with Path(path).open("rb"):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    # the worker appends `--frames FD`, which this child has no use for
    sys.exit(main(sys.argv[1 : sys.argv.index("--frames")]))
