"""One look for all who wait: its statements do not grow with readers or jobs, and nobody misses anything."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, event

from api.live.job_watcher import JobWatcher, Subscription, encode_event
from catalog.frames import LogLine
from jobs.queue import attempt_endings, attempt_writes
from jobs.records import LOCAL_TENANT, Claim, Job
from jobs.repository import events
from jobs.repository.events import read_history, read_new_events
from jobs.repository.store import delete_job, read_job, request_cancel
from tests.api import seeding


def say(engine: Engine, claim: Claim, message: str) -> None:
    attempt_writes.write_log_line(engine, claim, LogLine(level="info", message=message))


@pytest.fixture
def statements(ledger: Engine) -> Iterator[list[str]]:
    """Every SELECT that the ledger is asked."""
    asked: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        asked.append(statement)

    event.listen(ledger, "before_cursor_execute", note)
    yield asked
    event.remove(ledger, "before_cursor_execute", note)


def test_a_look_at_many_jobs_takes_two_statements(ledger: Engine, statements: list[str]) -> None:
    held = [seeding.running(ledger, LOCAL_TENANT) for _ in range(12)]
    at = {each.job_id: seen.through for each, seen in zip(held, map(_whole(ledger), held), strict=True)}
    for number, each in enumerate(held):
        for line in range(number):
            say(ledger, each, f"{number}.{line}")
    request_cancel(ledger, LOCAL_TENANT, held[3].job_id)
    attempt_endings.hand_back(ledger, held[3])
    statements.clear()
    seen = read_new_events(ledger, {**at, held[1].job_id: None, "00000000-0000-7000-8000-000000000000": 0})
    assert len([each for each in statements if "SELECT" in each]) == 2
    assert set(seen) == set(at)
    assert [len(seen[each.job_id].events) for each in held] == [0, 0, 2, 5, *range(4, 12)]
    assert [seen[each.job_id].ended for each in held] == [number == 3 for number in range(12)]
    for each in held:
        whole = _whole(ledger)(each)
        assert seen[each.job_id].through == whole.through
        if each is not held[1]:
            assert seen[each.job_id].events == tuple(one for one in whole.events if one.seq > at[each.job_id])


def _whole(ledger: Engine) -> Callable[[Claim], events.History]:
    def read(held: Claim) -> events.History:
        found = read_history(ledger, LOCAL_TENANT, held.job_id, 0)
        assert found is not None
        return found

    return read


def test_what_one_look_has_no_room_for_comes_with_the_next(ledger: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_AT_ONCE", 5)
    held = [seeding.running(ledger, LOCAL_TENANT) for _ in range(4)]
    for each in held:
        for line in range(3):
            say(ledger, each, str(line))
    attempt_endings.finish(ledger, held[0])
    at: dict[str, int | None] = {each.job_id: 0 for each in held}
    found: dict[str, list[int]] = {each.job_id: [] for each in held}
    for _ in range(20):
        for job_id, seen in read_new_events(ledger, at).items():
            found[job_id] += [each.seq for each in seen.events]
            at[job_id] = seen.through
            assert not (seen.ended and seen.more)
    for each in held:
        assert found[each.job_id] == [one.seq for one in _whole(ledger)(each).events]
    assert read_new_events(ledger, at)[held[0].job_id].ended


def test_forty_readers_and_thirty_polls_of_one_job_ask_as_much_as_one(ledger: Engine, statements: list[str]) -> None:
    held = seeding.running(ledger, LOCAL_TENANT)
    job = read_job(ledger, LOCAL_TENANT, held.job_id)
    assert job is not None
    reads = 0

    def read() -> Job | None:
        nonlocal reads
        reads += 1
        return read_job(ledger, LOCAL_TENANT, held.job_id)

    async def follow(watcher: JobWatcher, position: int) -> bytes:
        """As a stream does, which here may never have to read the table."""
        received = b""
        with watcher.subscribe(held.job_id, events=True) as subscription:
            while True:
                batch = subscription.events_after(position)
                assert batch is not None
                received += batch.text
                position = batch.through
                if batch.ended:
                    return received
                await subscription.wait(30)

    async def poll(watcher: JobWatcher) -> Job | None:
        with watcher.subscribe(held.job_id) as subscription:
            while not subscription.is_newer_than(job.event_seq):
                await subscription.wait(30)
            return await subscription.read(read)

    async def play() -> tuple[list[bytes], list[Job | None]]:
        watcher = JobWatcher(ledger, threading.Event())
        async with watcher.running():
            readers = [asyncio.ensure_future(follow(watcher, job.event_seq)) for _ in range(40)]
            polls = [asyncio.ensure_future(poll(watcher)) for _ in range(30)]
            with watcher.subscribe(held.job_id) as first:
                while not first.is_newer_than(job.event_seq - 1):  # before the first look is over
                    await first.wait(30)
            statements.clear()
            for line in range(20):
                await asyncio.to_thread(say, ledger, held, str(line))
            await asyncio.to_thread(attempt_endings.finish, ledger, held)
            return await asyncio.gather(*readers), await asyncio.gather(*polls)

    received, polled = asyncio.run(play())
    whole = [each for each in _whole(ledger)(held).events if each.seq > job.event_seq]
    assert received == [b"".join(encode_event(each) for each in whole)] * 40
    assert all(each is not None and each.event_seq > job.event_seq for each in polled)
    assert reads <= 21  # one for each version at the most, not one for each poll
    asked = [each for each in statements if each.lstrip().startswith("SELECT job_events")]
    assert 1 <= len(asked) <= 21


def test_who_waits_for_a_deleted_job_is_told(ledger: Engine) -> None:
    held = seeding.running(ledger, LOCAL_TENANT)
    request_cancel(ledger, LOCAL_TENANT, held.job_id)
    attempt_endings.hand_back(ledger, held)

    async def play() -> bool:
        watcher = JobWatcher(ledger, threading.Event())
        async with watcher.running():
            with watcher.subscribe(held.job_id, events=True) as subscription:
                assert await subscription.wait(300)
                await asyncio.to_thread(delete_job, ledger, LOCAL_TENANT, held.job_id)
                assert await subscription.wait(300)
                return _ended(subscription)

    assert asyncio.run(play())


def _ended(subscription: Subscription) -> bool:
    batch = subscription.events_after(0)
    return batch is not None and batch.ended
