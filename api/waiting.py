"""Waiting for a row of the ledger to change: in turns, so that neither the event loop nor a connection is held."""

import asyncio
import time
from collections.abc import Callable

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from api.problems import not_found, parameter_refused
from api.service import Service
from jobs.records import Job

MAX_WAIT_SECONDS = 30
_POLL_SECONDS = 0.4
_LONG_POLLS = 200


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
    polls: set[object] = request.app.state.long_polls
    ticket = object()
    # beyond the cap a poll is answered at once, which every caller must expect anyway
    waits = seconds > 0 and len(polls) < _LONG_POLLS
    if waits:
        polls.add(ticket)
    try:
        while True:
            job = await run_in_threadpool(read)
            if job is None:
                raise not_found(f"there is no such {what}")
            left = until - time.monotonic()
            if job.ended or news(job) or not waits or left <= 0 or service.stopping.is_set():
                return job
            await asyncio.sleep(min(_POLL_SECONDS, left))
            if await request.is_disconnected():
                return job
    finally:
        polls.discard(ticket)
