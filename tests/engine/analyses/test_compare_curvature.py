"""The analysis against explicit Kronecker matrices of two collections: every form, what is missing, what differs."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.analysis import LayerResult
from catalog.analyses.compare_curvature import CompareCurvatureMetrics, CompareCurvatureParams, CompareCurvatureSummary
from catalog.record import canonical_json, plain
from catalog.requests.collection import Stabilisation
from catalog.requests.woodbury import Woodbury
from engine.analyses.compare_curvature import Comparison
from engine.analyses.factors import KeptFactors
from engine.artifacts import Artifacts
from engine.errors import BrokenFactors, UsageError
from engine.factors.factor_files import read_factors
from engine.factors.factor_index import INDEX
from engine.factors.factor_set import FactorSet
from engine.linalg.linear_operator import Structured
from engine.operators.pairs import side_comparison
from engine.workspace import JobOptions, ModelInputs, Ports, Workspace
from tests.engine.operators.test_comparison import agree, shifted, twin
from tests.oracles import MemoryArtifacts, workspace

KS = (1, 2, 3)
PARAMS = CompareCurvatureParams(k=KS)


class Attention(nn.Module):
    """Parameters in one tensor, two layers that are fed by one tensor, and one parameter that is only added."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 5)
        self.shift = nn.Parameter(torch.linspace(-0.3, 0.3, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        pooled = mixed.mean(1)
        found: Tensor = self.head(torch.tanh(self.left(pooled)) * torch.sigmoid(self.right(pooled)) + self.shift)
        return found


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 9, 3))


def perceptron(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(7, 5), nn.Flatten(), nn.Linear(15, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 4)
    )


def wide_head() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 60))


def ids() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 7, (24, 3), generator=generator), torch.arange(24) % 3


def numbers(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(24, *shape, dtype=torch.float64, generator=generator), torch.arange(24) % 3


NETS: Mapping[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor], str]] = {
    "perceptron": (perceptron, ids(), "dense"),
    "attention": (Attention, numbers(3, 4), "dense"),
    "convolutions": (convolutions, numbers(2, 5, 5), "dense"),
    "wide_head": (wide_head, numbers(6), "all"),
}


FORMS = {
    "perceptron": {"kronecker", "diagonal", "block"},
    "attention": {"kronecker", "diagonal_block"},
    "convolutions": {"kronecker"},
    "wide_head": {"kronecker"},
}


def job(net: str, weights: int = 0, make: Callable[[], nn.Module] | None = None, **options: Any) -> Workspace:
    """A job that collects; ``weights`` is the seed of the model's."""
    made, batch, policy = NETS[net]
    torch.manual_seed(weights)
    space = workspace((make or made)().double(), [batch], "classification", **{"fisher": "empirical"} | options)
    space.options.woodbury = Woodbury(policy=policy)  # type: ignore[arg-type]
    space.options.decomposition = "none"
    return space


def stored(net: str, weights: int = 0, **options: Any) -> MemoryArtifacts:
    """Factors as a job keeps them."""
    space = job(net, weights, **options)
    space.options.kinds = ("factors",)
    for _ in KeptFactors(None, space).rows():
        pass
    artifacts = space.ports.artifacts
    assert isinstance(artifacts, MemoryArtifacts)
    return artifacts


def over(first: Artifacts, against: Artifacts | None, **options: Any) -> Workspace:
    return Workspace(
        inputs=ModelInputs(stored=first, stored_against=against),
        options=JobOptions(kinds=("compare_curvature",), decomposition="none", **options),
        ports=Ports(artifacts=MemoryArtifacts()),
    )


def run(space: Workspace) -> tuple[dict[str, LayerResult], CompareCurvatureSummary]:
    rows, steps = {}, Comparison(PARAMS, space).rows()
    while True:
        try:
            row = next(steps)
        except StopIteration as end:
            summary: CompareCurvatureSummary = end.value
            return rows, summary
        rows[row.layer] = row


def dense_sides(factors: FactorSet, name: str) -> tuple[Tensor, Tensor]:
    """G and A of one layer as float64 matrices."""
    layer = factors.load(next(each.ordinal for each in factors.layers if each.name == name))
    G = layer.G.to_dense(torch.float64) if isinstance(layer.G, Structured) else layer.widened_G.double()
    A = layer.widened_A.double()
    return (torch.diag(G) if G.ndim == 1 else G), (torch.diag(A) if A.ndim == 1 else A)


