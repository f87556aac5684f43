"""Folders of foreground runs in a service: jobs that are marked as imported, of which nothing is believed unchecked."""

import contextlib
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from catalog.record import plain
from kronoscope.client import Client, ClientError
from tests.kronoscope.cli.test_input_notices import Run
from tests.kronoscope.cli.test_serve import home as home  # noqa: PLC0414 - a fixture
from tests.kronoscope.cli.test_serve import url as url  # noqa: PLC0414 - a fixture

Change = Callable[[Path], None]
BUILTIN = """\
kind: [factors, capacity]
model: {source: builtin, name: digits_mlp}
data: {source: builtin, name: digits, limit: 64}
task: {type: classification}
collection: {batch_size: 32}
"""


@pytest.fixture
def ran(folder: Path, kronoscope: Run) -> Path:
    """The folder of a run that has kept its factors, of a model and data whose factors a service caches."""
    (folder / "builtin.yaml").write_text(BUILTIN)
    done = kronoscope("run", "builtin.yaml", "--output", "out", "--set", "keep=[factors]")
    assert done.returncode == 0, done.stderr
    return folder / "out"


def test_a_run_becomes_a_job_that_says_wherever_it_is_shown_that_it_was_imported(
    ran: Path, kronoscope: Run, url: str, home: Path
) -> None:
    done = kronoscope("import", "out", "--url", url)
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    written = json.loads((ran / "results.json").read_text())
    said = json.loads((ran / "job.json").read_text())
    with Client(url) as client:
        job, results = client.job(job_id), client.results(job_id)
        assert (job.state, job.imported, job.attempt, job.started_at) == ("succeeded", True, 0, None)
        # the service's own time, not that of the run
        assert job.finished_at is not None
        assert job.finished_at > said["finished_at"].replace("+00:00", "Z")
        rows = [plain(row) for row in client.layers(job_id)]
        assert sorted(rows, key=place) == sorted(written["layers"], key=place)
        assert (results.manifest or {})["model_sha256"] == said["model_sha256"]
        own = {
            f"run/{name}": hashlib.sha256((ran / name).read_bytes()).hexdigest()
            for name in ("job.json", "results.json")
        }
        assert {each.name: each.sha256 for each in results.artifacts} == own | {
            each["name"]: each["sha256"] for each in said["artifacts"]
        }
        assert results.job.notices[0].startswith("imported: ")
        listed = next(each for each in client.jobs() if each.id == job_id)
        assert listed.imported
        assert client.log(job_id).count("\n") == len(rows)
    raw = httpx.get(f"{url}/v1/jobs/{job_id}/artifacts/factors/factors.index.json", trust_env=False)
    assert raw.headers["content-disposition"].startswith("attachment;")
    assert "imported" in kronoscope("jobs", "--url", url).stdout
    assert "imported: a foreground run" in " ".join(kronoscope("results", job_id, "--url", url).stderr.split())
    again = kronoscope("import", "out", "--url", url)
    assert (again.returncode, again.stdout.strip()) == (0, job_id), again.stderr
    # neither an analysis of its factors nor a collection by the same document has any of them from, or in, the cache
    with Client(url) as client:
        asked = {"kind": "capacity", "factors": {"job": job_id}, "stabilisation": {"damping": 1e-4}}
        collecting = json.loads(kronoscope("submit", "builtin.yaml", "--wait", "--json", "--url", url).stdout)["id"]
        *_, ended = client.follow(client.submit(asked).id)
        assert ended.state == "succeeded", ended.failure
        assert not [each for each in client.events(collecting) if "from the cache" in str(each.data)]
    (ledger,) = (home / "data").glob("*.db")
    with contextlib.closing(sqlite3.connect(ledger)) as connection:
        entries = {each for (each,) in connection.execute("SELECT job_id FROM cached_factors")}
        digests = {each for (each,) in connection.execute("SELECT job_id FROM model_digests")}
    assert entries == {collecting}
    assert job_id not in digests
    with Client(url) as client:
        client.delete(job_id)
        with pytest.raises(ClientError, match="no such job"):
            client.job(job_id)


def place(row: dict[str, Any]) -> tuple[str, int]:
    return row["kind"], row["ordinal"]


