"""Waiting for a job to change: at the watch, so that neither a thread nor a connection to the database is held."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from api.problem_details import not_found, parameter_refused
from api.service import Service
from jobs.errors import LedgerUnavailable
from jobs.records import Job

MAX_WAIT_SECONDS = 30
_ASIDE_SECONDS = 2.0
"""Between two looks whether whoever waits is still there."""
_PATIENCE_SECONDS = 1.0
"""Between two reads from a database that does not answer."""


def check_wait(seconds: float) -> None:
    """Refuse a parameter `wait` that is out of range.

    Raises:
        Refusal: 422.
    """
    if not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise parameter_refused("wait", f"is out of range; take 0 to {MAX_WAIT_SECONDS} seconds")


async def awaited(
    request: Request,
    service: Service,
    read: Callable[[], Job | None],
    seconds: float,
    *,
    what: str = "job",
    news: Callable[[Job], bool] = lambda job: job.ended,
) -> Job:
    """What ``read`` gives once it has ended or is ``news``, or when the seconds are over.

    Raises:
        Refusal: 404 where there is none.
    """
    until = time.monotonic() + seconds
    job = await run_in_threadpool(read)
    if job is None:
        raise not_found(f"there is no such {what}")

    def over(job: Job) -> bool:
        return job.ended or news(job)

    if seconds <= 0 or over(job):
        return job
    polls: set[object] = request.app.state.long_polls
    if len(polls) >= service.settings.long_polls:
        return job  # answered at once, which every caller must expect anyway
    ticket = object()
    polls.add(ticket)
    try:
        with service.watch.waiting(job.id) as waiter:
            while not (over(job) or service.stopping.is_set()):
                if waiter.moved(job.event_seq):
                    job = await _patiently(lambda: waiter.read(read), until)
                    if job is None:
                        raise not_found(f"there is no such {what}")
                    continue
                left = until - time.monotonic()
                if left <= 0 or await request.is_disconnected():
                    break
                await waiter.news(min(left, _ASIDE_SECONDS))
        return job
    finally:
        polls.discard(ticket)


async def _patiently(read: Callable[[], Awaitable[Job | None]], until: float) -> Job | None:
    """Read, again and again while the database does not answer: whoever waits has the time."""
    while True:
        try:
            return await read()
        except LedgerUnavailable:
            left = until - time.monotonic()
            if left <= 0:
                raise
            await asyncio.sleep(min(left, _PATIENCE_SECONDS))
