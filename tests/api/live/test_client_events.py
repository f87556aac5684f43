"""The client's `events`: one sequence, whatever happens to the connections and the processes beneath it."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog.frames import LogLine
from jobs.queue import attempt_endings, attempt_writes
from jobs.records import LOCAL_TENANT
from jobs.repository.events import read_history
from jobs.schema.database import open_database
from jobs.schema.identifiers import new_id
from kronoscope import Client
from kronoscope.client import ClientError, ServiceUnreachable
from tests.api import seeding
from tests.api.server import held_port, serve
from tests.conftest import Databases

SHORT = {"KRONOSCOPE_EMBEDDED": "1", "KRONOSCOPE_STREAM_SECONDS": "0.7"}


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


def test_it_goes_on_over_streams_that_end_and_an_api_that_is_killed(
    databases: Databases, tmp_path: Path, port: int
) -> None:
    url = databases.migrated("sqlite")
    engine = open_database(url)
    claim = seeding.running(engine, LOCAL_TENANT)
    killed, stop = threading.Event(), threading.Event()

    def write() -> None:
        """Until the second API is up and has served a while."""
        number = 0
        while not stop.is_set():
            attempt_writes.write_log_line(engine, claim, LogLine(level="info", message=f"line {number}"))
            number += 1
            time.sleep(0.05)
        attempt_endings.finish(engine, claim)

    def replace() -> None:
        with serve(url, tmp_path, SHORT, port) as first:
            up.set()
            time.sleep(2.5)  # some streams long
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            killed.set()
        with serve(url, tmp_path, SHORT, port):
            time.sleep(2.5)
            stop.set()
            done.wait(600)

    up, done = threading.Event(), threading.Event()
    threads = [threading.Thread(target=write), threading.Thread(target=replace)]
    for thread in threads:
        thread.start()
    assert up.wait(600)
    with Client(f"http://127.0.0.1:{port}", timeout_seconds=300) as client:
        seen = list(client.events(claim.job_id, patience_seconds=600))
        assert killed.is_set()
        # all told, in pages
        stored = []
        position = 0
        while (page := read_history(engine, LOCAL_TENANT, claim.job_id, position)) is not None:
            stored += [(each.seq, each.type) for each in page.events]
            position = page.through
            if not page.more:
                break
        assert [(each.seq, each.type) for each in seen] == stored
        assert seen[-1].ends
        assert [each.seq for each in client.events(claim.job_id, after=seen[-3].seq)] == [
            each.seq for each in seen[-2:]
        ]
        assert list(client.events(claim.job_id, after=seen[-1].seq)) == []
        with pytest.raises(ClientError, match="no such job"):
            list(client.events(new_id()))
    done.set()
    for thread in threads:
        thread.join()
    with Client(f"http://127.0.0.1:{port}") as client, pytest.raises(ServiceUnreachable):
        list(client.events(claim.job_id, patience_seconds=0))
    engine.dispose()
