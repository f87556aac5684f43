"""The service as processes: in embedded mode API and worker on this machine, on SQLite, for one person.

Whichever of the first process, the API, the worker and the sender of webhooks ends, the others end within 10 s: the
first ends the others, and these end with the first (`jobs.parent_process`). What the worker starts for a job ends with
it (its guardian), and alone costs an attempt of that job. The next start on the folder goes on with the jobs
(`worker.agent.worker_locks`).
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from importlib.machinery import PathFinder
from pathlib import Path

from catalog.record import FieldError
from catalog.requests.inputs import require_factory
from kronoscope.cli.extras import require_extra
from kronoscope.cli.service_lock import FolderInUse, ServiceLock
from kronoscope.client.client import Client

_READY_SECONDS = 300.0
"""A process that has ended is noticed at once; one that starts from a slow disk needs time."""
_END_SECONDS = 15.0
_FAILED_SECONDS = 7.0
"""The same after a process of the service has ended by itself: it is to be gone within 10 s."""
_DEVICES_SECONDS = 20.0
"""A worker measures the walls between its jobs before it registers; without a device that answers it never does."""
_POLL_SECONDS = 0.1


class ServiceFailed(RuntimeError):
    """A process of the service that did not start, or has ended."""


class FactoryWrong(ValueError):
    """A factory that no job could name."""


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
        "KRONOSCOPE_WEBHOOK_KEY": "",
        "KRONOSCOPE_WEBHOOK_KEY_FILE": str(folder / "webhook.key"),
    }


def serve_embedded(folder: Path, port: int | None, say: Callable[[str], None]) -> int:
    """Migrate the ledger, start API and worker, and wait for ctrl-C, SIGTERM, or the end of a process.

    One service at a time works on ``folder``; ``port`` None takes 8000, or any free one. ``ServiceFailed`` if the
    service cannot start, or a process of it has ended.
    """
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = ServiceLock(folder)
    except OSError as error:
        raise ServiceFailed(f"{folder} cannot be used ({error.strerror}); give a folder with --data-dir") from error
    except FolderInUse as error:
        raise ServiceFailed(str(error)) from error
    with closing(lock):
        return _serve(folder, lock, port, say)


def _serve(folder: Path, lock: ServiceLock, port: int | None, say: Callable[[str], None]) -> int:
    chosen = _free_port(port)
    url = f"http://127.0.0.1:{chosen}"
    lock.write(url)
    environment = embedded_environment(os.environ, folder, chosen, Path.cwd(), folder / "models")
    say(f"opening {folder / 'ledger.db'}; an older one is brought to this version's schema")
    _once([sys.executable, "-P", "-m", "migrations.__main__"], environment, lock)
    if not (folder / "webhook.key").exists():
        (folder / "webhook.key").touch(mode=0o600)
        (folder / "webhook.key").write_text(secrets.token_hex(24))
    group = _Group(lock)
    previous = {number: signal.signal(number, group.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        parts = (("api", "api.__main__"), ("worker", "worker.embedded"), ("webhooks", "jobs.webhooks.__main__"))
        for name, module in parts:
            command = [sys.executable, "-P", "-m", module, "--with-parent", str(os.getpid())]
            group.start(name, command, environment, folder / f"{name}.log")
        _await_ready(url, group)
        devices = _await_devices(url, group)
        if not group.asked:
            say(f"folder: {folder}")
            say(f"port: {chosen}, on this machine alone (127.0.0.1)")
            say(f"devices: {devices or f'none answers yet; see {folder}/worker.log'}")
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


def exec_module(module: str, arguments: Sequence[str] = (), *, extra: str = "ledger") -> int:
    """Replace this process by one of the service's own programs, which an extra of the installation brings."""
    require_extra(extra, command=f"kronoscope {' '.join(sys.argv[1:2])}")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])  # noqa: S606 - no shell is meant