def lambdas(G: Tensor, A: Tensor, form: str, damping: float = 1e-4) -> tuple[float, float]:
    """λ_G and λ_A by the rule of Martens & Grosse, relative to the mean eigenvalue of the block."""
    mean_g, mean_a = float(G.trace()) / len(G), float(A.trace()) / len(A)
    joint = damping * mean_g * mean_a
    if form.endswith("block"):
        return joint, 0.0
    return (joint * mean_g / mean_a) ** 0.5, (joint * mean_a / mean_g) ** 0.5


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("net", NETS)
def test_every_layer_is_that_of_explicit_kronecker_matrices(net: str) -> None:
    # of two models, so that A differs too; 1e-2 keeps the explicit inverses to ten digits
    first, second = stored(net), stored(net, weights=1)
    sets = read_factors(first), read_factors(second)
    rows, summary = run(over(first, second, stabilisation=Stabilisation(damping=1e-2)))
    forms = set()
    squares, divergences = [0.0, 0.0], 0.0
    for name, row in rows.items():
        metrics: CompareCurvatureMetrics = row.metrics
        forms.add(metrics.form)
        (g1, a1), (g2, a2) = (dense_sides(each, name) for each in sets)
        added = [lambdas(g, a, metrics.form, 1e-2) for g, a in ((g1, a1), (g2, a2))]
        assert (metrics.lambda_G, metrics.lambda_A) == pytest.approx(added[0], rel=1e-12)
        assert (metrics.lambda_G_against, metrics.lambda_A_against) == pytest.approx(added[1], rel=1e-12)
        damped = [
            (shifted(g, of_g), shifted(a, of_a))
            for (g, a), (of_g, of_a) in zip(((g1, a1), (g2, a2)), added, strict=True)
        ]
        assert metrics.G is not None
        assert metrics.product is not None
        _agree(metrics.G, g1, g2, (damped[0][0], damped[1][0]))
        if metrics.A is not None:
            _agree(metrics.A, a1, a2, (damped[0][1], damped[1][1]))
        products = torch.kron(g1, a1), torch.kron(g2, a2)
        _agree(metrics.product, *products, (torch.kron(*damped[0]), torch.kron(*damped[1])))
        squares[0] += float((products[0] - products[1]).norm()) ** 2
        squares[1] += float(products[1].norm()) ** 2
        divergences += metrics.product.divergence or 0.0
    assert summary.layers == len(rows)
    assert summary.distance == pytest.approx(squares[0] ** 0.5, rel=1e-10)
    assert summary.relative_distance == pytest.approx((squares[0] / squares[1]) ** 0.5, rel=1e-10)
    assert summary.divergence == pytest.approx(divergences, rel=1e-12)
    assert forms == FORMS[net]
    if net == "wide_head":
        assert isinstance(sets[0].load(sets[0].layers[-1].ordinal).G, Structured)


def _agree(found: Any, first: Tensor, second: Tensor, damped: tuple[Tensor, Tensor]) -> None:
    """Whatever is determined, and nothing that is not: of singular factors the spans beyond their rank."""
    ks = tuple(k for k in KS if k <= len(first))
    expected = twin(first, second, damped, ks)
    overlaps = expected.pop("overlaps")
    for k, each in zip(KS, found.overlaps, strict=True):
        if each.overlap is None:
            assert "differ by no more than rounding" in each.why or each.why == f"there are {len(first)} eigenvectors"
        else:
            assert each.overlap == pytest.approx(overlaps[ks.index(k)], abs=1e-10)
    agree(found, expected)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("net", NETS)
def test_a_set_beside_itself_overlaps_wholly_and_has_no_distance(net: str) -> None:
    one = stored(net)
    rows, summary = run(over(one, one))
    assert (summary.distance, summary.relative_distance) == pytest.approx((0, 0), abs=1e-12)
    assert (summary.divergence, summary.reverse_divergence) == pytest.approx((0, 0), abs=1e-12)
    assert summary.factors_sha256 == summary.against_sha256
    assert (summary.differences, summary.only_first, summary.only_against, summary.other_sizes) == ((), (), (), ())
    found = [each.overlap for row in rows.values() for each in row.metrics.product.overlaps if each.overlap is not None]
    assert found == pytest.approx([1.0] * len(found), abs=1e-12)
    assert len(found) >= len(rows)


