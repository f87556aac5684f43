"""Checkpoints that an earlier version has left are gone on with, or discarded with the line that says so.

``checkpoint_of_an_earlier_version.pt.xz`` holds what the commit 2131c9d3 of 29 November 2026 had in its scratch place
when a job was stopped after five of eight batches: gradient rows, a tied head, variances, and a moving average.
"""

import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.requests.woodbury import Woodbury
from engine.artifacts import save_sealed
from engine.collect import collect_or_read
from engine.collection import checkpoints
from engine.collection.checkpoints import MANIFEST
from engine.errors import StopRequested
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import digest
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, workspace

STORED = Path(__file__).with_name("checkpoint_of_an_earlier_version.pt.xz")
BATCHES, STOPPED = 8, 6


class Net(nn.Module):
    """A table that is the head's weight, groups, a norm, and a layer with more rows than outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 6)
        self.q = nn.Linear(6, 6)
        self.mix = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 60, bias=False)
        self.head.weight = self.table.weight
        # the same numbers whatever the version of torch draws
        for place, parameter in enumerate(self.parameters()):
            parameter.data = torch.cos(torch.arange(parameter.numel()) * 0.7 + place).view_as(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(self.norm(torch.tanh(self.q(x)) + self.mix(x.mT).mT).mean(1))


def job(scratch: MemoryArtifacts, stop_at: int | None = None) -> Workspace:
    ids, y = torch.arange(48).view(16, 3) * 7 % 60, torch.arange(16) * 11 % 60
    options = {"batch_size": 2, "fisher": "empirical", "batch_variance": True, "self_check": "off", "ema_decay": 0.5}
    made = workspace(Net(), [(ids, y)], "classification", **options)
    made.inputs.examples, made.ports.scratch, made.resume.checkpoint_seconds = 16, scratch, 1e-9
    made.options.woodbury, made.options.kinds = Woodbury(policy="all", softmax_head=False), ("factors",)
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked == stop_at:
            raise StopRequested

    made.ports.raise_if_cancelled = stop
    return made


def digests(whole: FactorSet) -> list[Any]:
    loaded = [whole.load(facts.ordinal) for facts in whole.layers]
    return [(facts, digest(own.A), digest(own.G)) for facts, own in zip(whole.layers, loaded, strict=True)]


def stopped() -> MemoryArtifacts:
    scratch = MemoryArtifacts()
    with pytest.raises(StopRequested):
        collect_or_read(job(scratch, STOPPED))
    return scratch


def body_of(scratch: MemoryArtifacts) -> Mapping[str, Any]:
    body: Mapping[str, Any] = scratch.tables[MANIFEST]["body"]
    return body


def test_a_checkpoint_of_an_earlier_version_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    with lzma.open(STORED) as file:
        stored = torch.load(file, weights_only=True)
    earlier, here = MemoryArtifacts(), body_of(stopped())["conditions"]
    earlier.tensors, earlier.tables = stored["tensors"], stored["tables"]
    before = body_of(earlier)
    fields = before["conditions"]["set of saved fields"]
    # what else is required depends on the machine and on the version of torch
    save_sealed(earlier, MANIFEST, {**before, "conditions": {**here, "set of saved fields": fields}})
    again, lines = job(earlier), list[str]()
    again.ports.log = lambda _, line: lines.append(line)
    assert digests(collect_or_read(again)) == digests(collect_or_read(job(MemoryArtifacts())))
    if fields == here["set of saved fields"]:
        assert f"collection resumed at batch {STOPPED - 1} of {BATCHES}" in lines
    else:
        assert any(line.endswith("discarded: it was made under another set of saved fields") for line in lines)
