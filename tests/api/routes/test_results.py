"""Results over HTTP: summary, layers in three formats and any order, log, files whole and in part."""

import base64
import csv
import hashlib
import io
import json
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from catalog.frames import layer_frame
from catalog.responses.views import ArtifactView
from jobs.queue import attempt_endings, attempt_writes
from jobs.schema.database import reading
from jobs.schema.tables import artifacts
from jobs.tenancy.api_keys import verify_key
from kronoscope.client import Client, ClientError
from tests.api import seeding
from tests.api.conftest import Keyed
from tests.api.expect import problem
from tests.api.server import KEY_SECRET

EVIL = '=cmd|"/C calc"!A0'


@pytest.fixture(scope="module")
def job(keyed: Keyed) -> str:
    caller = verify_key(keyed.engine, KEY_SECRET, keyed.key)
    assert caller is not None
    return seeding.finished(keyed.engine, keyed.artifacts, caller.tenant_id)


@pytest.fixture(scope="module")
def evil_job(keyed: Keyed) -> str:
    """A job with layers that are called like formulas, markup and lines."""
    caller = verify_key(keyed.engine, KEY_SECRET, keyed.key)
    assert caller is not None
    claim = seeding.claimed(keyed.engine, caller.tenant_id)
    for ordinal, name in enumerate((EVIL, "+1", "-1", "@x", "\tx", "<script>", "two\nlines\u2028three", "a/b.c")):
        attempt_writes.write_layer(keyed.engine, claim, layer_frame(seeding.declared("capacity", ordinal, name)))
    attempt_endings.finish(keyed.engine, claim)
    return claim.job_id


def test_results(ours: httpx.Client, job: str) -> None:
    answer = ours.get(f"/v1/jobs/{job}/results")
    body = answer.json()
    assert set(body) == {"job", "summary", "manifest", "layers", "artifacts"}
    assert body["summary"]["capacity"]["coverage"]["declared_parameters"] == 1
    assert body["manifest"]["environment"]["torch"] == "2.13.0"
    assert body["layers"] == {"count": 16, "href": f"/v1/jobs/{job}/layers"}
    kept = {"memory_curve.json", *(f"spectra/{n}.json" for n in range(7))}
    assert {each["name"] for each in body["artifacts"]} == kept
    assert body["job"]["state"] == "succeeded"


def test_layers_in_pages(ours: httpx.Client, job: str) -> None:
    rows = []
    address = f"/v1/jobs/{job}/layers?limit=3"
    while address:
        answer = ours.get(address)
        rows += answer.json()["items"]
        address = answer.links.get("next", {}).get("url", "")
    assert [(row["kind"], row["ordinal"]) for row in rows] == [
        (k, n) for k in ("capacity", "factors") for n in range(8)
    ]
    declared = [row for row in rows if row["status"] == "declared"]
    assert {row["reason"] for row in declared} == {"no_gradient"}
    assert all(row["metrics"] is None for row in declared)
    assert rows[0]["record"]["lambda_A"] > 0
    assert rows[0]["observed"]["seconds"] > 0


@pytest.mark.parametrize("sort", ["trace", "-trace", "-effective_dimension", "kappa"])
def test_layers_sorted_by_a_metric(ours: httpx.Client, job: str, sort: str) -> None:
    values = []
    address = f"/v1/jobs/{job}/layers?kind=capacity&limit=3&sort={sort}"
    while address:
        answer = ours.get(address)
        values += [(row["metrics"] or {}).get(sort.lstrip("-")) for row in answer.json()["items"]]
        address = answer.links.get("next", {}).get("url", "")
    numbers = [value for value in values if value is not None]
    assert len(values) == 8
    assert values == [*sorted(numbers, reverse=sort.startswith("-")), *[None] * (8 - len(numbers))]


def test_layers_refuse_what_they_do_not_know(ours: httpx.Client, job: str) -> None:
    for query in ("sort=canary", "sort=layer;drop", "kind=canary", "limit=101", "after=canary"):
        answer = ours.get(f"/v1/jobs/{job}/layers?{query}")
        problem(answer, 422)
        assert "canary" not in answer.text
    problem(ours.get(f"/v1/jobs/{job}/layers.csv?sort=canary"), 422)


@pytest.mark.parametrize("address", ["layers", "layers/head.0", "layers.csv", "layers.jsonl"])
def test_a_sort_key_that_is_not_a_metric_is_refused_at_every_address(
    ours: httpx.Client, job: str, address: str
) -> None:
    for sort in ("canary", "-", "-canary", "--trace", ""):
        (fault,) = problem(ours.get(f"/v1/jobs/{job}/{address}", params={"sort": sort}), 422)["errors"]  # type: ignore[misc,attr-defined]
        assert fault["parameter"] == "sort"
        assert "is not a metric; take one of " in fault["message"]
    assert ours.get(f"/v1/jobs/{job}/{address}", params={"sort": "-trace"}).status_code == 200


