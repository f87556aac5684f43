"""A worker's entry in the ledger: there while it lives, made again where it was lost, and taken off at its end."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from sqlalchemy import delete, insert, select

from jobs.devices.registry import Device, leased_devices, list_devices, remove
from jobs.errors import SettingsInvalid
from jobs.records import LOCAL_TENANT
from jobs.scheduling.placement import has_future_work, next_places
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import device_leases, workers
from worker import devices as discover
from worker.agent.agent import Agent
from worker.agent.registration import Registration
from worker.devices import devices_of, fake_gpu, host
from worker.execution.computing_environment import computing_device
from worker.execution.failures import failure_of
from worker.execution.refusal import Unavailable
from worker.process.crash import DEVICE_LOST
from worker.settings import WorkerSettings


def entries(engine: Any) -> list[Any]:
    with reading(engine) as connection:
        return list(connection.execute(select(workers)).all())


def test_it_is_known_while_it_lives_and_renewed_and_made_again(
    ledger: Any, settings: Any, scripted: Any, eventually: Any
) -> None:
    agent = Agent(ledger, settings(lease_seconds=600, fake_gpus=(2**30, 2**31), slots=2), scripted(["finish"]))
    assert entries(ledger) == []
    agent.start()
    first = eventually(lambda: entries(ledger))[0]
    assert (first.slots, first.factories) == (2, [])
    assert [(each.capacity_bytes, each.stale) for each in list_devices(ledger)] == [(2**30, False), (2**31, False)]
    eventually(lambda: entries(ledger)[0].seen_at > first.seen_at)
    remove(ledger, first.id)
    eventually(lambda: entries(ledger))
    assert agent.drain(240)
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
        entry = eventually(lambda: entries(ledger))[0]
        assert (entry.node, entry.factories) == ("node-7", ["lab.models:resnet"])
        assert [each.capacity_bytes for each in list_devices(ledger)] == [16 * 2**30, 80 * 2**30]
        assert [each.uuid for each in list_devices(ledger)] == [fake_gpu("node-7", n, 1).uuid for n in (0, 1)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.wait()
    assert entries(ledger) == []
    assert all(each.stale for each in list_devices(ledger))


def test_while_no_device_answers_it_is_unknown_and_offers_what_answers_later(
    ledger: Any, settings: Any, eventually: Any
) -> None:
    offered: list[Device] = []
    registration = Registration(ledger, settings(lease_seconds=600), lambda: tuple(offered))
    registration.ensure()
    assert entries(ledger) == []
    registration.start()
    offered.append(fake_gpu("node", 0, 2**30))
    eventually(lambda: entries(ledger))
    offered.append(fake_gpu("node", 1, 2**31))
    eventually(lambda: len([each for each in list_devices(ledger) if not each.stale]) == 2)
    del offered[0]  # it has failed: nothing is put there any more, and the other one stays
    eventually(lambda: [each.capacity_bytes for each in list_devices(ledger) if not each.stale] == [2**31])
    registration.end()


def test_a_worker_whose_last_device_fails_stays_known_and_takes_nothing_until_it_is_well(
    ledger: Any, settings: Any, submitted: Any, eventually: Any, log_lines: Any
) -> None:
    only = fake_gpu("node", 0, 2**34)
    offered = [only]
    registration = Registration(ledger, settings(lease_seconds=600), lambda: tuple(offered))
    registration.start()
    job_id = submitted()

    def places() -> list[str]:
        return [each.job_id for each in next_places(ledger, registration.worker.id, 0)]

    def stale() -> list[bool]:
        return [each.stale for each in list_devices(ledger)]

    eventually(lambda: places() == [job_id])
    offered.clear()
    eventually(lambda: stale() == [True])
    first = entries(ledger)[0]
    eventually(lambda: entries(ledger)[0].seen_at > first.seen_at)
    assert (first.id, places(), stale()) == (registration.worker.id, [], [True])
    assert len([line for line in log_lines() if "no device answers" in line["event"]]) == 1
    offered.append(only)
    eventually(lambda: places() == [job_id])
    assert stale() == [False]
    registration.end()


def test_with_no_device_and_nothing_queued_a_worker_has_nothing_to_do(
    ledger: Any, settings: Any, submitted: Any
) -> None:
    registration = Registration(ledger, settings(), lambda: ())
    registration.ensure()
    assert not has_future_work(ledger, registration.worker.id, 60)
    submitted()
    assert has_future_work(ledger, registration.worker.id, 60)


@pytest.mark.parametrize("begun", [True, False], ids=["another device fails", "the worker begins"])
def test_what_a_job_held_is_not_others_where_it_ends_while_the_worker_registers(
    ledger: Any, settings: Any, eventually: Any, begun: bool
) -> None:
    """The reading has the job's memory, and when it is written the lease is gone."""
    failing, well = fake_gpu("node", 0, 2**30), fake_gpu("node", 1, 2**31)
    Registration(ledger, settings(), lambda: (failing, well)).ensure()
    with writing(ledger) as connection:
        leased = {"job_id": "job", "fence": 1, "tenant_id": LOCAL_TENANT, "bytes": 2**31, "whole": True}
        there = {"device_uuid": well.uuid, "worker_id": "w", "process_space": "s", "leased_at": ledger_now()}
        connection.execute(insert(device_leases).values(**leased, **there))
    readings = [(failing, well)] * begun
    ended = threading.Event()

    def read() -> tuple[Device, ...]:
        if readings:
            return readings.pop()
        if not leased_devices(ledger):  # by the next beat it is written, and what that one read would set it right
            ended.set()
            raise RuntimeError("the driver says nothing any more")
        with writing(ledger) as connection:
            connection.execute(delete(device_leases))
        return (replace(well, used_bytes=2**30),)

    registration = Registration(ledger, settings(), read)
    registration.ensure()
    registration.start()
    eventually(ended.is_set)
    registration.end()
    assert [each.foreign_bytes for each in list_devices(ledger) if each.uuid == well.uuid] == [0]


