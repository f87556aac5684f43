"""The analysis `reconstruction`: every stabilised factor against Q max(Λ, f) Qᵀ of the collected one, in float64."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.analysis import LayerResult, most_decomposed
from catalog.analyses.capacity import CapacityParams
from catalog.analyses.reconstruction import ReconstructionParams, ReconstructionSummary
from catalog.requests.collection import Stabilisation
from catalog.requests.woodbury import Woodbury
from engine.analyses.capacity import Capacity
from engine.analyses.reconstruction import FOLDER, INDEX, Reconstruction
from engine.collect import collect_or_read
from engine.errors import NoConditionNumber
from engine.factors.clipping.clipped_inverse import StabilisedInverse
from engine.factors.factor_files import read_factors
from engine.factors.kronecker_factors import digest
from engine.linalg.eigenbasis import Eigenbasis
from engine.linalg.linear_operator import Structured
from engine.measurement import clip_factor
from engine.workspace import JobResults, Workspace
from tests.oracles import MemoryArtifacts, workspace


class Net(nn.Module):
    """A diagonal A, a block, two layers of one input, and a layer that is frozen half."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)
        self.idle = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids).mean(1))
        return self.head(torch.tanh(self.left(x)) * self.right(x))


def given(**options: Any) -> Workspace:
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (12, 4), generator=torch.Generator().manual_seed(1))
    chunks = [(ids[place : place + 4], torch.arange(4) % 3) for place in (0, 4, 8)]
    space = workspace(Net(), chunks, "classification", **options)
    space.options.decomposition = most_decomposed([ReconstructionParams()])
    return space


def run(
    space: Workspace, kappa_max: float | None = 100.0, **options: Any
) -> tuple[dict[str, LayerResult], ReconstructionSummary]:
    space.options.stabilisation = Stabilisation(kappa_max=kappa_max)
    rows = {}
    analysis = Reconstruction(ReconstructionParams(**options), space).rows()
    while True:
        try:
            row = next(analysis)
        except StopIteration as end:
            return rows, end.value
        rows[row.layer] = row


def clipped(factor: Tensor, kappa_max: float) -> Tensor:
    wide = torch.diag(factor).double() if factor.ndim == 1 else factor.double()
    values, vectors = torch.linalg.eigh(wide)
    dense = (vectors * values.clamp_min(float(values[-1]) / kappa_max)) @ vectors.mT
    return dense.diagonal() if factor.ndim == 1 else dense


def stored(space: Workspace) -> Any:
    """The stabilised factors, read as a later job reads those of an earlier one."""
    artifacts = MemoryArtifacts()
    kept: Any = space.ports.artifacts
    for table in (kept.tensors, kept.tables):
        for name, content in table.items():
            if name.startswith(f"{FOLDER}/"):
                place = artifacts.tensors if table is kept.tensors else artifacts.tables
                place[name.replace(FOLDER, "factors")] = content
    return read_factors(artifacts)


@pytest.mark.parametrize("placement", ["auto", "device", "panels", "host"])
def test_every_factor_is_the_definition(placement: Any) -> None:
    space = given()
    rows, summary = run(space, placement=placement)
    whole, again = collect_or_read(space), stored(space)
    some = 0
    for facts in whole.layers:
        before, after, metrics = whole.load(facts.ordinal), again.load(facts.ordinal), rows[facts.name].metrics
        torch.testing.assert_close(after.G.double(), clipped(before.G, 100), rtol=0, atol=1e-12 * float(before.G.max()))
        assert metrics.G.digest == digest(after.G)
        assert metrics.G.floor_reached >= metrics.G.floor * (1 - 1e-9)
        assert metrics.G.kappa_reached <= 100 * (1 + 1e-9)
        assert metrics.G.relative_error <= 1e-12
        assert metrics.G.mass == pytest.approx(float(_dense(after.G).trace() - _dense(before.G).trace()), abs=1e-12)
        some += metrics.G.clipped
        if facts.form == "block":
            assert metrics.A is None
            continue
        torch.testing.assert_close(after.A.double(), clipped(before.A, 100), rtol=0, atol=1e-12 * float(before.A.max()))
        assert metrics.A.digest == digest(after.A)
    assert some > 0
    assert summary.clipped >= some
    assert summary.factors == 8  # two of each of left, head and table, one of norm; right has left's A
    assert rows["right"].metrics.shared_A_with == "left"
    assert rows["right"].metrics.A == rows["left"].metrics.A
    assert rows["idle"].status == "declared"
    assert summary.floor_kept == pytest.approx(1, abs=1e-9)
    assert summary.coverage.layers_declared == 1


def _dense(factor: Tensor) -> Tensor:
    return torch.diag(factor) if factor.ndim == 1 else factor


def test_the_collected_factors_stay_as_they_were() -> None:
    space = given()
    before = {
        facts.ordinal: digest(collect_or_read(space).load(facts.ordinal).G) for facts in collect_or_read(space).layers
    }
    run(space)
    assert before == {
        facts.ordinal: digest(collect_or_read(space).load(facts.ordinal).G) for facts in collect_or_read(space).layers
    }


