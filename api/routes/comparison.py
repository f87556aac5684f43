"""Comparison of jobs over HTTP: what they have stored, beside each other."""

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from api.problem_details import invalid_parameter
from api.requests.auth import Reader
from api.requests.openapi import error_responses
from api.requests.response_bodies import layer_view
from api.routes.results import Kind, Selection, owned_job, read_results, row_pages
from api.service import Service, ServiceOf
from catalog.record import record
from catalog.responses.comparison import MOST_JOBS, ComparisonView, compare

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
