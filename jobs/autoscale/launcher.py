"""A launcher lends machines: it starts one from a text, and lists those that it knows.

Every machine has an id that is made before the launcher is asked, and is part of its name there. So a machine is found
again whose start was interrupted, and none is started twice for one id.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from catalog.record import record
from jobs.errors import LauncherFailed, LauncherMissing

Stage = Literal["pending", "running", "ending"]

_ANSWER_SECONDS = 60.0
"""How long a launcher's program may take to answer."""
_SHOWN_CHARACTERS = 300


@record
class Lent:
    """A machine as the launcher knows it."""

    handle: str
    """The launcher's own name of it, such as the number of a Slurm job."""
    stage: Stage


@record
class NewMachine:
    """A machine to be started."""

    id: str
    class_name: str
    script: str
    """The rendered template of its class."""
    wall_seconds: float | None


class Launcher(Protocol):
    """Starts and lists machines."""

    @property
    def scope(self) -> str:
        """The queue that machines are started in, among all that one ledger may know."""

    def start(self, machine: NewMachine) -> str:
        """Start a machine."""

    def lent(self, known: Mapping[str, str | None]) -> dict[str, Lent]:
        """List the machines that have not ended."""


def require_programs(names: Sequence[str], remedy: str) -> None:
    """Refuse a launcher whose programs are not on the search path."""
    for name in names:
        if shutil.which(name) is None:
            raise LauncherMissing(f"`{name}` is not installed on this machine, or not on its PATH; {remedy}")


def ask(command: Sequence[str], text: str = "") -> str:
    """Run one of a launcher's programs."""
    try:
        done = subprocess.run(  # noqa: S603 - the operator's own launcher, and no shell
            list(command),
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired as error:
        raise LauncherFailed(f"`{command[0]}` did not answer within {_ANSWER_SECONDS:.0f} s") from error
    except OSError as error:
        raise LauncherFailed(f"`{command[0]}` cannot be run ({error.strerror})") from error
    if done.returncode:
        words = " ".join((done.stderr.strip() or done.stdout.strip()).split())[:_SHOWN_CHARACTERS]
        raise LauncherFailed(
            f"`{' '.join(command[:2])}` ended with code {done.returncode}: {words or 'no reason given'}"
        )
    return done.stdout
