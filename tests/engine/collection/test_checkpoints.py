"""A collection that is stopped anywhere and gone on with from its checkpoint ends with the same bits."""
# ruff: noqa: NPY002 - numpy's default generator is what is drawn from here

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from catalog.requests.woodbury import Woodbury
from engine.accumulation.layer_statistics import LayerStatistics
from engine.analyses.factors import KeptFactors
from engine.artifacts import save_sealed
from engine.collect import collect_or_read
from engine.collection import checkpoints
from engine.collection.checkpoints import MANIFEST, Checkpoints
from engine.errors import NonFiniteLoss, StopRequested
from engine.memory.plan import Chosen
from engine.model.state.model_state import bit_sum
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, workspace

BATCHES = 6
PARTS = (("table", "norm"), ("q", "k", "unused"), ("head",))


class Small(nn.Module):
    """Every form of statistics, a layer that is never reached, random numbers and a buffer that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Linear(8, 3)
        self.words = nn.Linear(8, 20)
        self.words.weight = self.table.weight
        self.head = nn.Linear(20, 3)
        self.register_buffer("count", torch.zeros(()))
        # an iterator moves on: numbers are put back after every forward pass
        self.forwards = itertools.count()

    def forward(self, ids: Tensor) -> Tensor:
        next(self.forwards)
        if torch.is_grad_enabled():
            # so that the dry run leaves it alone; without the generators' state and the buffer a resumed run differs
            self.count += 1
        x = self.norm(self.table(ids))
        x = self.q(x) * self.k(x) + torch.rand(8) + random.random() + float(np.random.random()) + self.count
        return self.head(torch.tanh(self.words(torch.tanh(x)))).mean(1)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(0, 20, (4, 5), generator=generator), torch.tensor([0, 1, 2, 0])) for _ in range(BATCHES)]


def space(
    scratch: MemoryArtifacts, *, stop_at: int | None = None, chunks: Any = None, policy: Any = "auto", **options: Any
) -> Workspace:
    torch.manual_seed(0)
    # a check would be one forward pass more in a batch that only some attempts come to
    options = {"self_check": "off", **options}
    made = workspace(Small(), chunks or data(), "classification", batch_size=4, **options)
    made.options.kinds, made.inputs.examples, made.ports.scratch, made.resume.checkpoint_seconds = (
        ("factors",),
        4 * BATCHES,
        scratch,
        1e-9,
    )
    made.options.woodbury = Woodbury(policy=policy)
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked == stop_at:
            raise StopRequested

    made.ports.raise_if_cancelled = stop
    return made


def rows(made: Workspace) -> list[dict[str, Any]]:
    """All that is delivered of each layer, but for what the run itself took."""
    return [asdict(row) | {"observed": None} for row in KeptFactors(None, made).rows()]


@functools.cache
def undisturbed_rows() -> list[dict[str, Any]]:
    """The rows of a collection that was never stopped, once for all tests that compare with it."""
    return rows(space(MemoryArtifacts()))


def said(made: Workspace) -> list[str]:
    lines: list[str] = []
    # that the model draws is said in every attempt
    made.ports.log = lambda level, message: (
        lines.append(message) if level != "debug" and "draws" not in message else None
    )
    return lines


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every batch, whatever the last one took, in more than one file."""
    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    monkeypatch.setattr(checkpoints, "_FILE_BYTES", 600)


