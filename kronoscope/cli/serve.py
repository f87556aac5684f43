"""The service as processes: in embedded mode API and worker on this machine, on SQLite, for one person."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kronoscope.client.client import Client

_READY_SECONDS = 300.0
"""A process that has ended is noticed at once; one that starts from a slow disk needs time."""
_END_SECONDS = 15.0
_POLL_SECONDS = 0.1


class ServiceFailed(RuntimeError):
    """A process of the service that did not start, or has ended."""


def embedded_environment(
    environ: Mapping[str, str], folder: Path, port: int, factory_path: Path, model_store: Path
) -> dict[str, str]:
    """Return the environment of API and worker in embedded mode.

    Factories and folders stay closed unless they are listed: there is no key on loopback, and every account of the
    machine reaches it.
    """
    return {
        **environ,
        "KRONOSCOPE_EMBEDDED": "1",
        "KRONOSCOPE_HOST": "127.0.0.1",
        "KRONOSCOPE_PORT": str(port),
        "KRONOSCOPE_DATABASE_URL": f"sqlite:///{folder / 'ledger.db'}",
        "KRONOSCOPE_ARTIFACTS": str(folder / "artifacts"),
        "KRONOSCOPE_MODEL_STORE": str(model_store),
        "KRONOSCOPE_FACTORY_PATH": environ.get("KRONOSCOPE_FACTORY_PATH", str(factory_path)),
    }


def serve_embedded(folder: Path, port: int | None, say: Callable[[str], None]) -> int:
    """Migrate the ledger, start API and worker, and wait for ctrl-C, SIGTERM, or the end of a process."""
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise ServiceFailed(f"{folder} cannot be used ({error.strerror}); give a folder with --data-dir") from error
    chosen = port if port is not None else _free_port()
    require_free(chosen)
    environment = embedded_environment(os.environ, folder, chosen, Path.cwd(), folder / "models")
    say(f"bringing {folder / 'ledger.db'} to this version's schema")
    _once([sys.executable, "-P", "-m", "migrations.__main__"], environment)
    group = _Group()
    previous = {number: signal.signal(number, group.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        group.start("api", [sys.executable, "-P", "-m", "api.__main__"], environment, folder / "api.log")
        group.start(
            "worker",
            [sys.executable, "-P", "-m", "worker.embedded", "--with-parent"],
            environment,
            folder / "worker.log",
        )
        url = f"http://127.0.0.1:{chosen}"
        _await_ready(url, group)
        if not group.asked:
            say(f"ready: {url}  (logs in {folder}; ctrl-C ends it)")
        while not group.asked:
            group.require_alive()
            time.sleep(_POLL_SECONDS)
        say("ending: running jobs go back into the queue")
    finally:
        group.end()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0


def exec_module(module: str, arguments: Sequence[str] = ()) -> int:
    """Replace this process by one of the service's own programs."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])  # noqa: S606 - no shell is meant


class _Group:
    """The service's processes; each in a session of its own, so that ctrl-C reaches them through this one."""

    def __init__(self) -> None:
        self.asked = False
        self._running: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def ask(self, *_: object) -> None:
        """Note that the processes are to end."""
        self.asked = True

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as file:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules, no shell
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        self._running.append((name, process, log))

    def require_alive(self) -> None:
        for name, process, log in self._running:
            code = process.poll()
            if code is not None and not self.asked:
                raise ServiceFailed(f"the {name} process ended with code {code}: {_last_line(log)} (see {log})")

    def end(self) -> None:
        """Send SIGTERM to all, and SIGKILL to those left after some seconds."""
        for _, process, _ in self._running:
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + _END_SECONDS
        for _, process, _ in self._running:
            try:
                process.wait(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_ready(url: str, group: _Group) -> None:
    until = time.monotonic() + _READY_SECONDS
    with Client(url, timeout_seconds=5) as client:
        while not group.asked and (why := client.unready()) is not None:
            group.require_alive()
            if time.monotonic() > until:
                raise ServiceFailed(f"the service is not ready after {_READY_SECONDS:.0f} s: {why}")
            time.sleep(_POLL_SECONDS)


def _once(command: Sequence[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(list(command), env=dict(environment), capture_output=True, text=True, check=False)  # noqa: S603 - as above
    if done.returncode != 0:
        raise ServiceFailed(f"the ledger cannot be brought up to date: {done.stderr.strip()[-500:]}")


def require_free(port: int) -> None:
    """Refuse a port that is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServiceFailed(f"port {port} cannot be used ({error.strerror}); give another with --port") from error


def _free_port() -> int:
    """Return port 8000, or any free one where that is in use."""
    for port in (8000, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ServiceFailed("this machine has no free port")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "its log is empty"
