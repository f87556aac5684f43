"""Long polls: waiting for a job to change by a subscription, which holds no thread and no database connection."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from api.problem_details import invalid_parameter, not_found
from api.requests.auth import KeyInUse
from api.requests.limits import limited, release_slot
from api.service import Service
from jobs.errors import LedgerUnavailable
from jobs.records import Job

MAX_WAIT_SECONDS = 30
_DISCONNECT_CHECK_SECONDS = 2.0
"""Between two checks whether the caller is still connected."""
_LATER_SECONDS = 5
_RETRY_SECONDS = 1.0
"""Between two reads from a database that does not answer."""


def check_wait(seconds: float) -> None:
    """Refuse a parameter `wait` that is not 0 to 30 seconds, with 422."""
    if not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise invalid_parameter("wait", f"is out of range; take 0 to {MAX_WAIT_SECONDS} seconds")


async def wait_for_job(
    request: Request,
    service: Service,
    read: Callable[[], Job | None],
    seconds: float,
    *,
    what: str = "job",
    news: Callable[[Job], bool] = lambda job: job.ended,
) -> Job:
    """Wait until a job has ended or changed.

    Args:
        request: The request that waits; it is answered early where its caller disconnects.
        service: The running API; without room for another long poll the job is returned at once.
        read: Reads the job from the ledger; returns None where there is none.
        seconds: The longest time to wait.
        what: The word for it in the refusal.
        news: Whether a job is worth returning before it has ended.

    Returns:
        The job as it was read last.

    Raises:
        Refusal: 401 where the key was revoked meanwhile, or has expired; 404 where there is no such job, or it is
            deleted meanwhile; 429 where too many requests of the key wait.
        LedgerUnavailable: If the database does not answer within ``seconds``.
    """
    until = time.monotonic() + seconds
    job = await run_in_threadpool(read)
    if job is None:
        raise not_found(f"there is no such {what}")

    def over(job: Job) -> bool:
        return job.ended or news(job)

    if seconds <= 0 or over(job):
        return job
    release_slot(request.scope)
    polls = service.limits.long_polls
    key = request.state.caller.key
    if polls.is_used_up(key):
        detail = f"{polls.most_per_key} requests of this key wait for news; ask without `wait`, or later"
        raise limited("too-many-long-polls", "Too many long polls", detail, _LATER_SECONDS)
    if polls.open >= polls.most:
        return job  # answered at once, which every caller must expect anyway
    with polls.hold(key):
        with service.job_watcher.subscribe(job.id) as subscription:
            while not (over(job) or service.stopping.is_set()):
                if subscription.is_newer_than(job.event_seq):
                    job = await _read_with_retries(lambda: subscription.read(read), until)
                    if job is None:
                        raise not_found(f"there is no such {what}")
                    continue
                left = until - time.monotonic()
                if left <= 0 or await request.is_disconnected():
                    break
                await subscription.wait(min(left, _DISCONNECT_CHECK_SECONDS))
        await run_in_threadpool(KeyInUse(service, key).require)
        return job


async def _read_with_retries(read: Callable[[], Awaitable[Job | None]], until: float) -> Job | None:
    """Read, and try again until the wait is over while the database does not answer."""
    while True:
        try:
            return await read()
        except LedgerUnavailable:
            left = until - time.monotonic()
            if left <= 0:
                raise
            await asyncio.sleep(min(left, _RETRY_SECONDS))
