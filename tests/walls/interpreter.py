"""An interpreter that every user may execute: the tests' own, or a copy of it where that is in somebody's home.

A worker of Compose runs with it.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = Path(sysconfig.get_path("purelib"))
PROGRAMS = Path(__file__).parent / "programs"
"""Programs for jobs, and for a worker of two jobs."""

WORKER, JOBS = 10_001, 20_000
"""The user of a worker of Compose, and the first of its jobs."""
_RIGHTS = "-all,+kill,+setgid,+setuid"


def as_worker(*command: str) -> list[str]:
    """Return a command that runs with the user and the rights of a worker of Compose.

    Args:
        command: The program and its arguments.
    """
    rights = [f"--{each}={_RIGHTS}" for each in ("inh-caps", "ambient-caps", "bounding-set")]
    return ["setpriv", f"--reuid={WORKER}", f"--regid={WORKER}", "--clear-groups", *rights, "--no-new-privs", *command]


def is_open(path: Path) -> bool:
    """Whether every user may come to a file or folder, and execute or enter it."""
    real = path.resolve()
    return all(each.stat().st_mode & 0o001 for each in (real, *real.parents))


def everybodys_python(folder: Path) -> str:
    """Return the interpreter's path; a copy is made in a folder that every user may enter.

    Args:
        folder: The folder for a copy.
    """
    own = Path(sys.executable).resolve()
    if is_open(own):
        return str(own)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base, copy = Path(sys.base_prefix), folder / "python"
    if not copy.exists():
        # under a name of its own until it is whole: tests in another process would start a half of it
        making = folder / f"python.{os.getpid()}"
        (making / "bin").mkdir(parents=True)
        shutil.copy(own, making / "bin" / name)
        # compiled modules are copied with their times: a user who cannot write any would compile them in each process
        unneeded = shutil.ignore_patterns("test", "tests", "site-packages", "idlelib", "tkinter")
        shutil.copytree(base / "lib" / name, making / "lib" / name, ignore=unneeded)
        for library in (base / "lib").glob("libpython*.so*"):
            shutil.copy(library, making / "lib" / library.name)
        try:
            making.rename(copy)
        except OSError:
            # another process was first
            shutil.rmtree(making)
    return str(copy / "bin" / name)


def environment(python: str) -> dict[str, str]:
    """Return the variables with which it imports the project and what that needs.

    Args:
        python: A path from `everybodys_python`.
    """
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, PACKAGES))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": str(Path(python).parent.parent / "lib"),
    }
