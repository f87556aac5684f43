"""A hub that lies: `fetch` keeps what it lists and nothing else, asks nobody inside, and says what is wrong."""

import gzip
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from catalog.requests.inputs import HuggingFaceModel
from worker.execution.loader_context import LoaderContext
from worker.execution.models import fetch, hub_snapshot, hub_transport
from worker.execution.models.hub_store import snapshot

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENTS = {"config.json": b'{"a": 1}', "model.safetensors": b"\x02" * 70_000, "1_Pooling/config.json": b"{}",
            "modules.json": b"[]"}  # fmt: skip
RESOLVED = f"/owner/name/resolve/{COMMIT}/"
API = "/api/models/owner/name/revision/"


def entry(name: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it."""
    if name.endswith(".safetensors"):
        digest = hashlib.sha256(content).hexdigest()
        return {"rfilename": name, "size": len(content), "blobId": "f" * 40, "lfs": {"sha256": digest}}
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"rfilename": name, "size": len(content), "blobId": blob}


def listed(**changes: Any) -> dict[str, Any]:
    """The honest list, changed."""
    files = [entry(name, content) for name, content in CONTENTS.items()]
    unwanted = {"rfilename": "pytorch_model.bin", "size": 10**15}
    return {"id": "owner/name", "sha": COMMIT, "siblings": [*files, unwanted]} | changes


def changed(name: str, **changes: Any) -> dict[str, Any]:
    """The honest list with one file changed."""
    siblings = [each | changes if each["rfilename"] == name else each for each in listed()["siblings"]]
    return listed(siblings=siblings)


class Hub(BaseHTTPRequestHandler):
    """A hub, honest until a test changes an answer."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append((path, self.headers.get("authorization")))
        for prefix, behave in self.server.behaviours.items():
            if path.startswith(prefix):
                behave(self)
                return
        if path.startswith(API):
            self.send(json.dumps(listed()).encode())
        elif path.startswith(RESOLVED) and path.removeprefix(RESOLVED) in CONTENTS:
            self.send(CONTENTS[path.removeprefix(RESOLVED)])
        else:
            self.send(b"", 404)

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """The server of one test."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Hub)
        self.asked: list[tuple[str, str | None]] = []
        self.behaviours: dict[str, Callable[[Hub], None]] = {}

    def handle_error(self, *_: object) -> None:
        """Leave out clients that hang up."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setattr(hub_snapshot, "_PAUSE_SECONDS", 0.0)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def told(body: bytes, status: int = 200, **headers: str) -> Callable[[Hub], None]:
    return lambda hub: hub.send(body, status, **headers)


def record(value: Any) -> Callable[[Hub], None]:
    return told(json.dumps(value).encode())


def to(place: str) -> Callable[[Hub], None]:
    return told(b"", 302, location=place)


def endless(hub: Hub) -> None:
    """400 MB where a length is not said."""
    hub.send_response(200)
    hub.send_header("connection", "close")
    hub.end_headers()
    for _ in range(400):
        hub.wfile.write(bytes(10**6))


def cut_short(hub: Hub) -> None:
    hub.send(b"12345", content_length=str(len(CONTENTS["model.safetensors"])))
    hub.close_connection = True


def dripping(hub: Hub) -> None:
    hub.send_response(200)
    hub.send_header("content-length", "70000")
    hub.end_headers()
    while True:
        hub.wfile.write(b"x")
        time.sleep(0.05)


def dripping_header(hub: Hub) -> None:
    hub.wfile.write(b"HTTP/1.1 200 OK\r\nx-a: ")
    while True:
        hub.wfile.write(b"x")
        time.sleep(0.05)


def fetched(store: Path) -> list[str]:
    return sorted(each.relative_to(store).as_posix() for each in store.rglob("*") if not each.is_dir())


def test_what_an_honest_hub_lists_is_kept_and_read_offline(hub: Server, tmp_path: Path) -> None:
    assert fetch.main(["owner/name", "--store", str(tmp_path)]) == 0
    source = HuggingFaceModel(source="huggingface", id="owner/name", revision=None)
    folder = snapshot(source, LoaderContext(store=tmp_path, offline=True))
    assert {name: (folder / name).read_bytes() for name in CONTENTS} == CONTENTS
    kept = [f"snapshots/{COMMIT}/{name}" for name in CONTENTS] + ["refs/main", f"trees/{COMMIT}.json"]
    assert fetched(tmp_path / "hub/models--owner--name") == sorted(kept)
    asked = len(hub.asked)
    assert fetch.main(["owner/name", "--store", str(tmp_path)]) == 0
    assert len(hub.asked) == asked + 1  # the list alone


def test_shapes_first_and_weights_later(hub: Server, tmp_path: Path) -> None:
    source = HuggingFaceModel(source="huggingface", id="owner/name", revision=COMMIT)
    folder = snapshot(source, LoaderContext(store=tmp_path, offline=False, shapes_only=True))
    assert not (folder / "model.safetensors").exists()
    with pytest.raises(Exception, match="is not in the model store"):
        snapshot(source, LoaderContext(store=tmp_path, offline=True))
    snapshot(source, LoaderContext(store=tmp_path, offline=False))
    assert snapshot(source, LoaderContext(store=tmp_path, offline=True)) == folder
    assert {name: (folder / name).read_bytes() for name in CONTENTS} == CONTENTS


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub: Server, tmp_path: Path) -> None:
    weights, ranges = CONTENTS["model.safetensors"], []

    def broken_once(answering: Hub) -> None:
        ranges.append(answering.headers.get("range"))
        if len(ranges) == 1:
            cut_short(answering)
        else:
            answering.send(weights[5:], 206, content_range=f"bytes 5-{len(weights) - 1}/{len(weights)}")

    honest = hashlib.sha256(b"12345" + weights[5:]).hexdigest()
    hub.behaviours = {
        RESOLVED + "model": broken_once,
        API: record(changed("model.safetensors", lfs={"sha256": honest})),
    }
    assert fetch.main(["owner/name", "--store", str(tmp_path)]) == 0
    assert ranges == [None, "bytes=5-"]


