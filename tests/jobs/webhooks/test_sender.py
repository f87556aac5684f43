"""Deliveries by the sender as it runs: signed, to no address within, one by one for each tenant, and never lost."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from sqlalchemy import Engine, Row, insert, select, update
from standardwebhooks import Webhook, WebhookVerificationError

from jobs.errors import DocumentRefused
from jobs.queue.attempt_endings import finish
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.store import delete_job, request_cancel
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import jobs, tenants
from jobs.schema.webhook_tables import webhook_deliveries, webhooks
from jobs.webhooks.__main__ import PAUSES_SECONDS
from jobs.webhooks.registry import (
    create_webhook,
    delete_webhook,
    list_deliveries,
    list_webhooks,
    rotate_secret,
)
from tests.jobs.conftest import POSTGRESQL_OFTEN
from tests.jobs.webhooks.receiver import KEY, Receiver, sending
from tests.machine.stopwatch import until
from tests.machine.template.client import forked

HERE = "127.0.0.1"
SENT_ALIKE = pytest.mark.parametrize("dialect", POSTGRESQL_OFTEN)
"""Answers of the network to a sender: the ledger's statements are run by the other tests, on both databases."""


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def hook(ledger: Engine, url: str, tenant: str = LOCAL_TENANT) -> tuple[str, str]:
    """A webhook's id and secret."""
    made = create_webhook(ledger, KEY, tenant, url)
    assert made.secret is not None
    return made.id, made.secret


def rows(ledger: Engine) -> list[Row[Any]]:
    with reading(ledger) as connection:
        return list(connection.execute(select(webhook_deliveries).order_by(webhook_deliveries.c.id)).all())


def make_due(ledger: Engine, **values: Any) -> None:
    with writing(ledger) as connection:
        pending = webhook_deliveries.c.state == "pending"
        connection.execute(update(webhook_deliveries).where(pending).values(due_at=ledger_now(-1), **values))


def verify(secret: str, got: tuple[dict[str, str], str]) -> Any:
    headers, body = got
    return Webhook(secret).verify(body, headers)


def test_each_change_of_state_is_delivered_once_and_verifies(
    ledger: Engine, ledger_url: str, held: Callable[..., Claim], queued: Callable[..., str],
    authority: trustme.CA, tmp_path: Path,
) -> None:  # fmt: skip
    with Receiver(authority).running() as receiver:
        hook_id, secret = hook(ledger, receiver.url)
        claim = held(labels={"team": "vision"}, name="digits", kind="factors")
        finish(ledger, claim)
        with sending(ledger_url, tmp_path, authority, hosts=HERE):
            until(lambda: [row.state for row in rows(ledger)] == ["delivered"] * 3)
        messages = [verify(secret, got) for got in receiver.got]
        bodies = [message["data"] for message in messages]
        assert sorted((body["seq"], body["before"], body["after"]) for body in bodies) == [
            (1, None, "queued"), (2, "queued", "running"), (3, "running", "succeeded"),
        ]  # fmt: skip
        assert {message["type"] for message in messages} == {"job.queued", "job.running", "job.succeeded"}
        assert all(body["job"] == claim.job_id and body["tenant"] == LOCAL_TENANT for body in bodies)
        assert all((body["name"], body["labels"]) == ("digits", {"team": "vision"}) for body in bodies)
        assert all(body["links"]["self"] == f"/v1/jobs/{claim.job_id}" for body in bodies)
        listed = list_deliveries(ledger, LOCAL_TENANT, hook_id)
        assert {each.id: (each.job, each.before, each.after) for each in listed} == {
            headers["webhook-id"]: tuple(json.loads(body)["data"][name] for name in ("job", "before", "after"))
            for headers, body in receiver.got
        }
        assert {(each.state, each.attempts, each.outcome) for each in listed} == {("delivered", 1, "answered 204")}
        log = (tmp_path / "sender.log").read_text()
        assert secret not in log
        assert KEY not in log


def test_what_is_rolled_back_and_what_is_no_job_of_a_caller_is_announced_to_nobody(
    ledger: Engine, document: Callable[..., Any], held: Callable[..., Claim]
) -> None:
    hook(ledger, "https://example.com/")
    with pytest.raises(DocumentRefused):
        submit(ledger, LOCAL_TENANT, document(schedule={"deadline": "2020-01-01T00:00Z"}))
    submit(ledger, LOCAL_TENANT, document(), estimate=True)
    assert rows(ledger) == []
    whole, piece = held(), held()
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == piece.job_id).values(parent_id=whole.job_id))
    before = len(rows(ledger))
    finish(ledger, piece)
    assert len(rows(ledger)) == before == 4


def test_a_job_and_a_webhook_take_their_deliveries_with_them(ledger: Engine, queued: Callable[..., str]) -> None:
    first, _ = hook(ledger, "https://example.com/1")
    second, _ = hook(ledger, "https://example.com/2")
    job, other = queued(), queued()
    request_cancel(ledger, LOCAL_TENANT, job)
    assert len(rows(ledger)) == 6
    delete_job(ledger, LOCAL_TENANT, job)
    assert [(row.job_id, row.webhook_id) for row in rows(ledger)] == [(other, first), (other, second)]
    assert not delete_webhook(ledger, "another", first)
    assert delete_webhook(ledger, LOCAL_TENANT, first)
    assert [row.webhook_id for row in rows(ledger)] == [second]
    assert [each.id for each in list_webhooks(ledger, LOCAL_TENANT)] == [second]


