"""A plan that is too large for its device waits for a machine that an autoscaler would start, and only for such."""

import secrets
from typing import Any

import pytest
from sqlalchemy import Engine, insert, select

from catalog.frames import Planned
from jobs.devices.leases import release
from jobs.devices.offered_classes import offered_class
from jobs.devices.registry import Device, Worker, register
from jobs.queue.attempt_endings import hand_back
from jobs.queue.attempt_writes import write_plan
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT
from jobs.repository.store import read_job
from jobs.scheduling.placement import next_places, placement_of
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import jobs, machine_classes

GIB = 2**30
OFFERED = {
    "scope": "slurm", "name": "large", "kind": "fake", "device_bytes": 8 * GIB, "devices": 1, "jobs_per_device": 1,
    "ceiling": 1, "factories": ["*"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "age", "stays"),
    [
        ({}, 60, False),
        ({}, 3600, True),  # its autoscaler was not heard of for an hour
        ({"device_bytes": 4 * GIB}, 60, True),
        ({"kind": "cuda"}, 60, False),  # no class of devices has computed for it yet
        ({"factories": []}, 60, True),
        (None, 60, True),
    ],
)
def test_a_job_is_handed_back_for_a_class_that_holds_its_plan(
    ledger: Engine, queued: Any, changes: Any, age: float, stays: bool
) -> None:
    job_id = queued(model={"source": "factory", "factory": "lab.models:net"})
    worker = Worker(id=new_id(), node="n", process_space="s", version="0", slots=1, factories=("*",))
    register(ledger, worker, [Device(uuid="FAKE-a", kind="fake", name="a", capacity_bytes=2 * GIB)], 600)
    if changes is not None:
        with writing(ledger) as connection:
            connection.execute(insert(machine_classes).values(OFFERED | changes | {"seen_at": ledger_now(-age)}))
    (place,) = next_places(ledger, worker.id, 6)
    held = claim(ledger, job_id, "w", secrets.token_hex(8), 45, place=place)
    assert held is not None
    assert write_plan(ledger, held, Planned(plan={"device_peak_bytes": 6 * GIB, "device": "cpu"})) is stays
    if not stays:
        assert hand_back(ledger, held) == "queued"
        release(ledger, job_id, held.fence)
        assert next_places(ledger, worker.id, 6) == []  # it waits for the machine
        seen = read_job(ledger, LOCAL_TENANT, job_id)
        assert seen is not None
        placement = placement_of(ledger, seen)
        assert placement is not None
        assert placement.status == "no_worker"
        assert placement.message.endswith(
            "; no worker that is there can take it; it begins on a machine of the class large (8.59 GB), which an "
            "autoscaler starts"
        )


@pytest.mark.parametrize(("devices", "ranks", "taken"), [(2, 4, False), (4, 4, True), (4, 1, True)])
def test_a_class_takes_no_more_ranks_than_it_has_devices(
    ledger: Engine, queued: Any, devices: int, ranks: int, taken: bool
) -> None:
    job_id = queued(world_size=ranks)
    with writing(ledger) as connection:
        offer = OFFERED | {"devices": devices, "seen_at": ledger_now()}
        connection.execute(insert(machine_classes).values(offer))
        row = connection.execute(select(jobs).where(jobs.c.id == job_id)).one()
        assert (offered_class(connection, row, 6 * GIB) is not None) is taken
        assert offered_class(connection, row, 9 * GIB) is None
    seen = read_job(ledger, LOCAL_TENANT, job_id)
    assert seen is not None
    placement = placement_of(ledger, seen)
    assert placement is not None
    assert ("class large" in placement.message) is taken
