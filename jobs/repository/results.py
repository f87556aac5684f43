"""The results of a job: layer rows, artifacts and events, read by its tenant in bounded pages."""

import base64
import binascii
import dataclasses
import heapq
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import get_args, get_type_hints

from sqlalchemy import ColumnElement, Double, Engine, Table, and_, func, literal, or_, select
from sqlalchemy import cast as sql_cast

from catalog import ANALYSES
from catalog.record import record
from jobs.errors import PageRefused
from jobs.records import Artifact, Event, LayerPage, LayerRow
from jobs.repository.row_records import artifact_record, read_row
from jobs.repository.store import check_limit
from jobs.schema.database import reading
from jobs.schema.identifiers import is_id
from jobs.schema.tables import artifacts, job_events, layer_results

MAX_ORDINAL = 2**31 - 1


def _numbers(metrics: type) -> set[str]:
    hints = get_type_hints(metrics)
    return {
        field.name
        for field in dataclasses.fields(metrics)
        if {int, float} & {hints[field.name], *get_args(hints[field.name])}
    }


SORT_KEYS: frozenset[str] = frozenset().union(*(_numbers(analysis.metrics) for analysis in ANALYSES.values()))
"""Metrics that layers can be sorted by: the numeric ones of the menu, and no other text reaches SQL."""


@record
class LayerQuery:
    """A selection of layer rows, their order and a page of them."""

    kind: str | None = None
    """The analysis; None selects all."""
    layer: str | None = None
    """The layer's name; None selects all."""
    sort: str | None = None
    """A metric, or ``-metric`` for descending order, with nulls last; None sorts by kind and ordinal."""
    after: str | None = None
    """The cursor of the page before."""
    limit: int = 100

    @property
    def descending(self) -> bool:
        """Whether the order is descending."""
        return self.sort is not None and self.sort.startswith("-")


ALL_LAYERS = LayerQuery()
"""The first page of all rows."""


def layer_rows(
    engine: Engine,
    tenant_id: str,
    job_id: str,
    asked: LayerQuery = ALL_LAYERS,
) -> LayerPage:
    """Return a page of a job's layer rows from the ledger.

    Args:
        engine: The ledger.
        tenant_id: The tenant; another tenant's job has no rows.
        asked: Which rows, in which order and from where on.

    Returns:
        The rows, and the cursor of the next page, or None on the last one.

    Raises:
        PageRefused: If the limit, the sort key or the cursor is not valid.
    """
    check_limit(asked.limit)
    table = layer_results.c
    query = select(layer_results).where(*_owned(layer_results, tenant_id, job_id))
    if asked.kind is not None:
        query = query.where(table.kind == asked.kind.replace("\0", ""))
    if asked.layer is not None:
        query = query.where(table.layer == asked.layer.replace("\0", ""))
    value = _sort_value(asked.sort, descending=asked.descending)
    if asked.after is not None:
        query = query.where(_beyond(value, _read_cursor(asked.after, asked.sort), descending=asked.descending))
    order = value.desc() if asked.descending else value.asc()
    query = (
        query.add_columns(value.label("sort_value")).order_by(order, table.kind, table.ordinal).limit(asked.limit + 1)
    )
    with reading(engine, tenant_id) as connection:
        rows = connection.execute(query).all()
    kept = rows[: asked.limit]
    last = kept[-1] if len(rows) > asked.limit else None
    following = None if last is None else _cursor(asked.sort, last.sort_value, last.kind, last.ordinal)
    return LayerPage(items=tuple(read_row(LayerRow, row) for row in kept), next=following)


def every_layer_row(engine: Engine, tenant_id: str, job_id: str) -> Iterator[LayerRow]:
    """Yield all of a job's layer rows from the ledger, page by page."""
    after = None
    while True:
        page = layer_rows(engine, tenant_id, job_id, LayerQuery(after=after))
        yield from page.items
        after = page.next
        if after is None:
            return


def page_of(rows: Iterable[LayerRow], asked: LayerQuery = ALL_LAYERS) -> LayerPage:
    """Return the page that `layer_rows` returns, of all rows of a job, in any order, that are not in the ledger.

    No more than a page of them is kept in memory. ``PageRefused`` if the sort key or the cursor is not valid.
    """
    number = _number_of(asked.sort)
    beyond = None if asked.after is None else _read_cursor(asked.after, asked.sort)
    sign = -1 if asked.descending else 1

    def place(row: LayerRow) -> tuple[float, str, int]:
        return sign * number(row), row.kind, row.ordinal

    kind, layer = asked.kind, asked.layer
    wanted = (row for row in rows if kind in (None, row.kind) and layer in (None, row.layer))
    if beyond is not None:
        last = (sign * beyond[0], *beyond[1:])
        wanted = (row for row in wanted if place(row) > last)
    found = heapq.nsmallest(asked.limit + 1, wanted, key=place)
    kept = found[: asked.limit]
    more = len(found) > asked.limit
    following = _cursor(asked.sort, number(kept[-1]), kept[-1].kind, kept[-1].ordinal) if more else None
    return LayerPage(items=tuple(kept), next=following)


