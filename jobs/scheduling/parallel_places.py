"""Parallel places: how many pieces of one job could compute at once on the devices of the workers that run.

A GPU holds one attempt, and so does each slot of a worker that computes in its host's memory; none runs more than it
has slots. What others hold now counts too: it is free when they have ended, and a division is made for longer.
"""

from sqlalchemy import Engine, select

from jobs.devices.requirements import suits
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading
from jobs.schema.tables import devices, jobs, worker_devices, workers


def count_places(engine: Engine, job_id: str) -> int:
    """Return the number, at least 1, of attempts of a job's pieces that could compute at once.

    They compute on the job's class of device, where a plan has tied it to one.
    """
    offered = (
        select(workers.c.id, workers.c.slots, workers.c.factories, devices.c.uuid, devices.c.kind)
        .join(worker_devices, worker_devices.c.worker_id == workers.c.id)
        .join(devices, devices.c.uuid == worker_devices.c.device_uuid)
        .where(workers.c.expires_at >= ledger_now())
    )
    with reading(engine) as connection:
        job = connection.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()
        if job is None:
            return 1
        rows = [row for row in connection.execute(offered) if suits(job, row.kind, row.factories)]
    slots: dict[str, int] = {row.id: row.slots for row in rows}
    gpus = {row.uuid for row in rows if row.kind != "host"}
    in_hosts = {row.id for row in rows if row.kind == "host"}
    beside = sum(slots[each] for each in slots if each not in in_hosts)
    return max(1, min(len(gpus), beside) + sum(slots[each] for each in in_hosts))
