"""Killed after any pass, with its checkpoint whole or harmed, a search of a spectrum ends with the same bits."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.spectrum import SpectrumParams
from engine.analyses.spectra.search_checkpoints import MANIFEST, SearchCheckpoints
from engine.artifacts import save_sealed
from engine.collection import checkpoints
from engine.factors.kronecker_factors import digest
from engine.workspace import Workspace
from tests.engine.analyses.test_spectrum import data, job, outcome, run
from tests.oracles import MemoryArtifacts

PARAMS = SpectrumParams(of="ggn", k=1, steps=4, probes=2, trace="none", tolerance=1e-2)


class Squashed(torch.autograd.Function):
    """A tangent hyperbolic without a forward derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2)


class LateRoute(nn.Module):
    """Needs second gradients from its second batch on: the first goes forward, in the first pass alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        late = bool((x.detach() == self.first(data()[0][5:6]).detach()).all(1).any())
        return self.head(Squashed.apply(x) if late else torch.tanh(x))


def space() -> Workspace:
    torch.manual_seed(0)
    return job(PARAMS, LateRoute().double(), self_check="off")


def ended(made: Workspace) -> str:
    return outcome(*run(PARAMS, made))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE", 0)


def moments(made: Workspace) -> list[MemoryArtifacts]:
    """What a kill after each checkpoint leaves; the attempt itself is not disturbed."""
    scratch, kept = MemoryArtifacts(), list[MemoryArtifacts]()
    real = scratch.save_json

    def save_json(name: str, value: object) -> None:
        real(name, value)
        if name == MANIFEST:
            kept.append(copy.copy(scratch))
            kept[-1].tensors, kept[-1].tables = dict(scratch.tensors), dict(scratch.tables)

    scratch.save_json = save_json  # type: ignore[method-assign]
    made.ports.scratch, made.resume.checkpoint_seconds = scratch, 1e-9
    return kept


def harmed(left: MemoryArtifacts, name: str, way: str) -> MemoryArtifacts:
    made = MemoryArtifacts()
    made.tensors, made.tables = copy.deepcopy(left.tensors), copy.deepcopy(left.tables)
    held: dict[str, Any] = made.tables if name in made.tables else made.tensors
    if way == "missing":
        del held[name]
    elif way == "flipped" and name in made.tables:
        made.tables[name]["body"]["chosen"]["length"] += 1
    elif way == "flipped":
        for tensor in held[name].values():
            tensor.view(torch.uint8).view(-1)[:1] ^= 1
    return made


def test_killed_after_any_pass() -> None:
    truth, first = ended(space()), space()
    kept = moments(first)
    assert ended(first) == truth
    # of the search under way; the last one has found all
    kept = kept[:-1]
    assert len(kept) > 2
    pick, ways = random.Random(0), set()
    cases = [(each, "", "intact") for each in pick.sample(kept, 2)]
    each = kept[len(kept) // 2]
    tensors = sorted(name for name in each.tensors if name.startswith("search/"))
    cases += [(each, pick.choice(tensors), way) for way in ("missing", "flipped")]
    cases.append((each, MANIFEST, "flipped"))
    for left, name, way in cases:
        again, lines = space(), list[str]()
        again.ports.scratch, again.resume.checkpoint_seconds = harmed(left, name, way), 1e-9
        again.ports.log = lambda level, text, lines=lines: lines.append(text)
        assert ended(again) == truth, (kept.index(left), name, way, lines)
        ways |= {word for word in ("resumed after", "discarded") if any(word in line for line in lines)}
    assert ways == {"resumed after", "discarded"}


def test_a_discarded_search_leaves_nothing() -> None:
    first = space()
    kept = moments(first)
    ended(first)
    again = space()
    left = again.ports.scratch = harmed(kept[1], MANIFEST, "flipped")
    again.resume.checkpoint_seconds = 1e-9
    named = set(left.tables[MANIFEST]["body"]["files"])
    assert named
    assert named <= left.tensors.keys()
    assert SearchCheckpoints(workspace=again, conditions={}).find() is None
    assert not named & left.tensors.keys()
    assert MANIFEST not in left.tables


def test_a_search_of_an_earlier_format_is_discarded() -> None:
    """As a version that wrote each tensor into a file of its own has left it."""
    made, scratch, lines = space(), MemoryArtifacts(), list[str]()
    made.ports.scratch, made.resume.checkpoint_seconds = scratch, 1e-9
    made.ports.log = lambda _, line: lines.append(line)
    tensor, file = torch.ones(3), "search/1.0.safetensors"
    scratch.save_tensors(file, {"basis": tensor}, {})
    body = {"format": "kronoscope-search/2", "serial": 1, "conditions": {}, "files": {file: {"basis": digest(tensor)}}}
    save_sealed(scratch, MANIFEST, body)
    assert SearchCheckpoints(workspace=made, conditions={}).find() is None
    assert not scratch.tensors
    assert not scratch.tables
    assert lines == ["the checkpoint of an earlier attempt's search is discarded: it is of another format"]
