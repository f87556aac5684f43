"""The requirements that a job has of a device: its class, the bytes there, and the factories that its worker lists."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, and_, or_

from jobs.schema.tables import jobs


def suits(job: Any, kind: str, factories: Collection[str]) -> bool:  # noqa: ANN401 - a row of `jobs`
    """Return whether a device may run a job, apart from its memory.

    Args:
        job: The job's row.
        kind: The device's kind.
        factories: The factories that its worker lists; `*` means all.

    Returns:
        True if the worker lists the job's factories, and the device has the class of the job's first attempt.
    """
    named = {name for name in (job.model_factory, job.data_factory) if name is not None}
    return job.device_class in (None, device_class(kind)) and ("*" in factories or named <= set(factories))


def suits_condition(kind: str, factories: Collection[str]) -> ColumnElement[bool]:
    """Return `suits` as an SQL condition on `jobs`.

    Args:
        kind: The device's kind.
        factories: The factories that its worker lists; `*` means all.

    Returns:
        The condition.
    """
    conditions: list[ColumnElement[bool]] = [
        or_(jobs.c.device_class.is_(None), jobs.c.device_class == device_class(kind))
    ]
    if "*" not in factories:
        listed = sorted(factories)
        conditions += [or_(each.is_(None), each.in_(listed)) for each in (jobs.c.model_factory, jobs.c.data_factory)]
    return and_(*conditions)


def device_class(kind: str) -> str:
    """Return the class of devices that compute the same numbers: a fake GPU computes on the CPU.

    Args:
        kind: A device's kind.

    Returns:
        `cuda` or `cpu`.
    """
    return "cuda" if kind == "cuda" else "cpu"


def needs_on(job: Any, kind: str) -> int:  # noqa: ANN401 - a row of `jobs`
    """Return the bytes that a job needs on one device.

    Args:
        job: The job's row; `needs_bytes` are those of one rank.
        kind: The device's kind.

    Returns:
        Bytes: of one rank on a GPU, of all ranks on the host that they share; 0 where nothing is known.
    """
    return (job.needs_bytes or 0) * (job.world_size if kind == "host" else 1)
