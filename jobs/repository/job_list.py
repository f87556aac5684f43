"""Lists of jobs: rows without what may be large, unless it is asked for, and then as many as a megabyte holds.

A document may have 256 KiB and a plan more: a page of a hundred of them took 23 MB. Of its document a row holds the
sources of model, data and factors, and the covered share that it asks for; the database cuts them out.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Connection, Row, Select, Text, cast, func

from jobs.records import Job
from jobs.repository.row_records import job_record
from jobs.schema.tables import jobs

FIELDS = ("document", "plan")
"""Fields that a list holds only on request."""
_LARGE = (*FIELDS, "manifest")
_LISTED = ("refused", "notices", "imported")
"""Fields of a manifest that a list holds."""
_SOURCES = ("model", "data", "factors", "series")
_PAGE_BYTES = 2**20
_LONGEST_VALUE = 300


def read_jobs(
    connection: Connection, query: Select[Any], limit: int, fields: tuple[str, ...]
) -> tuple[tuple[Job, ...], bool]:
    """Read one page of jobs."""
    query = query.limit(limit + 1)
    most = limit
    if fields:
        most = min(limit, _fitting(connection, query, fields))
    document = jobs.c.document
    columns: list[Any] = [column for column in jobs.c if column.name in fields or column.name not in _LARGE]
    if "document" not in fields:
        columns += [document[name].label(f"document_{name}") for name in _SOURCES]
        columns.append(document["collection", "min_coverage"].label("document_min_coverage"))
    columns += [jobs.c.manifest[name].label(name) for name in _LISTED]
    rows = connection.execute(query.with_only_columns(*columns).limit(most + 1)).all()
    return tuple(_record(row, fields) for row in rows[:most]), len(rows) > most


def _fitting(connection: Connection, query: Select[Any], fields: tuple[str, ...]) -> int:
    """Return how many of the first rows fit into a page, and 1 at least."""
    size: Any = sum(func.coalesce(func.length(cast(jobs.c[name], Text)), 0) for name in fields)
    left, count = _PAGE_BYTES, 0
    for characters in connection.execute(query.with_only_columns(size)).scalars():
        left -= characters
        if count and left < 0:
            break
        count += 1
    return max(1, count)


def _record(row: Row[Any], fields: tuple[str, ...]) -> Job:
    values = dict.fromkeys(_LARGE) | dict(row._mapping)  # noqa: SLF001 - SQLAlchemy's documented name
    values["manifest"] = {name: values[name] or [] for name in _LISTED}
    if "document" not in fields:
        values["document"] = {
            **{name: _scalars(values[f"document_{name}"]) for name in _SOURCES},
            "collection": {"min_coverage": values["document_min_coverage"]},
        }
    return job_record(SimpleNamespace(**values))


def _scalars(source: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the short plain values of a source: its kind and name, and none of its options."""
    if source is None:
        return None
    return {
        name: value
        for name, value in source.items()
        if isinstance(value, (str, int, float, bool)) and len(str(value)) <= _LONGEST_VALUE
    }