def count_layers(engine: Engine, tenant_id: str, job_id: str) -> int:
    """Return the number of layer rows that a job has so far; 0 for a job of another tenant."""
    return _count(engine, layer_results, tenant_id, job_id)


def count_events(engine: Engine, tenant_id: str, job_id: str) -> int:
    """Return the number of a job's events in the ledger; 0 for a job of another tenant."""
    return _count(engine, job_events, tenant_id, job_id)


def _count(engine: Engine, table: Table, tenant_id: str, job_id: str) -> int:
    query = select(func.count()).select_from(table).where(*_owned(table, tenant_id, job_id))
    with reading(engine, tenant_id) as connection:
        return connection.execute(query).scalar_one()


def list_artifacts(engine: Engine, tenant_id: str, job_id: str) -> tuple[Artifact, ...]:
    """Return the rows of all files of a job, by name; none for a job of another tenant."""
    query = select(artifacts).where(*_owned(artifacts, tenant_id, job_id)).order_by(artifacts.c.name)
    with reading(engine, tenant_id) as connection:
        return tuple(artifact_record(row) for row in connection.execute(query))


def read_artifact(engine: Engine, tenant_id: str, job_id: str, name: str) -> Artifact | None:
    """Return the row of one file, or None if there is none of that name; `ArtifactFolder.open` opens it."""
    query = select(artifacts).where(*_owned(artifacts, tenant_id, job_id), artifacts.c.name == name.replace("\0", ""))
    with reading(engine, tenant_id) as connection:
        row = connection.execute(query).one_or_none()
    return None if row is None else artifact_record(row)


def events_after(engine: Engine, tenant_id: str, job_id: str, seq: int = 0, limit: int = 100) -> tuple[Event, ...]:
    """Return a page of a job's events in the ledger.

    Args:
        seq: Only events with a greater number; numbers grow, with gaps.
        limit: The page's size, 1 to 100.

    Returns:
        The events in order; empty for a job of another tenant.

    Raises:
        PageRefused: If the limit is out of range.
    """
    check_limit(limit)
    query = (
        select(job_events)
        .where(*_owned(job_events, tenant_id, job_id), job_events.c.seq > max(0, min(seq, 2**63 - 1)))
        .order_by(job_events.c.seq)
        .limit(limit)
    )
    with reading(engine, tenant_id) as connection:
        return tuple(Event(seq=row.seq, at=row.at, type=row.type, data=row.data) for row in connection.execute(query))


def _owned(table: Table, tenant_id: str, job_id: str) -> tuple[ColumnElement[bool], ...]:
    return (table.c.tenant_id == tenant_id, table.c.job_id == (job_id if is_id(job_id) else ""))


def _sort_value(sort: str | None, *, descending: bool) -> ColumnElement[float]:
    """Return the sort value in SQL: a constant without a sort key, and beyond every number where it is null."""
    if sort is None:
        return sql_cast(literal(0.0), Double)
    metric = layer_results.c.outcome["metrics", _sort_key(sort)].as_float()
    return func.coalesce(metric, sql_cast(literal(-math.inf if descending else math.inf), Double))


def _sort_key(sort: str) -> str:
    key = sort.removeprefix("-")
    if key not in SORT_KEYS:
        raise PageRefused("sort", f"is not a metric; take one of {', '.join(sorted(SORT_KEYS))}, with - for descending")
    return key


def _beyond(value: ColumnElement[float], cursor: tuple[float, str, int], *, descending: bool) -> ColumnElement[bool]:
    last, kind, ordinal = cursor
    table = layer_results.c
    past = value < last if descending else value > last
    return or_(
        past,
        and_(value == last, or_(table.kind > kind, and_(table.kind == kind, table.ordinal > ordinal))),
    )


def _number_of(sort: str | None) -> Callable[[LayerRow], float]:
    """Return the sort value of a row outside of SQL, as `_sort_value`."""
    if sort is None:
        return lambda _: 0.0
    key = _sort_key(sort)
    beyond = -math.inf if sort.startswith("-") else math.inf

    def number(row: LayerRow) -> float:
        value = (row.outcome.get("metrics") or {}).get(key)
        return beyond if value is None else float(value)

    return number


def _cursor(sort: str | None, value: float, kind: str, ordinal: int) -> str:
    text = json.dumps([sort, repr(float(value)), kind, ordinal])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_cursor(cursor: str, sort: str | None) -> tuple[float, str, int]:
    refusal = PageRefused("after", "is not a cursor of this order; take `next` of the page before")
    try:
        padded = cursor[:1000] + "=" * (-len(cursor) % 4)
        made_for, value, kind, ordinal = json.loads(base64.urlsafe_b64decode(padded))
        number = float(value)
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise refusal from error
    if (
        made_for != sort
        or math.isnan(number)
        or kind not in ANALYSES
        or type(ordinal) is not int
        or not 0 <= ordinal <= MAX_ORDINAL
    ):
        raise refusal
    return number, kind, ordinal
