"""Cached factors: what a job leaves serves its tenant alone, and nobody changes what another job finds."""

import itertools
import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from sqlalchemy import Engine, insert, select

from jobs.codec import parse_document
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT, Job
from jobs.repository.results import events_after, layer_rows
from jobs.repository.store import read_job
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import cached_factors, tenants
from tests.machine.template.client import forked
from worker.disk.cache_folder import cache_of_tenant, tenants_caches
from worker.process.child_process import EXECUTION
from worker.service import with_possible_namespaces
from worker.supervision import frame_writer
from worker.supervision.supervisor import Supervisor

KEY = "a" * 64
FILES = {"factors/0.safetensors": "factors", "factors/factors.index.json": "{}"}
DOCUMENT = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits", "limit": 60},
    "task": {"type": "classification"},
    "collection": {"batch_size": 20},
}
FACTORY = {"source": "factory", "factory": "a:b"}
OTHER = "other"
Attempt = Callable[..., Job]


@pytest.fixture
def attempt(ledger: Engine, settings: Any, scripted: Any) -> Attempt:
    """``attempt(["ask_cache", key], tenant=…)``: the job after one attempt of a child that does just that."""

    def run(
        *steps: Any,
        tenant: str = LOCAL_TENANT,
        command: Any = None,
        store: Any = None,
        apart: bool = False,
        **document: Any,
    ) -> Job:
        body = json.dumps(DOCUMENT | document).encode()
        job_id = submit(ledger, tenant, parse_document(body)).job.id
        chosen = settings(child_namespaces=apart, **({} if store is None else {"model_store": store}))
        if apart:
            chosen = with_possible_namespaces(chosen)
        held = claim(ledger, job_id, "test", secrets.token_hex(8), chosen.ledger.lease_seconds)
        assert held is not None
        Supervisor(ledger, held, chosen, command or scripted(["started"], *steps, ["finish"])).run()
        found = read_job(ledger, tenant, job_id)
        assert found is not None
        return found

    return run


@pytest.fixture
def other(ledger: Engine) -> str:
    with writing(ledger) as connection:
        connection.execute(insert(tenants).values(id=OTHER, name=OTHER, created_at=ledger_now()))
    return OTHER


def said(ledger: Engine, job: Job, tenant: str = LOCAL_TENANT) -> list[str]:
    return [each.data["message"] for each in events_after(ledger, tenant, job.id, 0) if each.type == "log"]


def answered(ledger: Engine, job: Job, tenant: str = LOCAL_TENANT) -> Any:
    """The last answer that it has got."""
    return json.loads(said(ledger, job, tenant)[-1])


def entries(ledger: Engine) -> list[tuple[str, str]]:
    with reading(ledger) as connection:
        return [(row.tenant_id, row.job_id) for row in connection.execute(select(cached_factors))]


def stored(tmp_path: Path) -> list[Path]:
    """The files of all entries."""
    root = tenants_caches(tmp_path / "artifacts")
    return [each for each in root.rglob("*") if each.is_file() and not each.name.startswith(".")]


def test_what_a_job_leaves_its_tenants_jobs_find_and_nobody_elses(
    attempt: Attempt, ledger: Engine, tmp_path: Path, other: str
) -> None:
    left = attempt(["fill_cache", KEY, FILES])
    assert left.state == "succeeded"
    assert entries(ledger) == [(LOCAL_TENANT, left.id)]
    assert answered(ledger, attempt(["ask_cache", KEY])) == {"job": left.id, "files": FILES}
    foreign = attempt(["ask_cache", KEY], tenant=other)
    assert answered(ledger, foreign, other) == {"job": None, "files": {}}
    # under the same key, each has its own
    attempt(["fill_cache", KEY, {"evil": "scaled"}], tenant=other)
    assert answered(ledger, attempt(["ask_cache", KEY])) == {"job": left.id, "files": FILES}
    # nothing of it stays in the jobs' own folders
    assert [each for each in (tmp_path / "artifacts").iterdir() if not each.name.startswith(".")] == []


def test_whoever_left_an_entry_cannot_change_it(attempt: Attempt, ledger: Engine, tmp_path: Path) -> None:
    left = attempt(["fill_cache", KEY, FILES], ["ask_cache", KEY], ["scale_seconds"])
    assert answered(ledger, left)["files"] == FILES
    assert answered(ledger, attempt(["ask_cache", KEY]))["files"] == FILES
    for each in stored(tmp_path):
        assert (each.stat().st_nlink, each.stat().st_mode & 0o777) == (1, 0o444)