def test_two_runs_give_equal_digests_and_one_decomposition_serves_two_analyses() -> None:
    first, _ = run(given())
    space = given()
    space.options.stabilisation = Stabilisation(kappa_max=100.0)
    other = {row.layer: row for row in Capacity(CapacityParams(), space).rows()}
    second, _ = run(space)
    for layer, row in first.items():
        assert row.metrics == second[layer].metrics
        assert row.record == second[layer].record
        assert other[layer].record == row.record


def test_an_inverse_through_the_eigenbasis_is_the_dense_one() -> None:
    space = given()
    rows, summary = run(space, route="eigenbasis")
    kept: Any = space.ports.artifacts
    assert summary.route == "eigenbasis"
    assert kept.tables[INDEX]["kappa_max"] == 100.0
    generator = torch.Generator().manual_seed(3)
    for facts in collect_or_read(space).layers:
        factors, metrics = collect_or_read(space).load(facts.ordinal), rows[facts.name].metrics
        tensors = dict(kept.tensors[metrics.artifact])
        holder = facts.ordinal if facts.shared_A_with is None else facts.shared_A_with
        tensors |= {
            name: each for name, each in kept.tensors[f"{FOLDER}/{holder}.safetensors"].items() if "act" in name
        }
        gradient_side = Eigenbasis.read(tensors, "gradient")
        right = torch.randn(facts.out_dim, 2, generator=generator, dtype=torch.float64)
        g = clipped(factors.G, 100)
        torch.testing.assert_close(gradient_side.solve(right), torch.linalg.solve(_dense(g), right), rtol=1e-8, atol=0)
        assert metrics.G.update == "eigenbasis"
        if metrics.A is None:
            continue
        both = StabilisedInverse(A=Eigenbasis.read(tensors, "activation"), G=gradient_side)
        gradient = torch.randn(facts.out_dim, facts.in_dim, generator=generator, dtype=torch.float64)
        a = _dense(clipped(factors.A, 100))
        truth = torch.linalg.solve(a, torch.linalg.solve(_dense(g), gradient).mT).mT
        torch.testing.assert_close(both.solve(gradient), truth, rtol=1e-7, atol=1e-9 * float(truth.abs().max()))


def test_only_one_side() -> None:
    space = given()
    rows, _ = run(space, sides="A")
    whole, again = collect_or_read(space), stored(space)
    assert rows["head"].metrics.G is None
    for facts in whole.layers:
        assert torch.equal(again.load(facts.ordinal).G, whole.load(facts.ordinal).G)
    assert not torch.equal(again.load(rows["head"].ordinal).A, whole.load(rows["head"].ordinal).A)


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    space = given()
    rows, _ = run(space, keep_matrices=False)
    kept: Any = space.ports.artifacts
    assert not any(name.startswith(FOLDER) for name in (*kept.tensors, *kept.tables))
    assert rows["head"].metrics.artifact is None
    assert len(rows["head"].metrics.G.digest) == 64


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_come_back_as_sixteen_bits_with_their_scale(dtype: str) -> None:
    space = given(storage_dtype=dtype)
    rows, _ = run(space, kappa_max=10.0)
    whole, again = collect_or_read(space), stored(space)
    for facts in whole.layers:
        before, after = whole.load(facts.ordinal), again.load(facts.ordinal)
        assert after.G.dtype == before.G.dtype
        assert after.scale_G == before.scale_G
        truth = clipped(before.widened_G, 10)
        error = float((after.widened_G.double() - truth).norm() / truth.norm())
        assert error <= torch.finfo(before.G.dtype).eps
        assert rows[facts.name].metrics.G.floor == pytest.approx(float(_dense(truth).diagonal().max()), rel=0.95)


def test_a_condition_that_the_precision_can_not_hold_is_said() -> None:
    space = given(storage_dtype="bfloat16")
    said: list[str] = []
    space.ports.log = lambda level, message: said.append(f"{level}: {message}")
    rows, summary = run(space, kappa_max=1e12)
    assert any("warning: layer" in line and "route: eigenbasis" in line for line in said)
    assert summary.floor_kept is not None
    assert summary.floor_kept < 0.5
    assert summary.kappa_reached is None
    assert rows["head"].metrics.G.kappa_reached is None


def test_without_a_condition_number_there_is_nothing_to_clip_at() -> None:
    with pytest.raises(NoConditionNumber, match=r"`stabilisation\.kappa_max` is null"):
        run(given(), kappa_max=None)


def test_a_place_that_runs_out_of_memory_leaves_the_factor_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = clip_factor.stabilise_

    def short(factor: Tensor, *arguments: Any, placement: str = "", **more: Any) -> Any:
        found = real(factor, *arguments, placement=placement, **more)
        if placement == "device" and factor.ndim == 2:
            raise MemoryError("DefaultCPUAllocator: can't allocate memory")
        return found

    undisturbed, _ = run(given())
    monkeypatch.setattr(clip_factor, "stabilise_", short)
    space = given()
    rows, summary = run(space)
    assert rows["head"].metrics.G.rungs == ("device", "panels")
    assert rows["head"].metrics.G.placement == "panels"
    assert summary.relative_error is not None
    assert summary.relative_error <= 1e-12
    assert rows["head"].metrics.G.mass == undisturbed["head"].metrics.G.mass


