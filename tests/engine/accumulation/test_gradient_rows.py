"""A layer's gradient rows say the same of it as their sum, however they came to be kept."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.capacity import CapacityParams
from catalog.requests.memory import Memory
from catalog.requests.woodbury import Woodbury
from engine.accumulation.gradient_rows import GradientRows, RowStorage
from engine.analyses.capacity import Capacity
from engine.collect import collect_or_read
from engine.errors import EngineError, NonFiniteFactor
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import digest
from engine.factors.low_rank import LowRank
from engine.linalg.linear_operator import Structured
from engine.memory.plan import Chosen
from tests.memory_profile import peak_bytes
from tests.oracles import MemoryArtifacts, workspace

HOST = torch.device("cpu")


class Wide(nn.Module):
    """Wide outputs of every family that has a dense G."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 24)
        self.convolution = nn.Conv1d(24, 32, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(32)
        self.first = nn.Linear(32, 48)
        self.head = nn.Linear(48, 5, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        found = torch.tanh(self.convolution(self.table(ids).transpose(1, 2)).transpose(1, 2))
        return self.head(torch.tanh(self.first(self.norm(found))).mean(1))


def host_storage(capacity: int, dtype: torch.dtype) -> RowStorage:
    return RowStorage(capacity=capacity, dtype=dtype, working=torch.float64, arrive=HOST, stand=HOST)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Wide().to(torch.float64)


def data(count: int = 12) -> list[tuple[Tensor, ...]]:
    drawn = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(11, (count, 3), generator=drawn), torch.randint(5, (count,), generator=drawn)
    return [(ids[:5], labels[:5]), (ids[5:], labels[5:])]


def collect(woodbury: Woodbury, count: int = 12, *, memory: dict[str, Any] | None = None, **options: Any) -> FactorSet:
    space = workspace(model(), data(count), "classification", **{"fisher": "mc"} | options)
    space.options.woodbury, space.inputs.examples = woodbury, count
    space.options.memory = Memory(**memory or {})
    return collect_or_read(space)


def sides(whole: FactorSet) -> dict[str, Tensor | Structured]:
    return {layer.name: whole.load(layer.ordinal).G for layer in whole.layers}


def worst(rows: FactorSet, dense: FactorSet) -> float:
    """Largest relative difference of any layer's G."""
    found = 0.0
    for layer, matrix in sides(dense).items():
        side = sides(rows)[layer]
        assert isinstance(matrix, Tensor)
        own = side.to_dense(torch.float64) if isinstance(side, Structured) else side
        found = max(found, float((own - matrix).norm() / matrix.norm()))
    return found


ALL, DENSE = Woodbury(policy="all"), Woodbury(policy="dense")


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 2, "sharing": "reduce", "update_freq": 2},
        {"fisher": "type2", "exact_trace": False, "batch_size": 12},
        {"fisher": "empirical", "ema_decay": 0.7, "batch_size": 3},
        {"nested": True, "batch_size": 2},
    ],
    ids=str,
)
def test_rows_are_what_the_dense_sum_is_of(options: dict[str, Any]) -> None:
    rows, dense = collect(ALL, **options), collect(DENSE, **options)
    kept = {name for name, side in sides(rows).items() if isinstance(side, LowRank)}
    assert kept == {"table", "convolution[0]", "convolution[1]", "norm", "first", "head"}
    assert worst(rows, dense) < 1e-12
    for layer, other in zip(rows.layers, dense.layers, strict=True):
        assert dataclasses.replace(
            layer, why=other.why, representation_G="dense", rows_place=None, sums=None
        ) == dataclasses.replace(other, sums=None)
    for size, whole in zip(rows.nested, dense.nested, strict=True):
        for layer in rows.layers:
            side, matrix = size.load(layer.ordinal).G, whole.load(layer.ordinal).G
            assert isinstance(side, LowRank)
            assert isinstance(matrix, Tensor)
            assert float((side.to_dense(torch.float64) - matrix).norm()) <= 1e-12 * float(matrix.norm())


@pytest.mark.parametrize("memory", [{"micro_batch": 2}, {"offload": "on"}], ids=str)
def test_slices_and_offloaded_sums_keep_the_same_rows(memory: dict[str, Any]) -> None:
    assert worst(collect(ALL, memory=memory), collect(DENSE)) < 1e-12