def test_a_cursor_is_of_one_kind(ours: httpx.Client, job: str) -> None:
    kinds = (None, "capacity", "factors")
    pages = {kind: {"limit": "3", **({} if kind is None else {"kind": kind})} for kind in kinds}
    for kind, asked in pages.items():
        following = ours.get(f"/v1/jobs/{job}/layers", params=asked).json()["next"]
        for other, again in pages.items():
            answer = ours.get(f"/v1/jobs/{job}/layers", params={**again, "after": following})
            if other == kind:
                assert [row["ordinal"] for row in answer.json()["items"]] == [3, 4, 5]
                continue
            (fault,) = problem(answer, 422)["errors"]  # type: ignore[misc,attr-defined]
            assert fault["parameter"] == "after"
            assert "is not a cursor of this `kind`; take `next` of the page before" in fault["message"]


@pytest.mark.parametrize(
    ("accept", "served"),
    [
        ("text/csv;q=0, application/json", "application/json"),
        ("text/csv;q=0.2, application/jsonl;q=0.4", "application/jsonl"),
        ("application/json;q=0.1, text/csv", "text/csv; charset=utf-8"),
    ],
)
def test_the_format_is_the_one_of_the_largest_weight(ours: httpx.Client, job: str, accept: str, served: str) -> None:
    answer = ours.get(f"/v1/jobs/{job}/layers", headers={"accept": accept})
    assert answer.headers["content-type"] == served


def test_one_layer(ours: httpx.Client, job: str, evil_job: str) -> None:
    rows = ours.get(f"/v1/jobs/{job}/layers/features.3").json()["items"]
    assert [row["kind"] for row in rows] == ["capacity", "factors"]
    assert ours.get(f"/v1/jobs/{job}/layers/features.3?kind=factors").json()["items"] == rows[1:]
    assert ours.get(f"/v1/jobs/{evil_job}/layers/a/b.c").json()["items"][0]["layer"] == "a/b.c"
    problem(ours.get(f"/v1/jobs/{job}/layers/nothing"), 404)