def rewritten(name: str, change: Callable[[dict[str, Any]], None]) -> Change:
    def act(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return act


def metric_changed(value: dict[str, Any]) -> None:
    row = next(each for each in value["layers"] if each["kind"] == "capacity")
    name = next(name for name, each in row["metrics"].items() if isinstance(each, float))
    row["metrics"][name] *= 2


def sealed(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Change the first row, and write the digest that fits it."""

    def act(value: dict[str, Any]) -> None:
        row = value["layers"][0]
        change(row)
        outcome = {name: each for name, each in row.items() if name not in ("observed", "sha256")}
        text = json.dumps(outcome, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        row["sha256"] = hashlib.sha256(text.encode()).hexdigest()

    return act


def file_changed(folder: Path) -> None:
    path = folder / "artifacts" / "factors" / "0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


CASES: list[tuple[str, Change, str]] = [
    ("row", rewritten("results.json", metric_changed), r"layers/\d+, capacity of .*not the one that its SHA-256 is of"),
    ("file", file_changed, "artifacts/factors/0.safetensors is another file"),
    ("more", lambda f: (f / "artifacts" / "more.json").write_text("{}") and None, "artifacts/more.json is not listed"),
    ("less", lambda f: (f / "artifacts" / "factors" / "0.safetensors").unlink(), "factors/0.safetensors was not sent"),
    ("state", rewritten("job.json", lambda v: v.update(state="failed")), "job.json: /(state|format)"),
    ("layers", rewritten("results.json", lambda v: v.update(layers=5)), "results.json: /layers must be a list"),
    ("entries", rewritten("results.json", lambda v: v.update(layers=[5])), "results.json: /layers/0 must be an object"),
    (
        "summaries",
        rewritten("results.json", lambda v: v.update(summary=[1])),
        "results.json: /summary must be an object",
    ),
    ("files", rewritten("job.json", lambda v: v.update(artifacts=[{"name": "a"}])), "job.json: /artifacts/0/sha256"),
    ("empty", rewritten("job.json", lambda v: v.pop("document")), "job.json: document: "),
    (
        "shards",
        rewritten("job.json", lambda v: v["document"].update(shards=2)),
        "document: /shards makes it one job of",
    ),
    (
        "reproduces",
        rewritten("job.json", lambda v: v["document"].update(reproduces="x")),
        "document: /reproduces makes",
    ),
    ("ordinal", rewritten("results.json", sealed(lambda r: r.update(ordinal=2**40))), "no place of a layer"),
    ("format", rewritten("job.json", lambda v: v.update(format="other/1")), "job.json: /(state|format)"),
    ("kind", rewritten("job.json", lambda v: v["document"].update(kind="none")), "job.json: document: /kind"),
    (
        "summary",
        rewritten("results.json", lambda v: v["summary"].update(spectrum={})),
        "summary/spectrum is of an analysis that",
    ),
    ("figure", rewritten("results.json", lambda v: v["summary"]["capacity"].update(extra=1)), "summary/capacity/extra"),
    ("twice", rewritten("results.json", lambda v: v["layers"].append(v["layers"][0])), "or it stands twice"),
    (
        "words",
        rewritten("results.json", sealed(lambda r: r.update(ordinal="0"))),
        "layers/0/ordinal must be an integer",
    ),
    ("unknown", rewritten("results.json", sealed(lambda r: r.update(more=1))), "layers/0/more"),
    ("metric", rewritten("results.json", sealed(lambda r: r["metrics"].update(more=1))), "metrics/more"),
    ("nul", rewritten("results.json", sealed(lambda r: r.update(layer="a\0b"))), "NUL"),
    ("nan", lambda f: (f / "results.json").write_text('{"layers": [NaN]}') and None, "results.json: /layers/0"),
    ("deep", lambda f: (f / "results.json").write_text('{"a":' * 40 + "1" + "}" * 40) and None, "nested deeper"),
    (
        "large",
        lambda f: (f / "job.json").write_text(" " * 2**20 + (f / "job.json").read_text()) and None,
        "at most 1,048,576",
    ),
    ("sum", rewritten("job.json", lambda v: v.update(model_sha256=5)), "job.json: /model_sha256"),
    ("place", rewritten("job.json", lambda v: v.update(environment={"python": [1]})), "job.json: /environment"),
]


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize(("change", "said"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_folder_that_was_changed_is_refused_with_the_place_and_leaves_no_job(
    stored: Path, url: str, change: Change, said: str
) -> None:
    change(stored)
    with Client(url) as client:
        before = [each.id for each in client.jobs()]
        with pytest.raises(ClientError, match=said):
            client.import_run(stored)
        assert [each.id for each in client.jobs()] == before


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("original") / "out"


@pytest.fixture
def stored(original: Path, folder: Path, kronoscope: Run) -> Path:
    """A copy of one run's folder, to be changed."""
    if not original.exists():
        done = kronoscope("run", "job.yaml", "--output", str(original), "--set", "keep=[factors]")
        assert done.returncode == 0, done.stderr
    shutil.copytree(original, folder / "copy")
    return folder / "copy"


@pytest.mark.parametrize("name", ["artifacts/code.py", "artifacts/page.html", "artifacts/../job.json", "artifacts/a.pt",
                                  "log.txt", "artifacts/.hidden.json", "artifacts/a//b.json", "/job.json"])  # fmt: skip
def test_files_of_other_types_and_places_are_no_part_of_an_import(url: str, name: str) -> None:
    file = {"name": name, "size_bytes": 1, "sha256": "0" * 64}
    refused = httpx.post(f"{url}/v1/uploads", json={"kind": "run", "files": [file]}, trust_env=False)
    assert refused.status_code == 422
    assert "which is not read" in refused.text


def test_a_model_is_imported_as_no_run(url: str, folder: Path) -> None:
    (folder / "data.csv").write_text("text\na\n")
    with Client(url) as client:
        made = client.upload(folder / "data.csv")
        refused = httpx.post(f"{url}/v1/uploads/{made.id}:import", trust_env=False)
        assert (refused.status_code, "run's folder" in refused.text) == (409, True)
