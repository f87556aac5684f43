"""A Slurm of one node on loopback, in a folder of its own: munged, slurmctld and slurmd, each ended by its number.

It needs neither systemd nor control groups, and no account: the daemons run in the foreground as whoever starts them
(munge refuses root, and gets its own user).
"""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests import servers
from tests.machine.stopwatch import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")
NODE_CORES = 8
"""More than the machine may have: jobs are bounded by the test's ceilings, not by the node."""
_END_SECONDS = 30

_CONFIGURATION = """\
ClusterName=kronoscope
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
NodeName=node NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=16000 State=UNKNOWN
PartitionName=main Nodes=node Default=YES MaxTime=INFINITE DefaultTime=01:00:00 State=UP
"""


class SlurmCluster:
    """A running cluster; ``running_cluster`` makes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        self._daemons: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self) -> None:
        """Start the daemons and wait until the node takes jobs."""
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        assert not missing, f"{', '.join(missing)} not installed; `make test-slurm` installs them (slurm-wlm, munge)"
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir()
        self._start_munge()
        ports = [servers.hold_port() for _ in range(2)]
        numbers = [each.getsockname()[1] for each in ports]
        text = _CONFIGURATION.format(
            host=socket.gethostname(), folder=self.folder, user=pwd.getpwuid(os.geteuid()).pw_name, cores=NODE_CORES,
            controller_port=numbers[0], node_port=numbers[1],
        )  # fmt: skip
        self.configuration.write_text(text)
        for port in ports:
            port.close()
        self._daemon("slurmctld", "-D", "-c", "-f", str(self.configuration))
        self._daemon("slurmd", "-D", "-N", "node", "-f", str(self.configuration))
        until(self._is_ready, 120, lambda: f"the node is idle; {self.said()}")

    def stop(self) -> None:
        """End the jobs, and then the daemons, the last first."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--me", "--signal=KILL", "--full")
            self.run("scancel", "--me")
            until(lambda: not self.run("squeue", "--noheader"), _END_SECONDS)
        for _, process in reversed(self._daemons):
            for wish in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    process.send_signal(wish)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_END_SECONDS)

    def run(self, *command: str) -> str:
        """The output of one of Slurm's programs."""
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60,
            env=os.environ | {"SLURM_CONF": str(self.configuration)},
        )  # fmt: skip
        return done.stdout

    def queue(self) -> list[tuple[str, str, str]]:
        """Number, state and name of every job that has not ended."""
        lines = self.run("squeue", "--noheader", "--format=%i|%T|%j").splitlines()
        return [(number, state, name) for number, state, name in (line.split("|") for line in lines)]

    def said(self) -> str:
        """The last words of the daemons."""
        logs = (self.folder / name for name in ("slurmctld.log", "slurmd.log", "munged.out"))
        return "\n".join(f"{each.name}: {each.read_text()[-600:]}" for each in logs if each.exists())

    def _is_ready(self) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            return "idle" in self.run("sinfo", "--noheader", "--format=%T")
        return False

    def _start_munge(self) -> None:
        place = self.folder / "munge"
        key = place / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        place.chmod(0o755)
        user = []
        if os.geteuid() == 0:
            account = pwd.getpwnam("munge")
            for each in (place, key):
                os.chown(each, account.pw_uid, account.pw_gid)
            user = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        files = [f"--{name}-file={place / name}" for name in ("key", "pid", "log", "seed")]
        self._daemon(*user, "munged", "--foreground", f"--socket={place / 'socket'}", *files)
        until((place / "socket").exists, 60, lambda: f"munged listens; {self.said()}")

    def _daemon(self, *command: str) -> None:
        name = next(each for each in command if each in PROGRAMS)
        with (self.folder / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._daemons.append((name, process))


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A cluster for as long as it is wanted."""
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
