"""A collection that runs out of memory at any operation ends with the numbers of one that nobody disturbed."""

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from catalog.requests.memory import Memory
from engine.collect import collect_or_read
from engine.collection import ekfac_passes, run_passes
from engine.collection.run_passes import next_fallback
from engine.errors import OutOfMemory
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import digest
from engine.memory.plan import Chosen
from engine.workspace import Workspace
from tests.machine.parts import ALL, chosen_part, first_of
from tests.oracles import MemoryArtifacts, workspace

SAID = "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to allocate 96 bytes"


STRIDE = int(os.environ.get("KRONOSCOPE_TEST_STRIDE", "7"))
"""Every operation takes half a minute: `KRONOSCOPE_TEST_STRIDE=1`."""
LANDING = 32
"""A landing takes so many times fewer, others for each commit."""


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Collecting garbage looks at what these tests make, and not at what others before them have left."""
    gc.collect()
    gc.freeze()


class Injector(TorchDispatchMode):
    """Fails at the k-th operation, and knows every tensor that came into being before it."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at, self.seen, self.made = at, 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen == self.at:
            raise RuntimeError(SAID)
        made = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(each) for each in tree_leaves(made) if isinstance(each, Tensor)]
        return made


def space(micro_batch: int | None = None, batch_size: int = 4) -> Workspace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    made = workspace(
        model, [(x, y)], "classification", fisher="mc", dtype="float32", batch_size=batch_size, self_check="growing"
    )
    made.options.memory = Memory(micro_batch=micro_batch)
    return made


def disturbed(
    monkeypatch: pytest.MonkeyPatch, made: Workspace, at: Callable[[int], int | None]
) -> tuple[FactorSet, list[int], list[Injector]]:
    """Collect with a failure at operation ``at(attempt)``; what of each attempt was alive when the next began."""
    real = run_passes._pass
    attempts: list[Injector] = []
    alive: list[int] = []

    def armed(*arguments: Any) -> None:
        if attempts:
            alive.append(sum(ref() is not None for ref in attempts[-1].made))
        attempts.append(Injector(at(len(attempts))))
        with attempts[-1]:
            real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run_passes, "_pass", armed)
        return collect_or_read(made), alive, attempts


def facts(found: FactorSet) -> list[Any]:
    factors = [found.load(place) for place in range(len(found.layers))]
    sides = [(digest(each.A), digest(each.G)) for each in factors]
    return [found.layers, found.examples, found.updates, found.passes, found.micro_batch, sides]


