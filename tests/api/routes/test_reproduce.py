"""Reproduction over HTTP: of one's own jobs alone, by the rules of a submission, and with the plan of the first."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from catalog.frames import Failed, Finished, Planned
from jobs.objects.artifacts import ArtifactFolder
from jobs.queue import attempt_endings, attempt_writes, claims
from jobs.records import Claim
from jobs.repository.store import delete_job, read_job
from jobs.repository.submission import _replayed
from jobs.schema.database import writing
from jobs.schema.tables import jobs
from jobs.tenancy.quotas import set_quota
from tests.api import seeding
from tests.api.conftest import Keyed
from tests.api.connections.test_audit_trail import lines
from tests.api.expect import problem
from tests.api.routes.test_archived_layers import archived
from tests.api.routes.test_jobs import tenant
from worker.supervision.job_reproduction import with_original

DIGESTS = {"model_sha256": "a" * 64, "data_sha256": "b" * 64}
PLAN = {"threads": 3, "parts": [["features.0"]], "micro_batch": 7, "host_peak_bytes": 5000}


def ended(keyed: Keyed, claim: Claim, **changes: Any) -> str:
    seeding.write_rows(keyed.engine, keyed.artifacts, claim)
    seeding.summarise(keyed.engine, claim)
    attempt_endings.finish(keyed.engine, claim, Finished(**{**DIGESTS, **changes}))
    return claim.job_id


@pytest.fixture
def job(keyed: Keyed) -> str:
    """A job that has succeeded, with a plan and the digests of its inputs."""
    claim = seeding.claimed(keyed.engine, tenant(keyed))
    attempt_writes.write_plan(keyed.engine, claim, Planned(plan=PLAN))
    return ended(keyed, claim)


def claim_of(keyed: Keyed, job_id: str) -> Claim:
    claim = claims.claim(keyed.engine, job_id, "test", "token", 600)
    assert claim is not None
    return claim


def compared(keyed: Keyed, claim: Claim, **changes: Any) -> Any:
    last = Finished(**{**DIGESTS, **changes})
    return with_original(keyed.engine, ArtifactFolder(keyed.artifacts), claim, last).reproduction


def test_the_new_job_has_the_document_and_the_plan_and_nothing_else(keyed: Keyed, ours: httpx.Client, job: str) -> None:
    before = ours.get(f"/v1/jobs/{job}").json()
    answer = ours.post(f"/v1/jobs/{job}:reproduce")
    assert answer.status_code == 202, answer.text
    made = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{made['id']}"
    assert made["document"] == {**before["document"], "reproduces": job}
    assert (made["plan"], made["links"]["reproduces"]) == (before["plan"], f"/v1/jobs/{job}")
    assert ours.post(f"/v1/jobs/{job}:reproduce").json()["id"] != made["id"]
    claim = claim_of(keyed, made["id"])
    assert (claim.plan, claim.manifest, claim.completed) == (PLAN, None, ())
    assert ours.get(f"/v1/jobs/{job}").json() == before


def test_the_trail_names_the_new_job_and_labels_are_those_of_now(keyed: Keyed, ours: httpx.Client, job: str) -> None:
    assert ours.patch(f"/v1/jobs/{job}", json={"labels": {"of": "now"}}).status_code == 200
    before = len(lines(keyed.server.log))
    made = ours.post(f"/v1/jobs/{job}:reproduce").json()
    assert (made["labels"], made["document"]["labels"]) == ({"of": "now"}, {"of": "now"})
    problem(ours.post(f"/v1/jobs/{made['id']}:reproduce"), 422)  # it has not succeeded
    (line,) = lines(keyed.server.log)[before:]
    assert (line["action"], line["outcome"], line["job"]) == ("reproduce", "done", made["id"])


def test_threads_are_followed_without_a_plan_only_over_stored_factors_that_were_computed_here(
    keyed: Keyed, ours: httpx.Client, job: str
) -> None:
    stored = read_job(keyed.engine, tenant(keyed), job)
    assert stored is not None
    for factors, imported, plan in ((True, False, {"threads": 5}), (True, True, None), (False, False, None)):
        first = ended(keyed, seeding.claimed(keyed.engine, tenant(keyed)))
        manifest = {**DIGESTS, "environment": {"threads": 5}, "imported": imported}
        document = {**stored.document, "factors": {"job": job} if factors else None}
        with writing(keyed.engine, tenant(keyed)) as connection:
            changed = update(jobs).where(jobs.c.id == first)
            connection.execute(changed.values(manifest=manifest, document=document))
            assert _replayed(connection, tenant(keyed), first)["plan"] == plan


def test_rows_are_held_against_the_ledger_or_the_archive(keyed: Keyed, ours: httpx.Client, job: str) -> None:
    made = ours.post(f"/v1/jobs/{job}:reproduce").json()["id"]
    claim = claim_of(keyed, made)
    seeding.write_rows(keyed.engine, keyed.artifacts, claim)
    seeding.summarise(keyed.engine, claim)
    for _ in range(2):
        found = compared(keyed, claim)
        assert (found.equal, found.rows, found.differences) == (True, 2 * (len(seeding.LAYERS) + 1), ())
        changed = compared(keyed, claim, model_sha256="c" * 64)
        assert f"model_sha256: {'a' * 64} then, {'c' * 64} now" in changed.circumstances
        archived(keyed)
    stored = read_job(keyed.engine, tenant(keyed), job)
    assert stored is not None
    assert stored.archived_at is not None
    # what a child says of it by itself is not believed, where there is nothing to compare with
    delete_job(keyed.engine, tenant(keyed), job)
    assert compared(keyed, claim, reproduction=found) is None
    other = seeding.claimed(keyed.engine, tenant(keyed))
    assert compared(keyed, other, reproduction=found) is None


def test_a_failure_names_the_digests_where_the_caller_may_have_lost_what_they_are_of(
    keyed: Keyed, ours: httpx.Client, job: str
) -> None:
    claim = claim_of(keyed, ours.post(f"/v1/jobs/{job}:reproduce").json()["id"])
    folder = ArtifactFolder(keyed.artifacts)
    for category, named in (("usage", True), ("transient", False)):
        last = Failed(category=category, code="x", message="it is gone", pointer=None, layer=None, detail=None)  # type: ignore[arg-type]
        said = with_original(keyed.engine, folder, claim, last).message
        assert said.startswith("it is gone")
        assert (DIGESTS["model_sha256"] in said, DIGESTS["data_sha256"] in said) == (named, named)


def test_a_job_of_others_is_none(keyed: Keyed, theirs: httpx.Client, job: str) -> None:
    random = "0" * len(job)
    answers = [theirs.post(f"/v1/jobs/{each}:reproduce") for each in (job, random)]
    first, second = (problem(each, 404) for each in answers)
    apart = ("instance", "request_id")
    assert {name: value for name, value in first.items() if name not in apart} == {
        name: value for name, value in second.items() if name not in apart
    }
    # nor by a document that names it
    said = [problem(theirs.post("/v1/jobs", json={**seeding.DOCUMENT, "reproduces": each}), 422)["errors"]
            for each in (job, random)]  # fmt: skip
    assert said[0] == said[1]
    assert said[0][0]["pointer"] == "/reproduces"


def test_what_cannot_be_reproduced_says_why(keyed: Keyed, ours: httpx.Client) -> None:
    def refused(job_id: str) -> str:
        (error,) = problem(ours.post(f"/v1/jobs/{job_id}:reproduce"), 422)["errors"]
        assert error["pointer"] == "/reproduces"
        return str(error["message"])

    mine = tenant(keyed)
    assert "a job that is running; only one that has succeeded" in refused(seeding.running(keyed.engine, mine).job_id)
    assert "a job that is failed" in refused(seeding.failed(keyed.engine, mine))
    # as a version left it that took no digests, or stored no manifest at all
    older = seeding.finished(keyed.engine, keyed.artifacts, mine)
    assert "of an older version, without a manifest" in refused(older)
    with writing(keyed.engine, mine) as connection:
        connection.execute(update(jobs).where(jobs.c.id == older).values(manifest=None))
    assert "of an older version, without a manifest" in refused(older)
    parent, pieces = seeding.divided(keyed.engine, mine, 2)
    assert f"a piece of job {parent}; reproduce that one" in refused(pieces[0].job_id)
    first = ended(keyed, seeding.claimed(keyed.engine, mine))
    other = {**seeding.DOCUMENT, "collection": {"batch_size": 7}, "keep": ["factors"], "reproduces": first}
    (error,) = problem(ours.post("/v1/jobs", json=other), 422)["errors"]
    assert error["pointer"] == "/reproduces"
    assert "a job with another `collection, keep`, whose plan this one cannot follow" in error["message"]
    # neither a name nor labels are computed with
    named = {**seeding.DOCUMENT, "name": "again", "labels": {"round": "second"}, "reproduces": first}
    assert ours.post("/v1/jobs", json=named).status_code == 202
    for malformed in ("x", "../x", "0" * 36):
        problem(ours.post(f"/v1/jobs/{malformed}:reproduce"), 404)


def test_the_scope_of_a_submission_is_asked_for(keyed: Keyed, job: str) -> None:
    with keyed.server.client(keyed.reading_key) as reading:
        problem(reading.post(f"/v1/jobs/{job}:reproduce"), 403)
    with keyed.server.client(None) as nobody:
        problem(nobody.post(f"/v1/jobs/{job}:reproduce"), 401)


def test_the_quota_of_a_submission_holds(keyed: Keyed, ours: httpx.Client, job: str) -> None:
    assert set_quota(keyed.engine, "ours", 1)
    try:
        told = problem(ours.post(f"/v1/jobs/{job}:reproduce"), 429)
        assert str(told["type"]).endswith("quota-exceeded")
    finally:
        set_quota(keyed.engine, "ours", None)
    assert ours.post(f"/v1/jobs/{job}:reproduce").status_code == 202


def test_the_lists_of_a_submission_hold(keyed: Keyed, ours: httpx.Client, tmp_path: Path) -> None:
    # what was listed when the first job was submitted, and is no longer
    sources: tuple[tuple[str, dict[str, str], str], ...] = (
        ("model", {"source": "factory", "factory": "package.models:build"}, "/model/factory"),
        ("model", {"source": "directory", "path": str(tmp_path)}, "/model/path"),
        ("data", {"source": "file", "path": str(tmp_path / "x.safetensors")}, "/data/path"),
    )
    for part, source, pointer in sources:
        first = ended(keyed, seeding.claimed(keyed.engine, tenant(keyed), {**seeding.DOCUMENT, part: source}))
        errors = problem(ours.post(f"/v1/jobs/{first}:reproduce"), 422)["errors"]
        assert [(each["pointer"], each["code"]) for each in errors] == [(pointer, "not_allowed")]
