"""Classes of machines that an autoscaler offers: devices that are not there, and would be for a job that waits."""

from typing import Any

from sqlalchemy import Connection, Row, select

from jobs.devices.requirements import suits
from jobs.schema.clock import ledger_now
from jobs.schema.tables import machine_classes

_OFFERED_SECONDS = 900.0
"""An autoscaler renews its offers each round; one that is silent for longer starts nothing."""


def offered_class(connection: Connection, job: Any, needs: int) -> Row[Any] | None:  # noqa: ANN401 - a row of `jobs`
    """Return the smallest class of which one machine would take a job that needs so many bytes for one rank.

    The row has `name`, `kind`, `devices`, `device_bytes` and `factories`; None where there is none.
    """
    query = (
        select(machine_classes)
        .where(machine_classes.c.device_bytes >= needs, machine_classes.c.seen_at >= ledger_now(-_OFFERED_SECONDS))
        .order_by(machine_classes.c.device_bytes, machine_classes.c.name)
    )
    for each in connection.execute(query):
        on_host = each.kind == "host"
        large = each.device_bytes >= needs * (job.world_size if on_host else 1)
        if suits(job, each.kind, each.factories) and large and (on_host or each.devices >= job.world_size):
            return each
    return None
