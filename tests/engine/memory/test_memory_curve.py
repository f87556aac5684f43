"""The memory curve names every operation, keeps its extremes, and sees what is really held."""

import gc
import json
from typing import Any

import pytest
import torch
from torch import nn

from engine.analyses.factors import KeptFactors
from engine.collection import checkpoints
from engine.memory.budget import give_back_host_memory
from engine.memory.memory_curve import MOST_POINTS, MemoryCurve, Sample, thinned
from tests.oracles import MemoryArtifacts, workspace

CPU = torch.device("cpu")


def samples(heights: list[int]) -> list[Sample]:
    return [
        Sample(
            seconds=float(place), operation="op", moment="within", device_allocated_bytes=None,
            device_reserved_bytes=None, host_bytes=height,
        )
        for place, height in enumerate(heights)
    ]  # fmt: skip


def test_extremes_and_ends_outlive_thinning() -> None:
    heights = [1000 + place % 7 for place in range(5000)]
    heights[1234], heights[4321], heights[2222] = 99_999, 88_888, 1
    whole = samples(heights)
    found = thinned(whole)
    assert len(found) <= len(whole) / 2
    assert {whole[place] for place in (0, 1234, 2222, 4321, 4999)} <= set(found)
    assert found == sorted(found, key=lambda sample: sample.seconds)


def test_it_never_grows_beyond_its_bound() -> None:
    # what earlier tests have let go of would be given back in between, and hide what is held
    gc.collect()
    give_back_host_memory()
    curve = MemoryCurve()
    held = torch.zeros(1)
    for place in range(3 * MOST_POINTS):
        if place == MOST_POINTS:
            held = torch.ones(64 * 2**20 // 4)
        if place == MOST_POINTS + 1:
            held = torch.zeros(1)
        curve.sample("op", "within", CPU)
    assert len(curve.samples) <= MOST_POINTS
    top = max(curve.samples, key=lambda sample: sample.host_bytes)
    assert top.host_bytes - curve.samples[0].host_bytes > 60 * 2**20
    del held


def test_every_operation_has_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    torch.manual_seed(0)
    chunks = [(torch.randn(4, 6), torch.tensor([0, 1, 2, 0])) for _ in range(3)]
    made = workspace(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), chunks, "classification", batch_size=4)
    made.options.kinds, made.ports.scratch, made.resume.checkpoint_seconds = ("factors",), MemoryArtifacts(), 1e-9
    list(KeptFactors(None, made).rows())
    stored: dict[str, Any] = json.loads(json.dumps(made.machine.curve.as_json(CPU)))
    marks = [(sample["operation"], sample["moment"]) for sample in stored["samples"]]
    expected = ["dry run", "pass 1", "checkpoint", "layer 0", "layer 1"]
    for operation in expected:
        assert marks.index((operation, "before")) < marks.index((operation, "after"))
    assert marks.count(("pass 1", "within")) == 3
    assert marks.count(("checkpoint", "before")) == 3
    assert stored["planned_host_peak_bytes"] > 0
    assert stored["planned_device_peak_bytes"] == 0
    assert stored["measured_peak_bytes"] >= max(sample["host_bytes"] for sample in stored["samples"]) * 0.9
    seconds = [sample["seconds"] for sample in stored["samples"]]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0


def test_what_is_held_shows() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(3000, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(x)

    made = workspace(Large(), [(torch.randn(4, 3000), torch.zeros(4, 2))], "regression", batch_size=4)
    made.options.kinds = ("factors",)
    # what earlier tests left behind would be given back in between
    gc.collect()
    give_back_host_memory()
    list(KeptFactors(None, made).rows())
    by_mark = {(sample.operation, sample.moment): sample.host_bytes for sample in made.machine.curve.samples}
    # A alone is 36 MB
    assert by_mark["pass 1", "within"] - by_mark["pass 1", "before"] > 34e6
