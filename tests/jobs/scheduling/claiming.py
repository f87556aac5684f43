"""The claims of agents, and fleets to claim on, for the tests of placement."""

import secrets
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Engine, select

from jobs.devices.leases import release
from jobs.devices.registry import Device
from jobs.queue.attempt_endings import finish
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.store import read_job
from jobs.scheduling.placement import next_places, placement_of
from jobs.schema.database import reading
from jobs.schema.tables import device_leases, devices

GIB = 2**30
RACED_ON = ("postgresql", pytest.param("sqlite", marks=pytest.mark.part(of=8, by=())))
"""Databases of races of many hands, of which SQLite lets one write at a time."""


def gpu(name: str, gib: int, used: int = 0) -> Device:
    return Device(uuid=f"FAKE-{name}", kind="fake", name=name, capacity_bytes=gib * GIB, used_bytes=used * GIB)


def shared(name: str, gib: int, used: int = 0) -> Device:
    return Device(uuid=f"HOST-{name}", kind="host", name=name, capacity_bytes=gib * GIB, used_bytes=used * GIB)


def take(engine: Engine, worker: str, grace: float = 6) -> Claim | None:
    """What an agent with a free slot does."""
    for place in next_places(engine, worker, grace):
        held = claim(engine, place.job_id, "w", secrets.token_hex(8), 45, place=place)
        if held is not None:
            return held
    return None


def end(engine: Engine, held: Claim) -> None:
    finish(engine, held)
    release(engine, held.job_id, held.fence)


def over_committed(engine: Engine) -> list[str]:
    """Devices of which more is leased than they have; the oracle reads the rows and nothing of ours."""
    with reading(engine) as connection:
        leased = connection.execute(select(device_leases)).all()
        capacity = {row.uuid: row for row in connection.execute(select(devices)).all()}
    held, number = Counter[str](), Counter[str]()
    for row in leased:
        held[row.device_uuid] += row.bytes
        number[row.device_uuid] += 1
    return [
        uuid
        for uuid in held
        if held[uuid] > capacity[uuid].capacity_bytes or (capacity[uuid].kind != "host" and number[uuid] > 1)
    ]


def status(engine: Engine, job_id: str) -> Any:
    job = read_job(engine, LOCAL_TENANT, job_id)
    assert job is not None
    return placement_of(engine, job)
