"""The proxy before the API: bodies, streams and parts pass as they come, nothing is stored, and TLS is an option."""

import contextlib
import hashlib
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from sqlalchemy import Engine

from jobs.repository.store import request_cancel
from jobs.schema.database import open_database
from jobs.tenancy.api_keys import create_key, verify_key
from tests.api import seeding, streaming
from tests.api.connections.sockets import connect, head, received
from tests.api.connections.test_audit_trail import lines
from tests.api.expect import problem
from tests.api.routes.test_events import say
from tests.api.server import KEY_SECRET, METRICS_TOKEN, NO_TLS, Server, serve, serve_behind_proxy
from tests.conftest import Databases
from tests.machine.stopwatch import Stopwatch, until
from tests.servers import PARENT, proxy

CONTENT = os.urandom(2**23)
HALF = 2**22


class Behind:
    """A service behind its proxy, its ledger, and a key."""

    def __init__(self, server: Server, engine: Engine, folder: Path) -> None:
        self.server = server
        self.engine = engine
        self.folder = folder
        self.key = create_key(engine, KEY_SECRET, "ours")
        caller = verify_key(engine, KEY_SECRET, self.key)
        assert caller is not None
        self.tenant_id = caller.tenant_id


@pytest.fixture(scope="module")
def behind(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    url, folder = databases.migrated("sqlite"), tmp_path_factory.mktemp("behind")
    engine = open_database(url)
    more = {"KRONOSCOPE_KEY_SECRET": KEY_SECRET, "KRONOSCOPE_METRICS_TOKEN": METRICS_TOKEN}
    with serve_behind_proxy(url, folder, {**more, "KRONOSCOPE_BODY_SECONDS": "60"}) as server:
        yield Behind(server, engine, folder)
    engine.dispose()


def test_an_event_is_passed_on_at_once_and_a_long_poll_ends_with_its_job(behind: Behind) -> None:
    claim = seeding.running(behind.engine, behind.tenant_id)
    address = f"/v1/jobs/{claim.job_id}"
    with behind.server.client(behind.key) as client, client.stream("GET", f"{address}/events") as answer:
        events = streaming.events(answer)
        for number in range(3):  # each is read before the next one happens
            say(behind.engine, claim, f"line {number}")
            assert any(each["data"].get("message") == f"line {number}" for each in events)
    with behind.server.client(behind.key) as client:
        job_id = client.post("/v1/jobs", json=seeding.DOCUMENT).json()["id"]
        states: list[str] = []

        def poll() -> None:
            states.append(client.get(f"/v1/jobs/{job_id}?wait=30").json()["state"])

        polling = threading.Thread(target=poll)
        polling.start()
        behind.server.await_long_polls(1, METRICS_TOKEN)
        since = Stopwatch()
        request_cancel(behind.engine, behind.tenant_id, job_id)
        polling.join()
    assert states == ["cancelled"]
    assert since.seconds() < 20


def test_an_upload_reaches_the_api_while_it_comes_and_goes_on_where_it_broke_off(behind: Behind) -> None:
    file = {"name": "data.safetensors", "size_bytes": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest()}
    with behind.server.client(behind.key) as client:
        made = client.post("/v1/uploads", json={"kind": "data", "files": [file]})
        assert made.status_code == 201, made.text
        address = f"/v1/uploads/{made.json()['id']}"

        def come() -> int:
            return int(client.get(address).json()["files"][0]["received_bytes"])

        with connect(behind.server) as connection:
            declared = (f"Authorization: Bearer {behind.key}", f"Content-Length: {len(CONTENT)}")
            connection.sendall(head(behind.server, f"PUT {address}/{file['name']} HTTP/1.1", *declared))
            connection.sendall(CONTENT[:HALF])
            # the proxy holds back no more than what its buffers hold, and the rest has not been sent
            until(lambda: sum(each.stat().st_size for each in parts(behind.folder)) > HALF - 2**19)
            assert stored_by_the_proxy(behind.server) == []
        until(lambda: come() > HALF - 2**19)
        first = come()
        span = {"content-range": f"bytes {first}-{len(CONTENT) - 1}/{len(CONTENT)}"}
        rest = client.put(f"{address}/{file['name']}", content=CONTENT[first:], headers=span)
        assert rest.status_code == 200, rest.text
        assert client.post(f"{address}:complete").status_code == 200


def parts(folder: Path) -> list[Path]:
    """The files of uploads that have not wholly come."""
    return [each for each in (folder / "artifacts").rglob("*") if each.is_file() and "upload" in str(each)]


def stored_by_the_proxy(server: Server) -> list[str]:
    """The files of bodies and answers that the proxy has open; it removes their names at once."""
    assert server.proxy is not None
    opened = [str(each.readlink()) for each in Path(f"/proc/{server.proxy.pid}/fd").iterdir()]
    return [each for each in opened if "/body" in each or "/proxy" in each]


def test_a_part_of_a_file_is_a_part(behind: Behind) -> None:
    claim = seeding.running(behind.engine, behind.tenant_id)
    artifacts = behind.folder / "artifacts"
    seeding.artifact(behind.engine, artifacts, claim, "large.safetensors", CONTENT, "application/x-any")
    address = f"/v1/jobs/{claim.job_id}/artifacts/large.safetensors"
    with behind.server.client(behind.key) as client:
        answer = client.get(address, headers={"range": "bytes=3000000-3999999"})
        assert (answer.status_code, answer.content) == (206, CONTENT[3_000_000:4_000_000])
        assert client.get(address).content == CONTENT
        assert client.head(address).headers["content-length"] == str(len(CONTENT))


def test_the_address_of_the_trail_is_the_proxys_word_and_not_the_callers(behind: Behind) -> None:
    with connect(behind.server, "127.0.0.9") as connection:
        claims = ("X-Forwarded-For: 203.0.113.9", "X-Real-IP: 203.0.113.9", "Forwarded: for=203.0.113.9")
        connection.sendall(head(behind.server, "GET /v1/jobs HTTP/1.1", "Connection: close", *claims))
        assert received(connection).startswith(b"HTTP/1.1 401 ")
    clients = [each["client"] for each in lines(behind.server.log)]
    assert clients[-1] == "127.0.0.9"


def test_behind_a_load_balancer_each_network_of_its_clients_has_its_share(behind: Behind) -> None:
    """As the configuration's comment says; a client of IPv6 has a network of 64 bits."""
    changes = {
        "listen 8080 backlog=512 so_keepalive=on;": "listen 8080 proxy_protocol; set_real_ip_from 127.0.0.1;",
        "limit_conn connections 128": "limit_conn connections 3",
    }

    def told(address: str) -> bytes:
        family = "TCP6" if ":" in address else "TCP4"
        return f"PROXY {family} {address} {address} 1 1\r\n".encode()

    with proxy(behind.server.api_port, changes) as door, contextlib.ExitStack() as stack:

        def opened(address: str) -> socket.socket:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", door.port), timeout=60))
            connection.sendall(told(address))
            return connection

        for number in (1, 2, 3):
            opened(f"2001:db8::{number}").sendall(b"GET")
        assert received(opened("2001:db8::aaaa:4")) == b""
        for address in ("2001:db8:0:1::1", "198.51.100.7"):
            connection = opened(address)
            connection.sendall(head(behind.server, "GET /v1/jobs HTTP/1.1", "Connection: close"))
            assert received(connection).startswith(b"HTTP/1.1 401 ")
    clients = [each["client"] for each in lines(behind.server.log)]
    assert clients[-2:] == ["2001:db8:0:1::/64", "198.51.100.7"]


def test_without_an_api_the_proxy_says_so(databases: Databases, tmp_path: Path) -> None:
    with serve(databases.migrated("sqlite"), tmp_path, {"KRONOSCOPE_EMBEDDED": "1"}) as server:
        port = server.port
    with proxy(port) as door, httpx.Client(base_url=door.url, trust_env=False, verify=NO_TLS) as client:
        answer = client.get("/livez")
        assert problem(answer, 503)["type"] == "urn:kronoscope:problem:unavailable"
        assert answer.headers["retry-after"] == "5"


def test_with_a_certificate_the_proxy_speaks_tls_alone(behind: Behind) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with tempfile.TemporaryDirectory(dir=PARENT) as name:
        Path(name).chmod(0o755)  # the proxy runs as another user
        certificate, key = Path(name, "certificate.pem"), Path(name, "key.pem")
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)
        key.chmod(0o644)
        changes = {"/run/secrets/tls_certificate": str(certificate), "/run/secrets/tls_key": str(key)}
        with proxy(behind.server.api_port, changes, "tls.conf") as door:
            url = f"https://127.0.0.1:{door.port}"
            with httpx.Client(base_url=url, verify=trusting, trust_env=False) as client:
                answer = client.get("/v1/jobs", headers={"authorization": f"Bearer {behind.key}"})
                assert answer.status_code == 200
                assert answer.headers["strict-transport-security"] == "max-age=31536000"
            with httpx.Client(base_url=door.url, verify=NO_TLS, trust_env=False) as client:
                problem(client.get("/livez"), 400)
