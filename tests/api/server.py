"""The API as a process of its own, on a free port, ended by the id it was started with."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from tests.machine.stopwatch import Stopwatch, until
from tests.servers import PrivateServer, proxy

KEY_SECRET = "a secret that only the tests know"
WEBHOOK_KEY = "a key of webhooks that only the tests know"
METRICS_TOKEN = "a-token-that-only-the-tests-know"
START_SECONDS = 300

NO_TLS = False
"""Nothing here is encrypted, and reading the certificates takes 60 ms of a core for each client."""


class Server:
    """One running API."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self.port = self.api_port = int(url.rpartition(":")[2])
        self.process = process
        self.log = log
        self.proxy: PrivateServer | None = None
        """The proxy before it, where there is one."""

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=300, verify=NO_TLS)

    def await_long_polls(self, number: int, token: str | None = None) -> None:
        """Return once exactly so many requests wait for news of a job; they may wait for 30 s at most."""
        with self.client(token) as scraper:
            told = f"kronoscope_http_long_polls {number}.0\n"
            until(lambda: told in scraper.get("/metrics").text, what=f"{number} requests wait")


def environment(database_url: str, artifacts: Path, port: int, more: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KRONOSCOPE_", "DATABASE_URL", "REDIS_URL"))
    }
    return {
        **kept,
        "KRONOSCOPE_DATABASE_URL": database_url,
        "KRONOSCOPE_ARTIFACTS": str(artifacts),
        "KRONOSCOPE_PORT": str(port),
        "KRONOSCOPE_MODEL_STORE": str(artifacts / "models"),
        # what the process only murmurs about is a fault here, as in the tests themselves
        "PYTHONWARNINGS": "error",
        # tests ask with one key as fast as they can
        "KRONOSCOPE_REQUESTS_PER_SECOND": "0",
        # and without one from one address
        "KRONOSCOPE_REFUSED_PER_MINUTE": "0",
        **more,
    }


def ready(client: httpx.Client, wanted: str = "ready") -> dict[str, object]:
    """What the probe says once it says this; on a slow machine a part may be away for a second that answers."""

    def told() -> dict[str, object] | None:
        answer = client.get("/readyz")
        said: dict[str, object] = answer.json()
        return said if (answer.status_code, said["status"]) == (200, wanted) else None

    return until(told, what=lambda: client.get("/readyz").text) or {}


def free_port() -> int:
    """A port at which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that the kernel gives nobody else meanwhile, whether a server of ours listens there yet or not."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@contextlib.contextmanager
def serve(database_url: str, folder: Path, more: Mapping[str, str], port: int | None = None) -> Iterator[Server]:
    """Start an API and wait until it answers; afterwards it must end at SIGTERM. Who gives a port holds it."""
    if port is None:
        with held_port() as held, serve(database_url, folder, more, held) as server:
            yield server
        return
    log = folder / f"api-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "api"],
            env=environment(database_url, folder / "artifacts", port, more),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _await_answer(server)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@contextlib.contextmanager
def serve_behind_proxy(
    database_url: str, folder: Path, more: Mapping[str, str], changes: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """The same behind the service's own proxy, whose configuration has these changes; its address is the proxy's."""
    with (
        serve(database_url, folder, {"KRONOSCOPE_TRUSTED_PROXIES": "127.0.0.1", **more}) as server,
        proxy(server.port, changes) as door,
    ):
        behind = Server(door.url, server.process, server.log)
        behind.proxy, behind.api_port = door, server.port
        yield behind


def _await_answer(server: Server) -> None:
    watch = Stopwatch()
    while watch.seconds() < START_SECONDS and server.process.poll() is None:
        try:
            if httpx.get(f"{server.url}/livez", trust_env=False, timeout=300, verify=NO_TLS).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"the API did not start:\n{server.log.read_text()}")
