"""Counters: how often something has happened since the ledger began, where no row of a job would still tell.

They outlive processes, and jobs that were deleted. A counter's value is the sum of up to sixteen rows, of which
each writer takes one at random, so that two workers seldom wait for each other. What a transaction counts is
committed with it: nothing is counted twice by a process that is killed and does it again.
"""

import contextlib
import functools
import secrets
from collections.abc import Mapping
from typing import Literal

from sqlalchemy import Connection, Engine, Executable, func, select
from sqlalchemy.dialects import postgresql, sqlite

from jobs.errors import LedgerUnavailable
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.tables import counters

Counter = Literal[
    "attempt_failures", "device_milliseconds", "drains", "job_failures", "moves", "reaped", "refused_writes", "rounds"
]
"""``moves`` by the state moved to, ``attempt_failures`` by category and code, ``job_failures`` by category, ``rounds``
by reconciler, ``device_milliseconds`` by the tenant whose attempts have had a device."""

Reconciler = Literal["reaper"]

SHARDS = 16

OPERATOR_CODES = frozenset(
    {
        "artifact_damaged",
        "broken_child",
        "crashed",
        "deadline_exceeded",
        "device_lost",
        "disk_full",
        "disk_limit",
        "disk_quota",
        "factors_unavailable",
        "hub_unreachable",
        "machine",
        "no_progress",
        "not_started",
        "oom",
        "out_of_memory",
        "rank_lost",
        "rank_timed_out",
        "stopped_from_outside",
        "timeout",
        "unexpected",
        "worker_lost",
    }
)
"""Codes of failures that are counted by name. All others, and whatever a model's own code may send, are `other`."""


def add(connection: Connection, counter: Counter, label: str = "", count: int = 1) -> None:
    """Add to a counter; it counts if the transaction commits. The label is empty for a counter without one."""
    given = {"name": counter, "label": label, "shard": secrets.randbelow(SHARDS), "value": count}
    connection.execute(_one_more(connection.dialect.name), given)


def add_failure(connection: Connection, category: str, code: str, *, ends_job: bool) -> None:
    """Count a failed attempt, and a failed job where the attempt was its last.

    The category is `usage`, `transient` or `fatal`; a code outside `OPERATOR_CODES` counts as `other`.
    """
    add(connection, "attempt_failures", f"{category} {code if code in OPERATOR_CODES else 'other'}")
    if ends_job:
        add(connection, "job_failures", category)


def note_refused(engine: Engine) -> None:
    """Count a refused write of an attempt that has lost its job, outside the transaction that was rolled back.

    It stays uncounted while the database is away, which may be why the lease was lost.
    """
    with contextlib.suppress(LedgerUnavailable), writing(engine) as connection:
        add(connection, "refused_writes")


def note_round(engine: Engine, reconciler: Reconciler) -> None:
    """Record that a round of a reconciler has succeeded, in whichever process."""
    with writing(engine) as connection:
        add(connection, "rounds", reconciler)


def read_counters(connection: Connection) -> dict[Counter, dict[str, int]]:
    """Return the values of all counters."""
    found: dict[Counter, dict[str, int]] = {}
    total = func.sum(counters.c.value)
    for name, label, value in connection.execute(
        select(counters.c.name, counters.c.label, total).group_by(counters.c.name, counters.c.label)
    ):
        found.setdefault(name, {})[label] = int(value)
    return found


def seconds_since_round(connection: Connection) -> Mapping[Reconciler, float]:
    """Return the seconds since each reconciler's last successful round in any process."""
    last = (
        select(counters.c.label, func.max(counters.c.changed_at), ledger_now())
        .where(counters.c.name == "rounds")
        .group_by(counters.c.label)
    )
    return {label: (now - at).total_seconds() for label, at, now in connection.execute(last)}


@functools.cache
def _one_more(dialect: str) -> Executable:
    """The statement that counts; built once, since every move of a job counts."""
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    new = insert(counters).values(changed_at=ledger_now())
    return new.on_conflict_do_update(
        index_elements=[counters.c.name, counters.c.label, counters.c.shard],
        set_={"value": counters.c.value + new.excluded.value, "changed_at": new.excluded.changed_at},
    )
