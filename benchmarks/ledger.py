"""The ledger under load: ten thousand queued jobs listed and claimed, hundreds of readers and pollers, none refused.

A real PostgreSQL, a real API process, and load from processes of its own. Every time is told beside a floor of the
same run: one row by its primary key over the same connection pool. SQLite's figures stand beside PostgreSQL's. The
readers' account of what they received is held against the table.

    python -m benchmarks.ledger [--jobs 10000] [--readers 500] [--polls 200] [--seconds 40]
"""

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psycopg
from sqlalchemy import Engine, insert, select

from benchmarks import results_file
from jobs.codec import document_json, parse_document, sha256_of
from jobs.devices.registry import Device, Worker, register
from jobs.queue import claims
from jobs.records import Claim
from jobs.repository.events import read_history
from jobs.scheduling.placement import next_places
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, reading, upgrade_schema, writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import jobs
from jobs.tenancy.api_keys import create_key, verify_key
from tests import servers

TENANTS = 8
WORKER = "benchmark"
SECRET = "a secret of the benchmark alone"  # noqa: S105 - opens nothing that outlives the run
DOCUMENT = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
    "labels": {"purpose": "benchmark"},
}
_LISTED, _CLAIMED, _FLOOR = 300, 300, 600
_FOLLOWED = 50
_EVENTS_EACH_SECOND = 1.0
_PROCESSES = 2


def quantile(seconds: Sequence[float], share: float) -> float:
    """In milliseconds."""
    return 1000 * statistics.quantiles(seconds, n=100, method="inclusive")[round(100 * share) - 1]


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Seconds of each call."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return found


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds in the middle, at the 95th percentile, and at the most."""
    return {"p50_ms": quantile(seconds, 0.5), "p95_ms": quantile(seconds, 0.95), "max_ms": 1000 * max(seconds)}


@contextlib.contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty ledger; PostgreSQL with the durability that it has by default."""
    if kind == "sqlite":
        url = f"sqlite:///{folder}/ledger.db"
        upgrade_schema(url)
        yield url
        return
    with servers.private_postgres(fsync="on", full_page_writes="on", synchronous_commit="on") as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE ledger")
        url = server.url.rsplit("/", 1)[0] + "/ledger"
        upgrade_schema(url)
        yield url


