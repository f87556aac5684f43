"""Jobs over HTTP: create, list, read (with a long poll), cancel, delete."""

import dataclasses
import hashlib
import json
from functools import partial
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool

from api.problem_details import invalid_parameter, not_found
from api.requests.admission import admit
from api.requests.auth import Reader, Submitter
from api.requests.body import read_document_body, read_record
from api.requests.etags import has_current, require_match
from api.requests.job_filter import JobFilter
from api.requests.long_poll import check_wait, wait_for_job
from api.requests.openapi import document_body, error_responses, record_body, schedule_body
from api.requests.response_bodies import job_view
from api.routes.results import owned_job
from api.service import Service, ServiceOf
from catalog.record import record
from catalog.requests.job import Annotations, JobDocument
from catalog.requests.memory_requirements import least_bytes
from catalog.requests.schedule import Schedule
from catalog.responses.views import JobListView, JobView, LineageView, ValidationView
from jobs.codec import document_json, parse_document, sha256_of
from jobs.records import Caller, Job, Submitted
from jobs.repository.extended_documents import effective_document
from jobs.repository.job_list import FIELDS
from jobs.repository.lineage import read_lineage
from jobs.repository.pieces import read_pieces
from jobs.repository.store import annotate, delete_job, list_jobs, read_job, request_cancel, reschedule
from jobs.repository.submission import check_idempotency_key, places_of, submit, submitted_earlier
from jobs.retention.object_sweep import delete_unlisted
from jobs.scheduling.placement import placement_before, placement_of
from jobs.schema.database import for_tenant, reading
from jobs.tenancy.quotas import require_place, require_room


@record
class JobFields:
    """The large fields that a list is to hold."""

    fields: Annotated[
        str | None,
        Query(
            description="Comma list of `document` and `plan`. Without them `document` holds the sources of model, data "
            "and factors; `plan` is null. With them a page may be shorter than `limit`."
        ),
    ] = None

    def names(self) -> tuple[str, ...]:
        """Return the fields.

        Raises:
            Refusal: 422 if one of them is not known.
        """
        asked = () if self.fields is None else tuple(dict.fromkeys(self.fields.split(",")))
        if not set(asked) <= set(FIELDS):
            raise invalid_parameter("fields", f"must be a comma list of {', '.join(FIELDS)}")
        return asked


_RETRY_SECONDS = 2
_PAGE_BYTES = 2**18
_VIEW: TypeAdapter[JobView] = TypeAdapter(JobView)

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.post(
    "",
    operation_id="submit_job",
    status_code=202,
    response_model=JobView,
    summary="Submit a job",
    responses={
        200: {"model": ValidationView, "description": "`validate_only=true`: valid, and nothing was stored"},
        202: {
            "description": "Accepted and stored durably",
            "headers": {
                "Location": {"description": "The job", "schema": {"type": "string"}},
                "Retry-After": {"description": "Seconds until it is worth asking", "schema": {"type": "integer"}},
            },
        },
        **error_responses(408, 413, 415, 422, 429),
    },
    openapi_extra=document_body(),
)
async def create(
    request: Request,
    caller: Submitter,
    service: ServiceOf,
    idempotency_key: Annotated[
        str | None,
        Header(description="The same key and document give the same job; 1 to 255 visible ASCII characters."),
    ] = None,
    validate_only: Annotated[bool, Query(description="Run every check and store nothing.")] = False,
) -> Response:
    """Submit a job document, which a worker runs when one is free; returns the job."""
    check_idempotency_key(idempotency_key)
    raw = await read_document_body(request, service.settings)
    document = await run_in_threadpool(parse_document, raw)
    if validate_only:
        await run_in_threadpool(_submitted_or_admitted, service, caller, document, idempotency_key)
        return await run_in_threadpool(_validated, service, caller, document)
    return await accept(service, caller, document, idempotency_key)


async def accept(service: Service, caller: Caller, document: JobDocument, idempotency_key: str | None) -> Response:
    """Store a job of a valid document, unless the caller's key has stored it before, and return it.

    ``DocumentRefused`` if this service does not take the document, ``Refusal`` if the tenant has no room for it.
    """
    check_idempotency_key(idempotency_key)
    submitted = await run_in_threadpool(_submitted_or_admitted, service, caller, document, idempotency_key)
    if submitted is None:
        submitted = await run_in_threadpool(_stored, service, caller, document, idempotency_key)
    job = submitted.job
    headers = {"location": f"/v1/jobs/{job.id}", "retry-after": str(_RETRY_SECONDS)}
    return await run_in_threadpool(_placed, service, job, 202, headers)


def _stored(service: Service, caller: Caller, document: JobDocument, idempotency_key: str | None) -> Submitted:
    needed = least_bytes(effective_document(service.engine, caller.tenant_id, document))
    most = service.settings.queued_jobs, service.settings.queued_bytes
    return submit(service.engine, caller.tenant_id, document, idempotency_key, needs_bytes=needed, most=most)