def test_rows_of_an_earlier_attempt_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = MemoryArtifacts()
    first = given()
    first.ports.scratch, first.resume.checkpoint_seconds = scratch, 1.0
    rows, summary = run(first)
    second = given()
    second.ports.scratch, second.resume.checkpoint_seconds = scratch, 1.0
    done = {row.ordinal for row in rows.values() if row.layer in ("left", "table")}
    second.resume.completed = frozenset(("reconstruction", ordinal) for ordinal in done)
    made: list[str] = []
    real = clip_factor.rebuild
    monkeypatch.setattr(
        "engine.analyses.reconstruction.rebuild",
        lambda *arguments: made.append(arguments[1].layer) or real(*arguments),
    )
    again, whole = run(second)
    assert set(again) == set(rows) - {"left", "table"}
    assert set(made) == {"norm", "right", "head"}
    assert whole == summary
    assert all(again[layer].metrics == rows[layer].metrics for layer in again)
    kept: Any = second.ports.artifacts
    assert kept.tables[f"{FOLDER}/factors.index.json"] == first.ports.artifacts.load_json(
        f"{FOLDER}/factors.index.json"
    )


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("damage", ["a digit", "no table", "not sealed"])
def test_a_row_that_a_disk_has_changed_is_made_again(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    scratch = MemoryArtifacts()
    first = given()
    first.ports.scratch, first.resume.checkpoint_seconds = scratch, 1.0
    rows, summary = run(first)
    ordinal = rows["head"].ordinal
    sealed = copy.deepcopy(scratch.tables[f"reconstruction/{ordinal}.json"])
    if damage == "a digit":
        sealed["body"]["metrics"]["G"]["mass"] *= 1.5
    scratch.tables[f"reconstruction/{ordinal}.json"] = {"no table": [1], "not sealed": sealed["body"]}.get(
        damage, sealed
    )
    second = given()
    second.ports.scratch, second.resume.checkpoint_seconds = scratch, 1.0
    second.resume.completed = frozenset(("reconstruction", row.ordinal) for row in rows.values())
    made: list[str] = []
    real = clip_factor.rebuild
    monkeypatch.setattr(
        "engine.analyses.reconstruction.rebuild",
        lambda *arguments: made.append(arguments[1].layer) or real(*arguments),
    )
    again, whole = run(second)
    assert again == {}
    assert set(made) == {"head"}
    assert whole == summary


def test_a_layer_without_curvature_stays_without() -> None:
    space = given()
    model: Any = space.inputs.model
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    rows, summary = run(space)
    flat = rows["left"].metrics.G
    assert (flat.clipped, flat.floor, flat.floor_reached, flat.kappa_reached) == (0, 0.0, 0.0, None)
    assert rows["left"].status == "zero_curvature"
    assert summary.kappa_reached is not None


def test_the_same_of_stored_factors() -> None:
    """As a job with `factors: {job: …}` has them: stabilised once more, nothing is left to clip."""
    space = given()
    run(space)
    kept: Any = space.ports.artifacts
    later = MemoryArtifacts()
    later.tensors = {name.replace(FOLDER, "factors"): each for name, each in kept.tensors.items()}
    later.tables = {name.replace(FOLDER, "factors"): each for name, each in kept.tables.items()}
    second = replace(
        space,
        inputs=replace(space.inputs, model=None, batches=None, task=None, stored=later),
        ports=replace(space.ports, artifacts=MemoryArtifacts()),
        results=JobResults(),
    )
    _, summary = run(second, kappa_max=100.1)
    assert summary.clipped == 0
    assert summary.mass_share == 0


def test_a_side_that_is_never_made_dense_is_kept_as_its_eigenbasis() -> None:
    dense = given(batch_size=2)
    space = given(batch_size=2)
    space.options.woodbury = Woodbury(policy="all", dtype="fp32")
    rows, summary = run(space)
    kept: Any = space.ports.artifacts
    structured = 0
    for facts in collect_or_read(space).layers:
        side = collect_or_read(space).load(facts.ordinal).G
        if not isinstance(side, Structured):
            continue
        structured += 1
        found = rows[facts.name].metrics.G
        truth = clipped(collect_or_read(dense).load(facts.ordinal).G, 100)
        own = Eigenbasis.read(kept.tensors[rows[facts.name].metrics.artifact], "gradient")
        right = torch.eye(facts.out_dim, dtype=torch.float64)
        torch.testing.assert_close(own.apply(right), truth, rtol=0, atol=1e-6 * float(truth.max()))
        assert found.kind == "woodbury"
        assert found.found_by == "construction"
        assert found.clipped + found.unclipped == facts.out_dim
    assert structured > 0
    assert summary.not_stabilised == ()
    assert kept.tables[INDEX]["layers"][0]["sides"]["G"]["kind"] in ("matrix", "eigenbasis")
