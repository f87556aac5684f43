"""Estimates over HTTP: the memory and time of a job, planned by a worker from shapes alone without running it."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool

from api.problem_details import Fault, Refusal
from api.requests.admission import admit
from api.requests.auth import Reader, Submitter
from api.requests.body import read_document_body
from api.requests.long_poll import check_wait, wait_for_job
from api.requests.openapi import document_body, error_responses
from api.requests.response_bodies import estimate_view
from api.service import Service, ServiceOf
from catalog.requests.estimate import unplannable
from catalog.requests.job import JobDocument
from catalog.requests.series import checkpoint_documents
from catalog.responses.estimate_view import EstimateView
from jobs.codec import parse_document
from jobs.errors import DocumentRefused
from jobs.records import Job, Submitted
from jobs.repository.store import delete_job, read_estimate
from jobs.repository.submission import check_idempotency_key, submit, submitted_earlier

_RETRY_SECONDS = 2
_VIEW: TypeAdapter[EstimateView] = TypeAdapter(EstimateView)

router = APIRouter(prefix="/v1/estimates", tags=["estimates"])


@router.post(
    "",
    operation_id="create_estimate",
    status_code=200,
    response_model=EstimateView,
    summary="Estimate a job",
    responses={
        200: {"description": "The estimate", "headers": {"Location": {"schema": {"type": "string"}}}},
        202: {
            "model": EstimateView,
            "description": "Accepted; the estimate is not ready yet",
            "headers": {
                "Location": {"description": "The estimate", "schema": {"type": "string"}},
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
        Header(description="The same key and document give the same estimate; keys of jobs are apart."),
    ] = None,
) -> Response:
    """Peak bytes, seconds and the plan of each stage and layer, without running the job.

    Takes what `POST /v1/jobs` takes. A worker builds the model without weights and plans; this waits some seconds for
    it, and otherwise answers 202 with its future address. A document that cannot be run is refused as the job would be;
    one that fits nowhere is not an error: `fits` is false, and `smallest_budget` is the budget that it needs.
    """
    settings = service.settings
    check_idempotency_key(idempotency_key)
    raw = await read_document_body(request, settings)
    submitted = await run_in_threadpool(_submitted, service, caller.tenant_id, raw, idempotency_key)
    stored = partial(read_estimate, service.engine, caller.tenant_id, submitted.job.id)
    return _answer(
        await wait_for_job(request, service, stored, settings.estimate_seconds, what="estimate"), waiting=202
    )


def _submitted(service: Service, tenant_id: str, raw: bytes, key: str | None) -> Submitted:
    """Return the estimate of this key, or store a new one for a worker to find."""
    asked: JobDocument = parse_document(raw)
    document = next(iter(checkpoint_documents(asked)), asked)  # of a series its first checkpoint is planned
    if key is not None:
        earlier = submitted_earlier(service.engine, tenant_id, document, key, estimate=True)
        if earlier is not None:
            return earlier
    refused = unplannable(document)
    if refused is not None:
        raise DocumentRefused((refused,))
    settings = service.settings
    admit(asked, settings, service.engine, tenant_id)
    most = settings.queued_jobs, settings.queued_bytes
    return submit(service.engine, tenant_id, document, key, estimate=True, most=most)


@router.get(
    "/{estimate_id}",
    operation_id="read_estimate",
    response_model=EstimateView,
    summary="Read an estimate",
    responses=error_responses(404, 422),
)
async def read(
    estimate_id: str,
    request: Request,
    caller: Reader,
    service: ServiceOf,
    wait: Annotated[float, Query(description="Seconds to wait until it is there, at most 30.")] = 0,
) -> Response:
    """The memory and time of the job once `state` is `succeeded`; a problem where it cannot be planned."""
    check_wait(wait)
    stored = partial(read_estimate, service.engine, caller.tenant_id, estimate_id)
    return _answer(await wait_for_job(request, service, stored, wait, what="estimate"), waiting=200)


@router.delete(
    "/{estimate_id}",
    operation_id="delete_estimate",
    status_code=204,
    summary="Delete an estimate",
    responses=error_responses(404, 409),
)
def delete(estimate_id: str, caller: Submitter, service: ServiceOf) -> Response:
    """Delete an estimate that has ended; the answer has no body. Estimates are kept for as long as jobs."""
    delete_job(service.engine, caller.tenant_id, estimate_id, estimate=True)
    service.artifacts.remove(estimate_id)
    return Response(status_code=204)


def _answer(job: Job, *, waiting: int) -> Response:
    if job.failure is not None:
        raise _failed(job)
    headers = {"location": f"/v1/estimates/{job.id}"}
    if not job.ended:
        headers["retry-after"] = str(_RETRY_SECONDS)
    body = _VIEW.dump_json(estimate_view(job))
    status = 200 if job.ended else waiting
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def _failed(job: Job) -> Refusal:
    """Return the refusal of an estimate that has failed, with the reason and who can act."""
    failure = job.failure or {}
    fault = Fault(
        pointer=failure.get("pointer") or "", parameter=None, code=str(failure["code"]), message=str(failure["message"])
    )
    status, kind, title = 500, "estimate-failed", "The estimate failed"
    detail = "the service failed at this estimate; its operator finds it in the log"
    if failure.get("category") == "usage":
        status, kind, title = 422, "not-planned", "The job cannot be planned"
        detail = "the job would be refused where it runs; correct the fields that `errors` names"
    elif failure.get("category") == "transient":
        status, detail = 503, "the estimate failed for a reason outside the document; ask for a new one"
    return Refusal(status, kind, title, detail, errors=[fault], headers={"location": f"/v1/estimates/{job.id}"})
