"""A revoked key reads no more, not even by a request that was accepted before."""

import threading
import time

from catalog.frames import LogLine
from jobs.queue import attempt_endings, attempt_writes
from jobs.repository.store import read_job
from jobs.tenancy.api_keys import create_key, key_id, revoke_key, verify_key
from tests.api import seeding
from tests.api.conftest import Keyed
from tests.api.server import KEY_SECRET, METRICS_TOKEN
from tests.api.streaming import events


def note(keyed: Keyed, claim: object, message: str) -> None:
    attempt_writes.write_log_line(keyed.engine, claim, LogLine(level="info", message=message))


def test_an_open_stream_tells_nothing_that_comes_after(keyed: Keyed) -> None:
    key = create_key(keyed.engine, KEY_SECRET, "ours", ("read",))
    caller = verify_key(keyed.engine, KEY_SECRET, key)
    assert caller is not None
    claim = seeding.running(keyed.engine, caller.tenant_id)
    with (
        keyed.server.client(key) as client,
        client.stream("GET", f"/v1/jobs/{claim.job_id}/events", timeout=60) as answer,
    ):
        told = events(answer)
        note(keyed, claim, "before")
        assert next(each for each in told if each["type"] == "log")["data"]["message"] == "before"
        assert revoke_key(keyed.engine, key)
        note(keyed, claim, "secret")
        attempt_endings.finish(keyed.engine, claim)
        began = time.monotonic()
        assert list(told) == []  # the stream ends, and says nothing more
        assert time.monotonic() - began < 30


def test_a_long_poll_is_refused_when_its_key_is_revoked_meanwhile(keyed: Keyed) -> None:
    key = create_key(keyed.engine, KEY_SECRET, "ours", ("read",))
    caller = verify_key(keyed.engine, KEY_SECRET, key)
    assert caller is not None
    claim = seeding.running(keyed.engine, caller.tenant_id)
    job = read_job(keyed.engine, caller.tenant_id, claim.job_id)
    assert job is not None
    answers = []
    with keyed.server.client(key) as client:

        def ask() -> None:
            answers.append(client.get(f"/v1/jobs/{claim.job_id}?wait=20", timeout=60))

        asking = threading.Thread(target=ask)
        asking.start()
        keyed.server.await_long_polls(1, METRICS_TOKEN)
        assert revoke_key(keyed.engine, str(key_id(key)))
        attempt_endings.finish(keyed.engine, claim)
        asking.join(60)
    (answer,) = answers
    assert answer.status_code == 401
    assert claim.job_id not in answer.text


def test_other_keys_of_the_tenant_go_on(keyed: Keyed) -> None:
    caller = verify_key(keyed.engine, KEY_SECRET, keyed.key)
    assert caller is not None
    claim = seeding.running(keyed.engine, caller.tenant_id)
    with (
        keyed.server.client(keyed.key) as client,
        client.stream("GET", f"/v1/jobs/{claim.job_id}/events", timeout=60) as answer,
    ):
        told = events(answer)
        note(keyed, claim, "line")
        attempt_endings.finish(keyed.engine, claim)
        seen = list(told)
    assert "line" in [each["data"].get("message") for each in seen]
    assert seen[-1]["data"]["state"] == "succeeded"
