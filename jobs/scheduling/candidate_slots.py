"""Candidate slots: the queued jobs that fit a worker's devices, by one statement of the ledger.

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
    literal,
    or_,
)

from catalog.record import record
from jobs.devices.requirements import suits_condition
from jobs.scheduling.fair_share import fair_order, goes_ahead, has_running_slot, is_due
from jobs.schema.clock import Moment, ledger_now
from jobs.schema.tables import jobs, tenants

NEEDS = func.coalesce(jobs.c.needs_bytes, 0)
_SHAPES = 128


@record
class CandidateSlot:
    """A free place for a job, on a device or on several of one node, without the numbers of the statement."""

    kind: str
    factories: tuple[str, ...]
    kept: bool
    """Whether the device is reserved for a job."""
    smaller: tuple[tuple[str, int], ...]
    """Classes of the smaller free devices of others, to whom what they could hold is left for a grace; each with the
    ranks of a job that such devices could hold together."""
    ranks: int | None = 1
    """The ranks of a job that it is for; None for a host, which ranks share however many they are."""


@functools.lru_cache(maxsize=_SHAPES)
def candidates_query(dialect: str, limit: int, slots: tuple[CandidateSlot, ...], *, capped: bool) -> Select[Any]:
    """Build the query for the next jobs that fit into a slot, with the label of the slot of each as `device`.

    It is executed with `most_bytes`, the most that is free on any device, `before_grace`, the grace in seconds as a
    negative number, `slot_values` of each slot, and where it is capped `most_running`, the cap.
    """
    taken = [(_takes(number, slot), bindparam(f"device_{number}", type_=String())) for number, slot in enumerate(slots)]
    # what fits nowhere is passed over by one comparison
    claimable = and_(_bytes("most_bytes") >= NEEDS, is_due(), or_(*(condition for condition, _ in taken)))
    if capped:
        claimable = and_(claimable, has_running_slot())
    return fair_order(dialect, limit, claimable, case(*taken))


def slot_values(number: int, device: str, free_bytes: int, kept: Any, most: Sequence[int]) -> dict[str, Any]:  # noqa: ANN401 - a row of `jobs`
    """Return the parameters of one slot for `candidates_query`."""
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


def _takes(number: int, slot: CandidateSlot) -> ColumnElement[bool]:
    shared = slot.ranks is None
    conditions = [
        _bytes(f"free_{number}") >= (NEEDS * jobs.c.world_size if shared else NEEDS),
        suits_condition(slot.kind, slot.factories),
    ]
    if not shared:
        conditions.append(jobs.c.world_size == literal(slot.ranks, literal_execute=True))
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
    for index, (device_class, ranks) in enumerate(slot.smaller):
        conditions.append(
            or_(
                *([jobs.c.world_size != literal(ranks, literal_execute=True)] if shared else []),
                _bytes(f"most_{number}_{index}") < NEEDS,
                jobs.c.device_class != device_class,  # not of one that no plan has tied to a class yet
                jobs.c.queued_at <= ledger_now(bindparam("before_grace", type_=Double())),
            )
        )
    return and_(*conditions)


def _bytes(name: str) -> BindParameter[int]:
    return bindparam(name, type_=BigInteger())
