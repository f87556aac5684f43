"""An embedded service to break: ``kronoscope serve --embedded``, whose every process can be killed alone.

with embedded_service(folder) as service:
    job_id = service.submit(document)
    service.kill("worker")
    service.restart()
    service.await_end(job_id)
"""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from jobs.schema.database import open_database
from tests import servers
from tests.chaos.stack.processes import Part, below, command_of, gone
from tests.chaos.stack.stack import ROOT, START_SECONDS, Stack, _inherited
from tests.machine.stopwatch import until

SERVE = (sys.executable, "-P", "-c", "from kronoscope.cli import main; main()", "serve", "--embedded")
LEAVE_SECONDS = 10.0
"""What is left of a service, or of a job, has ended so long after the kill -9 of a process."""
SERVICE = {"api": "-m api.__main__", "worker": "-m worker.embedded", "webhooks": "-m jobs.webhooks.__main__"}
OF_A_JOB = {"guardian": "-m worker.process.guardian", "child": "-m worker.execution "}
PROCESSES = ("first", *SERVICE, *OF_A_JOB)


class EmbeddedService(Stack):
    """A folder and a port on which one service after another runs; ``embedded_service`` makes one."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.artifacts = self.data / "artifacts"
        self.engine = open_database(f"sqlite:///{self.data / 'ledger.db'}")
        self._port = servers.hold_port()
        self.port = self._port.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / "gates").mkdir(exist_ok=True)
        self.environment = {
            **_inherited(),
            "KRONOSCOPE_ALLOW_FACTORIES": "*",
            "KRONOSCOPE_FACTORY_PATH": str(Path(__file__).parents[1] / "factories"),
            "KRONOSCOPE_THREADS": "1",
            "KRONOSCOPE_REQUESTS_PER_SECOND": "0",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **settings,
        }
        command = (*SERVE, "--port", str(self.port), "--data-dir", str(self.data))
        self.api = self.first = Part("first", command, self.environment, folder)
        self.workers = []

    def client(self, timeout: float = 40) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=timeout, verify=False)

    def revive(self) -> None:
        """Start the service where it does not run, and wait until it is ready."""
        if not self.first.alive:
            self.first.start()
        until(self._is_up, START_SECONDS, lambda: f"the service is ready:\n{self.first.tail()}")

    def pid_of(self, name: str) -> int:
        """A process of the service, or of the job that runs."""
        if name == "first":
            return self.first.pid
        begins = (SERVICE | OF_A_JOB)[name]
        found = [pid for pid in below(self.first.pid) if begins in f"{command_of(pid)} ".partition(" -- ")[0]]
        assert len(found) == 1, [command_of(pid) for pid in below(self.first.pid)]
        return found[0]

    def kill(self, name: str) -> None:
        """kill -9 of one process: what was started with it has ended in time, and the port is free.

        A guardian or a computing process is one of a job's: the job's others end, and the service goes on.
        """
        victim, everything = self.pid_of(name), [self.first.pid, *below(self.first.pid)]
        of_the_job = [self.pid_of("guardian"), *below(self.pid_of("guardian"))] if name in OF_A_JOB else []
        # an end that its parent has not read is an end: the first process is a child of this one
        others = [pid for pid in of_the_job or everything if pid != victim]
        os.kill(victim, signal.SIGKILL)
        assert gone(others, LEAVE_SECONDS), f"{name} was killed; left: {[command_of(pid) for pid in others]}"
        if of_the_job:
            assert self._is_up(), self.first.tail()
            return
        self.first.ended(LEAVE_SECONDS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))
            probe.listen()  # which no two sockets may

    def _is_up(self) -> bool:
        assert self.first.alive, self.first.tail()
        return bool(self.first.said("ready:"))


@contextlib.contextmanager
def embedded_service(folder: Path, **settings: str) -> Iterator[EmbeddedService]:
    """A service that is ready; ended, whatever state it is in, when the block is left."""
    service = EmbeddedService(folder, settings)
    try:
        service.revive()
        yield service
    finally:
        service.close()