class Nvml:
    """A machine's GPUs, as its driver tells of them: one that is lost answers nothing."""

    class NVMLError(Exception):
        """What the driver says."""

        def __init__(self, value: int = pynvml.NVML_ERROR_GPU_IS_LOST) -> None:
            self.value = value

    NVML_DEVICE_MIG_ENABLE = 1
    NVML_ERROR_LIBRARY_NOT_FOUND = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    NVML_ERROR_NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION
    nvmlMemory_v2 = 2

    def __init__(self, *gpus: str, down: int | None = None) -> None:
        self.gpus = gpus
        self.down = down

    def nvmlInit(self) -> None:  # noqa: N802 - its name
        if self.down is not None:
            raise self.NVMLError(self.down)

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if self.gpus[index] == "lost":
            raise self.NVMLError
        if self.gpus[index] == "another's":
            raise self.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return self.gpus[index]

    def nvmlDeviceGetMigMode(self, gpu: str) -> tuple[int, int]:  # noqa: N802
        return (1, 1) if gpu.startswith("GPU-cut") else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: str) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: str, index: int) -> str:  # noqa: N802
        if gpu == "GPU-cut-into-none":
            raise self.NVMLError
        return f"{gpu}-{index}"

    def nvmlDeviceGetUUID(self, gpu: str) -> str:  # noqa: N802
        return gpu

    def nvmlDeviceGetName(self, gpu: str) -> str:  # noqa: N802
        return "a GPU"

    def nvmlDeviceGetMemoryInfo(self, gpu: str, version: int) -> SimpleNamespace:  # noqa: N802
        if gpu == "GPU-sick":
            raise self.NVMLError
        return SimpleNamespace(total=2**34, reserved=2**20, used=2**21)


MACHINE = ("GPU-well", "lost", "GPU-sick", "GPU-cut", "GPU-cut-into-none", "GPU-last")
"""Numbers 0 to 5: one is off the bus, one answers nothing but its name, and two are cut, one of them into no slice."""


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-well", "GPU-cut-0", "GPU-cut-1", "GPU-last"]),
        ("0,5", ["GPU-well", "GPU-last"]),
        ("5,GPU-cut-1", ["GPU-last", "GPU-cut-1"]),
        ("0,1,5", ["GPU-well", "GPU-last"]),
        ("1,0,5", ["GPU-well", "GPU-last"]),
        ("0,1,2,3,4,5", ["GPU-well", "GPU-cut-0", "GPU-last"]),
        # named by UUID, nobody can tell which of them it is that no longer says its own
        ("GPU-well,GPU-gone,MIG-gone,GPU-last", ["GPU-well", "GPU-last"]),
        ("GPU-gone,GPU-last", ["GPU-last"]),
        ("GPU-sick,GPU-last", ["GPU-last"]),
        # as CUDA does: a number that no GPU has, what is no name, and what names several
        ("0,6,5", ["GPU-well"]),
        ("0,-1,5", ["GPU-well"]),
        ("0,,5", ["GPU-well"]),
        ("0,NoDevFiles,5", ["GPU-well"]),
        ("0,GPU-cut-,5", ["GPU-well"]),
        ("", []),
    ],
)
def test_a_gpu_that_fails_takes_no_other_with_it(
    visible: str | None, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discover, "pynvml", Nvml(*MACHINE))
    assert [each.uuid for each in discover.nvidia_gpus(visible)] == uuids


