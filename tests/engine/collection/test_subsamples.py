"""Nested sample sizes: what is kept after the first examples is what those examples alone give."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.capacity import CapacityParams
from catalog.requests.memory import Memory
from catalog.requests.woodbury import Woodbury
from engine.analyses.capacity import Capacity
from engine.analyses.factors import KeptFactors
from engine.collect import collect_or_read
from engine.errors import BudgetExceeded, StopRequested
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import digest
from engine.memory.budget import MemoryBudget
from engine.memory.plan import Chosen
from engine.planning import job_plan
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, workspace

NAMES = ("table", "q", "k", "norm", "conv", "late", "head")


class Mixed(nn.Module):
    """Every form, a shared input, and a layer that is called late in the data only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 6, 3, padding=1, groups=2)
        self.late = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.table(ids))
        h = torch.tanh(self.q(h) * self.k(h))
        h = torch.tanh(self.conv(h.transpose(1, 2))).mean(2)
        if int(ids[0, 0]) == 10:
            h = h + torch.tanh(self.late(h))
        return self.head(h)


def data(examples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 10, (64, 5), generator=generator)
    ids[40:] = 10
    return ids[:examples], torch.randint(0, 3, (64,), generator=generator)[:examples]


def space(examples: int = 64, *, scratch: bool = True, policy: Any = "dense", **options: Any) -> Workspace:
    torch.manual_seed(0)
    settings = {"fisher": "mc", "dtype": "float32", "batch_size": 4} | options
    made = workspace(Mixed(), [data(examples)], "classification", **settings)
    made.ports.scratch = MemoryArtifacts() if scratch else None
    made.inputs.examples = examples
    # `auto` would choose by the number of examples, which is what differs here
    made.options.woodbury = Woodbury(policy=policy)
    return made


def run(examples: int = 64, **options: Any) -> FactorSet:
    return collect_or_read(space(examples, **options))


def once(examples: int = 64, **options: Any) -> FactorSet:
    """What ``run`` gives, computed once for all tests that compare with it."""
    return _once(examples, tuple(sorted(options.items())))


@functools.cache
def _once(examples: int, options: tuple[tuple[str, Any], ...]) -> FactorSet:
    return run(examples, **dict(options))


def same(left: FactorSet, size: int, right: FactorSet) -> None:
    """Size ``size`` of ``left`` has the digests of ``right``, wherever ``right`` has the layer."""
    ordinals = {layer.name: layer.ordinal for layer in left.layers}
    nested = left.nested[size]
    assert right.layers
    for layer in right.layers:
        one, other = nested.load(ordinals[layer.name]), right.load(layer.ordinal)
        assert (digest(one.A), digest(one.G)) == (digest(other.A), digest(other.G)), layer.name
        assert (one.scale_A, one.scale_G) == (other.scale_A, other.scale_G)
        assert nested.rank_bounds[ordinals[layer.name]] == (layer.rank_bound_A, layer.rank_bound_G)


@pytest.mark.part(of=32, by=("scratch",))
@pytest.mark.parametrize("scratch", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fisher": "type2", "dtype": "float64"},
        {"fisher": "empirical", "sharing": "reduce"},
        {"fisher": "forward_only"},
        {"ema_decay": 0.9},
        {"update_freq": 3},
        {"samples": 2, "seed": 5},
        {"storage_dtype": "float16"},
        {"storage_dtype": "bfloat16", "sharing": "reduce"},
        {"ekfac": True},
        {"policy": "all", "ema_decay": 0.9},
    ],
)
def test_a_size_is_the_run_over_its_examples_alone(options: dict[str, Any], scratch: bool) -> None:
    whole = run(nested=True, scratch=scratch, **options)
    assert [size.eighths for size in whole.nested] == [1, 2, 4]
    plain = once(**options)
    for layer in plain.layers:
        assert digest(plain.load(layer.ordinal).G) == digest(whole.load(layer.ordinal).G)
    for size, examples in enumerate((8, 16, 32)):
        alone = once(examples, **options)
        assert whole.nested[size].examples == alone.examples
        same(whole, size, alone)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("parts", [(("table", "norm"), ("q", "k"), ("conv", "late", "head")), (NAMES[:4], NAMES[4:])])
def test_several_passes_keep_the_same_sizes(parts: tuple[tuple[str, ...], ...]) -> None:
    made = space(nested=True)
    made.resume.chosen = Chosen(parts=parts)
    cut = collect_or_read(made)
    assert cut.passes == len(parts)
    for size, examples in enumerate((8, 16, 32)):
        same(cut, size, once(examples))


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("parts", [None, (("table", "norm"), ("q", "k"), ("conv", "late", "head"))])
@pytest.mark.parametrize("stop_at", [2, 4, 5, 9, 15, 22, 40])
def test_sizes_outlive_a_kill(stop_at: int, parts: tuple[tuple[str, ...], ...] | None) -> None:
    def begun(scratch: MemoryArtifacts, stop_at: int | None) -> Workspace:
        made = space(nested=True)
        made.ports.scratch, made.resume.checkpoint_seconds = scratch, 1e-9
        made.resume.chosen = None if parts is None else Chosen(parts=parts)
        asked = 0

        def stop() -> None:
            nonlocal asked
            asked += 1
            if asked == stop_at:
                raise StopRequested

        made.ports.raise_if_cancelled = stop
        return made

    scratch = MemoryArtifacts()
    try:
        collect_or_read(begun(scratch, stop_at))
    except StopRequested:
        pass
    else:
        assert parts is None, "stopped after the end"
    resumed, plain = collect_or_read(begun(scratch, None)), once(nested=True)
    for size, other in zip(resumed.nested, plain.nested, strict=True):
        assert (size.eighths, size.examples, size.rank_bounds) == (other.eighths, other.examples, other.rank_bounds)
        for layer in plain.layers:
            one, two = size.load(layer.ordinal), other.load(layer.ordinal)
            assert (digest(one.A), digest(one.G)) == (digest(two.A), digest(two.G))