def test_while_it_is_rotated_both_secrets_verify(
    ledger: Engine, ledger_url: str, queued: Callable[..., str], authority: trustme.CA, tmp_path: Path
) -> None:
    with (
        Receiver(authority).running() as receiver,
        sending(ledger_url, tmp_path, authority, hosts=f"{HERE}/32"),
    ):
        hook_id, first = hook(ledger, receiver.url)
        secrets = [first]

        def verified() -> list[bool]:
            before = len(receiver.got)
            queued()
            until(lambda: len(receiver.got) > before)
            found = []
            for secret in secrets:
                try:
                    verify(secret, receiver.got[-1])
                    found.append(True)
                except WebhookVerificationError:
                    found.append(False)
            return found

        assert verified() == [True]
        for wanted in ([True, True], [False, True, True]):
            rotated = rotate_secret(ledger, KEY, LOCAL_TENANT, hook_id)
            assert rotated is not None
            secrets.append(rotated.secret or "")
            assert verified() == wanted
        # and nothing of them is readable where they are kept
        with reading(ledger) as connection:
            (stored,) = connection.execute(select(webhooks.c.secrets)).scalars().all()
        assert not any(secret.removeprefix("whsec_")[:12] in stored for secret in secrets)


WITHIN = [
    *("127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "127.1", "0.0.0.0", "[::]", "10.0.0.1"),
    *("172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "[fe80::1]", "[fc00::1]"),
    *("[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b:1::7f00:1]", "[2002:7f00:1::]"),
    *("[2001:0:1:2:3:4:80ff:fffe]", "[::127.0.0.1]", "[::ffff:0:127.0.0.1]", "[fec0::1]", "no-such-host.invalid"),
]


@SENT_ALIKE
def test_an_address_within_is_refused_in_every_notation(
    ledger: Engine, ledger_url: str, queued: Callable[..., str], authority: trustme.CA, tmp_path: Path
) -> None:
    with Receiver(authority).running() as receiver:
        port = receiver.server_address[1]
        for each in WITHIN:
            hook(ledger, f"https://{each}:{port}/hook")
        queued()
        with sending(ledger_url, tmp_path, authority, hosts="127.0.0.2, hooks.example, 10.1.0.0/16"):
            until(lambda: all(row.outcome for row in rows(ledger)))
        outcomes = [(row.state, row.outcome) for row in rows(ledger)]
        refused = "refused: the host must have public addresses alone, or be listed in KRONOSCOPE_WEBHOOK_HOSTS"
        assert outcomes == [("pending", refused)] * len(WITHIN)
        assert receiver.connections == 0


@SENT_ALIKE
def test_a_redirect_is_not_followed_and_a_certificate_is_checked_for_the_name(
    ledger: Engine, ledger_url: str, queued: Callable[..., str], authority: trustme.CA, tmp_path: Path
) -> None:
    with (
        Receiver(authority).running() as receiver,
        Receiver(authority, "127.0.0.2").running() as inside,
        Receiver(authority, HERE, "elsewhere.example").running() as other,
        Receiver(trustme.CA()).running() as stranger,
    ):
        receiver.answer = lambda _: (302, {"location": inside.url})
        addresses = (receiver.url, f"https://{HERE}:{other.server_address[1]}/", stranger.url)
        hooks = [hook(ledger, url)[0] for url in addresses]
        queued()
        with sending(ledger_url, tmp_path, authority, hosts="127.0.0.0/8"):
            until(lambda: all(row.outcome for row in rows(ledger)))
        outcomes = {row.webhook_id: row.outcome for row in rows(ledger)}
        assert outcomes[hooks[0]] == "answered 302, and redirects are not followed"
        assert all("certificate verify failed" in outcomes[each] for each in hooks[1:])
        assert (inside.connections, other.got, stranger.got) == (0, [], [])


REBOUND = """
import socket, sys
from jobs.webhooks.__main__ import main
resolve, asked = socket.getaddrinfo, []
def look_up(host, *rest, **named):
    if host == "hooks.example":
        asked.append(host)
        host = "127.0.0.2" if len(asked) == 1 else "127.0.0.3"
    return resolve(host, *rest, **named)
socket.getaddrinfo = look_up
sys.exit(main())
"""


@SENT_ALIKE
def test_a_name_that_leads_elsewhere_the_second_time_is_asked_at_the_address_that_was_checked(
    ledger: Engine, ledger_url: str, queued: Callable[..., str], authority: trustme.CA, tmp_path: Path
) -> None:
    with Receiver(authority, "127.0.0.2", "hooks.example").running() as receiver:
        inside = Receiver(authority, "127.0.0.3", "hooks.example", port=receiver.server_address[1])
        with inside.running():
            hook(ledger, receiver.url)
            queued()
            with sending(ledger_url, tmp_path, authority, hosts="127.0.0.2", program=REBOUND):
                until(lambda: [row.outcome for row in rows(ledger)] == ["answered 204"])
                assert receiver.got[0][0]["host"] == f"hooks.example:{receiver.server_address[1]}"
                queued()  # and by now it is an address within
                until(lambda: all(row.outcome for row in rows(ledger)))
            assert rows(ledger)[1].outcome.startswith("refused: ")
            assert (len(receiver.got), inside.connections) == (1, 0)


@SENT_ALIKE
def test_a_server_that_answers_nothing_delays_no_other_tenant_and_is_asked_four_times_at_once(
    ledger: Engine, ledger_url: str, document: Callable[..., Any], authority: trustme.CA, tmp_path: Path
) -> None:
    with writing(ledger) as connection:
        connection.execute(insert(tenants).values(id="other", name="other", created_at=ledger_now()))
    silence = threading.Event()
    with Receiver(authority).running() as dead, Receiver(authority).running() as receiver:
        dead.answer = lambda _: (204 if silence.wait() else 0, {})
        for _ in range(3):
            hook(ledger, dead.url)
        hook(ledger, receiver.url, "other")
        for _ in range(10):
            submit(ledger, LOCAL_TENANT, document())
        try:
            with sending(ledger_url, tmp_path, authority, hosts=HERE):
                until(lambda: len(dead.got) == 4)
                submit(ledger, "other", document())  # behind thirty of the other tenant
                until(lambda: receiver.got)
                assert len(dead.got) == 4
                assert [row.outcome for row in rows(ledger) if row.tenant_id == LOCAL_TENANT] == [None] * 30
                until(lambda: any(row.outcome == "no answer within 10 s" for row in rows(ledger)))
                silence.set()  # those that were sent since then are answered before the sender ends
        finally:
            silence.set()


@SENT_ALIKE
@pytest.mark.real_programs
def test_a_sender_that_is_killed_between_sending_and_recording_leaves_what_is_sent_again_under_its_id(
    ledger: Engine, ledger_url: str, queued: Callable[..., str], authority: trustme.CA, tmp_path: Path
) -> None:
    with Receiver(authority).running() as receiver:
        _, secret = hook(ledger, receiver.url)
        queued()
        (delivery,) = rows(ledger)
        with sending(ledger_url, tmp_path, authority, hosts=HERE) as process:

            def kill(_: str) -> tuple[int, dict[str, str]]:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                return 204, {}

            receiver.answer = kill
            until(lambda: process.poll() is not None)
        (left,) = rows(ledger)
        assert (left.state, left.attempts, left.outcome) == ("pending", 1, None)
        receiver.answer = lambda _: (204, {})
        make_due(ledger)  # what half a minute does
        with forked(), sending(ledger_url, tmp_path, authority, hosts=HERE):
            until(lambda: rows(ledger)[0].state == "delivered")
        assert [headers["webhook-id"] for headers, _ in receiver.got] == [delivery.id] * 2
        assert all(verify(secret, got)["data"]["job"] == delivery.job_id for got in receiver.got)


@SENT_ALIKE
def test_attempts_are_bounded_with_growing_pauses_and_the_last_outcome_is_kept(
    ledger: Engine, ledger_url: str, queued: Callable[..., str], authority: trustme.CA, tmp_path: Path
) -> None:
    pauses: list[float] = []
    with Receiver(authority).running() as receiver:
        receiver.answer = lambda _: (500 + len(receiver.got), {})
        hook(ledger, receiver.url)
        queued()
        with sending(ledger_url, tmp_path, authority, hosts=HERE):
            for attempt in range(1, len(PAUSES_SECONDS) + 2):
                until(lambda: rows(ledger)[0].outcome is not None)
                with reading(ledger) as connection:
                    now = connection.execute(select(ledger_now())).scalar_one()
                (row,) = rows(ledger)
                assert (row.attempts, row.outcome) == (attempt, f"answered {500 + attempt}")
                pauses.append((row.due_at - now).total_seconds())
                if row.state == "pending":
                    make_due(ledger, outcome=None)
        (row,) = rows(ledger)
        assert (row.state, row.attempts) == ("failed", len(PAUSES_SECONDS) + 1)
        assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert all(left <= pause for left, pause in zip(pauses, (*PAUSES_SECONDS, 0), strict=True))
    assert pauses[2:-1] == sorted(pauses[2:-1])


def test_deliveries_of_long_ago_are_dropped_and_those_of_a_lost_key_say_so(
    ledger: Engine, ledger_url: str, queued: Callable[..., str], authority: trustme.CA, tmp_path: Path
) -> None:
    create_webhook(ledger, "another key of thirty-two characters", LOCAL_TENANT, "https://example.com/")
    queued()
    with writing(ledger) as connection:
        connection.execute(update(webhook_deliveries).values(due_at=ledger_now(-31 * 86_400), state="failed"))
    queued()
    with sending(ledger_url, tmp_path, authority):
        until(lambda: [bool(row.outcome) for row in rows(ledger)] == [True])
    assert "its secret is of another key: rotate it" in rows(ledger)[0].outcome
