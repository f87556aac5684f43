"""Others under attack: what an honest caller waits for while silent, dripping and greedy clients are at the service.

A real PostgreSQL and a real API behind its proxy, with their default limits. The attackers are a process of their own,
at addresses of the loopback network that the proxy counts: 1,100 sockets that say nothing, 300 that send one byte of a
header a second, and 50 threads with one key that ask for 20 lists each of long documents. The honest caller has another
address, key and tenant, and asks for a list, a job and the probe in turn, before the attack and during it. Before that
attack come 40 readers with keys of their own, each of a part of one file of 64 MiB that was never verified, 16 KiB
every 50 ms.

    python -m benchmarks.exhaustion [--silent 1100] [--dripping 300] [--threads 50] [--lists 20] [--seconds 20]
           [--readers 40]
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import results_file
from benchmarks.ledger import DOCUMENT, SECRET, database, free_port, quantile
from jobs.codec import parse_document
from jobs.repository.submission import submit
from jobs.schema.database import open_database
from jobs.tenancy.api_keys import create_key, verify_key
from tests.api import seeding
from tests.servers import proxy

JOBS = 200
LABELS, LABEL_CHARACTERS = 32, 250
TARGET_MS = 500
READERS_TARGET_MS = 300
FILE_BYTES = 64 * 2**20
_READ_BYTES, _READ_SECONDS = 16 * 2**10, 0.05
SILENT, DRIPPING, GREEDY, HONEST = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"
_PAUSE_SECONDS = 0.02


@contextlib.contextmanager
def api(url: str, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """The port of the proxy before an API with its defaults, and the API's process."""
    port = free_port()
    ours = {
        "KRONOSCOPE_DATABASE_URL": url,
        "KRONOSCOPE_ARTIFACTS": str(folder / "artifacts"),
        "KRONOSCOPE_MODEL_STORE": str(folder / "models"),
        "KRONOSCOPE_KEY_SECRET": SECRET,
        "KRONOSCOPE_METRICS_TOKEN": SECRET.replace(" ", "-"),
        "KRONOSCOPE_PORT": str(port),
        "KRONOSCOPE_TRUSTED_PROXIES": "127.0.0.1",
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KRONOSCOPE_", "REDIS_"))}
    with (folder / "api.log").open("wb") as log, subprocess.Popen(
        [sys.executable, "-P", "-m", "api"], env=inherited | ours, stdout=log, stderr=log
    ) as process:  # fmt: skip
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/livez", trust_env=False).is_success:
                    break
            time.sleep(0.1)
        try:
            with proxy(port) as door:
                yield door.port, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def fill(url: str) -> tuple[str, str, str]:
    """Queue jobs with long documents of one tenant and a short one of another; their keys and the other's job."""
    engine = open_database(url)
    try:
        greedy, honest = (create_key(engine, SECRET, name) for name in ("greedy", "honest"))
        caller, other = (verify_key(engine, SECRET, key) for key in (greedy, honest))
        if caller is None or other is None:
            raise RuntimeError("a key that was just made is not valid")
        labels = {f"label-{number}": "x" * LABEL_CHARACTERS for number in range(LABELS)}
        long = parse_document(json.dumps({**DOCUMENT, "labels": labels}).encode())
        for _ in range(JOBS):
            submit(engine, caller.tenant_id, long)
        job = submit(engine, other.tenant_id, parse_document(json.dumps(DOCUMENT).encode())).job
        return greedy, honest, job.id
    finally:
        engine.dispose()


def stored_file(url: str, folder: Path, tenant: str, readers: int) -> tuple[str, list[str]]:
    """Store a file of one tenant's running job; its path, and a key for each of those who will read it."""
    engine = open_database(url)
    try:
        keys = [create_key(engine, SECRET, tenant) for _ in range(readers)]
        caller = verify_key(engine, SECRET, keys[0])
        if caller is None:
            raise RuntimeError("a key that was just made is not valid")
        claim = seeding.running(engine, caller.tenant_id)
        content = os.urandom(FILE_BYTES)
        seeding.artifact(engine, folder / "artifacts", claim, "factors/0.safetensors", content, "application/x-any")
        return f"/v1/jobs/{claim.job_id}/artifacts/factors/0.safetensors", keys
    finally:
        engine.dispose()


@contextlib.contextmanager
def slow_readers(port: int, path: str, keys: list[str]) -> Iterator[Counter[str]]:
    """Readers that each take a part of a file slowly; their answers by status, and the bytes that they got."""
    ended, answers = threading.Event(), Counter[str]()

    def read(key: str) -> None:
        lines = ("Host: x", f"Authorization: Bearer {key}", "Range: bytes=1-", "Connection: close", "", "")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * _READ_BYTES)
            connection.bind((GREEDY, 0))
            connection.connect(("127.0.0.1", port))
            connection.settimeout(1)
            connection.sendall("\r\n".join((f"GET {path} HTTP/1.1", *lines)).encode())
            while not ended.wait(_READ_SECONDS):
                with contextlib.suppress(TimeoutError):
                    part = connection.recv(_READ_BYTES)
                    if part.startswith(b"HTTP/1.1 "):
                        answers[part[9:12].decode()] += 1
                    answers["bytes"] += len(part)

    threads = [threading.Thread(target=read, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def opened(port: int, source: str) -> socket.socket | None:
    """A connection, or None where the service takes none now."""
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=2, source_address=(source, 0))
    except OSError:
        return None


def attack(chosen: argparse.Namespace) -> int:
    """Attack until standard input ends; then say what became of it."""
    stopping = threading.Event()
    answers: Counter[str] = Counter()
    silent = [opened(chosen.port, SILENT) for _ in range(chosen.silent)]
    dripping: list[socket.socket | None] = [None] * chosen.dripping

    def drip() -> None:
        while not stopping.wait(1):
            for place, connection in enumerate(dripping):
                try:
                    if connection is None:
                        raise BrokenPipeError
                    connection.sendall(b"a")
                except OSError:
                    dripping[place] = renewed = opened(chosen.port, DRIPPING)
                    with contextlib.suppress(OSError):
                        if renewed is not None:
                            renewed.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nX-A: ")

    def ask(_: int) -> None:
        transport = httpx.HTTPTransport(local_address=GREEDY)
        with httpx.Client(transport=transport, base_url=f"http://127.0.0.1:{chosen.port}", timeout=120) as client:
            for _ in range(chosen.lists):
                try:
                    answer = client.get(
                        "/v1/jobs", params={"limit": "100"}, headers={"authorization": f"Bearer {chosen.key}"}
                    )
                    answers[str(answer.status_code)] += 1
                    answers["bytes"] += len(answer.content)
                except httpx.HTTPError as error:
                    answers[type(error).__name__] += 1

    threading.Thread(target=drip, daemon=True).start()
    with ThreadPoolExecutor(chosen.threads) as threads:
        begun = time.monotonic()
        print("attacking", flush=True)
        list(threads.map(ask, range(chosen.threads)))
        seconds = time.monotonic() - begun
    sys.stdin.read()
    stopping.set()
    kept = sum(_is_open(connection) for connection in silent if connection is not None)
    said = {"lists": dict(answers), "lists_seconds": seconds, "silent_still_open": kept}
    print(json.dumps(said), flush=True)
    return 0


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(65_536) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def listen(port: int, key: str, job_id: str, seconds: float) -> tuple[dict[str, list[float]], Counter[str]]:
    """Seconds of the honest caller's answers, and how many of each status."""
    times: dict[str, list[float]] = {"list": [], "job": [], "probe": []}
    statuses: Counter[str] = Counter()
    paths = {"list": "/v1/jobs?limit=20", "job": f"/v1/jobs/{job_id}", "probe": "/readyz"}
    headers = {"authorization": f"Bearer {key}"}
    transport = httpx.HTTPTransport(local_address=HONEST)
    until = time.monotonic() + seconds
    with httpx.Client(transport=transport, base_url=f"http://127.0.0.1:{port}", timeout=60, headers=headers) as client:
        while time.monotonic() < until:
            for name, path in paths.items():
                begun = time.perf_counter()
                try:
                    statuses[str(client.get(path).status_code)] += 1
                except httpx.HTTPError as error:
                    statuses[type(error).__name__] += 1
                times[name].append(time.perf_counter() - begun)
                time.sleep(_PAUSE_SECONDS)
    return times, statuses


def summarised(times: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds of each kind of request, and of all."""
    every = {**times, "all": [each for found in times.values() for each in found]}
    return {
        name: {
            "requests": len(found),
            "p50_ms": quantile(found, 0.5),
            "p99_ms": quantile(found, 0.99),
            "max_ms": 1000 * max(found),
        }
        for name, found in every.items()
    }


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """All figures of one run."""
    with tempfile.TemporaryDirectory() as name, database("postgresql", Path(name)) as url:
        greedy, honest, job_id = fill(url)
        path, keys = stored_file(url, Path(name), "greedy", chosen.readers)
        with api(url, Path(name)) as (port, process):
            listen(port, honest, job_id, 1)  # the first ones connect
            quiet, _ = listen(port, honest, job_id, chosen.seconds / 2)
            with slow_readers(port, path, keys) as answers:
                beside_readers, read_statuses = listen(port, honest, job_id, chosen.seconds)
            before = process.memory_info().rss
            arguments = ["--attack", "--port", str(port), "--key", greedy]
            for option in ("silent", "dripping", "threads", "lists"):
                arguments += [f"--{option}", str(getattr(chosen, option))]
            with subprocess.Popen(  # noqa: S603 - this very program
                [sys.executable, "-m", "benchmarks.exhaustion", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as attackers:
                assert attackers.stdin is not None
                assert attackers.stdout is not None
                attackers.stdout.readline()
                peak = threading.Event()
                largest = [before]

                def watch() -> None:
                    while not peak.wait(0.05):
                        largest.append(process.memory_info().rss)

                watcher = threading.Thread(target=watch)
                watcher.start()
                times, statuses = listen(port, honest, job_id, chosen.seconds)
                peak.set()
                watcher.join()
                attackers.stdin.close()
                attacked = json.loads(attackers.stdout.read())
    return {
        "quiet": summarised(quiet),
        "slow_readers": summarised(beside_readers) | {"readers": dict(answers)},
        "attacked": summarised(times),
        "statuses": dict(statuses + read_statuses),
        "attackers": attacked,
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "api_bytes_before": before,
        "api_bytes_at_most": max(largest),
    }


def main() -> int:
    """Measure and store, or attack."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--silent", type=int, default=1100)
    parser.add_argument("--dripping", type=int, default=300)
    parser.add_argument("--threads", type=int, default=50)
    parser.add_argument("--lists", type=int, default=20)
    parser.add_argument("--readers", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--attack", action="store_true", help="be the attackers of a run")
    parser.add_argument("--port", type=int)
    parser.add_argument("--key")
    chosen = parser.parse_args()
    if chosen.attack:
        return attack(chosen)
    figures = measure(chosen)
    p99 = figures["attacked"]["all"]["p99_ms"]
    refused = sum(count for status, count in figures["statuses"].items() if status != "200")
    crowd = f"{chosen.silent:,} silent, {chosen.dripping} dripping, {chosen.threads} x {chosen.lists} lists"
    beside_readers = figures["slow_readers"]["all"]["p99_ms"]
    claims = [
        results_file.claim(
            f"others' p99 beside {chosen.readers} slow readers of a file, in ms", beside_readers, READERS_TARGET_MS
        ),
        results_file.claim(f"others' p99 under {crowd}, in ms", p99, TARGET_MS),
        results_file.claim("requests of others that were not answered 200", refused, 0),
        results_file.claim("silent sockets still open at the end", figures["attackers"]["silent_still_open"], 100),
    ]
    results_file.write("exhaustion", claims, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
