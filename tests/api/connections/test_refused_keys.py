"""A flood of requests without a valid key: it is refused, counted and aggregated, and its neighbours are served."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs.schema.database import open_database
from jobs.tenancy.api_keys import create_key
from tests.api.expect import problem
from tests.api.server import KEY_SECRET, METRICS_TOKEN, Server, serve
from tests.conftest import Databases

MOST = 20
FLOOD = 300
GUARDED = {
    "KRONOSCOPE_KEY_SECRET": KEY_SECRET,
    "KRONOSCOPE_METRICS_TOKEN": METRICS_TOKEN,
    "KRONOSCOPE_REFUSED_PER_MINUTE": str(MOST),
    "KRONOSCOPE_TRUSTED_PROXIES": "127.0.0.1",
}


class Flooded:
    """An API, a key of it, and the answers to a flood from one address behind a trusted proxy."""

    def __init__(self, server: Server, key: str, answers: list[httpx.Response]) -> None:
        self.server = server
        self.key = key
        self.answers = answers


def from_address(server: Server, address: str, key: str | None) -> httpx.Client:
    client = server.client(key)
    client.headers["x-forwarded-for"] = address
    return client


def trail(log: Path, client: str) -> list[dict[str, Any]]:
    lines = [each for line in log.read_text().splitlines() if (each := json.loads(line)).get("event") == "audit"]
    return [each for each in lines if each["client"] == client]


@pytest.fixture(scope="module")
def flooded(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flooded]:
    url = databases.migrated("sqlite")
    engine = open_database(url)
    key = create_key(engine, KEY_SECRET, "ours")
    engine.dispose()
    with serve(url, tmp_path_factory.mktemp("flooded"), GUARDED) as server:
        with from_address(server, "198.51.100.9", None) as attacker:
            guesses = [{"authorization": f"Bearer guess-{number}"} for number in range(FLOOD)]
            answers = [attacker.get("/v1/jobs", headers=guess) for guess in guesses]
        yield Flooded(server, key, answers)


def test_a_flood_of_wrong_keys_is_answered_429_after_the_first(flooded: Flooded) -> None:
    statuses = [each.status_code for each in flooded.answers]
    assert statuses[:MOST] == [401] * MOST
    assert statuses.count(429) >= FLOOD - 2 * MOST  # one more is answered 401 every three seconds
    refused = next(each for each in flooded.answers if each.status_code == 429)
    assert problem(refused, 429)["type"] == "urn:kronoscope:problem:too-many-refused-keys"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert "www-authenticate" not in refused.headers


def test_a_valid_key_from_the_same_address_is_served(flooded: Flooded) -> None:
    with from_address(flooded.server, "198.51.100.9", flooded.key) as neighbour:
        assert [neighbour.get("/v1/jobs").status_code for _ in range(30)] == [200] * 30
    with from_address(flooded.server, "198.51.100.9", None) as nobody:
        assert nobody.get("/livez").status_code == 200
        assert nobody.get("/v1/jobs").status_code == 429
        assert nobody.request("HEAD", "/v1/jobs").content == b""


def test_other_addresses_are_answered_401(flooded: Flooded) -> None:
    with from_address(flooded.server, "198.51.100.10", None) as other:
        assert other.get("/v1/jobs").status_code == 401


def test_what_a_client_writes_before_the_proxy_s_entry_gives_it_no_new_address(flooded: Flooded) -> None:
    for number in range(5):
        with from_address(flooded.server, f"203.0.113.{number}, 198.51.100.9", None) as liar:
            assert liar.get("/v1/jobs").status_code == 429


def test_the_flood_is_counted_in_the_metrics(flooded: Flooded) -> None:
    with flooded.server.client(METRICS_TOKEN) as scraper:
        text = scraper.get("/metrics").text
    count = float(text.partition('kronoscope_http_limited_total{limit="too-many-refused-keys"} ')[2].split("\n")[0])
    assert count >= [each.status_code for each in flooded.answers].count(429)


def test_the_flood_has_a_few_lines_and_one_for_all_others(flooded: Flooded) -> None:
    lines = trail(flooded.server.log, "198.51.100.9")
    assert 1 <= len([each for each in lines if "requests" not in each]) <= 10
    assert len(lines) <= 12


def test_what_is_not_written_yet_is_written_when_the_process_ends(databases: Databases, tmp_path: Path) -> None:
    with (
        serve(databases.migrated("sqlite"), tmp_path, GUARDED) as server,
        from_address(server, "198.51.100.9", "a guess") as attacker,
    ):
        for _ in range(50):
            attacker.get("/v1/jobs")
    *single, together = trail(server.log, "198.51.100.9")
    assert len(single) + together["requests"] == 50
    assert (together["outcome"], together["action"]) == ("unauthorised", "request")
