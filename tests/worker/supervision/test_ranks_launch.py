"""What the ranks of a job are given: all leased GPUs to see, and each its part of threads and memory."""

from typing import Any

import pytest

from jobs.devices.leases import DeviceLease
from jobs.records import Claim
from worker.devices import host
from worker.supervision.child_launch import assignment, computing_threads, environment

MIB = 2**20


@pytest.fixture
def ledger_url() -> str:
    """No test here opens the ledger that its settings name."""
    return "sqlite:///nowhere.db"


class Scratch:
    """Folders that nothing is written to."""

    def attempt_folder(self, job: str, fence: int) -> str:
        return f"/scratch/{job}/{fence}"

    def before(self, _job: str, _fence: int) -> tuple[str, ...]:
        return ()


def claim_of(ranks: int, kind: Any, bound: int | None, **changes: Any) -> Claim:
    uuids = ("HOST-a",) if kind == "host" else tuple(f"GPU-{number}" for number in range(ranks))
    given: dict[str, Any] = {
        "job_id": "job", "tenant_id": "local", "kinds": ("factors",), "document": {}, "document_sha256": "0",
        "fence": 1, "claim_token": "t", "attempt": 1, "failures": 0, "plan": None, "manifest": None, "completed": (),
        "cancel_requested_at": None, "deadline_at": None, "world_size": ranks,
        "lease": DeviceLease(device_uuids=uuids, kind=kind, bytes=bound or 0, bound_bytes=bound),
    }  # fmt: skip
    return Claim(**given | changes)


def bounds(claim: Claim, settings: Any) -> Any:
    told = assignment(claim, settings, settings.ledger.artifact_root, Scratch())  # type: ignore[arg-type]
    return told.bounds


def test_every_rank_sees_all_leased_gpus_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert environment(claim_of(2, "cuda", 9), 1)["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert environment(claim_of(2, "fake", 9), 1)["CUDA_VISIBLE_DEVICES"] == ""
    assert environment(claim_of(2, "host", 9), 1)["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("kind", "ranks", "threads"), [("host", 2, 4), ("host", 16, 1), ("fake", 2, 8), ("cuda", 4, 8)]
)
def test_on_a_host_ranks_divide_the_threads_of_a_slot(settings: Any, kind: str, ranks: int, threads: int) -> None:
    chosen = settings(threads=8)
    assert computing_threads(claim_of(ranks, kind, None), chosen)[0] == threads
    # the first attempt's plan has those of one rank
    assert computing_threads(claim_of(ranks, kind, None, plan={"threads": 3}), chosen)[0] == 3


@pytest.mark.parametrize(
    ("slots", "ranks", "parts"),
    [
        (1, 2, 2),  # alone on the node
        (4, 4, 4),  # all GPUs: nobody runs beside it
        (4, 2, 4),  # two others may
        (4, 3, 4),
    ],
)
def test_beside_gpus_the_ranks_and_all_other_slots_share_the_host(
    settings: Any, slots: int, ranks: int, parts: int
) -> None:
    chosen = settings(slots=slots, fake_gpus=(MIB,) * max(slots, ranks))
    capacity = host("n").capacity_bytes
    found = bounds(claim_of(ranks, "cuda", 2**34), chosen)
    assert found["device_bytes"] == 2**34
    assert found["host_bytes"] == pytest.approx(capacity / parts, abs=parts)
    others = min(slots - 1, len(chosen.fake_gpus) - ranks)
    assert ranks * found["host_bytes"] + others * (capacity // slots) <= capacity
    assert bounds(claim_of(ranks, "host", 2**30), chosen) == {"host_bytes": 2**30}
