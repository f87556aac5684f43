"""Fair share: the order in which queued jobs are claimed, fair between tenants whatever priorities they give."""

from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Row,
    Select,
    Subquery,
    and_,
    bindparam,
    case,
    func,
    literal,
    or_,
    select,
    true,
)
from sqlalchemy.sql.util import ClauseAdapter

from jobs.lifecycle import HELD
from jobs.schema.clock import ledger_now
from jobs.schema.tables import jobs, tenants

_held = jobs.alias("held")
_others = jobs.alias("others")

AHEAD = 100
"""A priority that no document can ask for: before all of a tenant's jobs, for what takes seconds and is waited for."""

_AHEAD_EVERY_SECONDS = 60.0
"""The least time since a tenant was served for its estimate to precede all jobs: longer than an estimate takes."""


def fair_order(dialect: str, limit: int, claimable: ColumnElement[bool], device: ColumnElement[Any]) -> Select[Any]:
    """Build the query for the next queued jobs in fair-share order.

    The tenant with the fewest running jobs, each rank of which counts, comes first, among equals the one that was
    served longest ago. A priority orders a tenant's own jobs: if it counted between tenants, one who asked for the
    highest would hold up all the others.

    An estimate precedes all jobs once, and then takes part in that order: a tenant that asks for estimates without end
    holds up no other.

    No more than `limit` jobs of each tenant are read, by the index that holds queued jobs alone, so its cost does not
    grow with a backlog. Numbering the whole queue instead takes 25 ms and more for ten thousand jobs.
    """
    first = _first_of_each(dialect, limit, claimable, device)
    running = (
        select(
            jobs.c.tenant_id,
            func.sum(jobs.c.world_size).label("number"),
            func.sum(case((jobs.c.priority >= AHEAD, 1), else_=0)).label("ahead"),
        )
        .where(jobs.c.state.in_(HELD))
        .group_by(jobs.c.tenant_id)
        .subquery("running")
    )
    position = func.row_number().over(
        partition_by=first.c.tenant_id, order_by=(first.c.priority.desc(), first.c.queued_at, first.c.id)
    )
    ahead = and_(goes_ahead(first.c.priority, first.c.served_at), position == 1, func.coalesce(running.c.ahead, 0) == 0)
    return (
        select(first.c.id, first.c.device, first.c.tenant_id)
        .outerjoin(running, running.c.tenant_id == first.c.tenant_id)
        .order_by(
            ahead.desc(),
            position + func.coalesce(running.c.number, 0),
            # with one worker nothing runs when it looks: without this the longer backlog would go first, whole
            first.c.served_at.asc().nulls_first(),
            first.c.queued_at,
            first.c.id,
        )
        .limit(limit)
    )


def goes_ahead(priority: ColumnElement[int], served_at: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition for a job to precede all others: an estimate whose tenant was not served just now."""
    return and_(priority >= AHEAD, or_(served_at.is_(None), served_at <= ledger_now(-_AHEAD_EVERY_SECONDS)))


def is_due() -> ColumnElement[bool]:
    """Return the condition for a queued job to be claimable now: no pause, and no passed deadline."""
    return and_(
        or_(jobs.c.deadline_at.is_(None), jobs.c.deadline_at > ledger_now()),
        or_(jobs.c.not_before.is_(None), jobs.c.not_before <= ledger_now()),
    )


def has_running_slot() -> ColumnElement[bool]:
    """Return the condition for a queued job's tenant to run fewer jobs than the parameter `most_running`.

    One estimate may run beside them: it takes seconds, and they may take days.
    """
    full = _tenants_with(_held, bindparam("most_running", type_=Integer()))
    estimating = _tenants_with(_others, literal(1, literal_execute=True)).where(_others.c.priority >= AHEAD)
    return or_(
        jobs.c.tenant_id.not_in(full),
        and_(jobs.c.priority >= AHEAD, jobs.c.tenant_id.not_in(estimating)),
    )


def tenants_without_slot(connection: Connection, most_running: int) -> frozenset[str]:
    """Return the tenants that run as many jobs as they may."""
    return frozenset(connection.execute(_tenants_with(_held, literal(most_running))).scalars())


def is_within_cap(connection: Connection, taken: Row[Any], most_running: int) -> bool:
    """Return whether a tenant may run the job that this transaction has just taken.

    Exact where the transaction has locked the tenant's row before it asks: then no other claim is under way. False if
    there is one job too many with it; an estimate may be that one.
    """
    running, estimates = connection.execute(_RUNNING, {"tenant": taken.tenant_id}).one()
    return bool(running <= most_running or (taken.priority >= AHEAD and estimates == 1))


_RUNNING = select(func.count(), func.coalesce(func.sum(case((jobs.c.priority >= AHEAD, 1), else_=0)), 0)).where(
    jobs.c.tenant_id == bindparam("tenant"), jobs.c.state.in_(HELD)
)


def _tenants_with(running: Any, number: ColumnElement[int]) -> Select[Any]:  # noqa: ANN401 - an alias of `jobs`
    """The tenants that have at least so many jobs running."""
    return (
        select(running.c.tenant_id)
        .where(running.c.state.in_(HELD))
        .group_by(running.c.tenant_id)
        .having(func.count() >= number)
    )


def _first_of_each(dialect: str, limit: int, claimable: ColumnElement[bool], device: ColumnElement[Any]) -> Subquery:
    """The first ``limit`` queued jobs of each tenant. SQLite knows no LATERAL, and PostgreSQL no index into an IN."""
    waiting = (
        select(jobs.c.id, jobs.c.tenant_id, jobs.c.priority, jobs.c.queued_at, device.label("device"))
        # in the statement's text: neither database uses a partial index for the value of a parameter
        .where(jobs.c.tenant_id == tenants.c.id, jobs.c.state == literal("queued", literal_execute=True), claimable)
        .order_by(jobs.c.priority.desc(), jobs.c.queued_at, jobs.c.id)
        .limit(limit)
        .correlate(tenants)
    )
    if dialect == "postgresql":
        each = waiting.lateral("each")
        return select(each, tenants.c.served_at).select_from(tenants.join(each, true())).subquery("first")
    listed = jobs.alias("listed")
    return (
        select(
            listed.c.id,
            listed.c.tenant_id,
            listed.c.priority,
            listed.c.queued_at,
            tenants.c.served_at,
            ClauseAdapter(listed).traverse(device).label("device"),
        )
        .select_from(tenants.join(listed, listed.c.id.in_(waiting.with_only_columns(jobs.c.id))))
        .subquery("first")
    )
