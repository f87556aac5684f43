"""Layer rows wherever they are: in the ledger, or in the job's archive once they have left it."""

from api.problem_details import not_found
from api.service import Service
from jobs.records import Artifact, Job, LayerPage
from jobs.repository.results import LayerQuery, count_layers, layer_rows, page_of, read_artifact
from jobs.repository.store import read_job
from jobs.retention.archive import NAME, read_contents, read_layers


def layer_page(service: Service, job: Job, asked: LayerQuery) -> LayerPage:
    """Return a page of the job's layer rows, from the ledger or from its archive.

    Args:
        service: The service, for its ledger and its artifacts.
        job: The job.
        asked: Which rows, in which order and from where on.

    Returns:
        The rows, and the cursor of the next page, or None on the last one.

    Raises:
        PageRefused: If the limit, the sort key or the cursor is not valid.
        ArtifactDamaged: If the archive is not what was listed.
    """
    if job.archived_at is None:
        page = layer_rows(service.engine, job.tenant_id, job.id, asked)
        # none: there is none, or all of them have left since the job was read
        if page.items or not _archived(service, job):
            return page
    return page_of(read_layers(service.artifacts, _archive(service, job)), asked)


def layer_count(service: Service, job: Job) -> int:
    """How many layer rows the job has so far.

    Raises:
        ArtifactDamaged: If the archive is not what was listed.
    """
    if job.archived_at is None:
        count = count_layers(service.engine, job.tenant_id, job.id)
        if count or not _archived(service, job):
            return count
    return read_contents(service.artifacts, _archive(service, job)).layers


def _archived(service: Service, job: Job) -> bool:
    """Whether it is by now."""
    found = read_job(service.engine, job.tenant_id, job.id)
    return found is not None and found.archived_at is not None


def _archive(service: Service, job: Job) -> Artifact:
    found = read_artifact(service.engine, job.tenant_id, job.id, NAME)
    if found is None:
        raise not_found("there is no such job")  # deleted since it was read: an archived job lists its archive
    return found