def _submitted_or_admitted(
    service: Service, caller: Caller, document: JobDocument, idempotency_key: str | None
) -> Submitted | None:
    """Return what the key has stored earlier; None where the document is to be stored, once it is admitted."""
    # a repeated request gets its job even where the same document would be refused by now
    if idempotency_key is not None:
        submitted = submitted_earlier(service.engine, caller.tenant_id, document, idempotency_key)
        if submitted is not None:
            return submitted
    _admitted(service, caller, document)
    return None


def _admitted(service: Service, caller: Caller, document: JobDocument) -> None:
    """Refuse a document that this service does not take, or has no room for."""
    settings = service.settings
    admit(document, settings, service.engine, caller.tenant_id)
    require_room(service.engine, caller.tenant_id, settings.ledger.stored_bytes)
    most = settings.queued_jobs, settings.queued_bytes
    with reading(service.engine, caller.tenant_id) as connection:
        require_place(connection, caller.tenant_id, most, places_of(document))


def _validated(service: Service, caller: Caller, document: JobDocument) -> Response:
    body = document_json(document)
    effective = effective_document(service.engine, caller.tenant_id, document)
    placement = placement_before(service.fleet, effective, least_bytes(effective))
    view = ValidationView(valid=True, document=body, document_sha256=sha256_of(body), placement=placement)
    return Response(TypeAdapter(ValidationView).dump_json(view), media_type="application/json")


@router.get(
    "",
    operation_id="list_jobs",
    response_model=JobListView,
    summary="List jobs",
    responses={
        200: {"headers": {"Link": {"description": '`rel="next"`, where there is more', "schema": {"type": "string"}}}},
        **error_responses(404, 422),
    },
)
def list_all(
    caller: Reader,
    service: ServiceOf,
    chosen: Annotated[JobFilter, Depends()],
    wanted: Annotated[JobFields, Depends()],
) -> Response:
    """Your jobs, newest first unless `sort` says otherwise, in pages of at most 256 KiB; one read by itself is whole.

    The jobs of a divided job, or of a series, are listed where `parent` names it, or `id` one of them; a `parent` that
    is not a job of yours is not found.
    """
    page = list_jobs(service.engine, caller.tenant_id, dataclasses.replace(chosen.query(), fields=wanted.names()))
    parts: list[bytes] = []
    following, size = page.next, 0
    for place, job in enumerate(page.items):
        view = job_view(job)
        if "document" not in wanted.names():  # labels stand beside it already
            slim = {name: value for name, value in view.document.items() if name != "labels"}
            view = dataclasses.replace(view, document=slim)
        part = _VIEW.dump_json(view)
        size += len(part)
        if parts and size > _PAGE_BYTES:
            following = page.items[place - 1].id
            break
        parts.append(part)
    body = b'{"items":[' + b",".join(parts) + b'],"next":' + json.dumps(following).encode() + b"}"
    headers = {}
    if following is not None:
        parameters = vars(chosen) | vars(wanted) | {"before": following}
        query = urlencode({name: value for name, value in parameters.items() if value is not None}, doseq=True)
        headers["link"] = f'</v1/jobs?{query}>; rel="next"'
    return Response(body, media_type="application/json", headers=headers)


@router.get(
    "/{job_id}",
    operation_id="read_job",
    response_model=JobView,
    summary="Read a job",
    responses={
        200: {
            "headers": {
                "ETag": {
                    "description": "Names this version of the job, without its placement",
                    "schema": {"type": "string"},
                }
            }
        },
        304: {"description": "Still the version of `If-None-Match`"},
        **error_responses(404, 422),
    },
)
async def read(
    job_id: str,
    request: Request,
    caller: Reader,
    service: ServiceOf,
    wait: Annotated[
        float,
        Query(
            description="Seconds to wait, at most 30: with `If-None-Match` until the job has changed, "
            "without until it has ended."
        ),
    ] = 0,
    if_none_match: Annotated[str | None, Header(description="The ETag that you have.")] = None,
) -> Response:
    """State, progress and failure of a job."""
    check_wait(wait)

    def changed(job: Job) -> bool:
        return if_none_match is not None and not has_current(if_none_match, _etag(job))

    stored = partial(read_job, service.engine, caller.tenant_id, job_id)
    job = await wait_for_job(request, service, stored, wait, news=changed)
    answer = await run_in_threadpool(_placed, service, job)
    if if_none_match is not None and has_current(if_none_match, answer.headers["etag"]):
        return Response(status_code=304, headers={"etag": answer.headers["etag"]})
    return answer


@router.get("/{job_id}/lineage", operation_id="read_lineage", summary="Read lineage", responses=error_responses(404))
def lineage(job_id: str, caller: Reader, service: ServiceOf) -> LineageView:
    """The jobs whose factors a job used, your jobs that used its own, and its attempts and states over time."""
    found = read_lineage(service.engine, caller.tenant_id, job_id)
    if found is None:
        raise not_found("there is no such job")
    return found


