"""Which queued jobs a worker may put on its devices, asked of the ledger in one statement.

A `CandidateSlot` determines the text of the statement; its numbers are bound when it is executed. So the statement is
built once for each shape of fleet that a worker meets, not at each poll: building it takes longer than the answer.
"""

import functools
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Double,
    Integer,
    Select,
    String,
    and_,
    bindparam,
    case,
    func,
    or_,
)

from catalog.record import record
from jobs.devices.leases import suits_condition
from jobs.scheduling.fair_share import fair_order, goes_ahead, has_running_slot, is_due
from jobs.schema.clock import Moment, ledger_now
from jobs.schema.tables import jobs, tenants

NEEDS = func.coalesce(jobs.c.needs_bytes, 0)
_SHAPES = 128


@record
class CandidateSlot:
    """A free place for a job on a device, without the numbers that the statement is executed with."""

    kind: str
    factories: tuple[str, ...]
    kept: bool
    """Whether the device is reserved for a job."""
    smaller: tuple[str, ...]
    """Classes of the smaller free devices of others, to whom what they could hold is left for a grace."""


def candidates_query(dialect: str, limit: int, slots: Sequence[CandidateSlot], *, capped: bool) -> Select[Any]:
    """Build the query for the next jobs that fit into a slot, with the device of each as `device`.

    It is executed with `most_bytes`, the most that is free on any device, `before_grace`, the grace in seconds as a
    negative number, `slot_values` of each slot, and where it is capped `most_running`, the cap.

    Args:
        dialect: The database's.
        limit: The number of jobs.
        slots: The free slots of a worker.
        capped: Whether there is a cap on the running jobs of a tenant.

    Returns:
        The query; it is cached.
    """
    return _built(dialect, limit, tuple(slots), capped)


def slot_values(number: int, device: str, free_bytes: int, kept: Any, most: Sequence[int]) -> dict[str, Any]:  # noqa: ANN401 - a row of `jobs`
    """Return the parameters of one slot for `candidates_query`.

    Args:
        number: The slot's position.
        device: The device's UUID.
        free_bytes: The free bytes there.
        kept: The row of the job that the device is reserved for, or None.
        most: The most free bytes on a smaller device, in the order of the slot's `smaller` classes.

    Returns:
        Values by parameter.
    """
    values = {f"device_{number}": device, f"free_{number}": free_bytes}
    values |= {f"most_{number}_{index}": each for index, each in enumerate(most)}
    if kept is not None:
        values |= {
            f"kept_id_{number}": kept.id,
            f"kept_tenant_{number}": kept.tenant_id,
            f"kept_priority_{number}": kept.priority,
            f"kept_since_{number}": kept.queued_at,
        }
    return values


@functools.lru_cache(maxsize=_SHAPES)
def _built(dialect: str, limit: int, slots: tuple[CandidateSlot, ...], capped: bool) -> Select[Any]:
    taken = [(_takes(number, slot), bindparam(f"device_{number}", type_=String())) for number, slot in enumerate(slots)]
    # what fits nowhere is passed over by one comparison
    claimable = and_(_bytes("most_bytes") >= NEEDS, is_due(), or_(*(condition for condition, _ in taken)))
    if capped:
        claimable = and_(claimable, has_running_slot())
    return fair_order(dialect, limit, claimable, case(*taken))


def _takes(number: int, slot: CandidateSlot) -> ColumnElement[bool]:
    conditions = [_bytes(f"free_{number}") >= NEEDS, suits_condition(slot.kind, slot.factories)]
    if slot.kept:
        conditions.append(
            or_(
                goes_ahead(jobs.c.priority, tenants.c.served_at),
                and_(
                    jobs.c.tenant_id == bindparam(f"kept_tenant_{number}", type_=String()),
                    jobs.c.priority > bindparam(f"kept_priority_{number}", type_=Integer()),
                ),
                # named, as what SQLite keeps of a moment is finer than what comes back of it
                jobs.c.id == bindparam(f"kept_id_{number}", type_=String()),
                jobs.c.queued_at < bindparam(f"kept_since_{number}", type_=Moment()),
            )
        )
    for index, device_class in enumerate(slot.smaller):
        conditions.append(
            or_(
                _bytes(f"most_{number}_{index}") < NEEDS,
                jobs.c.device_class != device_class,  # not of one that no plan has tied to a class yet
                jobs.c.queued_at <= ledger_now(bindparam("before_grace", type_=Double())),
            )
        )
    return and_(*conditions)


def _bytes(name: str) -> BindParameter[int]:
    return bindparam(name, type_=BigInteger())
