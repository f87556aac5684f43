"""Devices over HTTP: sizes and states as the ledger has them, in pages, for whoever may read."""

import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import delete, insert, update

from jobs.devices.registry import Device, Worker, register
from jobs.records import LOCAL_TENANT
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import device_leases, devices, worker_devices, workers
from kronoscope.client import Client
from tests.api.conftest import Keyed
from tests.api.expect import problem

GIB = 2**30
SMALL = Device(uuid="FAKE-a", kind="fake", name="fake GPU 0", capacity_bytes=16 * GIB, used_bytes=GIB)
LARGE = Device(uuid="FAKE-b", kind="fake", name="fake GPU 1", capacity_bytes=80 * GIB)
OLD = Device(uuid="FAKE-c", kind="fake", name="fake GPU 2", capacity_bytes=8 * GIB)
HOST = Device(uuid="HOST-a", kind="host", name="host memory", capacity_bytes=64 * GIB)


@pytest.fixture
def fleet(keyed: Keyed) -> Iterator[None]:
    """Two nodes: one with a free and a leased GPU, one with the host's memory and a GPU whose worker is silent."""

    def joined(node: str, *offered: Device, expiry: float = 600) -> None:
        worker = Worker(id=new_id(), node=node, process_space="s", version="0", slots=1, factories=())
        register(keyed.engine, worker, offered, expiry)

    joined("node-1", SMALL, LARGE)
    joined("node-2", HOST)
    joined("node-2", OLD, expiry=-1)
    lease(keyed, LARGE, 40 * GIB)
    lease(keyed, HOST, 3 * GIB, draining=True)
    with writing(keyed.engine) as connection:
        connection.execute(update(devices).where(devices.c.uuid == SMALL.uuid).values(reserved_job_id=new_id()))
    yield
    with writing(keyed.engine) as connection:
        for table in (device_leases, worker_devices, workers, devices):
            connection.execute(delete(table))


def lease(keyed: Keyed, device: Device, size: int, *, draining: bool = False) -> None:
    values: dict[str, Any] = {"job_id": new_id(), "fence": 1, "tenant_id": LOCAL_TENANT, "device_uuid": device.uuid}
    values |= {"bytes": size, "whole": device.whole, "worker_id": secrets.token_hex(4), "process_space": "s"}
    values |= {"leased_at": ledger_now(), "draining_at": ledger_now() if draining else None}
    with writing(keyed.engine) as connection:
        connection.execute(insert(device_leases).values(values))


def test_no_worker_is_no_error(ours: httpx.Client) -> None:
    assert ours.get("/v1/devices").json() == {"items": [], "next": None}


@pytest.mark.usefixtures("fleet")
def test_every_device_with_what_is_free(keyed: Keyed, ours: httpx.Client) -> None:
    found = ours.get("/v1/devices").json()["items"]
    names = ("node", "uuid", "state", "capacity_bytes", "free_bytes", "leased_bytes", "foreign_bytes", "jobs")
    assert {tuple(each[name] for name in names) for each in found} == {
        ("node-1", "FAKE-a", "free", 16 * GIB, 15 * GIB, 0, GIB, 0),
        ("node-1", "FAKE-b", "leased", 80 * GIB, 0, 40 * GIB, 0, 1),
        ("node-2", "FAKE-c", "stale", 8 * GIB, 8 * GIB, 0, 0, 0),
        ("node-2", "HOST-a", "draining", 64 * GIB, 61 * GIB, 3 * GIB, 0, 1),
    }
    assert [each["uuid"] for each in found if each["reserved"]] == ["FAKE-a"]
    with Client(keyed.server.url, keyed.reading_key) as client:
        assert [(each.uuid, each.state) for each in client.devices()] == [
            (each["uuid"], each["state"]) for each in found
        ]


@pytest.mark.usefixtures("fleet")
def test_in_pages(ours: httpx.Client) -> None:
    whole = ours.get("/v1/devices").json()["items"]
    seen = []
    address = "/v1/devices?limit=3"
    while address:
        answer = ours.get(address)
        seen += answer.json()["items"]
        address = answer.links.get("next", {}).get("url", "")
    assert seen == whole
    for query in ("limit=0", "limit=101", "after=canary"):
        assert "canary" not in problem(ours.get(f"/v1/devices?{query}"), 422)