def test_a_failure_at_any_operation_costs_a_second_attempt_and_nothing_else(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = chosen_part(request.config)
    stride = STRIDE if part == ALL else LANDING * STRIDE
    wanted, _, (undisturbed,) = disturbed(monkeypatch, space(), lambda _: None)
    assert undisturbed.seen > 500
    for at in range(1 + first_of(part, stride), undisturbed.seen + 1, stride):
        made = space()
        found, alive, _ = disturbed(monkeypatch, made, lambda attempt, at=at: at if attempt == 0 else None)
        assert facts(found) == facts(wanted), f"operation {at}"
        assert alive == [0], f"operation {at}"
        assert [error.rung for error in made.machine.guard.planning_errors] == ["slices of 4, 1 pass"]


def test_the_ladder_goes_down_in_order_and_ends_as_the_last_rung_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[dict[str, Any]] = []
    made = space()
    made.ports.announce_plan = lambda plan: announced.append(dict(plan))
    found, alive, _ = disturbed(monkeypatch, made, lambda attempt: 60 if attempt < 4 else None)
    wanted = collect_or_read(space(micro_batch=1))
    # the first check saw the batch in the slices that were planned then, and rounding differs
    assert all((layer.gradient_identity or 0) < 1e-5 for each in (found, wanted) for layer in each.layers)
    ends = [
        replace(
            each, layers=tuple(replace(layer, gradient_identity=None, examples_checked=None) for layer in each.layers)
        )
        for each in (found, wanted)
    ]
    assert facts(ends[0]) == facts(ends[1])
    assert found.micro_batch == 1
    assert alive == [0] * 4
    tried = [error.rung for error in made.machine.guard.planning_errors]
    assert tried == [f"{slices}, 1 pass" for slices in ("slices of 4",) * 2 + ("slices of 2",) * 2]
    # what the job's row holds in the end, and a later attempt does again
    assert Chosen.read(announced[-1]).micro_batch == 1
    assert [error["rung"] for error in announced[-1]["planning_errors"]] == tried
    assert announced[-1]["planning_errors"][0]["said"] == SAID


def test_where_no_slice_is_small_enough_the_layers_go_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = space()
    made.ports.scratch = MemoryArtifacts()
    found, _, attempts = disturbed(monkeypatch, made, lambda attempt: 40 if attempt < 6 else None)
    alone = collect_or_read(space(micro_batch=1))
    assert facts(found)[-1] == facts(alone)[-1]
    assert (found.passes, found.storage_policy, len(attempts)) == (2, "laid aside", 8)


def test_a_pass_that_fails_late_keeps_the_passes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, undisturbed = space(), space()
    for each in (made, undisturbed):
        each.ports.scratch = MemoryArtifacts()
        each.resume.chosen = Chosen(parts=(("0",), ("2",)), micro_batch=2)
    found, _, attempts = disturbed(monkeypatch, made, lambda attempt: 50 if attempt == 1 else None)
    assert facts(found) == facts(collect_or_read(undisturbed))
    assert len(attempts) == 3


def test_a_second_attempt_goes_on_from_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    made, undisturbed = space(batch_size=1), space(batch_size=1)
    made.ports.scratch, made.resume.checkpoint_seconds = MemoryArtifacts(), 1e-9
    monkeypatch.setattr("engine.collection.checkpoints._SHARE", 0)
    lines: list[str] = []
    made.ports.log = lambda _, line: lines.append(line)
    wanted, _, (whole,) = disturbed(monkeypatch, undisturbed, lambda _: None)
    found, _, (_, rest) = disturbed(monkeypatch, made, lambda attempt: int(whole.seen * 0.8) if attempt == 0 else None)
    assert facts(found) == facts(wanted)
    assert any(line.startswith("collection resumed at batch") for line in lines)
    assert rest.seen < whole.seen


def test_the_end_of_the_ladder_says_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    made = space()
    before = {name: tensor.clone() for name, tensor in made.inputs.model.state_dict().items()}  # type: ignore[union-attr]
    with pytest.raises(OutOfMemory, match="the collection ran out of memory") as ended:
        disturbed(monkeypatch, made, lambda _: 30)
    assert SAID in ended.value.message
    assert "are resident" in ended.value.message
    assert "the plan counts" in ended.value.message
    assert len(made.machine.guard.planning_errors) == 6
    assert all(torch.equal(before[name], tensor) for name, tensor in made.inputs.model.state_dict().items())  # type: ignore[union-attr]
    assert all(parameter.grad is None for parameter in made.inputs.model.parameters())  # type: ignore[union-attr]


def test_a_correction_that_runs_out_begins_its_pass_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def corrections(made: Workspace) -> list[str]:
        found = collect_or_read(made)
        assert found.load_corrected is not None
        return [digest(found.load_corrected(place).eigenvalues) for place in range(len(found.layers))]

    real, attempts = ekfac_passes._run, 0

    def failing(*arguments: Any) -> list[list[int]]:
        nonlocal attempts
        attempts += 1
        with Injector(150 if attempts < 3 else None):
            return real(*arguments)

    made, undisturbed = space(), space()
    for each in (made, undisturbed):
        each.options.collection = replace(each.options.collection, ekfac=True)
    monkeypatch.setattr(ekfac_passes, "_run", failing)
    found = corrections(made)
    assert [error.rung for error in made.machine.guard.planning_errors] == ["slices of 4"]
    monkeypatch.setattr(ekfac_passes, "_run", lambda job, *rest: real(replace(job, micro_batch=2), *rest))
    assert found == corrections(undisturbed)
    assert attempts == 3


def test_layers_of_one_factor_stay_in_one_pass() -> None:
    chosen = Chosen(parts=(("q", "k", "v", "o"),), micro_batch=1)
    below = next_fallback(chosen, 0, 8, {"k": "q", "v": "q"}, aside=True)
    assert below == replace(chosen, parts=(("q", "k", "v"), ("o",)))
    assert next_fallback(replace(chosen, parts=(("q", "k"),)), 0, 8, {"k": "q"}, aside=True) is None
    assert next_fallback(chosen, 0, 8, {}, aside=False) is None


def test_a_first_batch_that_does_not_fit_is_checked_in_smaller_groups() -> None:
    class Large(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 8:
                raise RuntimeError(SAID)
            return super().forward(x)

    made, wanted = space(batch_size=24), space(micro_batch=6, batch_size=24)
    x, y = torch.randn(24, 4), torch.randint(0, 3, (24,))
    for each in (made, wanted):
        each.inputs.batches = lambda: iter([(x, y)])
    assert made.inputs.model is not None
    # the plan is made from a few examples, and knows nothing of it
    made.inputs.model = Large(*made.inputs.model)
    found, reference = collect_or_read(made), collect_or_read(wanted)
    assert found.micro_batch == 6
    for one, other in zip(found.layers, reference.layers, strict=True):
        assert one.examples_checked
        assert digest(found.load(one.ordinal).A) == digest(reference.load(other.ordinal).A)
        assert digest(found.load(one.ordinal).G) == digest(reference.load(other.ordinal).G)
