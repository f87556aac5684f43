"""A service that lies to the command line: a sentence, no endless reading, no byte beyond what is listed."""

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from catalog.responses.views import ArtifactView
from kronoscope.cli.exit_codes import run_command
from kronoscope.client import Client, ClientError
from kronoscope.client import connection as connection_module
from kronoscope.client import uploads as uploads_module
from tests.kronoscope.test_stored_run import RUN

JOB = "01890000-0000-7000-8000-000000000000"


class Liar(BaseHTTPRequestHandler):
    """A service that answers everything in one way."""

    protocol_version = "HTTP/1.1"
    answer: Callable[["Liar"], None]

    def do_GET(self) -> None:
        self.close_connection = True
        type(self).answer(self)

    do_POST = do_PUT = do_GET

    def send(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        self.send_header("Connection", "close")  # or a client that asks again may do so as it closes
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """The server of one test."""

    daemon_threads = True
    sent = 0

    def handle_error(self, *_: object) -> None:
        """Leave out clients that hang up."""


@pytest.fixture
def lying() -> Iterator[Callable[[Callable[[Liar], None]], str]]:
    servers = []

    def start(answer: Callable[[Liar], None]) -> str:
        server = Server(("127.0.0.1", 0), type("One", (Liar,), {"answer": staticmethod(answer)}))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def record(value: Any) -> Callable[[Liar], None]:
    return lambda liar: liar.send(json.dumps(value).encode())


def endless(liar: Liar) -> None:
    liar.send_response(200)
    liar.end_headers()
    for _ in range(100):
        liar.wfile.write(b"data: " + b" " * 10**6)


JOB_VIEW = {"id": JOB, "state": "running", "kinds": ["factors"]}
LIES: dict[str, Callable[[Liar], None]] = {
    "nothing": record({}),
    "null": record(None),
    "list": record([1]),
    "number": record({"items": 5, "id": 5, "state": "queued", "job": 1}),
    "texts": record({"items": ["x"], "next": None, "id": JOB, "state": ["x"], "job": "x"}),
    "types": record(JOB_VIEW | {"progress": "x", "items": [JOB_VIEW | {"kinds": 3}], "next": None, "job": JOB_VIEW}),
    "deep": lambda liar: liar.send(b"[" * 10**6),
    "digits": lambda liar: liar.send(b'{"id": ' + b"9" * 10_000 + b"}"),
    "bomb": lambda liar: liar.send(gzip.compress(b" " * 10**7), content_encoding="gzip"),
    "endless": endless,
    "events": lambda liar: liar.send(b"data: {\n\n"),
}
CALLS: dict[str, Callable[[Client], object]] = {
    "job": lambda client: client.job(JOB),
    "follow": lambda client: list(client.follow(JOB, patience_seconds=0)),
    "events": lambda client: list(client.events(JOB, patience_seconds=0)),
    "past events": lambda client: list(client.events(JOB, follow=False)),
    "annotate": lambda client: client.annotate(JOB, note="mine"),
    "jobs": lambda client: list(client.jobs()),
    "cancel": lambda client: client.cancel(JOB),
    "results": lambda client: client.results(JOB),
    "layers": lambda client: list(client.layers(JOB)),
    "devices": lambda client: list(client.devices()),
    "estimate": lambda client: client.estimate({}),
    "import": lambda client: client.import_run(RUN),
}


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("lie", LIES)
def test_every_call_ends_in_a_sentence(
    lying: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lie: str
) -> None:
    monkeypatch.setattr(connection_module, "_MOST_BYTES", 10**7)
    url = lying(LIES[lie])
    with Client(url) as client:
        for name, call in CALLS.items():
            if name == "events" and lie not in ("events", "endless", "bomb"):
                continue  # what is no event is passed over, and asked for again
            if name != "events" and lie == "events":
                continue
            with pytest.raises(ClientError) as refused:
                call(client)
            error = refused.value
            assert run_command(partial(_raise, error)) in (2, 3)
            said = capsys.readouterr().err
            assert said.startswith("error: ")
            assert len(said) < 600


def _raise(error: Exception) -> None:
    raise error


def test_a_list_that_turns_in_a_circle_ends(lying: Any) -> None:
    with Client(lying(record({"items": [], "next": "a"}))) as client, pytest.raises(ClientError, match="not as Kron"):
        list(client.jobs())


def test_no_more_bytes_are_taken_than_a_file_is_listed_with(lying: Any, tmp_path: Path) -> None:
    listed = ArtifactView(name="a.bin", sha256="0" * 64, size_bytes=10, media_type="x", href="x")
    with Client(lying(endless)) as client, pytest.raises(ClientError, match="is listed with 10 bytes"):
        client.download(JOB, listed, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_more_bytes_are_taken_from_a_store_either(lying: Any, tmp_path: Path) -> None:
    store = lying(endless)

    def elsewhere(liar: Liar) -> None:
        liar.send_response(307)
        liar.send_header("location", f"{store}/file")
        liar.send_header("content-length", "0")
        liar.end_headers()

    listed = ArtifactView(name="a.bin", sha256="0" * 64, size_bytes=10, media_type="x", href="x")
    with Client(lying(elsewhere)) as client, pytest.raises(ClientError, match="is listed with 10 bytes"):
        client.download(JOB, listed, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../a.bin", "/tmp/a.bin", "b/../../a.bin", "link/a.bin"])
def test_no_file_is_put_outside_the_folder(lying: Any, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    listed = ArtifactView(name=name, sha256="0" * 64, size_bytes=10, media_type="x", href="x")
    with Client(lying(record({}))) as client, pytest.raises(ClientError, match="outside the folder"):
        client.download(JOB, listed, folder)


def view(liar: Liar, complete: bool = False, **changes: Any) -> None:
    """Answer with the upload of one file of 300,000 bytes."""
    file = {"name": "a.csv", "size_bytes": 300_000, "sha256": "0" * 64, "received_bytes": 0} | changes
    liar.send(json.dumps({"id": "x", "kind": "data", "complete": complete, "files": [file]}).encode())


def body(liar: Liar) -> bytes:
    return liar.rfile.read(int(liar.headers.get("content-length") or 0))


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ({"name": "../b.csv"}, "other files than were declared"),
        ({"size_bytes": 10**6}, "other files than were declared"),
        ({"received_bytes": -1}, "other files than were declared"),
        ({}, "0 bytes of the upload, though more were sent"),
        ({"received_bytes": 300_000}, "300,000 bytes of the upload, though more were sent"),
    ],
)
def test_no_other_file_is_read_for_an_upload_and_none_is_sent_without_end(
    lying: Any, tmp_path: Path, listed: dict[str, Any], said: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_bytes(b"a" * 300_000)
    (tmp_path / "b.csv").write_bytes(b"SECRET" * 50_000)
    taken: list[bytes] = []

    def answer(liar: Liar) -> None:
        taken.append(body(liar))
        view(liar, **listed)

    with Client(lying(answer)) as client, pytest.raises(ClientError, match=said):
        client.upload(tmp_path / "in" / "a.csv")
    assert 1 <= len(taken) <= 2
    assert not any(b"SECRET" in each for each in taken)


def refuse(liar: Liar, status: int) -> None:
    liar.send_response(status)
    for name, value in (("retry-after", "0"), ("content-length", "0")):
        liar.send_header(name, value)
    liar.end_headers()


def test_parts_that_a_slow_line_does_not_carry_become_smaller_and_storing_is_waited_for(
    lying: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The window for a service that is away is none here: what grows, and what is being stored, does not use it up."""
    monkeypatch.setattr(uploads_module, "_PART_BYTES", 200_000)
    monkeypatch.setattr(uploads_module, "_STORED_BYTES_A_SECOND", 1_000)
    monkeypatch.setattr(uploads_module, "_PATIENCE_SECONDS", 1e-3)
    (tmp_path / "a.csv").write_bytes(b"a" * 300_000)
    come, sizes, busy = 0, [], [1, 1, 1]

    def answer(liar: Liar) -> None:
        nonlocal come
        sent = body(liar)
        if liar.command == "PUT":
            sizes.append(len(sent))
            come += min(len(sent), 120_000)
            if len(sent) > 120_000:
                refuse(liar, 408)
                return
        elif liar.path.endswith(":complete"):
            if busy:
                busy.pop()
                refuse(liar, 409)
                return
            view(liar, complete=True, received_bytes=come)
            return
        view(liar, received_bytes=come)

    with Client(lying(answer)) as client:
        assert client.upload(tmp_path / "a.csv").complete
    assert (sizes, busy) == ([200_000, 100_000, 80_000], [])