WEIGHTS = RESOLVED + "model.safetensors"
CONFIG = RESOLVED + "config.json"
LIES: dict[str, tuple[dict[str, Callable[[Hub], None]], int, str]] = {
    "html": ({API: told(b"<html>sign in</html>", content_type="text/html")}, 2, "is not JSON (its type is `text/html`"),
    "nested": ({API: told(b"[" * 10**6)}, 2, "is not JSON"),
    "list": ({API: record([1])}, 2, "is not an object (got list)"),
    "no commit": ({API: record(listed(sha="../../x"))}, 2, "`sha` in the list of files of owner/name is not a commit"),
    "no files": ({API: record(listed(siblings=None))}, 2, "`siblings` in the list of files of owner/name is not"),
    "no name": ({API: record(listed(siblings=[{"size": 1}]))}, 2, "has no text as `rfilename`"),
    "no size": ({API: record(changed("config.json", size=None))}, 2, "`size` of config.json"),
    "wrong size": ({API: record(changed("config.json", size="8"))}, 2, "`size` of config.json"),
    "no weights": ({API: record(listed(siblings=[]))}, 2, "has no safetensors weights"),
    "upwards": ({API: record(changed("model.safetensors", rfilename="../../m.safetensors"))}, 2, "is not a plain name"),
    "root": ({API: record(changed("model.safetensors", rfilename="/tmp/m.safetensors"))}, 2, "is not a plain name"),
    "hidden": ({API: record(changed("model.safetensors", rfilename="\x1b[2J.safetensors"))}, 2, "is not a plain name"),
    "long": ({API: record(changed("model.safetensors", rfilename="a" * 300 + ".safetensors"))}, 2, "not a plain name"),
    "twice": ({API: record(listed(siblings=listed()["siblings"] * 2))}, 2, "two entries for `config.json`"),
    "many": (
        {API: record(listed(siblings=[entry(f"{n}.safetensors", b"") for n in range(1_001)]))}, 2, "at most 1,000",
    ),
    "large": ({API: record(changed("config.json", size=10**10))}, 2, "at most 134,217,728 are read"),
    "larger": ({API: record(changed("model.safetensors", size=10**18))}, 2, "the model store has"),
    "endless list": ({API: endless}, 2, "sends more than the 16,777,216 bytes"),
    "400 MB for 8 bytes": ({CONFIG: endless}, 2, "sends more than the 8 bytes that config.json may have"),
    "longer": ({CONFIG: told(b"{" * 9)}, 2, "config.json is listed with 8 bytes and sent with `9`"),
    "shorter": ({CONFIG: told(b"{}")}, 2, "config.json is listed with 8 bytes and sent with `2`"),
    "other bytes": ({CONFIG: told(b'{"a": 2}')}, 2, "has not the digest that is listed"),
    "other weights": ({WEIGHTS: told(b"\x03" * 70_000)}, 2, "has not the SHA-256 that is listed"),
    "cut short": ({WEIGHTS: cut_short}, 3, "did not answer for model.safetensors"),
    "500": ({API: told(b"{", 500)}, 3, "did not answer for owner/name (status 500)"),
    "500 later": ({WEIGHTS: told(b"", 500)}, 3, "did not answer for model.safetensors (status 500)"),
    "404": ({API: told(b"", 404)}, 2, "is not on the hub, or not public"),
    "gated": ({API: told(b"[]", 403, x_error_code="GatedRepo")}, 2, "asks for an agreement"),
    "no HTTP": ({API: lambda hub: hub.wfile.write(b"\0\xff" * 99) and None}, 3, "did not answer"),
    "bomb": (
        {API: told(gzip.compress(bytes(10**8), 1), content_encoding="gzip")}, 2, "Content-Encoding `gzip`",
    ),
    "round": ({API: to(API + "main")}, 2, "from one address to the next without end"),
    "dripping": ({WEIGHTS: dripping}, 3, "did not deliver model.safetensors within"),
    "dripping header": ({API: dripping_header}, 3, "did not deliver the list of files of owner/name within"),
    "to a file": ({WEIGHTS: to("file:///etc/passwd")}, 2, "its scheme is not https or http"),
    "to metadata": ({WEIGHTS: to("http://169.254.169.254/latest")}, 2, "its address 169.254.169.254 is not public"),
    "to v6": ({WEIGHTS: to("http://[::1]:6379/")}, 2, "its address ::1 is not public"),
    "to mapped": ({WEIGHTS: to("http://[::ffff:10.0.0.1]/")}, 2, "is not public"),
    "to compatible": ({WEIGHTS: to("http://[::127.0.0.1]/")}, 2, "is not public"),
    "to translated": ({WEIGHTS: to("http://[64:ff9b::7f00:1]/")}, 2, "is not public"),
    "to decimal": ({WEIGHTS: to("http://2130706433/")}, 2, "its address 127.0.0.1 is not public"),
    "to a name": ({WEIGHTS: to("http://inside.example/")}, 2, "its address 10.0.0.7 is not public"),
    "to one of two": ({WEIGHTS: to("http://mixed.example/")}, 2, "its address 192.168.0.1 is not public"),
}  # fmt: skip
SLOW = {"dripping", "dripping header"}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_a_sentence_and_leaves_nothing(
    hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lie: str
) -> None:
    hub.behaviours, code, sentence = LIES[lie]
    named = {"inside.example": ["10.0.0.7"], "mixed.example": ["1.1.1.1", "192.168.0.1"]}
    resolve = socket.getaddrinfo

    def look_up(host: Any, port: Any, *rest: Any, **named_: Any) -> Any:
        if host in named:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in named[host]]
        return resolve(host, port, *rest, **named_)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    if lie in SLOW:
        monkeypatch.setattr(hub_snapshot, "_ANSWER_SECONDS", 0.5)
        monkeypatch.setattr(hub_snapshot, "_SLOWEST_BYTES_A_SECOND", 2**30)
    before = time.monotonic()
    assert fetch.main(["owner/name", "--store", str(tmp_path)]) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert said.strip().isprintable()
    assert fetched(tmp_path) == []
    assert time.monotonic() - before < 60


