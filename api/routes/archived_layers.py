"""Layer rows of a job, read from the ledger, or from the job's archive once they have left it."""

from api.problem_details import not_found
from api.service import Service
from jobs.records import Artifact, Job, LayerPage
from jobs.repository.results import LayerQuery, count_layers, layer_rows, page_of, read_artifact
from jobs.repository.store import read_job
from jobs.retention.archive import NAME, read_contents, read_layers


def layer_page(service: Service, job: Job, asked: LayerQuery) -> LayerPage:
    """Return a page of the job's layer rows, from the ledger or from its archive."""
    if job.archived_at is None:
        page = layer_rows(service.engine, job.tenant_id, job.id, asked)
        # no rows: there are none, or they were archived since the job was read
        if page.items or not _archived(service, job):
            return page
    return page_of(read_layers(service.artifacts, _archive(service, job)), asked)


def layer_count(service: Service, job: Job) -> int:
    """Count the job's layer rows so far."""
    if job.archived_at is None:
        count = count_layers(service.engine, job.tenant_id, job.id)
        if count or not _archived(service, job):
            return count
    return read_contents(service.artifacts, _archive(service, job)).layers


def _archived(service: Service, job: Job) -> bool:
    """Return whether the job has been archived by now."""
    current = read_job(service.engine, job.tenant_id, job.id)
    return current is not None and current.archived_at is not None


def _archive(service: Service, job: Job) -> Artifact:
    archive = read_artifact(service.engine, job.tenant_id, job.id, NAME)
    if archive is None:
        raise not_found("there is no such job")  # deleted since it was read: an archived job lists its archive
    return archive
