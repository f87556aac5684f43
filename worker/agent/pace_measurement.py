"""The pace of this machine's devices, measured for jobs that run as users of their own: they only read the model store.

Such a job's measurement would be its own word, which every later job's plan is made by. So a process that runs no job's
code measures each kind of device once, beside the first jobs, with the threads that a job has. Of several workers that
start on one machine one measures after the other, and finds what is there already.
"""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Mapping

import structlog

from jobs.objects.local_store import LOCKS
from worker.devices.discover import devices_of
from worker.process.child_process import child_environment
from worker.settings import WorkerSettings

_PROGRAM = (sys.executable, "-P", "-m", "worker.execution.device_calibration")
_SECONDS = 180.0
"""After which a device that does not answer is left unmeasured."""
_LOCK = "pace"


class PaceMeasurement:
    """A thread that measures what is not measured yet, and ends."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Get ready.

        Args:
            settings: The worker's settings.
        """
        self._settings = settings
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="pace", daemon=True)
        self._log = structlog.get_logger("kronoscope.worker")

    def start(self) -> None:
        """Begin, where jobs have users of their own; others measure for themselves."""
        if self._settings.child_user is not None or self._settings.child_namespaces:
            self._thread.start()

    def stop(self) -> None:
        """End what is being measured; it is measured at the next start."""
        self._stopped.set()
        with self._guard:
            if self._process is not None:
                self._process.kill()

    def join(self, seconds: float) -> None:
        """Wait for the end of all measurements.

        Args:
            seconds: The longest wait.
        """
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            # closed to jobs, which could hold it for ever
            folder = self._settings.ledger.artifact_root / LOCKS
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (folder / _LOCK).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for shown in self._kinds():
                    self._measure(shown)
        except (OSError, subprocess.SubprocessError) as error:
            self._log.warning("the machine's pace is not measured; jobs plan with what is usual", why=str(error))

    def _kinds(self) -> list[str]:
        """Return the CUDA_VISIBLE_DEVICES for each kind of device that jobs compute on."""
        found = devices_of(self._settings.node, self._settings.fake_gpus)()
        by_name = {each.name: each.uuid for each in found if each.kind == "cuda"}
        return list(by_name.values()) or [""]

    def _measure(self, shown: str) -> None:
        variables: Mapping[str, str] = child_environment(os.environ) | {"CUDA_VISIBLE_DEVICES": shown}
        options = {
            "--store": self._settings.model_store,
            "--scratch": self._settings.ledger.artifact_root,
            "--threads": self._settings.computing_threads(),
        }
        command = [*_PROGRAM, *(str(each) for pair in options.items() for each in pair)]
        with self._guard:
            if self._stopped.is_set():
                return
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        try:
            _, said = self._process.communicate(timeout=_SECONDS)
        finally:
            with self._guard:
                process, self._process = self._process, None
                process.kill()
                process.wait()
        if process.returncode != 0 and not self._stopped.is_set():
            self._log.warning(
                "a device's pace is not measured; jobs plan with what is usual of it",
                device=shown or "host",
                why=said.decode(errors="replace").strip()[-500:],
            )