def test_a_layer_that_comes_late_has_nothing_before() -> None:
    whole = once(nested=True)
    (late,) = [layer.ordinal for layer in whole.layers if layer.name == "late"]
    assert float(whole.load(late).G.norm()) > 0
    for size in whole.nested:
        assert float(size.load(late).G.norm()) == 0
    rows = {row.layer: row for row in KeptFactors(None, space(nested=True)).rows()}
    assert [entry.trace for entry in rows["late"].metrics.nested][:3] == [0, 0, 0]
    metrics = {row.layer: row.metrics for row in Capacity(CapacityParams(), space(nested=True)).rows()}
    assert [entry.effective_rank for entry in metrics["late"].nested][:3] == [None, None, None]


def test_a_size_is_reached_at_the_end_of_its_batch() -> None:
    # marks at 7.5, 15 and 30 of 60 examples, batches of 8
    whole = run(60, nested=True, batch_size=8)
    assert [(size.eighths, size.examples) for size in whole.nested] == [(1, 8), (2, 16), (4, 32)]
    # a batch that crosses two marks keeps the later, and the last batch is the whole
    whole = run(60, nested=True, batch_size=20)
    assert [(size.eighths, size.examples) for size in whole.nested] == [(2, 20), (4, 40)]
    same(whole, 1, run(40, batch_size=20))


def test_batches_too_large_for_the_sizes_are_said() -> None:
    said: list[str] = []
    made = space(40, nested=True, batch_size=40)
    made.ports.log = lambda level, message: said.append(f"{level}: {message}")
    whole = collect_or_read(made)
    assert whole.nested == ()
    assert any("warning" in line and "lower `collection.batch_size` to 5 or less" in line for line in said)
    (row, *_) = KeptFactors(None, made).rows()
    assert [entry.examples for entry in row.metrics.nested] == [40]


def test_data_of_unknown_length_is_counted_first() -> None:
    made = space(nested=True)
    made.inputs.examples = None
    assert [size.examples for size in collect_or_read(made).nested] == [8, 16, 32]


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("storage_dtype", [None, "float16"])
def test_rows_show_every_size_up_to_the_whole(storage_dtype: str | None) -> None:
    made = space(nested=True, storage_dtype=storage_dtype)
    factor_rows = {row.layer: row.metrics for row in KeptFactors(None, made).rows()}
    capacity_rows = {row.layer: row.metrics for row in Capacity(CapacityParams(), made).rows()}
    for place, examples in enumerate((8, 16, 32, 64)):
        alone = space(examples, storage_dtype=storage_dtype)
        for row in Capacity(CapacityParams(), alone).rows():
            metrics = row.metrics
            if metrics is None:
                continue  # not called by so few
            nested = capacity_rows[row.layer].nested[place]
            assert nested.examples == examples
            assert (nested.trace, nested.participation_ratio, nested.effective_rank) == (
                metrics.trace,
                metrics.participation_ratio,
                metrics.effective_rank,
            )
            traces = factor_rows[row.layer].nested[place]
            assert (traces.examples, traces.trace_A, traces.trace_G) == (examples, metrics.trace_A, metrics.trace_G)
            assert traces.trace == traces.trace_A * traces.trace_G
    unasked = next(iter(KeptFactors(None, space()).rows()))
    assert unasked.metrics.nested is None


def test_kept_factors_have_a_file_for_each_size() -> None:
    made = space(nested=True)
    made.options.kinds = ("factors",)
    rows = list(KeptFactors(None, made).rows())
    artifacts = made.ports.artifacts
    assert isinstance(artifacts, MemoryArtifacts)
    found = {name for name in artifacts.tensors if name.startswith("nested/")}
    assert found == {f"nested/{eighths}/{row.ordinal}.safetensors" for eighths in (1, 2, 4) for row in rows}
    stored = artifacts.tensors["nested/4/1.safetensors"]["activation_covariance"]
    assert torch.equal(stored, _packed_a(once(32), 1))


def _packed_a(whole: FactorSet, ordinal: int) -> Tensor:
    factor = whole.load(ordinal).A
    return factor[tuple(torch.triu_indices(*factor.shape))]


def test_the_plan_counts_what_the_sizes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_plan, "resident_bytes", lambda: 0)

    def planned(**options: Any) -> dict[str, Any]:
        plans: list[Any] = []
        made = space(**options)
        made.ports.announce_plan = plans.append
        collect_or_read(made)
        return dict(plans[0]) | {term["name"]: term["size_bytes"] for term in plans[0]["terms"]}

    plain, aside, held = planned(scratch=False), planned(nested=True), planned(nested=True, scratch=False)
    assert not any(name.startswith("nested") for name in plain)
    # three packed copies on the host, or one layer at a time on its way to the scratch place
    assert 1.5 * plain["accumulators"] <= held["nested sizes"] <= 3 * plain["accumulators"]
    assert "nested sizes" not in aside
    assert 0 < aside["nested copy"] == held["nested copy"] < held["nested sizes"]
    assert plain["host_peak_bytes"] < aside["host_peak_bytes"] < held["host_peak_bytes"]
    made = space(scratch=False)
    made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=aside["host_peak_bytes"])
    collect_or_read(made)
    made = space(nested=True, scratch=False)
    # smaller slices of a batch would make room
    made.options.memory = Memory(micro_batch=4)
    made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=aside["host_peak_bytes"])
    with pytest.raises(BudgetExceeded):
        collect_or_read(made)