def test_rows_stay_where_the_options_say_and_are_as_wide() -> None:
    plain, narrow = collect(ALL, dtype="float32"), collect(Woodbury(policy="all", dtype="fp16"), dtype="float32")
    for name, side in sides(narrow).items():
        assert isinstance(side, LowRank)
        assert side.storage_dtype == torch.float16
        wide = sides(plain)[name]
        assert isinstance(wide, LowRank)
        assert wide.storage_dtype == torch.float32
        matrix = wide.to_dense(torch.float64)
        assert 0 < float((side.to_dense(torch.float64) - matrix).norm() / matrix.norm()) < 5e-4


def test_auto_keeps_rows_where_they_are_few_and_says_why() -> None:
    whole = collect(Woodbury(), 6)
    found = {layer.name: (layer.representation_G, layer.why) for layer in whole.layers}
    # 6 examples of 3 positions: 18 rows against 48, 24, 16 and 5 outputs; one row an example where positions are summed
    assert found["first"][0] == "woodbury"
    assert "18 are foreseen, for 48 outputs" in found["first"][1]
    assert found["norm"][0] == "woodbury"
    assert found["table"][0] == "dense"
    assert "18 gradient rows are foreseen, more than 0.414 of 24 outputs" in found["table"][1]
    assert found["head"][0] == "dense"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
def test_spectra_and_records_agree_both_ways(dtype: str, tolerance: float) -> None:
    rows = {}
    for policy in ("auto", "dense"):
        space = workspace(model(), data(6), "classification", fisher="mc", dtype=dtype)
        space.options.woodbury, space.inputs.examples, space.options.kinds = Woodbury(policy=policy), 6, ("capacity",)  # type: ignore[arg-type]
        rows[policy] = {row.layer: row for row in Capacity(CapacityParams(), space).rows()}
        spectra = [space.ports.artifacts.load_json(f"spectra/{place}.json")["G"] for place in range(len(rows[policy]))]
        rows[policy]["spectra"] = spectra  # type: ignore[assignment]
    for own, other in zip(rows["auto"].pop("spectra"), rows["dense"].pop("spectra"), strict=True):
        assert max(abs(x - y) for x, y in zip(own, other, strict=True)) <= tolerance * max(other)
    kept = rows["auto"]["first"].record
    assert (kept.branch, kept.policy, kept.gradient_rows, kept.gradient_rows_dtype) == ("woodbury", "auto", 18, dtype)
    assert (kept.gradient_rows_device, kept.cholesky_jitter) == ("host", 0.0)
    assert kept.factor_bytes < rows["dense"]["first"].record.factor_bytes  # type: ignore[operator]
    assert rows["dense"]["first"].record.branch == "eigendecomposition"
    assert rows["dense"]["first"].record.cholesky_jitter is None
    for layer, row in rows["auto"].items():
        assert row.metrics.trace == pytest.approx(rows["dense"][layer].metrics.trace, rel=tolerance)
        assert row.record.kronecker_trace == pytest.approx(rows["dense"][layer].record.kronecker_trace, rel=tolerance)