def test_two_runs_give_equal_digests_and_a_resumed_one_the_rest() -> None:
    first, second = stored("attention"), stored("attention", weights=1)

    def digest(rows: dict[str, LayerResult], summary: CompareCurvatureSummary) -> str:
        table = {name: [plain(row.metrics), plain(row.record)] for name, row in rows.items()}
        return hashlib.sha256(canonical_json([table, plain(summary)]).encode()).hexdigest()

    rows, summary = run(over(first, second))
    assert digest(rows, summary) == digest(*run(over(first, second)))
    resumed = over(first, second)
    resumed.resume.completed = frozenset(("compare_curvature", row.ordinal) for row in list(rows.values())[:2])
    rest, whole = run(resumed)
    assert list(rest) == list(rows)[2:]
    assert [each.metrics for each in rest.values()] == [rows[name].metrics for name in rest]
    assert whole == summary


def test_a_job_that_collects_is_compared_with_a_stored_set() -> None:
    first, second = stored("perceptron", seed=1, fisher="mc"), stored("perceptron", seed=2, fisher="mc")
    collecting = job("perceptron", seed=1, fisher="mc")
    collecting.inputs.stored_against = second
    collecting.options.kinds = ("compare_curvature",)
    rows, summary = run(collecting)
    again, expected = run(over(first, second))
    assert summary == expected
    assert {name: row.metrics for name, row in rows.items()} == {name: row.metrics for name, row in again.items()}


def test_layers_that_are_missing_or_of_another_size_are_named() -> None:
    def longer() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(7, 5), nn.Flatten(), nn.Linear(15, 8), nn.Tanh(), nn.Identity(), nn.Linear(8, 6), nn.Tanh(),
            nn.Linear(6, 4),
        )  # fmt: skip

    first, second = stored("perceptron"), stored("perceptron", make=longer)
    rows, summary = run(over(first, second))
    assert summary.only_first == ("3",)
    assert summary.only_against == ("7",)
    assert [plain(each) for each in summary.other_sizes] == [
        {"layer": "5", "first": "9×4 kronecker", "against": "9×6 kronecker"}
    ]
    assert summary.layers == 2
    assert rows["3"].metrics.why == "the set compared with has no layer of this name"
    assert rows["5"].metrics.why == "the layer is 9×4 kronecker here and 9×6 kronecker in the set compared with"
    assert (rows["3"].metrics.G, rows["3"].metrics.product, rows["3"].metrics.form) == (None, None, "block")
    assert rows["2"].metrics.why is None
    # 35 of the table, 128 and 54 and 28 of the layers
    assert [(each.option, each.first, each.against) for each in summary.differences] == [
        ("trainable_parameters", "215", "245")
    ]


def test_sets_without_a_common_layer_are_refused_with_the_names_of_both() -> None:
    with pytest.raises(UsageError, match="no layer in common") as caught:
        run(over(stored("attention"), stored("perceptron")))
    assert "`attention." in caught.value.message or "`left`" in caught.value.message
    assert "`2`" in caught.value.message
    assert caught.value.pointer == "/compare_curvature/against"


def test_without_a_second_set_nothing_is_read() -> None:
    with pytest.raises(UsageError, match=r"give `compare_curvature\.against`") as caught:
        run(over(stored("perceptron"), None))
    assert caught.value.pointer == "/compare_curvature/against"


def test_a_damaged_second_set_is_told_from_the_first() -> None:
    first, second = stored("perceptron"), stored("perceptron", weights=1)
    second.tensors["factors/1.safetensors"]["gradient_covariance"][0] += 1
    with pytest.raises(BrokenFactors, match="of the set compared with: layer `2`: `gradient_covariance`") as caught:
        run(over(first, second))
    assert caught.value.pointer == "/compare_curvature/against"
    # the other way round it is the first
    with pytest.raises(BrokenFactors, match=r"^layer `2`") as caught:
        run(over(second, first))
    assert caught.value.pointer == "/factors"
    broken = stored("perceptron")
    broken.tables[INDEX]["layers"][0]["in_dim"] = "3"
    with pytest.raises(BrokenFactors, match="of the set compared with") as caught:
        run(over(first, broken))
    assert caught.value.pointer == "/compare_curvature/against"