@router.post(
    "/{job_id}:cancel",
    operation_id="cancel_job",
    status_code=202,
    response_model=JobView,
    summary="Cancel a job",
    responses=error_responses(404),
)
def cancel(job_id: str, caller: Submitter, service: ServiceOf) -> Response:
    """Cancel a queued job, or ask a running one to stop before its next batch or layer; returns the job.

    An ended job stays as it is. A divided job is cancelled with its pieces, and a piece with its job.
    """
    return _placed(service, request_cancel(service.engine, caller.tenant_id, job_id, caller.key), 202)


@router.post(
    "/{job_id}:reproduce",
    operation_id="reproduce_job",
    status_code=202,
    response_model=JobView,
    summary="Reproduce a job",
    responses=error_responses(404, 422, 429),
)
async def reproduce(
    job_id: str,
    caller: Submitter,
    service: ServiceOf,
    idempotency_key: Annotated[str | None, Header(description="The same key gives the same job.")] = None,
) -> Response:
    """Compute a succeeded job again, without cached factors; `reproduction` of the new job's manifest compares them."""
    job = await run_in_threadpool(owned_job, service, caller.tenant_id, job_id)
    again = json.dumps({**job.document, "labels": dict(job.labels), "name": job.name, "reproduces": job.id}).encode()
    return await accept(service, caller, await run_in_threadpool(parse_document, again), idempotency_key)


@router.put(
    "/{job_id}/schedule",
    operation_id="reschedule_job",
    response_model=JobView,
    summary="Schedule a job anew",
    responses=error_responses(404, 408, 409, 413, 415, 422),
    openapi_extra=schedule_body(),
)
async def reschedule_job(job_id: str, request: Request, caller: Submitter, service: ServiceOf) -> Response:
    """Replace priority and deadline of a job that has not ended, and of its pieces; returns the job."""
    schedule = await read_record(request, service.settings, Schedule)
    job = await run_in_threadpool(reschedule, service.engine, caller.tenant_id, job_id, schedule)
    return await run_in_threadpool(_placed, service, job)


@router.patch(
    "/{job_id}",
    operation_id="annotate_job",
    response_model=JobView,
    summary="Edit labels or note",
    responses=error_responses(404, 408, 412, 413, 415, 422),
    openapi_extra=record_body("Annotations", "Labels or note; what is left out stays."),
)
async def annotate_job(
    job_id: str,
    request: Request,
    caller: Submitter,
    service: ServiceOf,
    if_match: Annotated[
        str | None,
        Header(description="The ETag that you have, or several: where none is the job's, nothing is changed."),
    ] = None,
) -> Response:
    """Replace labels or note of a job, which may have ended; returns the job. Its document and digest stay."""
    given = await read_record(request, service.settings, Annotations)
    headers = [] if if_match is None else request.headers.getlist("if-match")

    def require(current: Job) -> None:
        require_match(headers, _etag(current))

    job = await run_in_threadpool(annotate, service.engine, caller.tenant_id, job_id, given, require)
    return await run_in_threadpool(_placed, service, job)


@router.delete(
    "/{job_id}", operation_id="delete_job", status_code=204, summary="Delete a job", responses=error_responses(404, 409)
)
def delete(job_id: str, caller: Submitter, service: ServiceOf) -> Response:
    """Delete an ended job with its results and files, and its pieces; the answer has no body."""
    deleted = delete_job(service.engine, caller.tenant_id, job_id)
    for each in {job_id, *(file.job_id for file in deleted)}:
        service.artifacts.remove(each)
    engine = for_tenant(service.engine, caller.tenant_id)
    delete_unlisted(engine, service.artifacts, deleted, service.settings.ledger.grace_seconds)
    return Response(status_code=204)


def _json(job: Job) -> bytes:
    return _VIEW.dump_json(job_view(job))


def _etag(job: Job) -> str:
    # while others compute its pieces every write to it is news of one of them
    version = job.event_seq if job.state == "waiting" else 0
    return f'"{hashlib.sha256(_json(job) + b"%d" % version).hexdigest()[:32]}"'


def _placed(service: Service, job: Job, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return the job with its placement and its pieces.

    Neither is part of the ETag: they may change while the job does not, and long polls do not wake for them. Whenever
    a piece begins or ends, and once a second while pieces compute, the job changes too.
    """
    placement = placement_of(service.fleet, job, service.settings.ledger.running_jobs)
    divisible = job.document.get("shards") is not None and job.parent_id is None
    pieces = read_pieces(service.engine, job.tenant_id, job.id) if divisible else ()
    body = _VIEW.dump_json(job_view(job, placement, pieces or None))
    named = {"etag": _etag(job), **(headers or {})}
    return Response(body, status_code=status, media_type="application/json", headers=named)
