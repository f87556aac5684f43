"""Uses of keys by real requests: written beside the answers, and no answer waits for it."""

import time

from jobs.schema.database import writing
from jobs.schema.tables import api_keys
from jobs.tenancy.api_keys import create_key
from jobs.tenancy.key_uses import KeyRecord, list_keys
from tests.api.conftest import Keyed
from tests.api.server import KEY_SECRET
from tests.machine.stopwatch import Stopwatch, until


def record_of(keyed: Keyed, key: str) -> KeyRecord:
    (found,) = [each for each in list_keys(keyed.engine) if each.key == key.split("_")[1]]
    return found


def test_a_use_is_listed_with_the_address_that_a_proxy_names(keyed: Keyed) -> None:
    key, unused = (create_key(keyed.engine, KEY_SECRET, "ours") for _ in range(2))
    with keyed.server.client(key) as client:
        client.headers["x-forwarded-for"] = "198.51.100.7"
        assert client.get("/v1/jobs").status_code == 200
        until(lambda: record_of(keyed, key).last_used_at is not None, what="the use is written")
        first = record_of(keyed, key)
        assert first.last_used_from == "198.51.100.7"
        client.headers["x-forwarded-for"] = "198.51.100.8"
        assert [client.get("/v1/jobs").status_code for _ in range(30)] == [200] * 30
        time.sleep(1.2)  # more than a round of the thread that writes
        assert record_of(keyed, key) == first
    assert record_of(keyed, unused).last_used_at is None


def test_a_refused_key_is_not_used(keyed: Keyed) -> None:
    key = create_key(keyed.engine, KEY_SECRET, "ours")
    with keyed.server.client(key[:-1] + ("0" if key[-1] != "0" else "1")) as client:
        assert client.get("/v1/jobs").status_code == 401
    time.sleep(1.2)
    assert record_of(keyed, key).last_used_at is None


def test_no_answer_waits_for_the_row_of_its_key(keyed: Keyed) -> None:
    key = create_key(keyed.engine, KEY_SECRET, "ours")
    with keyed.server.client(key) as client:
        with writing(keyed.engine) as connection:  # holds the rows on PostgreSQL, the whole file on SQLite
            connection.execute(api_keys.update().values(scopes=api_keys.c.scopes))
            watch = Stopwatch()
            for _ in range(10):
                assert client.get("/v1/jobs").status_code == 200
                time.sleep(0.15)  # a round of the thread that writes begins meanwhile
            assert watch.seconds() < 5
        until(lambda: record_of(keyed, key).last_used_at is not None, what="the use is written afterwards")