def stopped(scratch: MemoryArtifacts, stop_at: int, **more: Any) -> None:
    made = space(scratch, stop_at=stop_at, **more)
    with pytest.raises(StopRequested):
        collect_or_read(made)


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("stop_at", range(2, BATCHES + 1))
@pytest.mark.parametrize(
    "options",
    [
        {"fisher": "mc", "samples": 2},
        {"fisher": "empirical", "ema_decay": 0.9, "update_freq": 2},
        {"fisher": "type2", "sharing": "reduce"},
        {"fisher": "forward_only", "dtype": "float64"},
        {"fisher": "mc", "policy": "all", "ema_decay": 0.9},
    ],
)
def test_the_same_bits_wherever_it_is_stopped(options: dict[str, Any], stop_at: int) -> None:
    undisturbed = space(MemoryArtifacts(), **options)
    undisturbed.resume.checkpoint_seconds = 0
    truth = rows(undisturbed)
    forwards = next(undisturbed.inputs.model.forwards)  # type: ignore[union-attr]
    scratch = MemoryArtifacts()
    stopped(scratch, stop_at, **options)
    again = space(scratch, **options)
    lines = said(again)
    assert rows(again) == truth
    assert f"collection resumed at batch {stop_at - 1} of {BATCHES}" in lines
    dry_runs = forwards - -(-BATCHES // options.get("update_freq", 1))
    update_freq = options.get("update_freq", 1)
    left = sum(number % update_freq == 0 for number in range(stop_at - 1, BATCHES))
    assert next(again.inputs.model.forwards) == dry_runs + left  # type: ignore[union-attr]
    assert float(again.inputs.model.count) == 0  # type: ignore[union-attr, arg-type]


@pytest.fixture(scope="module")
def undisturbed_passes() -> tuple[list[dict[str, Any]], int]:
    """The rows of three passes that nobody stopped, and how often they ran the model."""
    undisturbed = space(MemoryArtifacts())
    undisturbed.resume.chosen = Chosen(parts=PARTS)
    truth = rows(undisturbed)
    return truth, next(undisturbed.inputs.model.forwards)  # type: ignore[union-attr, return-value]


@pytest.mark.part(of=36, by=())
@pytest.mark.parametrize("stop_at", range(1, 3 * BATCHES + 2))
def test_finished_passes_are_not_made_again(stop_at: int, undisturbed_passes: tuple[list[dict[str, Any]], int]) -> None:
    truth, forwards = undisturbed_passes
    assert truth[0]["record"]["passes"] == 3
    scratch = MemoryArtifacts()
    made = space(scratch, stop_at=stop_at)
    made.resume.chosen = Chosen(parts=PARTS)
    with pytest.raises(StopRequested):
        rows(made)
    again = space(scratch)
    again.resume.chosen = Chosen(parts=PARTS)
    lines = said(again)
    assert rows(again) == truth
    assert next(again.inputs.model.forwards) == forwards - min(stop_at - 1, 3 * BATCHES)  # type: ignore[union-attr]
    assert bool(lines) == (stop_at > 1)


def test_killed_while_the_eigenvalues_are_corrected() -> None:
    def corrections(made: Workspace) -> list[Tensor]:
        whole = collect_or_read(made)
        assert whole.load_corrected is not None
        return [whole.load_corrected(layer.ordinal).eigenvalues for layer in whole.layers]

    undisturbed = space(MemoryArtifacts(), ekfac=True)
    truth = corrections(undisturbed)
    scratch = MemoryArtifacts()
    # in the second batch of the second pass
    stopped(scratch, BATCHES + 2, ekfac=True)
    again = space(scratch, ekfac=True)
    lines = said(again)
    found = corrections(again)
    assert all(torch.equal(one, other) for one, other in zip(found, truth, strict=True))
    assert f"collection resumed at batch {BATCHES} of {BATCHES}" in lines
    assert collect_or_read(again).passes == collect_or_read(undisturbed).passes


def test_a_third_attempt_goes_on_from_the_second() -> None:
    truth = undisturbed_rows()
    scratch = MemoryArtifacts()
    stopped(scratch, 3)
    # passing over the two batches asks twice
    stopped(scratch, 2 + 3)
    again = space(scratch)
    lines = said(again)
    assert rows(again) == truth
    assert f"collection resumed at batch 4 of {BATCHES}" in lines


def test_only_the_last_checkpoint_stands() -> None:
    scratch = MemoryArtifacts()
    stopped(scratch, 5)
    assert set(scratch.tensors) == set(scratch.tables[MANIFEST]["body"]["files"])
    assert len(scratch.tensors) > 1


def flipped(scratch: MemoryArtifacts) -> None:
    file = max(scratch.tensors)
    tensor = next(iter(scratch.tensors[file].values()))
    tensor.view(torch.uint8).view(-1)[0] ^= 1


def counted(scratch: MemoryArtifacts) -> None:
    scratch.tables[MANIFEST]["body"]["cursor"]["terms"] += 1


def missing(scratch: MemoryArtifacts) -> None:
    del scratch.tensors[max(scratch.tensors)]


def earlier(scratch: MemoryArtifacts) -> None:
    """As a version before this one has written it."""
    save_sealed(scratch, MANIFEST, {**scratch.tables[MANIFEST]["body"], "format": "kronoscope-checkpoint/3"})


def without_a_field(scratch: MemoryArtifacts) -> None:
    """As a version that saves less, under the same name."""
    body = scratch.tables[MANIFEST]["body"]
    del body["state"]["fields"]["batches"]
    save_sealed(scratch, MANIFEST, body)


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("damage", [flipped, counted, missing, earlier, without_a_field])
def test_a_damaged_checkpoint_is_discarded(damage: Callable[[MemoryArtifacts], None]) -> None:
    truth = undisturbed_rows()
    scratch = MemoryArtifacts()
    stopped(scratch, 4)
    damage(scratch)
    again = space(scratch)
    lines = said(again)
    assert rows(again) == truth
    assert "discarded" in lines[0]
    assert not any("resumed" in line for line in lines)
    # nothing of it is left but what has been written since
    assert set(scratch.tensors) == set(scratch.tables[MANIFEST]["body"]["files"])


def test_damaged_factors_that_waited_are_collected_again() -> None:
    parts = (("table", "norm", "q", "k"), ("unused", "head"))
    undisturbed = space(MemoryArtifacts())
    undisturbed.resume.chosen = Chosen(parts=parts)
    truth = rows(undisturbed)
    scratch = MemoryArtifacts()
    made = space(scratch, stop_at=BATCHES + 3)
    made.resume.chosen = Chosen(parts=parts)
    with pytest.raises(StopRequested):
        collect_or_read(made)
    scratch.tensors["0.G.safetensors"]["G"][0] += 1
    again = space(scratch)
    again.resume.chosen = Chosen(parts=parts)
    lines = said(again)
    assert rows(again) == truth
    assert "layer `table`" in lines[0]


def others() -> Iterator[tuple[str, Callable[[Workspace], None]]]:
    def weights(made: Workspace) -> None:
        with torch.no_grad():
            made.inputs.model.head.weight[0, 0] += 1  # type: ignore[union-attr, index, operator]

    def document(made: Workspace) -> None:
        made.resume.conditions = {"document": "another"}

    def plan(made: Workspace) -> None:
        made.resume.chosen = Chosen(parts=(("table", "norm", "q", "k"), ("unused", "head")))

    def values(made: Workspace) -> None:
        chunks = data()
        chunks[1][0][0, 0] = (chunks[1][0][0, 0] + 1) % 20
        made.inputs.batches = lambda: iter(chunks)

    def order(made: Workspace) -> None:
        chunks = data()
        made.inputs.batches = lambda: iter([chunks[1], chunks[0], *chunks[2:]])

    def fewer(made: Workspace) -> None:
        made.inputs.batches = lambda: iter(data()[:2])

    yield "model", weights
    yield "document", document
    yield "plan", plan
    yield "data", values
    yield "data", order
    yield "data", fewer


@pytest.mark.part(of=16, by=("named",))
@pytest.mark.parametrize(("named", "change"), list(others()))
def test_a_checkpoint_of_something_else_is_discarded(named: str, change: Callable[[Workspace], None]) -> None:
    fresh = space(MemoryArtifacts())
    change(fresh)
    truth = rows(fresh)
    scratch = MemoryArtifacts()
    stopped(scratch, 4)
    again = space(scratch)
    change(again)
    lines = said(again)
    assert rows(again) == truth
    assert "discarded" in lines[0]
    assert named in lines[0]


def test_a_full_disk_costs_the_checkpoint_and_not_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = undisturbed_rows()
    made = space(MemoryArtifacts())

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made.ports.scratch, "save_tensors", refuse)
    lines = said(made)
    assert rows(made) == truth
    assert "No space left" in lines[0]