@pytest.mark.parametrize("visible", ["GPU-well,GPU-gone,GPU-last", "0,7,1"])
def test_where_none_has_failed_a_name_of_none_ends_the_list(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "pynvml", Nvml("GPU-well", "GPU-last"))
    assert [each.uuid for each in discover.nvidia_gpus(visible)] == ["GPU-well"]


NOT_LOADED = pynvml.NVML_ERROR_DRIVER_NOT_LOADED


@pytest.mark.parametrize(
    ("machine", "nodes", "visible", "kinds"),
    [
        # GPUs are there, and their driver is not up (any more), or none of them answers: not the host in their stead
        (Nvml(down=NOT_LOADED), 2, None, []),
        (Nvml(down=NOT_LOADED), 0, "0,1", []),
        (Nvml(down=NOT_LOADED), 0, "GPU-well", []),
        (Nvml("lost"), 1, None, []),
        (Nvml("lost"), 1, "0", []),
        (Nvml("lost"), 1, "GPU-well", []),
        (Nvml("GPU-sick"), 1, None, []),
        (Nvml("lost", "GPU-well"), 2, None, ["cuda"]),
        # nobody gave it one: a node of a cluster without any, its GPUs hidden or somebody else's, a number of none
        (Nvml(down=NOT_LOADED), 0, None, ["host"]),
        (Nvml(down=NOT_LOADED), 2, "", ["host"]),
        (Nvml(down=NOT_LOADED), 2, "-1", ["host"]),
        (Nvml(down=NOT_LOADED), 2, "NoDevFiles", ["host"]),
        (Nvml(down=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), 2, "0", ["host"]),
        (Nvml(down=pynvml.NVML_ERROR_NO_PERMISSION), 2, "0", ["host"]),
        (Nvml("another's", "another's"), 2, None, ["host"]),
        (Nvml("another's", "lost"), 2, "NoDevFiles", ["host"]),
        (Nvml("GPU-well"), 1, "1", ["host"]),
        (Nvml("GPU-well"), 1, "", ["host"]),
        (Nvml(), 0, None, ["host"]),
    ],
)
def test_gpus_that_do_not_answer_are_waited_for(
    machine: Nvml, nodes: int, visible: str | None, kinds: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for number in range(nodes):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(discover, "_NODES", tmp_path)
    monkeypatch.setattr(discover, "pynvml", machine)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    offered = devices_of("node", (), environ)
    assert [each.kind for each in offered()] == kinds
    if not kinds:
        monkeypatch.setattr(discover, "pynvml", Nvml("GPU-well", "GPU-last"))
        assert {each.kind for each in offered()} == {"cuda"}


@pytest.mark.parametrize(
    ("machine", "gib", "slots"),
    [
        (Nvml(*(f"GPU-{number}" for number in range(8))), 512, 8),
        (Nvml(*(f"GPU-{number}" for number in range(8))), 8, 2),
        (Nvml(*(f"GPU-{number}" for number in range(8))), 3, 1),
        (Nvml("GPU-well"), 512, 1),
        (Nvml("lost", "lost"), 512, 2),
        (Nvml(), 512, 1),
    ],
)
def test_it_has_a_slot_for_each_gpu_that_there_is_host_memory_for(
    machine: Nvml, gib: int, slots: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(discover, "pynvml", machine)
    monkeypatch.setattr(discover, "host", lambda node: replace(host(node), capacity_bytes=gib * 2**30))
    environ = {"KRONOSCOPE_DATABASE_URL": f"sqlite:///{tmp_path}/x.db", "KRONOSCOPE_SLOTS": ""}
    assert WorkerSettings.from_environment(environ).slots == slots
    assert WorkerSettings.from_environment(environ | {"KRONOSCOPE_SLOTS": "5"}).slots == 5


def test_a_job_whose_gpu_does_not_come_up_computes_nowhere_else() -> None:
    if torch.cuda.is_available():
        assert computing_device("cuda").type == "cuda"
        return
    with pytest.raises(Unavailable, match="CUDA does not come up") as raised:
        computing_device("cuda")
    assert (raised.value.category, raised.value.code) == ("transient", DEVICE_LOST)
    assert [computing_device(kind).type for kind in ("host", "fake", None)] == ["cpu"] * 3


def test_a_gpu_that_is_counted_and_does_not_answer_is_found_out_before_anything_of_the_job_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uncorrectable(device: object = None) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", uncorrectable)
    with pytest.raises(RuntimeError, match="ECC") as raised:
        computing_device("cuda")
    assert failure_of(raised.value).code == DEVICE_LOST


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
    ("given", "slots"),
    [({}, 3), ({"KRONOSCOPE_SLOTS": "2"}, 2), ({"KRONOSCOPE_SLOTS": ""}, 3), ({"KRONOSCOPE_FAKE_GPUS": ""}, 1)],
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