def test_how_the_two_were_collected_is_part_of_the_summary() -> None:
    first, second = stored("perceptron", fisher="mc", seed=3), stored("perceptron", sharing="reduce")
    _, summary = run(over(first, second))
    found = {each.option: (json.loads(each.first), json.loads(each.against)) for each in summary.differences}
    assert found == {"fisher": ("mc", "empirical"), "seed": (3, 0), "sharing": ("expand", "reduce")}


def test_corrected_eigenvalues_are_compared_where_both_have_them() -> None:
    first, second = stored("perceptron", ekfac=True), stored("perceptron", weights=1, ekfac=True)
    rows, _ = run(over(first, second))
    sets = read_factors(first), read_factors(second)
    for facts in sets[0].layers:
        loads = [each.load_corrected for each in sets]
        values = [load(facts.ordinal).eigenvalues.flatten().sort().values for load in loads if load is not None]
        found = rows[facts.name].metrics.ekfac
        assert found.trace_log_ratio == pytest.approx(float((values[0].sum() / values[1].sum()).log()))
        assert found.spectral_distance == pytest.approx(float((values[0] - values[1]).norm() / values[1].norm()))
    plainly, _ = run(over(first, stored("perceptron")))
    assert {row.metrics.ekfac for row in plainly.values()} == {None}


def test_an_input_that_layers_share_is_decomposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = stored("attention"), stored("attention", weights=1)
    plainly, _ = run(over(first, second))
    decomposed: list[int] = []
    plain_decompose = side_comparison.decompose

    def counted(factor: Tensor, *args: Any, **options: Any) -> Any:
        decomposed.append(factor.shape[0])
        return plain_decompose(factor, *args, **options)

    monkeypatch.setattr(side_comparison, "decompose", counted)
    counted_rows, _ = run(over(first, second))
    layers = read_factors(first).layers
    followers = [each for each in layers if each.shared_A_with is not None]
    assert followers
    # two sets, two sides, without the followers' A
    assert len(decomposed) == 2 * (2 * len(layers) - len(followers))
    assert {name: row.metrics for name, row in counted_rows.items()} == {
        name: row.metrics for name, row in plainly.items()
    }


def test_a_layer_without_curvature_is_said_to_have_none() -> None:
    def dead() -> nn.Module:
        model = perceptron()
        nn.init.zeros_(model[5].weight)  # type: ignore[index, arg-type] # nothing before it has a gradient
        return model

    rows, summary = run(over(stored("perceptron"), stored("perceptron", make=dead)))
    found = rows["2"].metrics.product
    assert found.why == "the set compared with has no curvature here, so nothing to damp"
    assert (found.relative_distance, found.cosine, found.divergence) == (None, None, None)
    assert found.distance == found.norm
    assert {each.why for each in found.overlaps} == {"a set has no curvature here"}
    assert summary.divergence is None
    assert summary.distance is not None


def test_the_digests_of_the_second_set_stand_beside_those_of_the_first() -> None:
    first, second = stored("perceptron"), stored("perceptron", weights=1)
    rows, summary = run(over(first, second))
    swapped, exchanged = run(over(second, first))
    for name, row in rows.items():
        assert (row.metrics.digest_A_against, row.metrics.digest_G_against) == (
            swapped[name].record.digest_A, swapped[name].record.digest_G,
        )  # fmt: skip
        assert row.metrics.product.divergence == pytest.approx(swapped[name].metrics.product.reverse_divergence)
        assert row.metrics.product.distance == pytest.approx(swapped[name].metrics.product.distance)
    assert (summary.factors_sha256, summary.against_sha256) == (exchanged.against_sha256, exchanged.factors_sha256)
    assert summary.factors_sha256 != summary.against_sha256


def test_a_cancelled_job_stops_between_layers() -> None:
    class Stopped(Exception):
        """Asked to stop."""

    def stop() -> None:
        raise Stopped

    space = over(stored("perceptron"), stored("perceptron", weights=1))
    space.ports = dataclasses.replace(space.ports, raise_if_cancelled=stop)
    with pytest.raises(Stopped):
        run(space)
