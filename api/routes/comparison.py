"""Comparison of jobs over HTTP: what they have stored, beside each other; likewise the checkpoints of a series."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query

from api.problem_details import invalid_parameter, not_found
from api.requests.auth import Reader
from api.requests.openapi import error_responses
from api.requests.response_bodies import job_view, layer_view
from api.routes.results import Kind, Selection, owned_job, row_pages
from api.service import Service, ServiceOf
from catalog.responses.comparison import MOST_JOBS, ComparisonView, compare
from catalog.responses.series import SeriesOverlap, SeriesPoint, SeriesView, largest_eigenvalues
from jobs.records import Job
from jobs.repository.pieces import read_series

router = APIRouter(prefix="/v1", tags=["results"])
Metric = Annotated[str | None, Query(description="Only the number of this path, such as `trace` or `kfac.trace`.")]
Ids = Annotated[str, Query(description="2 to 8 ids of your jobs, parted by commas; the first is the reference.")]


@router.get("/jobs:compare", operation_id="compare_jobs", summary="Compare jobs", responses=error_responses(404, 422))
def read(caller: Reader, service: ServiceOf, ids: Ids, kind: Kind = None, metric: Metric = None) -> ComparisonView:
    """The numbers of several jobs beside each other, as they were stored: by layer, of the models, and the documents.

    Differences and ratios are to the first job. A layer that one of them lacks is there too, with nulls.
    """
    named = ids.split(",")
    if not 2 <= len(named) <= MOST_JOBS or len(set(named)) != len(named):
        raise invalid_parameter("ids", f"must be 2 to {MOST_JOBS} ids, each once, parted by commas")
    return _compared(service, [owned_job(service, caller.tenant_id, each) for each in named], kind, metric)


def _compared(
    service: Service, jobs: Sequence[Job], kind: str | None, metric: str | None, *, layers: bool = True
) -> ComparisonView:
    chosen = Selection(kind=kind)
    rows = [(layer_view(row) for page in row_pages(service, job, chosen) for row in page) for job in jobs if layers]
    return compare([(job_view(job), job.summary or {}) for job in jobs], rows or [()] * len(jobs), kind, metric)


@router.get(
    "/jobs/{job_id}/series", operation_id="read_series", summary="Read a series", responses=error_responses(404, 422)
)
def series(job_id: str, caller: Reader, service: ServiceOf, kind: Kind = None, metric: Metric = None) -> SeriesView:
    """The checkpoints of a job with `series`, with what they have stored so far; `metric` adds that number by layer."""
    parent = owned_job(service, caller.tenant_id, job_id)
    asked = parent.document.get("series")
    if asked is None:
        raise not_found("the job is not a series")
    checkpoints, pairs = read_series(service.engine, caller.tenant_id, job_id)
    rates = asked["learning_rate"]
    rates = rates if isinstance(rates, list) else [rates] * len(checkpoints)
    compared = _compared(service, checkpoints, kind, metric, layers=metric is not None)
    return SeriesView(
        job=parent.id,
        state=parent.state,
        points=tuple(
            SeriesPoint(
                model=name,
                job=job.id,
                state=job.state,
                failure=(job.failure or {}).get("message"),
                largest=largest_eigenvalues(job.summary or {}),
                stable_below=None if rate is None else 2 / rate,
            )
            for name, job, rate in zip(asked["model"], checkpoints, rates, strict=True)
        ),
        overlaps=tuple(_overlap(place, job) for place, job in pairs),
        model=compared.model,
        layers=compared.layers,
    )


def _overlap(place: int, job: Job) -> SeriesOverlap:
    (summary,) = (job.summary or {"": {}}).values()
    return SeriesOverlap(
        index=place,
        job=job.id,
        state=job.state,
        failure=(job.failure or {}).get("message"),
        overlaps={str(each["k"]): each["overlap"] for each in summary.get("overlaps") or ()},
        relative_distance=summary.get("relative_distance"),
    )
