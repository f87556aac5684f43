"""What RFC 9110 asks of every server: HEAD, Allow, conditional requests, and ranges of what is really there."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from jobs.records import LOCAL_TENANT
from tests.api import seeding
from tests.api.conftest import Embedded
from tests.api.expect import problem


@pytest.fixture
def client(embedded: Embedded) -> Iterator[httpx.Client]:
    with embedded.server.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def job_id(embedded: Embedded) -> str:
    return seeding.finished(embedded.engine, embedded.artifacts, LOCAL_TENANT)


@pytest.fixture
def file(client: httpx.Client, job_id: str) -> dict[str, object]:
    """The largest file of the job."""
    files = client.get(f"/v1/jobs/{job_id}/artifacts").json()["items"]
    return dict(max(files, key=lambda each: each["size_bytes"]))


def stored_at(embedded: Embedded, file: dict[str, object]) -> Path:
    return next(embedded.artifacts.rglob(str(file["sha256"])))


@pytest.mark.parametrize(
    "path", ["/", "/livez", "/readyz", "/v1/jobs", "/v1/jobs/{}", "/v1/jobs/{}/log", "/v1/jobs/{}/layers.csv", "{}"]
)
def test_head_is_get_without_a_body(client: httpx.Client, job_id: str, file: dict[str, str], path: str) -> None:
    address = file["href"] if path == "{}" else path.format(job_id)
    whole, head = client.get(address), client.head(address)
    assert head.status_code == whole.status_code == 200
    assert head.content == b""
    for name in ("content-type", "content-length", "etag", "digest"):
        assert head.headers.get(name) == whole.headers.get(name), name


def test_head_of_a_stream_ends_at_once(client: httpx.Client, embedded: Embedded) -> None:
    running = seeding.running(embedded.engine, LOCAL_TENANT).job_id
    head = client.head(f"/v1/jobs/{running}/events", timeout=20)
    assert head.status_code == 200
    assert head.headers["content-type"].startswith("text/event-stream")


def test_head_of_what_is_not_there_is_refused_as_get_is(client: httpx.Client) -> None:
    assert client.head("/v1/jobs/x").status_code == 404
    assert client.head("/v1/nothing").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/jobs", {"GET", "HEAD", "POST"}),
        ("PUT", "/v1/jobs/{}", {"DELETE", "GET", "HEAD", "PATCH"}),
        ("GET", "/v1/jobs/{}/schedule", {"PUT"}),
        ("HEAD", "/v1/jobs/{}/schedule", {"PUT"}),
        ("DELETE", "/livez", {"GET", "HEAD"}),
        ("OPTIONS", "/v1/devices", {"GET", "HEAD"}),
        # no method of the job itself, though its id might match all of it
        ("OPTIONS", "/v1/jobs/{}:cancel", {"POST"}),
    ],
)
def test_allow_names_every_method_of_an_address(
    client: httpx.Client, job_id: str, method: str, path: str, allowed: set[str]
) -> None:
    answer = client.request(method, path.format(job_id))
    assert answer.status_code == 405
    # one header, each method once
    assert answer.headers.get_list("allow") == [", ".join(sorted(allowed))]


def test_a_weak_tag_is_a_tag(client: httpx.Client, job_id: str, file: dict[str, str]) -> None:
    for address in (file["href"], f"/v1/jobs/{job_id}", "/dashboard/scripts/app.js"):
        etag = client.get(address).headers["etag"]
        for header in (etag, f"W/{etag}", f'"other", W/{etag}', "*"):
            assert client.get(address, headers={"if-none-match": header}).status_code == 304, (address, header)
        assert client.get(address, headers={"if-none-match": 'W/"other"'}).status_code == 200
    # a part is only sent for a strong one: bytes of two versions must never meet
    part = {"range": "bytes=0-1", "if-range": f"W/{client.get(file['href']).headers['etag']}"}
    assert client.get(file["href"], headers=part).status_code == 200


def test_parts_of_a_sound_file(client: httpx.Client, file: dict[str, str]) -> None:
    whole = client.get(file["href"]).content
    for span, part in [("0-", whole), ("1-", whole[1:]), ("0-3", whole[:4]), ("-2", whole[-2:]), ("2-2", whole[2:3])]:
        answer = client.get(file["href"], headers={"range": f"bytes={span}"})
        assert (answer.status_code, answer.content) == (206, part)


@pytest.mark.parametrize("span", ["0-", "0-3", "1-", "-2"])
def test_no_part_of_a_damaged_file_is_sent(
    client: httpx.Client, embedded: Embedded, file: dict[str, str], span: str
) -> None:
    path = stored_at(embedded, file)
    sound = path.read_bytes()
    # it was verified a moment ago, and is read again since it has changed
    assert client.get(file["href"], headers={"range": "bytes=0-3"}).content == sound[:4]
    path.chmod(0o600)
    path.write_bytes(bytes([sound[0] ^ 1]) + sound[1:])
    try:
        answer = client.get(file["href"], headers={"range": f"bytes={span}"})
        assert problem(answer, 500)["type"] == "urn:kronoscope:problem:artifact-damaged"
    finally:
        path.write_bytes(sound)


def test_a_change_of_another_version_is_refused(client: httpx.Client, embedded: Embedded) -> None:
    address = f"/v1/jobs/{seeding.finished(embedded.engine, embedded.artifacts, LOCAL_TENANT)}"
    etag = client.get(address).headers["etag"]
    # a weak tag is none of a strong comparison
    for header in (
        '"wrong"', f"W/{etag}", f"w/{etag}", etag.strip('"'), f'"other", W/{etag}', "", f"{etag[:-1]}", f"x{etag}",
    ):  # fmt: skip
        refused = client.patch(address, json={"note": "mine"}, headers={"if-match": header})
        body = problem(refused, 412)
        assert body["type"] == "urn:kronoscope:problem:precondition-failed"
        assert "`If-Match` names no current version of the job; read the job again" in str(body["detail"])
        assert body["errors"][0]["parameter"] == "If-Match"  # type: ignore[index]
        assert refused.headers["etag"] == etag
    assert client.get(address).json()["note"] is None
    for number, several in enumerate((False, False, True, True)):
        current = client.get(address).headers["etag"]
        value = ("*", current, f'"other" , {current}', current)[number]
        headers = [("if-match", value), *([("if-match", '"more"')] if several else [])]
        changed = client.patch(address, json={"note": f"note {number}"}, headers=headers)
        assert changed.status_code == 200, (headers, changed.text)
        assert changed.headers["etag"] != current
    # of changes that name one version, one is made
    current = {"if-match": client.get(address).headers["etag"]}
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda n: client.patch(address, json={"note": str(n)}, headers=current), range(16))
        assert sorted(answer.status_code for answer in answers) == [200, *[412] * 15]
    changed = client.patch(address, json={"note": "again"})
    # the tag of an answer is that of the next change
    headers = {"if-match": changed.headers["etag"]}
    assert client.patch(address, json={"note": ""}, headers=headers).status_code == 200
    assert client.patch(address, json={"note": "late"}, headers=headers).status_code == 412
    assert client.patch("/v1/jobs/x", json={"note": "a"}, headers={"if-match": "*"}).status_code == 404
