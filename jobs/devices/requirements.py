"""The requirements that a job has of a device: its class, the bytes there, and the factories that its worker lists."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, and_, or_

from jobs.schema.tables import jobs


def suits(job: Any, kind: str, factories: Collection[str]) -> bool:  # noqa: ANN401 - a row of `jobs`
    """Return whether a device may run a job, apart from its memory.

    It may if its worker lists the job's factories (`*` means all) and it has the class of the job's first attempt.
    """
    named = {name for name in (job.model_factory, job.data_factory) if name is not None}
    return job.device_class in (None, device_class(kind)) and ("*" in factories or named <= set(factories))


def suits_condition(kind: str, factories: Collection[str]) -> ColumnElement[bool]:
    """Return `suits` as an SQL condition on `jobs`."""
    conditions: list[ColumnElement[bool]] = [
        or_(jobs.c.device_class.is_(None), jobs.c.device_class == device_class(kind))
    ]
    if "*" not in factories:
        listed = sorted(factories)
        conditions += [or_(each.is_(None), each.in_(listed)) for each in (jobs.c.model_factory, jobs.c.data_factory)]
    return and_(*conditions)


def device_class(kind: str) -> str:
    """Return the class, `cuda` or `cpu`, of devices that compute the same numbers: a fake GPU computes on the CPU."""
    return "cuda" if kind == "cuda" else "cpu"


def needs_on(job: Any, kind: str) -> int:  # noqa: ANN401 - a row of `jobs`
    """Return the bytes that a job needs on one device, 0 where nothing is known.

    Those of one rank on a GPU, of all ranks on the host that they share.
    """
    return (job.needs_bytes or 0) * (job.world_size if kind == "host" else 1)