class _Group:
    """The service's processes; each in a session of its own, so that ctrl-C reaches them through this one."""

    def __init__(self, lock: ServiceLock) -> None:
        self.asked = False
        self._lock = lock
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
                pass_fds=(self._lock.descriptor,),
                start_new_session=True,
            )
        self._running.append((name, process, log))

    def require_alive(self) -> None:
        for name, process, log in self._running:
            code = process.poll()
            if code is not None and not self.asked:
                # what is killed has no say: the last line of its log is of other things
                how = f"ended with code {code}: {_last_line(log)}" if code > 0 else f"was ended by {_signal(-code)}"
                raise ServiceFailed(f"the {name} process {how} (see {log})")

    def end(self) -> None:
        """Send SIGTERM to all, and SIGKILL to those left after some seconds."""
        seconds = _END_SECONDS if self.asked else _FAILED_SECONDS
        for _, process, _ in self._running:
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + seconds
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


def _await_devices(url: str, group: _Group) -> str:
    """Return the devices that the service's worker offers, once it does; empty where it offers none for long."""
    until = time.monotonic() + _DEVICES_SECONDS
    with Client(url, timeout_seconds=5) as client:
        while not group.asked and time.monotonic() < until:
            group.require_alive()
            offered = [each for each in client.devices() if each.state != "stale"]
            if offered:
                return "; ".join(f"{each.name}, {each.capacity_bytes / 2**30:,.1f} GiB" for each in offered)
            time.sleep(_POLL_SECONDS)
    return ""


def _once(command: Sequence[str], environment: Mapping[str, str], lock: ServiceLock) -> None:
    done = subprocess.run(  # noqa: S603 - as above
        list(command),
        env=dict(environment),
        pass_fds=(lock.descriptor,),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ServiceFailed(f"the ledger cannot be brought up to date: {done.stderr.strip()[-500:]}")


def require_factories(listed: Sequence[str], *, importable: bool) -> None:
    """Raise ``FactoryWrong`` for a value of `--allow-factory` that no job could name.

    It is written otherwise than `package.module:callable`, or there is no such module, where jobs run on this machine.
    """
    folders = os.environ.get("KRONOSCOPE_FACTORY_PATH", str(Path.cwd())).split(os.pathsep)
    for each in filter(None, ",".join(listed).split(",")):
        name = each.strip().rpartition("=")[2]  # TENANT_ID=package.module:callable
        if name == "*":
            continue
        try:
            require_factory("factory", name)
        except FieldError as error:
            raise FactoryWrong(f"--allow-factory is {each[:80]!r}; write `package.module:callable`, or `*`") from error
        module = name.partition(":")[0]
        if importable and not _is_found(module, [*sys.path, *folders]):
            raise FactoryWrong(
                f"--allow-factory is {each[:80]!r}, and there is no module {module!r} in {', '.join(folders)} or among"
                " those that are installed; correct it, or start the service in the module's folder"
            )


def _is_found(module: str, folders: Sequence[str]) -> bool:
    """Whether there is such a module; nothing is imported."""
    places: Sequence[str] | None = folders
    for depth, part in enumerate(module.split(".")):
        spec = None if places is None else PathFinder.find_spec(part, list(places))
        if spec is None and depth == 0:
            # a package that is installed to be edited has a finder of its own
            spec = next(filter(None, (each.find_spec(part, None) for each in sys.meta_path)), None)
        if spec is None:
            return module in sys.builtin_module_names
        places = spec.submodule_search_locations
    return True


def _free_port(asked: int | None) -> int:
    """Return the port that is asked for, else 8000, or any free one where that is in use."""
    why = ""
    for port in (8000, 0) if asked is None else (asked,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                why = error.strerror or ""
            else:
                return int(probe.getsockname()[1])
    if asked is None:
        raise ServiceFailed("this machine has no free port")
    raise ServiceFailed(f"port {asked} cannot be used ({why}); give another with --port")


def _signal(number: int) -> str:
    named = {each.value: each.name for each in signal.Signals}
    return named.get(number, f"signal {number}") if number else "itself, without an error"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "its log is empty"
