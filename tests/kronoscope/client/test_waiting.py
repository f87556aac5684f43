"""The client while it waits: at a service that is away for a while, has no room, or is somebody else."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from catalog.responses.views import ArtifactView
from kronoscope import Client
from kronoscope.cli.exit_codes import run_command
from kronoscope.client import ClientError, DownloadFailed

Answer = tuple[int, dict[str, str], str]

AWAY: Answer = (503, {"Retry-After": "0"}, json.dumps({"title": "Away", "detail": "the database is away"}))
UNCHANGED: Answer = (304, {}, "")
REFUSED: Answer = (401, {}, json.dumps({"title": "No key", "detail": "this key has ended"}))


def told(state: str, tag: str | None = None) -> Answer:
    job = {"id": "1", "state": state, "kinds": ["capacity"], "document": {}}
    return (200, {} if tag is None else {"ETag": f'"{tag}"'}, json.dumps(job))


class Service:
    """Answers as it is told to, one request after the other."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[Answer] = []
        self.asked: list[tuple[float, str, str | None]] = []


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.asked.append((time.monotonic(), self.path, self.headers["if-none-match"]))
            status, headers, text = made.answers.pop(0)
            self.send_response(status)
            # what is longer than what is sent breaks off
            for name, value in ({} if status == 304 else {"Content-Length": str(len(text))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_job_is_followed_through_a_service_that_is_away(service: Service) -> None:
    service.answers = [told("queued", "a"), AWAY, UNCHANGED, told("running"), (502, {"Retry-After": "0"}, "proxy"),
                       told("succeeded", "c")]  # fmt: skip
    with Client(service.url) as client:
        assert [job.state for job in client.follow("1")] == ["queued", "running", "succeeded"]
    # none is asked for what changes where it is not said what is known
    assert [tag for _, _, tag in service.asked] == [None, '"a"', '"a"', '"a"', None, None]
    assert [path.partition("?")[2] for _, path, _ in service.asked] == ["", *["wait=20.0"] * 5]
    # one that has no room for who waits answers at once, and is asked again a second later
    assert service.asked[3][0] - service.asked[2][0] > 0.9


@pytest.mark.parametrize(
    ("answers", "patience", "said"),
    [
        ([told("running", "a"), REFUSED], 60, "this key has ended"),
        ([told("running", "a"), AWAY], 0, "the database is away"),
        ([AWAY], 60, "the database is away"),
    ],
)
def test_what_no_waiting_mends_is_said_at_once(
    service: Service, answers: list[Answer], patience: float, said: str
) -> None:
    service.answers = list(answers)
    with Client(service.url) as client, pytest.raises(ClientError, match=said):
        list(client.follow("1", patience_seconds=patience))
    assert len(service.asked) == len(answers)


def test_an_answer_has_its_time_behind_the_wait(service: Service) -> None:
    service.answers = [told("running")]
    seen: list[httpx.Request] = []
    with Client(service.url, timeout_seconds=30) as client:
        client._connection.http.event_hooks = {"request": [seen.append]}
        client.job("1", wait_seconds=30)
    assert seen[0].extensions["timeout"]["read"] == float(seen[0].url.params["wait"]) + 30


def test_who_listens_slowly_does_not_take_that_for_the_services_silence(service: Service) -> None:
    def event(seq: int, state: str) -> str:
        return f"data: {json.dumps({'seq': seq, 'at': '', 'type': 'state', 'data': {'state': state}})}\n\n"

    broken = event(1, "running")
    service.answers = [
        (200, {"Content-Length": str(len(broken) + 1)}, broken),
        (200, {}, event(2, "succeeded")),
    ]
    seen = []
    with Client(service.url) as client:
        for each in client.events("1", patience_seconds=0.2):
            seen.append(each.seq)
            time.sleep(0.3)
    assert seen == [1, 2]


def test_somebody_else_at_the_address_is_told_from_the_service(service: Service) -> None:
    service.answers = [(200, {"Content-Type": "text/html"}, "<h1>It works!</h1>")]
    with Client(service.url) as client, pytest.raises(ClientError, match="answered 200, not as Kronoscope does; check"):
        client.menu()


EVENT = {"seq": 1, "at": "2030-01-01T12:00:00Z", "type": "state", "data": {"state": "succeeded", "attempt": 1}}


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", "null", "{}", '{"seq": "1"}', '{"seq": 1, "type": 2, "data": [', "[" * 10**5]
)
def test_what_is_no_event_is_said(service: Service, text: str) -> None:
    service.answers = [(200, {}, f"data: {text}\n\n")]
    with Client(service.url) as client, pytest.raises(ClientError, match="which is no event of Kronoscope's"):
        list(client.events("1"))


@pytest.mark.parametrize("milliseconds", ["\u00b2", "-1", "9" * 5000, "1e3", ""], ids=lambda text: text[:3])
def test_a_pause_that_is_none_is_left_out(service: Service, milliseconds: str) -> None:
    text = f"retry: 1\n\nretry: {milliseconds}\n\n"
    service.answers = [
        (200, {"Content-Length": str(len(text.encode()))}, text),
        (200, {}, f"data: {json.dumps(EVENT)}\n\n"),
    ]
    with Client(service.url) as client:
        assert [each.seq for each in client.events("1")] == [1]


def test_a_file_is_cut_at_the_size_that_is_listed(service: Service, tmp_path: Path) -> None:
    listed = ArtifactView(name="a", sha256="0" * 64, size_bytes=10, media_type="text/plain", href="/")
    service.answers = [(200, {}, "x" * 4_000_000)]
    with Client(service.url) as client, pytest.raises(DownloadFailed, match="listed with 10 bytes, and more are sent"):
        client.download("1", listed, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ClientError(422, "", "wrong"), 2),
        (ClientError(404, "", "no such job"), 2),
        (ClientError(429, "", "too many under way"), 3),
        (ClientError(503, "", "away"), 3),
        (DownloadFailed(0, "", "broke off; try again"), 3),
        (DownloadFailed(403, "", "kept in a store that answered 403; try again"), 3),
    ],
)
def test_what_later_may_succeed_has_the_exit_code_of_that(error: ClientError, code: int) -> None:
    def command() -> None:
        raise error

    assert run_command(command) == code
