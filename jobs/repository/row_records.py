"""Records of the ledger's rows, as the rest of the service reads them."""

import dataclasses
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from sqlalchemy import Row

from jobs.records import Artifact, Job

T = TypeVar("T")


def artifact_record(row: Row[Any]) -> Artifact:
    """Return the record of a row of `artifacts`."""
    return read_row(Artifact, row)


def job_record(row: Row[Any] | SimpleNamespace) -> Job:
    """Return the record of a row of `jobs`; the failure's detail, meant for operators, is left out."""
    failure = row.failure
    if failure is not None:
        failure = {name: value for name, value in failure.items() if name != "detail"}
    return read_row(Job, row, labels=row.labels or {}, kinds=tuple(row.kind.split(",")), failure=failure)


def read_row(record: type[T], row: Row[Any] | SimpleNamespace, **others: Any) -> T:  # noqa: ANN401 - fields of any type
    """Return a record with the columns of its fields' names, but for the others."""
    names = {field.name for field in dataclasses.fields(cast("Any", record))} - others.keys()
    return record(**{name: getattr(row, name) for name in names}, **others)