def test_a_wide_output_never_takes_more_than_its_rows_and_a_square_of_them() -> None:
    """Of 20,000 outputs a dense G has 1.6 GB, and its rows 5 MB."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 20_000, bias=False), nn.Tanh(), nn.Linear(20_000, 3, bias=False))
    chunk = (torch.randn(64, 8), torch.randint(3, (64,)))
    space = workspace(net, [chunk], "classification", fisher="mc", dtype="float32", exact_trace=False)
    # an A of 20,000 rows is another's business
    net[2].weight.requires_grad_(False)
    space.inputs.examples, space.options.kinds = 64, ("capacity",)

    found = []
    peak = peak_bytes(lambda: found.extend(Capacity(CapacityParams(), space).rows()))
    row = found[0]
    rows = 64 * 20_000 * 4
    assert row.record.branch == "woodbury"
    # rows, the gradient they came from, activations and what autograd saves of them, and the chunks of 16 MiB
    assert peak < 8 * rows + 64 * 64 * 8 * 8 + 6 * 2**24


def test_auto_is_dense_where_nobody_counts_the_data() -> None:
    space = workspace(model(), data(), "classification", fisher="mc")
    whole = collect_or_read(space)
    assert {layer.representation_G for layer in whole.layers} == {"dense"}
    assert all("do not say how many examples" in layer.why for layer in whole.layers)


def test_hybrid_keeps_rows_of_wide_outputs_alone() -> None:
    whole = collect(Woodbury(policy="hybrid", hybrid_from=40))
    assert {layer.name for layer in whole.layers if layer.representation_G == "woodbury"} == {"norm", "first"}


@pytest.mark.parametrize(("options", "reason"), [({"ekfac": True}, "EK-FAC"), ({"fisher": "forward_only"}, "identity")])
def test_what_needs_a_matrix_stays_one_and_says_so(options: dict[str, Any], reason: str) -> None:
    whole = collect(ALL, **options)
    assert {layer.representation_G for layer in whole.layers} == {"dense"}
    assert all(reason in layer.why for layer in whole.layers)


def test_rows_read_back_from_what_waits_between_passes() -> None:
    space = workspace(model(), data(), "classification", fisher="mc")
    space.options.woodbury, space.inputs.examples, space.ports.scratch = ALL, 12, MemoryArtifacts()
    single = collect_or_read(space)
    plan: dict[str, Any] = {}
    again = workspace(model(), data(), "classification", fisher="mc")
    again.options.woodbury, again.inputs.examples, again.ports.scratch, again.ports.announce_plan = (
        ALL,
        12,
        MemoryArtifacts(),
        plan.update,
    )
    names = tuple(layer.name.partition("[")[0] for layer in single.layers)
    first, second = tuple(dict.fromkeys(names))[:2], tuple(dict.fromkeys(names))[2:]
    again.resume.chosen = Chosen(parts=(first, second))
    several = collect_or_read(again)
    assert several.passes == 2
    assert several.storage_policy == "laid aside"
    for layer in single.layers:
        assert digest(several.load(layer.ordinal).G) == digest(single.load(layer.ordinal).G)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-14), (torch.float16, 5e-4)])
def test_a_moving_average_of_many_rows_is_merged_exactly(dtype: torch.dtype, tolerance: float) -> None:
    drawn = torch.randn(900, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    kept = GradientRows.empty(1, 7, host_storage(900, dtype))
    dense = torch.zeros(7, 7, dtype=torch.float64)
    for batch in drawn.split(10):
        kept.decay_(0.99)
        dense.mul_(0.99)
        kept.add_(batch)
        dense += batch.T @ batch
        assert kept.rows.shape[1] <= 7
    (side,) = kept.finished(3.0)
    assert side.count == 7
    # of 900 rows: what a step rounds off would add up to thirty times as much in float16
    assert float((side.to_dense(torch.float64) - dense / 3).norm() / dense.norm() * 3) < tolerance


def test_more_rows_than_were_foreseen_find_room() -> None:
    drawn = torch.randn(30, 2 * 40, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    kept = GradientRows.empty(2, 40, host_storage(5, torch.float64))
    for batch in drawn.split(4):
        kept.add_(batch)
    for group, side in enumerate(kept.finished(1.0)):
        own = drawn.view(30, 2, 40)[:, group]
        assert torch.equal(side.rows, own)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "auto"])
def test_gradients_beyond_the_rows_range_are_refused_where_they_are_kept(dtype: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3)).to(torch.float64)
    with torch.no_grad():
        net[2].weight *= 1e45
    chunk = (torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,)))
    space = workspace(net, [chunk], "classification", fisher="empirical")
    space.options.woodbury, space.inputs.examples = Woodbury(policy="all", dtype=dtype), 8  # type: ignore[arg-type]
    if dtype in ("fp32", "bf16"):
        with pytest.raises(
            NonFiniteFactor, match=r"layer `0`: gradients reach .*e\+4\d, .* take `woodbury.dtype: fp16`"
        ):
            collect_or_read(space)
    else:
        assert sides(collect_or_read(space))["0"].trace() > 1e60  # type: ignore[operator]


def test_a_non_finite_gradient_is_refused_by_layer() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 64)
            self.second = nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            # the root's slope at zero is infinite
            return self.second((self.first(x) * 0).sqrt())

    torch.manual_seed(0)
    space = workspace(Steep().to(torch.float64), [(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))], "classification")
    space.options.woodbury, space.inputs.examples = ALL, 4
    # no slope, or no number at all, of each of the 64
    with pytest.raises(EngineError, match=r"layer `first`: 64 of the 64 moments on the diagonal of G .* batch 0"):
        collect_or_read(space)