def fill(engine: Engine, count: int) -> list[str]:
    """Queue ``count`` jobs of several tenants, the first with half of them; returns a key of each tenant."""
    keys = [create_key(engine, SECRET, f"tenant-{number}") for number in range(TENANTS)]
    callers = [verify_key(engine, SECRET, key) for key in keys]
    tenants = [caller.tenant_id for caller in callers if caller is not None]
    document = document_json(parse_document(json.dumps(DOCUMENT).encode()))
    kept = {"document": document, "document_sha256": sha256_of(document), "kind": "capacity", "state": "queued"}
    rows = []
    for number in range(count):
        tenant = tenants[0 if number % 2 else 1 + number // 2 % (TENANTS - 1)]
        rows.append({**kept, "id": new_id(), "tenant_id": tenant, "needs_bytes": 2**28, "event_seq": 1})
    with writing(engine) as connection:
        now = connection.execute(select(ledger_now())).scalar_one()
        for row in rows:
            row["created_at"] = row["queued_at"] = now
        connection.execute(insert(jobs), rows)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE")
    return keys


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def api(url: str, folder: Path, readers: int, polls: int) -> Iterator[str]:
    """The address of an API as it is run, its caps raised."""
    port = free_port()
    ours = {
        "KRONOSCOPE_DATABASE_URL": url,
        "KRONOSCOPE_ARTIFACTS": str(folder / "artifacts"),
        "KRONOSCOPE_MODEL_STORE": str(folder / "models"),
        "KRONOSCOPE_KEY_SECRET": SECRET,
        "KRONOSCOPE_PORT": str(port),
        "KRONOSCOPE_STREAMS": str(readers),
        "KRONOSCOPE_STREAMS_PER_KEY": str(readers),
        "KRONOSCOPE_LONG_POLLS": str(polls),
        "KRONOSCOPE_LONG_POLLS_PER_KEY": str(polls),
        "KRONOSCOPE_REQUESTS_PER_SECOND": "0",
        "KRONOSCOPE_REQUESTS_PER_KEY": str(readers + polls),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KRONOSCOPE_", "REDIS_"))}
    with (folder / "api.log").open("wb") as log, subprocess.Popen(
        [sys.executable, "-P", "-m", "api"], env=inherited | ours, stdout=log, stderr=log
    ) as process:  # fmt: skip
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{address}/livez", trust_env=False).is_success:
                    break
            time.sleep(0.1)
        try:
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def measure_floor(engine: Engine) -> list[float]:
    """One row by its primary key, as every read of the ledger goes."""
    with reading(engine) as connection:
        one = connection.execute(select(jobs.c.id).limit(1)).scalar_one()

    def look() -> None:
        with reading(engine) as connection:
            connection.execute(select(jobs.c.id).where(jobs.c.id == one)).one()

    timed(look, 50)
    return timed(look, _FLOOR)


def measure_list(address: str, keys: Sequence[str], times: int) -> list[float]:
    """The first page of each tenant's jobs in turn, and of those that wait, over HTTP."""
    found: list[float] = []
    with httpx.Client(base_url=address, trust_env=False, timeout=60) as client:
        for number in range(times + 1):
            headers = {"authorization": f"Bearer {keys[number % len(keys)]}"}
            query = {"limit": "20"} if number % 2 else {"limit": "20", "state": "queued"}
            begun = time.perf_counter()
            answer = client.get("/v1/jobs", params=query, headers=headers)
            found.append(time.perf_counter() - begun)
            if not answer.is_success or not answer.json()["items"]:
                raise RuntimeError(f"the list answered {answer.status_code}")
    return found[1:]  # the first one connects


def register_worker(engine: Engine) -> None:
    """Make a worker known on whose device everything fits: the conditions of placement are looked at all the same."""
    worker = Worker(id=WORKER, node="bench", process_space="bench", version="0", slots=10_000, factories=("*",))
    device = Device(uuid="host-bench", kind="host", name="host", capacity_bytes=2**45)
    register(engine, worker, [device], 3600)


def take(engine: Engine) -> Claim:
    """Look whose turn it is and on which device, and claim it, as an Agent does."""
    for place in next_places(engine, WORKER, 9):
        held = claims.claim(engine, place.job_id, WORKER, secrets.token_hex(16), 3600, place=place)
        if held is not None:
            return held
    raise RuntimeError("nothing to claim")


def measure_claims(engine: Engine, times: int) -> tuple[list[float], list[Claim]]:
    """One after the other, each looked for anew."""
    held: list[Claim] = []
    return timed(lambda: held.append(take(engine)), times), held


class Loader:
    """A process that loads, started and told what to do."""

    def __init__(self, task: dict[str, Any]) -> None:
        command = [sys.executable, "-P", "-c", "from benchmarks.cases.ledger_load import main; main()"]
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and words
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._tell(task)

    def begin(self, ready: float, until: float) -> None:
        """Begin, once it is up; everybody is under way at ``ready``."""
        self._tell({"ready": ready, "until": until})

    def up(self) -> None:
        """Wait until it is."""
        if self._process.stdout is None or self._process.stdout.readline() != "up\n":
            raise RuntimeError("a loading process did not start; what it said stands above")

    def account(self) -> dict[str, Any]:
        """What it has seen, once it is over."""
        out, _ = self._process.communicate()
        found: dict[str, Any] = json.loads(out)
        return found

    def _tell(self, line: dict[str, Any]) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()


def measure_load(
    url: str, engine: Engine, address: str, held: Sequence[Claim], keys: dict[str, str], chosen: argparse.Namespace
) -> dict[str, Any]:
    """Readers and pollers of running jobs while events are written, and a list asked for now and then."""
    followed = [(each.job_id, keys[each.tenant_id]) for each in held]
    writer = Loader({"url": url, "claims": [dataclasses.asdict(each) for each in held], "rate": chosen.rate})
    loaders = [
        Loader(
            {
                "address": address,
                "followed": followed[part:] + followed[:part],
                "readers": chosen.readers // _PROCESSES,
                "polls": chosen.polls // _PROCESSES,
            }
        )
        for part in range(_PROCESSES)
    ]
    for each in (writer, *loaders):
        each.up()
    ready = time.time() + max(3.0, (chosen.readers + chosen.polls) / 40)
    until = ready + chosen.seconds
    for each in (writer, *loaders):
        each.begin(ready, until)
    listed = list_meanwhile(address, list(keys.values()), ready, until)
    told = [each.account() for each in loaders]
    lines = writer.account()["written"]
    stored = {each.job_id: all_numbers(engine, each) for each in held}
    wrong = sum(numbers != stored[job_id] for part in told for job_id, numbers in part["received"])
    latencies = [seconds for part in told for seconds in part["latencies"]]
    return {
        "seconds": chosen.seconds,
        "readers": sum(len(part["received"]) for part in told),
        "pollers": chosen.polls,
        "jobs_followed": len(held),
        "events_written": lines,
        "events_delivered": sum(len(numbers) for part in told for _, numbers in part["received"]),
        "readers_with_gaps_or_doubles": wrong,
        "polls_answered": sum(part["polls"] for part in told),
        "failed_requests": sum(len(part["failures"]) for part in told),
        "failures": sorted({failure for part in told for failure in part["failures"]})[:10],
        "readers_under_way_at_most": sum(part["readers_under_way"] for part in told),
        "latency": summary(latencies),
        "list_meanwhile": summary(listed),
    }


def list_meanwhile(address: str, keys: Sequence[str], ready: float, until: float) -> list[float]:
    """A page of jobs every half second while the load is on."""
    time.sleep(max(0.0, ready - time.time()))
    found = []
    while time.time() < until - 1:
        found += measure_list(address, keys, 2)
        time.sleep(1)
    return found


def all_numbers(engine: Engine, held: Claim) -> list[int]:
    """The table's account of one job."""
    from_table: list[int] = []
    position = 0
    while (page := read_history(engine, held.tenant_id, held.job_id, position)) is not None:
        from_table += [each.seq for each in page.events]
        position = page.through
        if not page.more:
            break
    return from_table


def measure(kind: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Everything on one database."""
    with tempfile.TemporaryDirectory() as name, database(kind, Path(name)) as url:
        engine = open_database(url)
        keys = fill(engine, chosen.jobs)
        register_worker(engine)
        by_tenant = {}
        for key in keys:
            caller = verify_key(engine, SECRET, key)
            if caller is not None:
                by_tenant[caller.tenant_id] = key
        with api(url, Path(name), chosen.readers, chosen.polls) as address:
            floor = measure_floor(engine)
            listed = measure_list(address, keys, _LISTED)
            claimed, held = measure_claims(engine, min(_CLAIMED, chosen.jobs // 4))
            load = measure_load(url, engine, address, held[:_FOLLOWED], by_tenant, chosen)
        engine.dispose()
    over = quantile(floor, 0.95)
    found = {"floor": summary(floor), "list": summary(listed), "claim": summary(claimed), "load": load}
    for part in ("list", "claim"):
        found[part]["times_the_floor"] = found[part]["p95_ms"] / over
    return found


def main() -> None:
    """Measure both databases, judge PostgreSQL."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=500)
    parser.add_argument("--polls", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--rate", type=float, default=_EVENTS_EACH_SECOND, help="events a second of each running job")
    parser.add_argument("--postgresql-only", action="store_true")
    parser.add_argument("--print-only", action="store_true", help="store nothing")
    chosen = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    kinds = ("postgresql",) if chosen.postgresql_only else ("postgresql", "sqlite")
    figures = {kind: measure(kind, chosen) for kind in kinds}
    print(json.dumps(figures, indent=2))
    if chosen.print_only:
        return
    found = figures["postgresql"]
    load = found["load"]
    results_file.write(
        "ledger",
        [
            results_file.claim(
                f"95th percentile in ms of a page of jobs over HTTP, {chosen.jobs} queued", found["list"]["p95_ms"], 50
            ),
            results_file.claim(
                f"95th percentile in ms of looking for and claiming a job, {chosen.jobs} queued",
                found["claim"]["p95_ms"],
                20,
            ),
            results_file.claim(
                "streams of events open at a time", load["readers_under_way_at_most"], 500, at_most=False
            ),
            results_file.claim(
                f"failed requests of {chosen.readers} readers and {chosen.polls} pollers in {chosen.seconds:g} s",
                load["failed_requests"],
                0,
            ),
            results_file.claim(
                "readers that missed an event or had one twice", load["readers_with_gaps_or_doubles"], 0
            ),
            results_file.claim(
                "95th percentile in ms from an event's writing to its arrival", load["latency"]["p95_ms"], 1000
            ),
        ],
        figures,
    )


if __name__ == "__main__":
    main()
