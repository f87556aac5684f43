"""Files that a bucket keeps: fetched from it by signed address, without the key, or through the API."""

import base64
import hashlib
import http.server
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import obstore
import pytest
from obstore.store import S3Store

from api.requests.response_bodies import artifact_view
from catalog.responses.views import ArtifactView
from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.s3_store import S3Objects
from jobs.queue import attempt_endings
from jobs.repository.results import list_artifacts
from jobs.schema.database import open_database
from jobs.tenancy.api_keys import create_key, verify_key
from kronoscope.client import Client, ClientError
from tests.api import seeding
from tests.api.expect import problem
from tests.api.server import KEY_SECRET, METRICS_TOKEN, Server, ready, serve
from tests.conftest import Databases, new_bucket

CONTENT = bytes(range(256)) * 2000  # more than is read before an answer begins
NAME = "factors/0.safetensors"


class Watched(http.server.ThreadingHTTPServer):
    """Passes requests on to the store and keeps what came along with them."""

    def __init__(self, store: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.store = store
        self.seen: list[dict[str, str]] = []


class _Passing(http.server.BaseHTTPRequestHandler):
    server: Watched

    def do_GET(self) -> None:
        self.server.seen.append({name.lower(): value for name, value in self.headers.items()})
        wanted = {"Range": self.headers["Range"]} if "Range" in self.headers else {}
        request = urllib.request.Request(self.server.store + self.path, headers=wanted)
        try:
            answer: Any = urllib.request.urlopen(request, timeout=300)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            body = answer.read()
            self.send_response(answer.status)
            for name in ("Content-Type", "Content-Disposition", "Content-Range"):
                if answer.headers[name]:
                    self.send_header(name, answer.headers[name])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Stored:
    """An API over a bucket, with one file in it."""

    def __init__(self, server: Server, key: str, watched: Watched, job: str, artifact: Any, raw: S3Store) -> None:
        self.server = server
        self.key = key
        self.watched = watched
        self.job = job
        self.artifact = artifact
        self.path = f"/v1/jobs/{job}/artifacts/{NAME}"
        self._raw = raw

    def replace(self, content: bytes) -> None:
        obstore.put(self._raw, self.artifact.uri, content)


@pytest.fixture(scope="module")
def stored(databases: Databases, s3_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    folder = tmp_path_factory.mktemp("stored")
    bucket = new_bucket(s3_url)
    url = databases.migrated("sqlite")
    engine = open_database(url)
    key = create_key(engine, KEY_SECRET, "ours", ("read", "submit"))
    caller = verify_key(engine, KEY_SECRET, key)
    assert caller is not None
    claim = seeding.claimed(engine, caller.tenant_id)
    seeding.artifact(
        engine, ArtifactFolder(folder / "staging", S3Objects(bucket)), claim, NAME, CONTENT, "application/json"
    )
    attempt_endings.finish(engine, claim)
    (artifact,) = list_artifacts(engine, caller.tenant_id, claim.job_id)
    engine.dispose()
    watched = Watched(s3_url)
    threading.Thread(target=watched.serve_forever, daemon=True).start()
    more = {
        "KRONOSCOPE_KEY_SECRET": KEY_SECRET,
        "KRONOSCOPE_METRICS_TOKEN": METRICS_TOKEN,
        "KRONOSCOPE_ARTIFACTS": f"s3://{bucket.bucket}/{bucket.prefix}",
        "KRONOSCOPE_STAGING": "/proc/not-to-be-made",  # an API stages nothing
        "KRONOSCOPE_S3_ENDPOINT": s3_url,
        "KRONOSCOPE_S3_PUBLIC_ENDPOINT": f"http://127.0.0.1:{watched.server_port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "canary-secret",
    }
    config: Any = {"endpoint": s3_url, "access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}
    raw = S3Store(bucket.bucket, prefix=bucket.prefix, config=config, client_options={"allow_http": True})
    try:
        with serve(url, folder, more) as server:
            yield Stored(server, key, watched, claim.job_id, artifact, raw)
            assert "canary-secret" not in server.log.read_text()
    finally:
        watched.shutdown()
        watched.server_close()


@pytest.fixture
def ours(stored: Stored) -> Iterator[httpx.Client]:
    with stored.server.client(stored.key) as client:
        yield client


def listed(stored: Stored) -> ArtifactView:
    return artifact_view(stored.artifact)


def test_a_file_is_fetched_from_the_store_by_a_signed_address(stored: Stored, ours: httpx.Client) -> None:
    answer = ours.get(stored.path)
    digest = hashlib.sha256(CONTENT)
    assert (answer.status_code, answer.content) == (307, b"")
    assert answer.headers["etag"] == f'"{digest.hexdigest()}"'
    assert answer.headers["digest"] == f"sha-256={base64.b64encode(digest.digest()).decode()}"
    assert answer.headers["cache-control"] == "no-store"
    assert "X-Amz-Expires=300&" in answer.headers["location"]
    for secret in (stored.key, "canary-secret"):
        assert secret not in str(answer.headers)
    with httpx.Client(trust_env=False, timeout=300) as stranger:
        sent = stranger.get(answer.headers["location"])
    assert sent.content == CONTENT
    assert sent.headers["content-disposition"] == "attachment; filename*=UTF-8''0.safetensors"
    assert sent.headers["content-type"] == "application/json"
    kept = ours.get(stored.path, headers={"if-none-match": answer.headers["etag"]})
    assert kept.status_code == 304


@pytest.mark.parametrize("direct", [True, False])
def test_a_part_of_a_file_either_way(stored: Stored, ours: httpx.Client, direct: bool) -> None:
    params = {} if direct else {"direct": "false"}
    answer = ours.get(stored.path, params=params, headers={"range": "bytes=300000-300009"}, follow_redirects=True)
    assert (answer.status_code, answer.content) == (206, CONTENT[300_000:300_010])
    assert answer.headers["content-range"] == f"bytes 300000-300009/{len(CONTENT)}"


def test_through_the_api_where_that_is_asked_for(stored: Stored, ours: httpx.Client) -> None:
    before = len(stored.watched.seen)
    answer = ours.get(stored.path, params={"direct": "false"})
    assert (answer.status_code, answer.content) == (200, CONTENT)
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''0.safetensors"
    assert len(stored.watched.seen) == before


def test_the_client_follows_without_its_key_and_verifies(stored: Stored, tmp_path: Path) -> None:
    stored.watched.seen.clear()
    with Client(stored.server.url, stored.key, timeout_seconds=300) as client:
        path = client.download(stored.job, listed(stored), tmp_path)
    assert path.read_bytes() == CONTENT
    (headers,) = stored.watched.seen
    assert "authorization" not in headers
    assert stored.key not in str(headers)


def test_a_flipped_byte_reaches_nobody_as_if_it_were_good(stored: Stored, ours: httpx.Client, tmp_path: Path) -> None:
    damaged = bytearray(CONTENT)
    damaged[-1] ^= 1
    with Client(stored.server.url, stored.key, timeout_seconds=300) as client:
        try:
            stored.replace(bytes(damaged))
            with pytest.raises(ClientError, match="arrived damaged"):
                client.download(stored.job, listed(stored), tmp_path)
            with pytest.raises(httpx.RemoteProtocolError):
                ours.get(stored.path, params={"direct": "false"})
            stored.replace(CONTENT[:-1])
            problem(ours.get(stored.path, params={"direct": "false"}), 500)
            with pytest.raises(ClientError, match="arrived damaged"):
                client.download(stored.job, listed(stored), tmp_path)
        finally:
            stored.replace(CONTENT)
        assert list(tmp_path.rglob("*.*")) == []
        client.download(stored.job, listed(stored), tmp_path)


def test_an_api_over_a_bucket_needs_no_folder(ours: httpx.Client) -> None:
    assert ready(ours)["checks"] == {"database": "ok", "disk": "ok"}


def test_an_api_over_a_bucket_tells_of_no_disk(stored: Stored) -> None:
    """Its alert for a disk that nobody tells of would never be silent."""
    with stored.server.client(METRICS_TOKEN) as scraper:
        answer = scraper.get("/metrics")
    assert answer.status_code == 200
    assert "kronoscope_database_up" in answer.text
    assert "kronoscope_disk" not in answer.text


def test_a_client_goes_nowhere_but_to_an_address(stored: Stored, tmp_path: Path) -> None:
    """A service may send it to a file of the machine, or to nowhere."""

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(307)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with (
            Client(f"http://127.0.0.1:{server.server_port}") as client,
            pytest.raises(ClientError, match="not an address"),
        ):
            client.download(stored.job, listed(stored), tmp_path)
    finally:
        server.shutdown()
        server.server_close()