def test_layers_that_stop_sharing_in_a_resumed_run() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x if x[0, 0] < 100 else x.clone())

    chunks = [(torch.randn(4, 4), torch.tensor([0, 1, 2, 0])) for _ in range(4)]
    chunks[3][0][0, 0] = 1000

    def made(scratch: MemoryArtifacts, stop_at: int | None = None) -> Workspace:
        given = space(scratch, stop_at=stop_at, chunks=chunks)
        torch.manual_seed(3)
        given.inputs.model = Sometimes()
        return given

    truth = rows(made(MemoryArtifacts()))
    assert truth[0]["record"]["passes"] == 2
    scratch = MemoryArtifacts()
    with pytest.raises(StopRequested):
        collect_or_read(made(scratch, 3))
    assert rows(made(scratch)) == truth
    # and once more, in the pass that was begun anew
    scratch = MemoryArtifacts()
    with pytest.raises(StopRequested):
        collect_or_read(made(scratch, 7))
    assert rows(made(scratch)) == truth


def test_a_fault_after_resuming_names_the_same_examples() -> None:
    chunks = [(torch.randn(4, 4), torch.tensor([0, 1, 2, 0])) for _ in range(4)]
    chunks[3][0][0, 0] = torch.nan

    def fault(scratch: MemoryArtifacts, stop_at: int | None = None) -> str:
        made = space(scratch, stop_at=stop_at, chunks=chunks, update_freq=3)
        made.inputs.model = nn.Linear(4, 3)
        torch.nn.init.ones_(made.inputs.model.weight)
        torch.nn.init.ones_(made.inputs.model.bias)
        with pytest.raises((NonFiniteLoss, StopRequested)) as raised:
            collect_or_read(made)
        return str(raised.value)

    truth = fault(MemoryArtifacts())
    assert "examples 12 to" in truth
    scratch = MemoryArtifacts()
    assert fault(scratch, 3) == ""
    assert fault(scratch) == truth