def test_a_redirect_to_another_port_of_the_hub_s_own_host_is_not_followed(
    hub: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    neighbour = Server()
    thread = threading.Thread(target=neighbour.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        hub.behaviours = {WEIGHTS: to(f"http://127.0.0.1:{neighbour.server_address[1]}/")}
        assert fetch.main(["owner/name", "--store", str(tmp_path)]) == 2
    finally:
        neighbour.shutdown()
        neighbour.server_close()
        thread.join()
    assert "is not public" in capsys.readouterr().err
    assert neighbour.asked == []


def test_a_public_address_gets_no_token_and_the_connection_that_was_checked(
    hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is public when it is looked up and internal a moment later is asked at the address looked at."""
    monkeypatch.setattr(hub_transport, "is_public", lambda address: str(address) == "127.0.0.2")
    looked_up: list[str] = []
    resolve = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **named: Any) -> Any:
        if host == "elsewhere.example":
            looked_up.append(host)
            host = "127.0.0.2" if len(looked_up) == 1 else "127.0.0.1"
        return resolve(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    class Elsewhere(Server):
        def __init__(self) -> None:
            ThreadingHTTPServer.__init__(self, ("127.0.0.2", 0), Hub)
            self.asked, self.behaviours = [], {"/blob": told(CONTENTS["model.safetensors"])}

    elsewhere = Elsewhere()
    thread = threading.Thread(target=elsewhere.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        hub.behaviours = {WEIGHTS: to(f"http://elsewhere.example:{elsewhere.server_address[1]}/blob")}
        assert fetch.main(["owner/name", "--store", str(tmp_path)]) == 0
    finally:
        elsewhere.shutdown()
        elsewhere.server_close()
        thread.join()
    assert elsewhere.asked == [("/blob", None)]
    assert looked_up == ["elsewhere.example"]
    assert {authorization for _, authorization in hub.asked} == {"Bearer a secret"}
