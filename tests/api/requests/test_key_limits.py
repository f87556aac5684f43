"""Valid requests that would exhaust the service: each key has its share, and probes and others are answered."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine

from api.requests.limits import RequestRate
from catalog.frames import ArtifactWritten
from jobs.objects.artifacts import object_key
from jobs.queue.attempt_writes import write_artifact
from jobs.queue.claims import claim
from jobs.schema.database import open_database
from jobs.tenancy.api_keys import create_key
from jobs.tenancy.quotas import set_quota
from tests.api.connections.sockets import client, connect, head, seconds_of
from tests.api.expect import problem
from tests.api.seeding import DOCUMENT
from tests.api.server import KEY_SECRET, METRICS_TOKEN, Server, serve
from tests.conftest import Databases

TIGHT = {
    "KRONOSCOPE_KEY_SECRET": KEY_SECRET,
    "KRONOSCOPE_METRICS_TOKEN": METRICS_TOKEN,
    "KRONOSCOPE_REQUESTS_PER_SECOND": "20",
    "KRONOSCOPE_REQUESTS_PER_KEY": "1",
    "KRONOSCOPE_LONG_POLLS_PER_KEY": "3",
    "KRONOSCOPE_QUEUED_JOBS": "2",
    "KRONOSCOPE_RUNNING_JOBS": "1",
    "KRONOSCOPE_STORED_BYTES": "100",
    "KRONOSCOPE_METRICS_SECONDS": "0",
}


class Tight:
    """An API with low limits, and keys of three tenants."""

    def __init__(self, server: Server, keys: list[str], url: str) -> None:
        self.server = server
        self.keys = keys
        self.url = url

    @contextlib.contextmanager
    def ledger(self) -> Iterator[Engine]:
        engine = open_database(self.url)
        yield engine
        engine.dispose()

    def limited(self, limit: str) -> int:
        with client(self.server, key=METRICS_TOKEN) as scraper:
            text = scraper.get("/metrics").text
        return int(float(text.partition(f'kronoscope_http_limited_total{{limit="{limit}"}} ')[2].partition("\n")[0]))


@pytest.fixture(scope="module")
def tight(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tight]:
    url = databases.migrated("sqlite")
    engine = open_database(url)
    keys = [create_key(engine, KEY_SECRET, f"tenant-{number}") for number in range(6)]
    engine.dispose()
    with serve(url, tmp_path_factory.mktemp("tight"), TIGHT) as server:
        yield Tight(server, keys, url)


def test_a_key_that_asks_too_often_is_refused_and_nobody_else(tight: Tight) -> None:
    with client(tight.server, key=tight.keys[0]) as greedy, client(tight.server, key=tight.keys[1]) as other:
        answers = [greedy.get("/v1/jobs") for _ in range(120)]
        refused = [each for each in answers if each.status_code != 200]
        assert len(refused) >= 30
        assert problem(refused[0], 429)["type"] == "urn:kronoscope:problem:too-many-requests"
        assert refused[0].headers["retry-after"] == "1"
        assert other.get("/v1/jobs").status_code == 200
        for path in ("/livez", "/readyz"):  # also with the key of the greedy one
            assert [greedy.get(path).status_code for _ in range(30)] == [200] * 30
        assert "may ask 20 times a second" in refused[0].json()["detail"]
    assert tight.limited("too-many-requests") >= len(refused)


def test_a_key_that_asks_for_much_at_a_time_waits_for_itself(tight: Tight) -> None:
    """One is worked on and 32 wait; whatever is beyond is refused at once."""
    with client(tight.server, key=tight.keys[1]) as greedy, client(tight.server, "127.0.0.9") as probe:
        began = threading.Event()

        def ask(_: int) -> int:
            began.set()
            return greedy.get("/v1/jobs").status_code

        with ThreadPoolExecutor(50) as threads:
            answers = threads.map(ask, range(50))
            began.wait()
            assert seconds_of(probe, "/livez") < 2
            statuses = list(answers)
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 33


def test_long_polls_of_a_key_are_counted(tight: Tight) -> None:
    with client(tight.server, key=tight.keys[2]) as mine, contextlib.ExitStack() as stack:
        address = f"/v1/jobs/{mine.post('/v1/jobs', json=DOCUMENT).json()['id']}?wait=30"
        lines = head(tight.server, f"GET {address} HTTP/1.1", f"Authorization: Bearer {tight.keys[2]}")
        for _ in range(3):
            stack.enter_context(connect(tight.server)).sendall(lines)
        tight.server.await_long_polls(3, METRICS_TOKEN)
        # more of them than are worked on at a time, so waiting takes no slot
        refused = mine.get(address)
        assert problem(refused, 429)["type"] == "urn:kronoscope:problem:too-many-long-polls"
        assert refused.headers["retry-after"] == "5"
        assert mine.get(address.partition("?")[0]).status_code == 200
    assert tight.limited("too-many-long-polls") == 1


def test_queued_jobs_of_a_tenant_are_counted(tight: Tight) -> None:
    with client(tight.server, key=tight.keys[3]) as mine:
        known = {"idempotency-key": "first"}
        first = mine.post("/v1/jobs", json=DOCUMENT, headers=known)
        assert mine.post("/v1/jobs", json=DOCUMENT).status_code == 202
        for address in ("/v1/jobs", "/v1/jobs?validate_only=true", "/v1/estimates"):
            refused = mine.post(address, json=DOCUMENT)
            assert problem(refused, 429)["type"] == "urn:kronoscope:problem:queue-full"
            assert refused.headers["retry-after"] == "60"
        # a repeated request gets its job
        assert mine.post("/v1/jobs", json=DOCUMENT, headers=known).json()["id"] == first.json()["id"]
        mine.post(f"/v1/jobs/{first.json()['id']}:cancel")
        assert mine.post("/v1/jobs", json=DOCUMENT).status_code == 202
    assert tight.limited("queue-full") == 3


def test_a_tenant_that_runs_as_many_jobs_as_it_may_learns_so(tight: Tight) -> None:
    with client(tight.server, key=tight.keys[4]) as mine, tight.ledger() as engine:
        first, second = (mine.post("/v1/jobs", json=DOCUMENT).json()["id"] for _ in range(2))
        assert claim(engine, first, "test", "token", 600) is not None
        told = mine.get(f"/v1/jobs/{second}").json()["placement"]
    assert told["status"] == "waiting"
    assert told["message"].startswith("1 of your jobs run, as many as may at a time")


def test_stored_bytes_of_a_tenant_are_counted_without_a_quota_of_its_own(tight: Tight) -> None:
    with client(tight.server, key=tight.keys[5]) as mine, tight.ledger() as engine:
        job = mine.post("/v1/jobs", json=DOCUMENT).json()["id"]
        held = claim(engine, job, "test", "token", 600)
        assert held is not None
        written = ArtifactWritten(name="a", sha256="0" * 64, size_bytes=101, media_type="application/json")
        write_artifact(engine, held, written, object_key(held.tenant_id, written.sha256))
        refused = mine.post("/v1/jobs", json=DOCUMENT)
        assert problem(refused, 429)["type"] == "urn:kronoscope:problem:quota-exceeded"
        assert "your files take 101 of the 100 bytes that they may" in refused.json()["detail"]
        assert refused.headers["retry-after"] == "300"
        # the operator gives this tenant more
        assert set_quota(engine, "tenant-5", 200)
        assert mine.post("/v1/jobs", json=DOCUMENT).status_code == 202
    assert tight.limited("quota-exceeded") == 1


def test_a_bucket_fills_again() -> None:
    rate = RequestRate(10)
    assert [rate.take(b"a", 100.0) for _ in range(20)] == [0.0] * 20
    assert rate.take(b"a", 100.0) == pytest.approx(0.1)
    assert rate.take(b"b", 100.0) == 0.0
    assert rate.take(b"a", 100.15) == 0.0
    assert rate.take(b"a", 100.15) > 0
    assert all(RequestRate(0).take(b"a", 1.0) == 0.0 for _ in range(1000))
