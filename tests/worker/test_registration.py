"""A worker's entry in the ledger: there while it lives, made again where it was lost, and taken off at its end."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from sqlalchemy import select

from jobs.database import reading
from jobs.devices import list_devices, remove
from jobs.errors import SettingsInvalid
from jobs.tables import workers
from worker.agent import Agent
from worker.devices import devices_of, fake_gpu, host
from worker.settings import WorkerSettings


def entries(engine: Any) -> list[Any]:
    with reading(engine) as connection:
        return list(connection.execute(select(workers)).all())


def test_it_is_known_while_it_lives_and_renewed_and_made_again(
    ledger: Any, settings: Any, scripted: Any, eventually: Any
) -> None:
    agent = Agent(ledger, settings(lease_seconds=1, fake_gpus=(2**30, 2**31), slots=2), scripted(["finish"]))
    assert entries(ledger) == []
    agent.start()
    first = eventually(lambda: entries(ledger))[0]
    assert (first.slots, first.factories) == (2, [])
    assert [(each.capacity_bytes, each.stale) for each in list_devices(ledger)] == [(2**30, False), (2**31, False)]
    eventually(lambda: entries(ledger)[0].seen_at > first.seen_at)
    remove(ledger, first.id)
    eventually(lambda: entries(ledger))
    assert agent.drain(5)
    assert entries(ledger) == []


def test_a_worker_process_offers_what_its_environment_says(
    ledger: Any, ledger_url: Any, tmp_path: Any, eventually: Any
) -> None:
    given = {
        "KRONOSCOPE_DATABASE_URL": ledger_url,
        "KRONOSCOPE_ARTIFACTS": str(tmp_path / "artifacts"),
        "KRONOSCOPE_FAKE_GPUS": "16GiB, 80GiB",
        "KRONOSCOPE_NODE": "node-7",
        "KRONOSCOPE_ALLOW_FACTORIES": "lab.models:resnet",
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "worker.embedded"], env={**os.environ, **given}, stderr=subprocess.DEVNULL
    )
    try:
        entry = eventually(lambda: entries(ledger), 60)[0]
        assert (entry.node, entry.factories) == ("node-7", ["lab.models:resnet"])
        assert [each.capacity_bytes for each in list_devices(ledger)] == [16 * 2**30, 80 * 2**30]
        assert [each.uuid for each in list_devices(ledger)] == [fake_gpu("node-7", n, 1).uuid for n in (0, 1)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert entries(ledger) == []
    assert all(each.stale for each in list_devices(ledger))


def test_without_a_gpu_it_offers_the_host(settings: Any) -> None:
    (offered,) = devices_of("node", (), {"CUDA_VISIBLE_DEVICES": ""})()
    assert (offered.kind, offered.uuid) == ("host", host("another name of the same machine").uuid)
    assert 0 < offered.used_bytes < offered.capacity_bytes


@pytest.mark.parametrize("text", ["16 gigs", "auto", "0.5", "-1GiB", "16GiB,,many"])
def test_capacities_that_mean_nothing_are_refused(text: str, tmp_path: Any) -> None:
    with pytest.raises(SettingsInvalid, match=r'KRONOSCOPE_FAKE_GPUS has .* "16GiB,80GiB"'):
        WorkerSettings.from_environment(
            {"KRONOSCOPE_DATABASE_URL": f"sqlite:///{tmp_path}/x.db", "KRONOSCOPE_FAKE_GPUS": text}
        )


@pytest.mark.parametrize(
    ("given", "slots"), [({}, 3), ({"KRONOSCOPE_SLOTS": "2"}, 2), ({"KRONOSCOPE_FAKE_GPUS": ""}, 1)]
)
def test_it_has_a_slot_for_each_device_unless_told_otherwise(given: dict[str, str], slots: int, tmp_path: Any) -> None:
    environ = {
        "KRONOSCOPE_DATABASE_URL": f"sqlite:///{tmp_path}/x.db",
        "KRONOSCOPE_FAKE_GPUS": "16GiB,16GiB,80GiB",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert WorkerSettings.from_environment(environ | given).slots == slots


def test_no_slots_at_all_are_refused(tmp_path: Any) -> None:
    with pytest.raises(SettingsInvalid, match="KRONOSCOPE_SLOTS is 0; take 1 to 64"):
        WorkerSettings.from_environment(
            {"KRONOSCOPE_DATABASE_URL": f"sqlite:///{tmp_path}/x.db", "KRONOSCOPE_SLOTS": "0"}
        )
