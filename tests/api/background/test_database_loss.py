"""Without its PostgreSQL the API says so soon and everywhere, keeps who waits, and goes on when it is back."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest
from sqlalchemy import Engine, Table, func
from sqlalchemy import select as sql_select

from jobs.queue import attempt_endings
from jobs.schema.database import open_database, reading, upgrade_schema
from jobs.schema.identifiers import new_id
from jobs.schema.tables import jobs
from jobs.tenancy.api_keys import create_key, verify_key
from tests import servers
from tests.api import seeding, streaming
from tests.api.expect import problem
from tests.api.requests.test_auth import OPEN, application, walk
from tests.api.seeding import DOCUMENT
from tests.api.server import KEY_SECRET, METRICS_TOKEN, Server, serve
from tests.chaos.stack.proxy import LossyProxy
from tests.machine.stopwatch import Stopwatch, until

WAIT_SECONDS = 30
BOUND_SECONDS = 8
"""For the quickest answer of some; what bounds it are the three seconds of a connection that nobody accepts."""
FLOCK_SECONDS = 60
"""For many that are asked for at once, each of which waits for a connection some seconds at most."""


class ClosingProxy(LossyProxy):
    """One whose address answers nobody once it is closed."""

    def close(self) -> None:
        """Also for the thread that waits for the next connection: closing alone would leave it its last one."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        super().close()


class Breakable:
    """An API on a PostgreSQL of its own, behind a proxy."""

    def __init__(self, postgres: servers.PrivateServer, proxy: LossyProxy, engine: Engine, server: Server) -> None:
        self.postgres = postgres
        self.proxy = proxy
        self.engine = engine
        self.server = server
        self.key = create_key(engine, KEY_SECRET, "ours")
        caller = verify_key(engine, KEY_SECRET, self.key)
        assert caller is not None
        self.tenant_id = caller.tenant_id

    def count(self, table: Table = jobs) -> int:
        with reading(self.engine) as connection:
            return int(connection.execute(sql_select(func.count()).select_from(table)).scalar_one())


@pytest.fixture(scope="module")
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Breakable]:
    """An API whose PostgreSQL may be killed."""
    with servers.private_postgres(synchronous_commit="on") as postgres:  # it is killed: what it said, it keeps
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE ledger")
        parts = urlsplit(postgres.url)._replace(path="/ledger")
        upgrade_schema(parts.geturl())
        proxy = ClosingProxy("127.0.0.1", postgres.port)
        through = parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{proxy.port}").geturl()
        engine = open_database(parts._replace(query="connect_timeout=60").geturl())
        settings = {"KRONOSCOPE_KEY_SECRET": KEY_SECRET, "KRONOSCOPE_METRICS_TOKEN": METRICS_TOKEN}
        settings["KRONOSCOPE_DATABASE_SECONDS"] = "2"
        with serve(through, tmp_path_factory.mktemp("breakable"), settings) as server:
            yield Breakable(postgres, proxy, engine, server)
        engine.dispose()
        proxy.close()


def unavailable(answer: httpx.Response) -> None:
    problem(answer, 503)
    assert int(answer.headers["retry-after"]) > 0


def soon_unavailable(ask: Callable[[], httpx.Response]) -> None:
    seconds = []
    for _ in range(3):
        watch = Stopwatch()
        unavailable(ask())
        seconds.append(watch.seconds())
    assert min(seconds) < BOUND_SECONDS


