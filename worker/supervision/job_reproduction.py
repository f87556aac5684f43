"""The reproduction of a job: its comparison with the job that it reproduces, once all its rows stand in the ledger."""

from dataclasses import replace
from typing import TypeVar

from sqlalchemy import Engine

from catalog.frames import Failed, Finished
from catalog.record import plain
from catalog.responses.reproduction import Run, compare_runs, name_inputs
from jobs.errors import ArtifactDamaged
from jobs.objects.artifacts import ArtifactFolder
from jobs.records import Claim, Job
from jobs.repository.results import every_layer_row, list_artifacts
from jobs.repository.store import read_job
from jobs.retention.archive import NAME, read_layers

T = TypeVar("T", Finished, Failed)


def with_original(engine: Engine, folder: ArtifactFolder, claim: Claim, last: T) -> T:
    """Return a last frame with the comparison, or with the inputs of the original that may be gone or changed."""
    named = None if claim.parent_id is not None else claim.document.get("reproduces")
    original = None if named is None else read_job(engine, claim.tenant_id, named)
    if isinstance(last, Failed):
        if original is None or last.category != "usage":
            return last
        return replace(last, message=last.message + name_inputs(original.manifest or {}))
    job = None if original is None else read_job(engine, claim.tenant_id, claim.job_id)
    if original is None or job is None:
        return replace(last, reproduction=None)  # whatever the child has said
    again = replace(job, manifest={**(job.manifest or {}), **plain(last)})
    try:
        return replace(last, reproduction=compare_runs(_run(engine, folder, original), _run(engine, folder, again)))
    except ArtifactDamaged:  # of the original's archive, which all who read it hear of
        return replace(last, reproduction=None)


def _run(engine: Engine, folder: ArtifactFolder, job: Job) -> Run:
    files = list_artifacts(engine, job.tenant_id, job.id)
    archive = next((each for each in files if each.name == NAME), None)
    stored = every_layer_row(engine, job.tenant_id, job.id) if archive is None else read_layers(folder, archive)
    rows = ({**each.outcome, "observed": each.observed} for each in stored)
    named = {each.name: each.sha256 for each in files if each.name != NAME}
    dropped = archive is not None and not named
    return Run(job.id, job.manifest or {}, job.plan, rows, job.summary or {}, None if dropped else named)