def test_no_checkpoint_sooner_than_it_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE", 20)
    made = space(MemoryArtifacts())
    now = 0.0

    def clock() -> float:
        return now

    kept = Checkpoints(workspace=made, model=nn.Linear(1, 1), conditions={}, clock=clock)
    made.resume.checkpoint_seconds = 60
    now = 59
    assert not kept.due()
    now = 60
    assert kept.due()
    kept._saved_at, kept._took = 60, 10
    now = 259
    assert not kept.due()
    now = 260
    assert kept.due()
    made.resume.checkpoint_seconds = 0
    assert not kept.due()


def test_state_that_a_checkpoint_cannot_hold_is_an_error() -> None:
    statistics = LayerStatistics(layer=None, sharing="expand")  # type: ignore[arg-type]
    assert statistics.plain()["terms"] == 0
    statistics.flaw = ["a list"]  # type: ignore[assignment]
    with pytest.raises(TypeError, match="`flaw`"):
        statistics.plain()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.cfloat])
def test_every_type_of_tensor_has_a_checksum(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 2).to(dtype)
    before = bit_sum(tensor)
    assert before != 0
    tensor[1, 1] = 0
    assert bit_sum(tensor) != before
    # what lies elsewhere in memory, or not in order
    moved = torch.cat([torch.zeros(1, 2, dtype=dtype), tensor])[1:]
    assert bit_sum(moved) == bit_sum(tensor)
    assert bit_sum(moved.T.contiguous().T) == bit_sum(tensor)
    assert bit_sum(tensor[:0]) == 0
    assert bit_sum(torch.ones((), dtype=dtype)) != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_checksum_tells_signs_and_places_apart(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 61).to(dtype)
    others = [-tensor, tensor.flip(0), tensor.flip(1), tensor.roll(1), tensor.reshape(-1)[torch.randperm(427)]]
    for place in range(427):
        for second in (place, (place + 1) % 427, (place + 2) % 427, (place + 128) % 427):
            other = tensor.clone().view(-1)
            other[[place, second]] *= -1
            others.append(other)
    assert bit_sum(tensor) not in {bit_sum(each) for each in others}
