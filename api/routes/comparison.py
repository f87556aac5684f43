"""Comparison of jobs over HTTP: what they have stored, beside each other; likewise the checkpoints of a series."""

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from api.problem_details import invalid_parameter, not_found
from api.requests.auth import Reader
from api.requests.openapi import error_responses
from api.requests.response_bodies import job_view, layer_view
from api.routes.results import Kind, Selection, owned_job, read_results, row_pages
from api.service import Service, ServiceOf
from catalog.record import record
from catalog.responses.comparison import MOST_JOBS, ComparisonView, compare
from catalog.responses.series import SeriesOverlap, SeriesPoint, SeriesView, largest_eigenvalues
from catalog.responses.views import LayersLink, ResultsView
from jobs.records import Job
from jobs.repository.pieces import read_series

router = APIRouter(prefix="/v1", tags=["results"])
Metric = Annotated[str | None, Query(description="Only the number of this path, such as `trace` or `kfac.trace`.")]


@record
class ComparedJobs:
    """The jobs, and what of them is compared."""

    ids: Annotated[str, Query(description="2 to 8 ids of your jobs, parted by commas; the first is the reference.")]
    kind: Kind = None
    metric: Metric = None

    def names(self) -> list[str]:
        """Return the ids.

        Raises:
            Refusal: 422 if they are too few or too many, or one is named twice.
        """
        ids = self.ids.split(",")
        if not 2 <= len(ids) <= MOST_JOBS or len(set(ids)) != len(ids):
            raise invalid_parameter("ids", f"must be 2 to {MOST_JOBS} ids, each once, parted by commas")
        return ids


def rows_of(service: Service, tenant_id: str, job_id: str, chosen: Selection) -> Iterator[Any]:
    """Yield all rows of a job, as its caller sees them."""
    for rows in row_pages(service, owned_job(service, tenant_id, job_id), chosen):
        yield from map(layer_view, rows)


@router.get("/jobs:compare", operation_id="compare_jobs", summary="Compare jobs", responses=error_responses(404, 422))
def read(caller: Reader, service: ServiceOf, chosen: Annotated[ComparedJobs, Depends()]) -> ComparisonView:
    """The numbers of several jobs beside each other, as they were stored: by layer, of the models, and the documents.

    Differences and ratios are to the first job. A layer that one of them lacks is there too, with nulls.
    """
    ids = chosen.names()
    selection = Selection(kind=chosen.kind)
    results = [read_results(job_id, caller, service) for job_id in ids]
    rows = [rows_of(service, caller.tenant_id, job_id, selection) for job_id in ids]
    return compare(results, rows, chosen.kind, chosen.metric)


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
    selection = Selection(kind=kind)
    rows = [rows_of(service, caller.tenant_id, each.id, selection) if metric else () for each in checkpoints]
    compared = compare([_results(each) for each in checkpoints], rows, kind, metric)
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


def _results(job: Job) -> ResultsView:
    links = LayersLink(count=0, href="")
    return ResultsView(job=job_view(job), summary=job.summary or {}, manifest=None, layers=links, artifacts=())


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