def test_csv_holds_every_row_and_no_formula(ours: httpx.Client, job: str, evil_job: str) -> None:
    answer = ours.get(f"/v1/jobs/{job}/layers", params={"kind": "capacity"}, headers={"accept": "text/csv"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"].startswith("attachment")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["layer"] for row in rows] == [*(layer[0] for layer in seeding.LAYERS), seeding.DECLARED[0]]
    assert float(rows[0]["logdet_damped"]) < 0
    evil = ours.get(f"/v1/jobs/{evil_job}/layers.csv").text
    cells = [cell for line in csv.reader(io.StringIO(evil)) for cell in line]
    assert f"'{EVIL}" in cells
    for cell in cells:
        assert cell[:1] not in {"=", "+", "@", "\t", "\r"}
        assert cell[:1] != "-" or (cell[1:2].isdigit() and cell != "-1")


def test_json_lines(ours: httpx.Client, job: str, evil_job: str) -> None:
    answer = ours.get(f"/v1/jobs/{job}/layers", headers={"accept": "application/jsonl"})
    assert len([json.loads(line) for line in answer.text.splitlines()]) == 16
    log = ours.get(f"/v1/jobs/{job}/log")
    assert log.headers["content-type"] == "application/jsonl"
    first = json.loads(log.text.splitlines()[0])
    assert (first["kind"], first["layer"], first["status"]) == ("capacity", "features.0", "covered")
    assert first["lambda_G"] > 0
    assert first["digest_A"]
    assert first["seconds"] > 0
    # one object a line whatever a name contains
    evil = ours.get(f"/v1/jobs/{evil_job}/log").text
    assert len(evil.splitlines()) == 8
    assert json.loads(evil.splitlines()[6])["layer"] == "two\nlines\u2028three"


@pytest.fixture
def spectrum(keyed: Keyed, job: str) -> bytes:
    return stored(keyed, job, "spectra/3.json").read_bytes()


def stored(keyed: Keyed, job_id: str, name: str) -> Path:
    """Where the file's bytes stand."""
    with reading(keyed.engine) as connection:
        uri = connection.execute(select(artifacts.c.uri).filter_by(job_id=job_id, name=name)).scalar_one()
    return keyed.artifacts / uri


def test_a_file_whole(ours: httpx.Client, job: str, spectrum: bytes) -> None:
    answer = ours.get(f"/v1/jobs/{job}/artifacts/spectra/3.json")
    digest = hashlib.sha256(spectrum)
    assert answer.content == spectrum
    assert answer.headers["etag"] == f'"{digest.hexdigest()}"'
    assert answer.headers["digest"] == f"sha-256={base64.b64encode(digest.digest()).decode()}"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == str(len(spectrum))
    kept = ours.get(f"/v1/jobs/{job}/artifacts/spectra/3.json", headers={"if-none-match": answer.headers["etag"]})
    assert kept.status_code == 304
    (entry,) = [e for e in ours.get(f"/v1/jobs/{job}/artifacts").json()["items"] if e["name"] == "spectra/3.json"]
    assert (entry["sha256"], entry["size_bytes"]) == (digest.hexdigest(), len(spectrum))
    assert ours.get(entry["href"]).content == spectrum


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [("bytes=0-9", 0, 9), ("bytes=5-", 5, None), ("bytes=-7", -7, None), ("bytes=0-99999999", 0, None)],
)
def test_a_part_of_a_file(
    ours: httpx.Client, job: str, spectrum: bytes, asked: str, first: int, last: int | None
) -> None:
    answer = ours.get(f"/v1/jobs/{job}/artifacts/spectra/3.json", headers={"range": asked})
    assert answer.status_code == 206
    expected = spectrum[first : None if last is None else last + 1]
    assert answer.content == expected
    start = first % len(spectrum)
    assert answer.headers["content-range"] == f"bytes {start}-{start + len(expected) - 1}/{len(spectrum)}"


def test_ranges_that_are_ignored_or_refused(ours: httpx.Client, job: str, spectrum: bytes) -> None:
    address = f"/v1/jobs/{job}/artifacts/spectra/3.json"
    for asked in ("bytes=0-1,3-4", "lines=0-1", "bytes=9-3", "bytes=", "x"):
        answer = ours.get(address, headers={"range": asked})
        assert (answer.status_code, answer.content) == (200, spectrum)
    beyond = ours.get(address, headers={"range": f"bytes={len(spectrum)}-"})
    problem(beyond, 416)
    assert beyond.headers["content-range"] == f"bytes */{len(spectrum)}"
    problem(ours.get(address, headers={"range": "bytes=-0"}), 416)
    other = ours.get(address, headers={"range": "bytes=0-1", "if-range": '"another"'})
    assert (other.status_code, other.content) == (200, spectrum)


def test_names_that_lead_elsewhere(ours: httpx.Client, job: str) -> None:
    for name in ("../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "spectra", "spectra/99.json", "%ff"):
        problem(ours.get(f"/v1/jobs/{job}/artifacts/{name}"), 404)


def test_a_flipped_byte_is_not_served(keyed: Keyed, ours: httpx.Client) -> None:
    caller = verify_key(keyed.engine, KEY_SECRET, keyed.key)
    assert caller is not None
    job = seeding.finished(keyed.engine, keyed.artifacts, caller.tenant_id)
    address = f"/v1/jobs/{job}/artifacts/spectra/0.json"
    path = stored(keyed, job, "spectra/0.json")
    whole = path.read_bytes()
    content = bytearray(whole)
    content[5] ^= 1
    path.write_bytes(content)
    problem(ours.get(address), 500)
    path.write_bytes(content[:-1])
    problem(ours.get(address), 500)
    path.unlink()
    problem(ours.get(address), 500)
    # other jobs of the tenant list the same bytes
    path.write_bytes(whole)
    assert ours.get("/livez").status_code == 200


def test_a_flipped_byte_of_a_long_file_ends_the_connection_early(
    keyed: Keyed, ours: httpx.Client, tmp_path: Path
) -> None:
    caller = verify_key(keyed.engine, KEY_SECRET, keyed.key)
    assert caller is not None
    claim = seeding.claimed(keyed.engine, caller.tenant_id)
    name, content = "factors/0.safetensors", bytes(300 * 1024)  # more than is read before an answer begins
    seeding.artifact(keyed.engine, keyed.artifacts, claim, name, content, "application/octet-stream")
    attempt_endings.finish(keyed.engine, claim)
    stored(keyed, claim.job_id, name).write_bytes(b"\1" + content[1:])
    with pytest.raises(httpx.RemoteProtocolError):
        ours.get(f"/v1/jobs/{claim.job_id}/artifacts/{name}")
    listed = ArtifactView(
        name=name, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content), media_type="x/y", href=""
    )
    with Client(str(ours.base_url), keyed.key) as client, pytest.raises(ClientError, match="broke off; try again"):
        client.download(claim.job_id, listed, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