def test_a_link_in_the_place_of_a_file_is_not_followed(attempt: Attempt, ledger: Engine, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("what the service alone may read")
    evil = attempt(["fill_cache", KEY, FILES, str(secret)])
    assert evil.state == "succeeded"
    assert "reached through a link" in said(ledger, evil)[-1]
    assert entries(ledger) == []
    assert stored(tmp_path) == []


def test_files_that_were_announced_otherwise_are_no_entry(attempt: Attempt, ledger: Engine, tmp_path: Path) -> None:
    line = tmp_path / "frame"
    files = [{"name": "f", "sha256": "0" * 64, "size_bytes": 5}]
    line.write_text(json.dumps({"frame": "cache_filled", "key": KEY, "files": files}) + "\n")
    evil = attempt(["raw_file", str(line)], ["artifact", ".filled/f", "12345"], ["raw_file", str(line)])
    assert "factors are not cached" in said(ledger, evil)[0]
    assert entries(ledger) == []


@pytest.mark.part(of=16)
@pytest.mark.parametrize("dialect", ["postgresql"])
@pytest.mark.parametrize("step", [["ask_cache", KEY], ["fill_cache", KEY, FILES]])
@pytest.mark.parametrize(
    "document",
    [{"model": FACTORY}, {"cache": "off"}, {"collection": {"batch_size": 20, "nested": True}}],
    ids=["factory", "off", "nested"],
)
def test_no_entry_is_taken_or_given_of_a_document_that_has_no_key(
    attempt: Attempt, ledger: Engine, step: Any, document: Any
) -> None:
    attempt(["fill_cache", KEY, FILES])
    evil = attempt(step, **document)
    assert evil.failure is not None
    assert (evil.failure["category"], evil.failure["code"]) == ("fatal", "broken_child")
    assert len(entries(ledger)) == 1


def test_a_flood_of_questions_ends_the_job(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_writer, "_MOST", {**frame_writer._MOST, frame_writer.CacheAsked: 3})
    evil = attempt(*itertools.repeat(["ask_cache", KEY], 5))
    assert evil.failure is not None
    assert evil.failure["code"] == "broken_child"


def test_a_row_without_its_folder_is_no_entry(attempt: Attempt, ledger: Engine, tmp_path: Path) -> None:
    attempt(["fill_cache", KEY, FILES])
    shutil.rmtree(cache_of_tenant(tmp_path / "artifacts", LOCAL_TENANT))
    assert answered(ledger, attempt(["ask_cache", KEY])) == {"job": None, "files": {}}
    assert entries(ledger) == []
    again = attempt(["fill_cache", KEY, FILES])
    assert answered(ledger, attempt(["ask_cache", KEY]))["job"] == again.id


def test_a_folder_without_a_row_is_no_entry(attempt: Attempt, ledger: Engine, tmp_path: Path) -> None:
    """As an earlier version has left it, or a job that came to write there."""
    folder = cache_of_tenant(tmp_path / "artifacts", LOCAL_TENANT) / KEY
    (folder / "factors").mkdir(parents=True)
    (folder / "factors" / "0.safetensors").write_text("evil")
    listed = {"format": "kronoscope-cached-factors/1", "key": KEY, "job": "evil", "files": {}}
    (folder / "entry.json").write_text(json.dumps(listed))
    assert answered(ledger, attempt(["ask_cache", KEY])) == {"job": None, "files": {}}


@pytest.mark.parametrize("dialect", ["postgresql"])
def test_factors_that_somebody_scaled_are_collected_again(
    attempt: Attempt, ledger: Engine, tmp_path: Path, store: Path
) -> None:
    """The attack that made another tenant's same job succeed with traces sixteen times too large."""

    def compute() -> tuple[list[str], list[str]]:
        with forked():
            done = attempt(command=EXECUTION, store=store)
        assert done.state == "succeeded", done.failure
        rows = layer_rows(ledger, LOCAL_TENANT, done.id).items
        return [row.sha256 for row in rows], said(ledger, done)

    first, _ = compute()
    reused, log = compute()
    assert any("nothing is collected" in line for line in log)
    scaled = 0
    for path in stored(tmp_path):
        if path.suffix == ".safetensors":
            tensors = safetensors.torch.load(path.read_bytes())
            path.chmod(0o644)
            path.write_bytes(safetensors.torch.save({name: 4 * each for name, each in tensors.items()}))
            scaled += 1
    assert scaled
    after, log = compute()
    assert any("cached factors are damaged, and collected again" in line for line in log)
    assert first == reused == after
    again, log = compute()
    assert again == first
    assert any("nothing is collected" in line for line in log)


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_a_job_in_namespaces_of_its_own_reads_what_was_found_for_it(
    attempt: Attempt, ledger: Engine, tmp_path: Path, store: Path
) -> None:
    """The folder of the answer is there when the namespaces are made, and has to be the same one afterwards."""
    rows = []
    for _ in range(2):
        done = attempt(command=EXECUTION, store=store, apart=True)
        assert done.state == "succeeded", done.failure
        rows.append([row.sha256 for row in layer_rows(ledger, LOCAL_TENANT, done.id).items])
    assert any("nothing is collected" in line for line in said(ledger, done))
    assert rows[0] == rows[1]
