"""The processes that load the benchmark `ledger`: readers and pollers on plain sockets, and a writer of events.

Each is told what to do by a line of JSON, says that it is up, is told when, and answers with its account.

Each reader keeps the numbers of the events that it received and how late each was; each poller asks
again as soon as it is answered. Whatever is no expected answer is a failure.
"""

import asyncio
import itertools
import json
import resource
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from catalog.frames import LogLine
from jobs.queue import attempt_endings, attempt_writes
from jobs.records import Claim
from jobs.schema.database import open_database

_WAIT_SECONDS = 10
_PATIENCE_SECONDS = 120


class Account:
    """What one process has seen."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.received: list[tuple[str, list[int]]] = []
        self.latencies: list[float] = []
        self.failures: list[str] = []
        self.polls = 0
        self.under_way = 0
        self.most_under_way = 0


def main() -> None:
    """Do what the first line asks for, in the time that the second one names."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    task = json.loads(sys.stdin.readline())
    sys.stdout.write("up\n")
    sys.stdout.flush()
    times = json.loads(sys.stdin.readline())
    found = _write(task, **times) if "url" in task else _follow(task, **times)
    sys.stdout.write(json.dumps(found))


def _follow(task: Mapping[str, Any], ready: float, until: float) -> dict[str, Any]:
    """Follow the jobs, each given with a key, with so many readers and pollers; all have begun by ``ready``."""
    account = Account(until)
    followed = [(str(job_id), str(key)) for job_id, key in task["followed"]]
    asyncio.run(_load(task["address"], followed, task["readers"], task["polls"], ready, account))
    return {
        "received": account.received,
        "latencies": account.latencies,
        "failures": account.failures,
        "polls": account.polls,
        "readers_under_way": account.most_under_way,
    }


def _write(task: Mapping[str, Any], ready: float, until: float) -> dict[str, int]:
    """As workers do: each job so many lines a second, and then its end."""
    held = [Claim(**each) for each in task["claims"]]
    engine = open_database(task["url"])
    written = 0
    time.sleep(max(0.0, ready - time.time()))
    due = time.time()
    while time.time() < until:
        attempt_writes.write_log_line(
            engine, held[written % len(held)], LogLine(level="info", message=f"line {written}")
        )
        written += 1
        due += 1 / (task["rate"] * len(held))
        time.sleep(max(0.0, due - time.time()))
    for each in held:
        attempt_endings.finish(engine, each)
    engine.dispose()
    return {"written": written}


async def _load(
    address: str,
    followed: Sequence[tuple[str, str]],
    readers: int,
    polls: int,
    ready: float,
    account: Account,
) -> None:
    turn = itertools.cycle(followed)
    everyone = [_read(address, *next(turn), account) for _ in range(readers)]
    everyone += [_poll(address, *next(turn), account) for _ in range(polls)]
    pause = max(0.0, ready - time.time()) / max(1, len(everyone))
    tasks = []
    for each in everyone:
        tasks.append(asyncio.ensure_future(each))
        await asyncio.sleep(pause)
    await asyncio.gather(*tasks)


async def _read(address: str, job_id: str, key: str, account: Account) -> None:
    numbers: list[int] = []
    account.received.append((job_id, numbers))
    try:
        async with asyncio.timeout(account.until - time.time() + _PATIENCE_SECONDS):
            status, lines = await _ask(address, f"/v1/jobs/{job_id}/events", key)
            if status != 200:
                account.failures.append(f"a stream answered {status}")
                return
            account.under_way += 1
            account.most_under_way = max(account.most_under_way, account.under_way)
            begun = time.time()
            async for line in lines:
                if line.startswith(b"data: "):
                    told = json.loads(line[6:])
                    numbers.append(told["seq"])
                    written = datetime.fromisoformat(told["at"]).timestamp()
                    if written > begun:  # what was there before is no news
                        account.latencies.append(time.time() - written)
            account.under_way -= 1
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        account.failures.append(f"a stream broke: {type(error).__name__}")


async def _poll(address: str, job_id: str, key: str, account: Account) -> None:
    tag = ""
    try:
        async with asyncio.timeout(account.until - time.time() + _PATIENCE_SECONDS):
            while time.time() < account.until:
                path = f"/v1/jobs/{job_id}?wait={_WAIT_SECONDS}"
                status, lines, tag = await _ask_tagged(address, path, key, tag)
                async for _ in lines:
                    pass
                if status not in (200, 304):
                    account.failures.append(f"a poll answered {status}")
                account.polls += 1
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        account.failures.append(f"a poll broke: {type(error).__name__}")


async def _ask(address: str, path: str, key: str, more: str = "") -> tuple[int, AsyncIterator[bytes]]:
    status, lines, _ = await _exchange(address, path, key, more)
    return status, lines


async def _ask_tagged(address: str, path: str, key: str, tag: str) -> tuple[int, AsyncIterator[bytes], str]:
    status, lines, new = await _exchange(address, path, key, f"If-None-Match: {tag}\r\n" if tag else "")
    return status, lines, new or tag


async def _exchange(address: str, path: str, key: str, more: str) -> tuple[int, AsyncIterator[bytes], str]:
    """One request on a connection of its own: status, the body's lines, and the ETag."""
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**22)
    head = f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    writer.write(f"{head}{more}\r\n".encode())
    status = int((await reader.readline()).split()[1])
    tag, chunked = "", False
    while line := (await reader.readline()).strip():
        name, _, value = line.decode().partition(": ")
        chunked = chunked or name.lower() == "transfer-encoding"
        tag = value if name.lower() == "etag" else tag
    return status, _body(reader, writer, chunked=chunked), tag


async def _body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, chunked: bool) -> AsyncIterator[bytes]:
    try:
        rest = b""
        while True:
            if chunked:
                size = int(await reader.readline(), 16)
                part = await reader.readexactly(size)
                await reader.readexactly(2)
            else:
                part = await reader.read(65_536)
            if not part:
                return
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line
    finally:
        writer.close()
