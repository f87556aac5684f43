"""What a stage took: its own peak and no other's, its seconds, and a warning where it held more than was planned."""

import mmap
from typing import Any

import pytest
import torch

from engine.analyses.factors import KeptFactors
from engine.memory.budget import begin_peak
from engine.memory.memory_curve import MemoryCurve, StagePeaks
from engine.memory.plan import Plan, Stage, Term
from tests.oracles import workspace

CPU = torch.device("cpu")
MIB = 2**20
HELD = 64 * MIB


def foreseen(sizes: dict[Stage, int]) -> Plan:
    terms = [
        Term(name="t", formula="f", size_bytes=size, place="host", source="exact", stage=stage)
        for stage, size in sizes.items()
    ]
    return Plan(terms=tuple(terms), seconds={"collection": 2.0})


def hold(size_bytes: int) -> None:
    """Touch so many bytes, and let go of them: pages of the kernel, since malloc may keep what it is given back."""
    with mmap.mmap(-1, size_bytes) as held:
        for page in range(0, size_bytes, mmap.PAGESIZE):
            held[page] = 1


@pytest.fixture
def taken() -> StagePeaks:
    begin_peak(CPU)  # of what other tests of this process have held
    times = iter((0.0, 3.0, 3.0, 4.0, 4.0, 5.0))
    peaks = StagePeaks(apart=True, clock=lambda: next(times))
    with peaks.within("collection", CPU):
        hold(4 * HELD)
    with peaks.within("decomposition", CPU):
        hold(HELD)
    with peaks.within("collection", CPU):
        hold(MIB)
    return peaks


def test_each_stage_has_its_own_peak(taken: StagePeaks) -> None:
    collection, decomposition = (taken.taken[stage].host_bytes or 0 for stage in ("collection", "decomposition"))
    # the smaller one comes later: without a new beginning it would show the larger one's peak
    assert collection - decomposition == pytest.approx(3 * HELD, abs=8 * MIB)
    assert taken.peak_bytes(CPU) == collection
    assert taken.taken["collection"].seconds == 4.0
    assert taken.taken["collection"].device_bytes is None


def test_what_was_planned_stands_beside_what_was_measured(taken: StagePeaks) -> None:
    peaks = {stage: found.host_bytes or 0 for stage, found in taken.taken.items()}
    taken.plan = foreseen({"collection": 2 * peaks["collection"], "decomposition": peaks["decomposition"] // 2})
    collection, decomposition = taken.as_json()
    assert (collection["planned_seconds"], collection["measured_seconds"], collection["error_seconds"]) == (2, 4, 1)
    assert collection["error_host_bytes"] == -0.5
    assert decomposition["error_host_bytes"] == pytest.approx(1, abs=1e-4)
    assert decomposition["planned_seconds"] is None
    assert decomposition["error_seconds"] is None
    assert taken.plan_error() == -0.5
    (warned,) = taken.exceeded()
    assert "`decomposition`" in warned


class Counters:
    """Torch's counters of a device whose allocator keeps what tensors let go of."""

    def __init__(self) -> None:
        self.held = {"allocated_bytes": 0, "reserved_bytes": 0}
        self.peaks = dict(self.held)

    def hold(self, size_bytes: int) -> None:
        self.held = {"allocated_bytes": 0, "reserved_bytes": max(self.held["reserved_bytes"], size_bytes)}
        self.peaks = {"allocated_bytes": size_bytes, "reserved_bytes": self.held["reserved_bytes"]}

    def begin(self, _: torch.device) -> None:
        self.peaks = dict(self.held)

    def nested(self, _: torch.device) -> Any:
        return {name: {"all": {"peak": self.peaks[name], "current": self.held[name]}} for name in self.held}


def test_of_a_device_what_tensors_hold_stands_beside_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, gpu = Counters(), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", counters.nested)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", counters.begin)
    terms = (Term(name="t", formula="f", size_bytes=8 * MIB, place="device", source="exact", stage="decomposition"),)
    peaks = StagePeaks(apart=True, plan=Plan(terms=terms, seconds={"decomposition": 1.0}))
    for stage, size in (("collection", 40 * MIB), ("decomposition", 10 * MIB)):
        with peaks.within(stage, gpu):
            counters.hold(size)
    assert [each.device_allocated_bytes for each in peaks.taken.values()] == [40 * MIB, 10 * MIB]
    # what the first stage has taken is kept for the second
    assert [each.device_bytes for each in peaks.taken.values()] == [40 * MIB, 40 * MIB]
    assert peaks.as_json()[-1]["error_device_allocated_bytes"] == 0.25
    assert peaks.as_json()[-1]["error_device_bytes"] == 4


def test_without_a_plan_nothing_is_compared(taken: StagePeaks) -> None:
    assert all(row["error_host_bytes"] is None for row in taken.as_json())
    assert taken.plan_error() is None
    assert list(taken.exceeded()) == []


def test_where_the_kernel_keeps_its_peak_no_bytes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.memory.memory_curve.begin_peak", lambda _: False)
    peaks = StagePeaks(apart=True, plan=foreseen({"collection": 1}))
    with peaks.within("collection", CPU):
        pass
    (row,) = peaks.as_json()
    assert (row["measured_host_bytes"], row["error_host_bytes"]) == (None, None)
    assert peaks.plan_error() is None
    assert list(peaks.exceeded()) == []


@pytest.mark.parametrize(("ekfac", "stages"), [(False, []), (True, ["correction"])])
def test_a_collection_tells_the_stages_of_its_plan(ekfac: bool, stages: list[Any]) -> None:
    chunks = [(torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))]
    made = workspace(torch.nn.Sequential(torch.nn.Linear(6, 3)), chunks, "classification", ekfac=ekfac)
    made.machine.curve = MemoryCurve(stages=StagePeaks(apart=True))
    list(KeptFactors(None, made).rows())
    found = made.machine.curve.as_json(CPU)
    assert [row["stage"] for row in found["stages"]] == ["collection", *stages, "decomposition", "whole job"]
    assert all(row["planned_seconds"] > 0 and row["planned_host_bytes"] > 0 for row in found["stages"][:-1])
    whole = found["stages"][-1]
    assert whole["measured_seconds"] >= sum(row["measured_seconds"] for row in found["stages"][:-1])
    assert whole["planned_seconds"] > sum(row["planned_seconds"] for row in found["stages"][:-1])
    assert found["plan_error"] is not None
