"""The results of a job over HTTP: summary and manifest, layers in three formats, the log."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.responses import StreamingResponse

from api.problem_details import invalid_parameter, not_found
from api.requests.accepted_formats import preferred
from api.requests.auth import KeyInUse, Reader
from api.requests.openapi import error_responses
from api.requests.response_bodies import artifact_view, job_view, layer_view
from api.service import Service, ServiceOf
from catalog import ANALYSES
from catalog.record import plain, record
from catalog.responses.layer_record import TABLE_COLUMNS, table_cell
from catalog.responses.views import LayerListView, LayersLink, ResultsView
from jobs.records import Artifact, Caller, Job, LayerPage, LayerRow
from jobs.repository.results import (
    SORT_KEYS,
    LayerQuery,
    count_layers,
    layer_rows,
    list_artifacts,
    page_of,
    read_artifact,
)
from jobs.repository.store import check_limit, read_job
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


_PAGE = 100
_ARCHIVED_PAGE = 1000
"""Larger than `_PAGE`, since the whole archive is read for each page."""
Format = Literal["application/json", "text/csv", "application/jsonl"]
_JSON: Format = "application/json"
_CSV: Format = "text/csv"
_LINES: Format = "application/jsonl"

_LINE_SEPARATORS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["results"])

Kind = Annotated[str | None, Query(description=f"Only this analysis: one of {', '.join(ANALYSES)}.")]
Sort = Annotated[
    str | None,
    Query(
        description="A metric, with `-` before it for descending; undefined values come last. "
        f"One of {', '.join(sorted(SORT_KEYS))}."
    ),
]


@record
class Selection:
    """A selection of rows, and their order."""

    kind: Kind = None
    sort: Sort = None

    def __post_init__(self) -> None:
        """Refuse a kind that is not on the menu, and a sort key that is not a metric."""
        if self.kind is not None and self.kind not in ANALYSES:
            raise invalid_parameter("kind", f"must be one of {', '.join(ANALYSES)}")
        if self.sort is not None and self.sort.removeprefix("-") not in SORT_KEYS:
            metrics = ", ".join(sorted(SORT_KEYS))
            raise invalid_parameter("sort", f"is not a metric; take one of {metrics}, with - for descending")

    def cursor(self, ledger_cursor: str | None) -> str | None:
        """Return the ledger's cursor as the caller gets it: with the kind, which the ledger's does not name."""
        return ledger_cursor if self.kind is None or ledger_cursor is None else f"{self.kind}.{ledger_cursor}"

    def ledger_cursor(self, cursor: str | None) -> str | None:
        """Return a caller's cursor as the ledger takes it.

        Raises:
            Refusal: 422 if it is one of another kind.
        """
        kind, _, rest = ("", "", cursor) if cursor is None or "." not in cursor else cursor.partition(".")
        if cursor is not None and kind != (self.kind or ""):
            raise invalid_parameter(
                "after", "is not a cursor of this `kind`; take `next` of the page before, or leave `after` out"
            )
        return rest


Chosen = Annotated[Selection, Depends()]


@record
class LayerPageRequest(Selection):
    """A selection of rows, the page of them, and the format."""

    after: Annotated[str | None, Query(description="`next` of the page before.")] = None
    limit: Annotated[int, Query(description="1 to 100.")] = 50
    accept: Annotated[
        str | None,
        Header(description="`application/json`, `text/csv` or `application/jsonl`: the one of the largest `q`."),
    ] = None


def owned_job(service: Service, tenant_id: str, job_id: str) -> Job:
    """Read a job of a tenant.

    Raises:
        Refusal: 404 otherwise, whether the job belongs to another tenant or does not exist.
    """
    job = read_job(service.engine, tenant_id, job_id)
    if job is None:
        raise not_found("there is no such job")
    return job


@router.get("/results", operation_id="read_results", summary="Summary and manifest", responses=error_responses(404))
def results(job_id: str, caller: Reader, service: ServiceOf) -> ResultsView:
    """The summary of each analysis, the environment in which it was computed, and links to layers and files."""
    job = owned_job(service, caller.tenant_id, job_id)
    files = list_artifacts(service.engine, caller.tenant_id, job_id)
    count = layer_count(service, job)
    return ResultsView(
        job=job_view(job),
        summary=job.summary or {},
        manifest=job.manifest,
        layers=LayersLink(count=count, href=f"/v1/jobs/{job.id}/layers"),
        artifacts=tuple(artifact_view(file) for file in files),
    )


_LAYERS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": LayerListView,
        "description": "A page as JSON; as CSV or JSON lines all rows at once",
        "headers": {"Link": {"description": '`rel="next"`, where there is more', "schema": {"type": "string"}}},
        "content": {_CSV: {"schema": {"type": "string"}}, _LINES: {"schema": {"type": "string"}}},
    },
    **error_responses(404, 422),
}


@router.get("/layers", operation_id="list_layers", response_model=LayerListView, summary="Layers", responses=_LAYERS)
def layers(
    job_id: str, response: Response, caller: Reader, service: ServiceOf, chosen: Annotated[LayerPageRequest, Depends()]
) -> Any:  # noqa: ANN401 - a page, or a stream
    """One row per layer and analysis: metrics, reproducibility record, what this run took."""
    job = owned_job(service, caller.tenant_id, job_id)
    wanted = _format(chosen.accept)
    if wanted != _JSON:
        return _stream(service, caller, job, wanted, chosen)
    check_limit(chosen.limit)
    after = chosen.ledger_cursor(chosen.after)
    query = LayerQuery(kind=chosen.kind, after=after, limit=chosen.limit, sort=chosen.sort)
    page = layer_page(service, job, query)
    further = chosen.cursor(page.next)
    if further is not None:
        parameters = {"kind": chosen.kind, "sort": chosen.sort, "after": further, "limit": str(chosen.limit)}
        following = urlencode({name: value for name, value in parameters.items() if value is not None})
        response.headers["link"] = f'</v1/jobs/{job.id}/layers?{following}>; rel="next"'
    response.headers["vary"] = "Accept"
    return LayerListView(items=tuple(layer_view(row) for row in page.items), next=further)


@router.get(
    "/layers.csv",
    operation_id="download_layers_csv",
    summary="Layers as CSV",
    response_class=Response,
    responses={200: {"content": {_CSV: {"schema": {"type": "string"}}}}, **error_responses(404, 422)},
)
def layers_csv(job_id: str, caller: Reader, service: ServiceOf, chosen: Chosen) -> Response:
    """All rows as a table for a spreadsheet; no cell of it is taken for a formula."""
    return _stream(service, caller, owned_job(service, caller.tenant_id, job_id), _CSV, chosen)


@router.get(
    "/layers.jsonl",
    operation_id="download_layers_jsonl",
    summary="Layers as JSON lines",
    response_class=Response,
    responses={200: {"content": {_LINES: {"schema": {"type": "string"}}}}, **error_responses(404, 422)},
)
def layers_jsonl(job_id: str, caller: Reader, service: ServiceOf, chosen: Chosen) -> Response:
    """All rows, one JSON object a line."""
    return _stream(service, caller, owned_job(service, caller.tenant_id, job_id), _LINES, chosen)


@router.get("/layers/{name:path}", operation_id="read_layer", summary="One layer", responses=error_responses(404, 422))
def layer(job_id: str, name: str, caller: Reader, service: ServiceOf, chosen: Chosen) -> LayerListView:
    """The rows of one layer by its module name, one per analysis."""
    job = owned_job(service, caller.tenant_id, job_id)
    page = layer_page(service, job, LayerQuery(kind=chosen.kind, layer=name, sort=chosen.sort))
    if not page.items:
        raise not_found("the job has no row of a layer of this name (yet)")
    return LayerListView(items=tuple(layer_view(row) for row in page.items), next=page.next)


@router.get(
    "/log",
    operation_id="download_log",
    summary="Reproducibility log",
    response_class=Response,
    responses={200: {"content": {_LINES: {"schema": {"type": "string"}}}}, **error_responses(404)},
)
def log(job_id: str, caller: Reader, service: ServiceOf) -> Response:
    """One JSON object per layer row: what was done to the layer, with which numbers, on what."""
    job = owned_job(service, caller.tenant_id, job_id)
    key = KeyInUse(service, caller.key)
    return _download(key, _lines(service, job, Selection(), _log_line), _LINES, f"{job.id}.log.jsonl")


def _format(accept: str | None) -> Format:
    """Return the format that ``accept`` prefers; JSON where it names none that is served here."""
    formats: dict[str, Format] = {_JSON: _JSON, _CSV: _CSV, _LINES: _LINES, "application/x-ndjson": _LINES}
    return preferred(accept, formats, _JSON)


def _stream(service: Service, caller: Caller, job: Job, wanted: Format, chosen: Selection) -> StreamingResponse:
    key = KeyInUse(service, caller.key)
    if wanted == _CSV:
        return _download(key, _table(service, job, chosen), "text/csv; charset=utf-8", f"{job.id}.layers.csv")
    lines = _lines(service, job, chosen, lambda row: _one_line(plain(layer_view(row))))
    return _download(key, lines, _LINES, f"{job.id}.layers.jsonl")


def _download(key: KeyInUse, chunks: Iterator[str], media_type: str, name: str) -> StreamingResponse:
    # the first chunk is read now, while a refusal (a sort key, the database) can still be answered
    first = next(chunks, "")

    def all_chunks() -> Iterator[str]:
        yield first
        for chunk in chunks:
            key.require_if_due()
            yield chunk

    headers = {"content-disposition": f'attachment; filename="{name}"', "vary": "Accept"}
    return StreamingResponse(all_chunks(), media_type=media_type, headers=headers)


def row_pages(service: Service, job: Job, chosen: Selection) -> Iterator[tuple[LayerRow, ...]]:
    """Yield all layer rows of a job, in pages."""
    after = None
    limit = _PAGE if job.archived_at is None else _ARCHIVED_PAGE
    while True:
        page = layer_page(service, job, LayerQuery(kind=chosen.kind, after=after, limit=limit, sort=chosen.sort))
        yield page.items
        after = page.next
        if after is None:
            return


def _lines(service: Service, job: Job, chosen: Selection, line: Callable[[LayerRow], str]) -> Iterator[str]:
    for rows in row_pages(service, job, chosen):
        yield "".join(line(row) for row in rows)


def _one_line(value: Any) -> str:  # noqa: ANN401
    """Return JSON on one line, with the line separators of Unicode escaped."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_SEPARATORS) + "\n"


def _log_line(row: LayerRow) -> str:
    outcome = row.outcome
    head = {
        "kind": row.kind,
        "ordinal": row.ordinal,
        "layer": row.layer,
        "status": outcome.get("status"),
        "reason": outcome.get("reason"),
    }
    return _one_line({**head, **(outcome.get("record") or {}), **row.observed})


def _table(service: Service, job: Job, chosen: Selection) -> Iterator[str]:
    kinds = [each for each in ANALYSES if each in job.kinds and chosen.kind in (None, each)]
    metrics = list(dict.fromkeys(name for each in kinds for name in ANALYSES[each].metrics.__annotations__))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow([*TABLE_COLUMNS, *metrics, "seconds", "sha256"])
    for rows in row_pages(service, job, chosen):
        for row in rows:
            view = layer_view(row)
            values = [getattr(view, name) for name in TABLE_COLUMNS]
            values += [(view.metrics or {}).get(name) for name in metrics]
            writer.writerow([table_cell(value) for value in (*values, row.observed.get("seconds"), row.sha256)])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
