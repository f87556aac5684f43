"""Exports over HTTP: a job's factors as a file of another tool, which a worker writes as artifact of a small job."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response
from starlette.concurrency import run_in_threadpool

from api.problem_details import Refusal, not_found
from api.requests.auth import Reader, Submitter
from api.requests.openapi import error_responses
from api.routes.artifacts import FILE_RESPONSES, DownloadOptions, download
from api.routes.jobs import accept
from api.routes.results import owned_job
from api.service import Service, ServiceOf
from catalog.analyses.export import EXPORT_FILES, ExportFormat
from catalog.record import record
from catalog.requests.job import JobDocument
from catalog.responses.views import JobView
from jobs.codec import document_json, parse_document, sha256_of
from jobs.records import Job
from jobs.repository.results import read_artifact
from jobs.repository.submission import submitted_under

router = APIRouter(prefix="/v1/jobs/{job_id}/exports", tags=["artifacts"])


@record
class ExportChoices:
    """The options of an export; the same ones name it again."""

    without: Annotated[
        list[str] | None, Query(description="Layers to leave out, by name; `*` stands for any characters.")
    ] = None
    likelihood: Annotated[
        str | None, Query(description="Of `laplace`, which needs it: `classification` or `regression`.")
    ] = None
    outputs: Annotated[
        int | None,
        Query(
            description="Of `laplace`, which needs it: the number of the model's outputs; left out, that of the head, "
            "where the factors show it."
        ),
    ] = None

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
    key = await run_in_threadpool(_key_of, service, caller.tenant_id, document, format)
    return await accept(service, caller, document, key)


@router.get(
    "/{format}",
    operation_id="download_export",
    summary="Download exported factors",
    response_class=Response,
    responses={**FILE_RESPONSES, **error_responses(404, 409, 416, 422)},
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
    made = await run_in_threadpool(submitted_under, service.engine, caller.tenant_id, document, _prefix(document))
    good = await run_in_threadpool(_good, service, caller.tenant_id, made, format)
    if good is not None and good.state == "succeeded":
        return await download(good.id, _file(format), caller, service, options)
    if good is not None:
        raise Refusal(
            409,
            "export-not-ready",
            "The export is not ready",
            f"job {good.id}, which writes the file, is {good.state}; ask again once it has succeeded",
            headers={"retry-after": "2"},
        )
    ended = f"job {made[-1].id}, which was to write the file, is {made[-1].state}" if made else "it was not exported so"
    raise not_found(f"the file is not there: {ended}; send the same request with POST")


def _file(format: ExportFormat) -> str:  # noqa: A002 - the path's own word
    return f"export/{EXPORT_FILES[format]}"


def _prefix(document: JobDocument) -> str:
    """Begin the idempotency keys of all jobs of a document, each of which is tried once."""
    return f"export/{sha256_of(document_json(document))}/"


def _key_of(service: Service, tenant_id: str, document: JobDocument, format: ExportFormat) -> str:  # noqa: A002
    """Return the key of the job that writes the file or has written it; a new one where none does."""
    prefix = _prefix(document)
    made = submitted_under(service.engine, tenant_id, document, prefix)
    good = _good(service, tenant_id, made, format)
    if good is not None and good.idempotency_key is not None:
        return good.idempotency_key
    # a caller's own key may begin alike, and go on with anything
    rests = [(job.idempotency_key or "").removeprefix(prefix) for job in made]
    return f"{prefix}{1 + max((int(rest) for rest in rests if rest.isdecimal() and len(rest) < 10), default=-1)}"


def _good(service: Service, tenant_id: str, made: Sequence[Job], format: ExportFormat) -> Job | None:  # noqa: A002
    """Return the newest of these jobs that has the file, or may come to have it."""
    for job in reversed(made):
        if job.state in ("failed", "cancelled", "cancelling"):
            continue
        if job.state != "succeeded" or read_artifact(service.engine, tenant_id, job.id, _file(format)) is not None:
            return job
    return None
