"""Exports over HTTP: a job's factors as a file of another tool, which a worker writes as artifact of a small job."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response
from starlette.concurrency import run_in_threadpool

from api.problem_details import Refusal, not_found
from api.requests.auth import Reader, Submitter
from api.requests.openapi import error_responses
from api.routes.artifacts import DownloadOptions, download
from api.routes.jobs import accept
from api.routes.results import owned_job
from api.service import Service, ServiceOf
from catalog.analyses.export import EXPORT_FILES, ExportFormat
from catalog.record import record
from catalog.requests.job import JobDocument
from catalog.responses.views import JobView
from jobs.codec import document_json, parse_document, sha256_of
from jobs.records import Job
from jobs.repository.submission import submitted_earlier

_MOST_ATTEMPTS = 100
_UNDONE = ("failed", "cancelled")

router = APIRouter(prefix="/v1/jobs/{job_id}/exports", tags=["artifacts"])


@record
class ExportChoices:
    """The options of an export; the same ones name it again."""

    without: Annotated[
        list[str] | None, Query(description="Layers to leave out, by name; `*` stands for any characters.")
    ] = None
    likelihood: Annotated[str, Query(description="Of `laplace`: `classification` or `regression`.")] = "classification"
    outputs: Annotated[int | None, Query(description="Of `laplace`: the number of the model's outputs.")] = None

    def document(self, job_id: str, named: ExportFormat) -> JobDocument:
        """Return the document of the job that writes the file.

        Raises:
            DocumentRefused: If an option cannot be, or contradicts the format.
        """
        options: Mapping[str, Any] = {
            "format": named,
            "without": self.without or [],
            "likelihood": self.likelihood,
            "outputs": self.outputs,
        }
        return parse_document(json.dumps({"kind": "export", "factors": {"job": job_id}, "export": options}).encode())


@router.post(
    "/{format}",
    operation_id="export_job",
    status_code=202,
    response_model=JobView,
    summary="Export factors",
    responses=error_responses(404, 422, 429),
)
async def create(
    job_id: str,
    format: ExportFormat,  # noqa: A002 - the path's own word
    caller: Submitter,
    service: ServiceOf,
    choices: Annotated[ExportChoices, Depends()],
) -> Response:
    """Write a job's factors as a file of another tool; returns the job that does so, or that has done so already."""
    await run_in_threadpool(owned_job, service, caller.tenant_id, job_id)
    document = await run_in_threadpool(choices.document, job_id, format)
    key, _ = await run_in_threadpool(_latest, service, caller.tenant_id, document)
    return await accept(service, caller, document, key)


@router.get(
    "/{format}",
    operation_id="download_export",
    summary="Download exported factors",
    response_class=Response,
    responses={200: {"description": "The file", "content": {"*/*": {}}}, **error_responses(404, 409, 416, 422)},
)
async def read(
    job_id: str,
    format: ExportFormat,  # noqa: A002 - the path's own word
    caller: Reader,
    service: ServiceOf,
    choices: Annotated[ExportChoices, Depends()],
    options: Annotated[DownloadOptions, Depends()],
) -> Response:
    """The file that the same request with POST has had written."""
    await run_in_threadpool(owned_job, service, caller.tenant_id, job_id)
    document = await run_in_threadpool(choices.document, job_id, format)
    _, job = await run_in_threadpool(_latest, service, caller.tenant_id, document)
    if job is None:
        raise not_found("these factors were not exported so; send the same request with POST")
    if job.state != "succeeded":
        raise Refusal(
            409,
            "export-not-ready",
            "The export is not ready",
            f"job {job.id}, which writes the file, is {job.state}; ask again once it has succeeded",
            headers={"retry-after": "2"},
        )
    return await download(job.id, f"export/{EXPORT_FILES[format]}", caller, service, options)


def _latest(service: Service, tenant_id: str, document: JobDocument) -> tuple[str, Job | None]:
    """Return the idempotency key of the next such job, or of the last one where that is good, and the last one."""
    digest = sha256_of(document_json(document))
    last = None
    for attempt in range(_MOST_ATTEMPTS):
        key = f"export/{digest}/{attempt}"
        found = submitted_earlier(service.engine, tenant_id, document, key)
        if found is None:
            return key, last
        last = found.job
        if last.state not in _UNDONE:
            break
    return key, last
