"""Machines that Slurm lends: one batch job each, whose name ends in the machine's id.

``sbatch`` takes the script from its standard input, ``squeue`` lists the user's own jobs. What Slurm still cleans up
after (`COMPLETING`) counts as a machine, but takes no job any more.
"""

from collections.abc import Mapping

from jobs.autoscale.launcher import Lent, NewMachine, Stage, ask, require_programs
from jobs.errors import LauncherFailed

_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_THERE = ("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
_ID_CHARACTERS = 36


class Slurm:
    """The launcher `slurm`."""

    def __init__(self, scope: str | None = None) -> None:
        """Look for Slurm's programs."""
        require_programs(
            ("sbatch", "squeue"),
            "run this on a node from which jobs are submitted (Debian: apt-get install slurm-client, with the "
            "cluster's slurm.conf and munge key)",
        )
        self.scope = scope or "slurm"

    def start(self, machine: NewMachine) -> str:
        """Submit a batch job."""
        command = ["sbatch", "--parsable", f"--job-name=kronoscope-{machine.class_name}-{machine.id}"]
        if machine.wall_seconds is not None:
            command.append(f"--time={_clock(machine.wall_seconds)}")
        said = ask(command, machine.script).strip()
        # with several clusters: NUMBER;CLUSTER, and some sites' wrappers say more before it
        number = said.splitlines()[-1].partition(";")[0] if said else ""
        if not number.isdecimal():
            raise LauncherFailed(f"`sbatch` named no job (got {said[:80]!r})")
        return number

    def lent(self, known: Mapping[str, str | None]) -> dict[str, Lent]:
        """List the batch jobs that have not ended."""
        found = {}
        for line in ask(["squeue", "--me", "--noheader", "--format=%i|%T|%j"]).splitlines():
            number, _, rest = line.strip().partition("|")
            state, _, name = rest.partition("|")
            machine_id = name[-_ID_CHARACTERS:]
            if machine_id in known:
                found[machine_id] = Lent(handle=number, stage=_stage(state))
        return found


def _stage(state: str) -> Stage:
    if state in _WAITING:
        return "pending"
    return "running" if state in _THERE else "ending"


def _clock(seconds: float) -> str:
    """A time limit as Slurm reads it, hours:minutes:seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