def available(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """The first answer that is none of a database that is not back yet."""

    def answered() -> httpx.Response | None:
        answer = ask()
        if answer.status_code == 503:
            unavailable(answer)
            return None
        return answer

    answer = until(answered, 120)
    assert answer is not None
    return answer


def recovered(client: httpx.Client) -> None:
    assert available(lambda: client.get("/v1/jobs")).status_code == 200


def test_every_route_says_503_until_postgresql_is_back_and_who_waits_is_kept(
    breakable: Breakable, tmp_path: Path
) -> None:
    claim = seeding.running(breakable.engine, breakable.tenant_id)
    address = f"/v1/jobs/{claim.job_id}"
    # metrics ask for a token of their own before anything else
    routes = [(method, path) for path, method, _ in walk(application(tmp_path)) if path not in OPEN | {"/metrics"}]
    assert len(routes) > 15
    polled: list[httpx.Response] = []
    with breakable.server.client(breakable.key) as client:
        poll = threading.Thread(target=lambda: polled.append(client.get(address, params={"wait": WAIT_SECONDS})))
        poll.start()
        breakable.server.await_long_polls(1, METRICS_TOKEN)
        with client.stream("GET", f"{address}/events") as answer:
            received = streaming.events(answer)
            seen = [next(received)]
            breakable.postgres.kill(signal.SIGQUIT)

            def ask(route: tuple[str, str]) -> httpx.Response:
                method, path = route
                return client.request(method, path.replace("{job_id}", claim.job_id).replace("{", "").replace("}", ""))

            watch = Stopwatch()
            # more at once than the pool has connections, and no more than may wait
            with ThreadPoolExecutor(min(2 * len(routes), 48)) as pool:
                for asked in pool.map(ask, 2 * routes):
                    unavailable(asked)
            assert watch.seconds() < FLOCK_SECONDS
            assert client.get("/livez").status_code == 200
            assert problem(client.get("/readyz"), 503)
            breakable.postgres.restart()
            recovered(client)
            attempt_endings.finish(breakable.engine, claim)
            seen += received
        poll.join()
        assert seen[-1]["data"]["state"] == "succeeded"
        assert [each["seq"] for each in seen] == sorted({each["seq"] for each in seen})
        page = client.get(f"{address}/events", headers={"accept": "application/json"}).json()
        assert page["items"] == seen
        # on a machine so slow that the wait was over before, it was answered as things stood
        assert polled[0].elapsed.total_seconds() > WAIT_SECONDS or polled[0].json()["state"] == "succeeded"


def test_behind_a_connection_that_is_open_and_silent_a_request_ends_with_its_limit(breakable: Breakable) -> None:
    with breakable.server.client(breakable.key) as client:
        recovered(client)
        breakable.proxy.hush()
        watch = Stopwatch()
        try:
            unavailable(client.get("/v1/jobs"))
        finally:
            breakable.proxy.keep()
        assert watch.seconds() < 2 + BOUND_SECONDS
        recovered(client)


def test_while_nobody_listens_at_its_address_it_is_the_same(breakable: Breakable) -> None:
    with breakable.server.client(breakable.key) as client:
        recovered(client)
        breakable.proxy.close()
        try:
            soon_unavailable(lambda: client.get("/v1/jobs"))
            soon_unavailable(lambda: client.post("/v1/jobs", json=DOCUMENT))
        finally:
            breakable.proxy = ClosingProxy("127.0.0.1", breakable.postgres.port, breakable.proxy.port)
        recovered(client)


def test_a_submission_whose_commit_nobody_confirmed_is_repeated_safely(breakable: Breakable) -> None:
    with breakable.server.client(breakable.key) as client:
        recovered(client)
        before = breakable.count()
        headers = {"idempotency-key": f"key-{new_id()}"}
        breakable.proxy.lose_after(b"INSERT INTO jobs")

        def lost() -> bool:
            unavailable(client.post("/v1/jobs", json=DOCUMENT, headers=headers))
            return breakable.proxy.lost == 1

        until(lost)  # where connecting took too long, nothing had been asked yet
        breakable.proxy.keep()
        assert breakable.count() == before + 1  # done, and nobody was told
        recovered(client)
        answers = [available(lambda: client.post("/v1/jobs", json=DOCUMENT, headers=headers)) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [202, 202]
        assert answers[0].json()["id"] == answers[1].json()["id"]
        assert breakable.count() == before + 1
