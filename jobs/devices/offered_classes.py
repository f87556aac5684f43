"""Classes of machines that an autoscaler offers: devices that are not there, and would be for a job that waits."""

from typing import Any

from sqlalchemy import Connection, Row, select

from jobs.schema.clock import ledger_now
from jobs.schema.tables import machine_classes

_OFFERED_SECONDS = 900.0
"""An autoscaler renews its offers each round; one that is silent for longer starts nothing."""


def offered_classes(connection: Connection, needs: int) -> list[Row[Any]]:
    """Return the classes of which one device has room for a job.

    Args:
        connection: A connection with an open transaction.
        needs: The bytes of the job's plan.

    Returns:
        Their rows, with `kind`, `devices`, `device_bytes` and `factories`.
    """
    query = select(machine_classes).where(
        machine_classes.c.device_bytes >= needs, machine_classes.c.seen_at >= ledger_now(-_OFFERED_SECONDS)
    )
    return list(connection.execute(query).all())
