"""Whether a metric has arrived: layers whose inputs have a known power law for their spectrum."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.capacity import CapacityParams
from catalog.requests.woodbury import Woodbury
from engine.analyses.capacity import Capacity
from engine.analyses.metrics.sample_convergence import extrapolated, heading, not_converged
from engine.collect import collect_or_read
from engine.factors import softmax_fisher
from engine.workspace import Workspace
from tests.oracles import workspace


def law(size: int, exponent: float) -> Tensor:
    return torch.arange(1, size + 1, dtype=torch.float64).pow(-exponent)


def effective_rank(spectrum: Tensor) -> float:
    share = spectrum / spectrum.sum()
    return math.exp(-float((share * share.log()).sum()))


def measured(
    size: int, exponent: float, examples: int, seed: int = 0, **options: Any
) -> tuple[dict[str, Any], Any, Any]:
    """A linear layer fed with ``examples`` draws from the law: A is their covariance, G one number."""
    drawn = torch.randn(examples, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    inputs = drawn * law(size, exponent).sqrt()
    torch.manual_seed(0)
    model = nn.Linear(size, 1, bias=False).double()
    chunks = [(part, torch.zeros(len(part), 1).double()) for part in inputs.split(math.ceil(examples / 8))]
    made = workspace(model, chunks, "regression", nested=True, **options)
    made.inputs.examples = examples
    rows = Capacity(CapacityParams(), made).rows()
    row = next(rows)
    try:
        next(rows)
    except StopIteration as end:
        return {each.metric: each for each in row.metrics.convergence}, row.metrics, end.value
    raise AssertionError("one layer gives one row")


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(("exponent", "examples"), [(0.5, 340), (0.8, 240), (0.65, 300)])
def test_a_power_law_is_flagged_although_reruns_agree(exponent: float, examples: int) -> None:
    truth = effective_rank(law(200, exponent))
    found, metrics, summary = measured(200, exponent, examples)
    again, other, _ = measured(200, exponent, examples, seed=1)
    assert 0.15 <= 1 - metrics.effective_rank / truth <= 0.35
    assert metrics.effective_rank == pytest.approx(other.effective_rank, rel=0.05)
    for convergence, value in ((found, metrics), (again, other)):
        ranks = convergence["effective_rank"]
        assert ranks.not_converged is True
        assert ranks.values[-1] == value.effective_rank
        # most of what is missing is told
        assert abs(1 - ranks.extrapolation / truth) < 0.6 * abs(1 - value.effective_rank / truth)
        assert convergence["trace"].not_converged is False
    assert (summary.not_converged["effective_rank"], summary.not_converged["trace"]) == (1, 0)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_enough_examples_are_not_flagged(exponent: float) -> None:
    truth = effective_rank(law(40, exponent))
    found, metrics, summary = measured(40, exponent, 6000, batch_size=50)
    assert metrics.effective_rank == pytest.approx(truth, rel=0.02)
    assert found["effective_rank"].not_converged is False
    assert found["effective_rank"].extrapolation == pytest.approx(truth, rel=0.02)
    assert summary.not_converged["effective_rank"] == 0


def test_every_size_has_the_metric_of_its_own_examples_with_the_damping_of_the_whole() -> None:
    found, metrics, _ = measured(30, 1.0, 64)
    drawn = torch.randn(64, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs = drawn * law(30, 1.0).sqrt()
    second = metrics.trace_G
    for place, examples in enumerate((8, 16, 32, 64)):
        a = torch.linalg.eigvalsh(inputs[:examples].T @ inputs[:examples] / examples).clamp_min(0)
        f = a * second  # one output with `mse`: G is 2 whatever the examples are
        expected = {
            "trace": float(f.sum()),
            "frobenius_norm": float(f.norm()),
            "spectral_norm": float(f[-1]),
            "participation_ratio": float(f.sum() ** 2 / f.square().sum()),
            "effective_dimension": float((f / (f + metrics.damping)).sum()),
            "logdet_damped": float((f + metrics.damping).log().sum()),
        }
        for name, value in expected.items():
            assert found[name].examples[place] == examples
            assert found[name].values[place] == pytest.approx(value, rel=1e-9), name


def exponent(values: Tensor, rank: int) -> float:
    """Of all eigenvalues sorted, by the normal equations of the fit that docs/convention.md describes."""
    last = rank // 4
    ranks = torch.tensor([round(10 * (last / 10) ** (place / 11)) for place in range(12)])
    height = values.sort(descending=True).values[ranks - 1].log()
    place = ranks.double().log()
    return -float(((place - place.mean()) * height).sum() / (place - place.mean()).square().sum())


def test_the_decay_is_followed_as_the_exponent_of_each_size() -> None:
    found, metrics, summary = measured(200, 0.8, 1200)
    drawn = torch.randn(1200, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs = drawn * law(200, 0.8).sqrt()
    followed = found["decay"]
    assert followed.examples == (152, 300, 600, 1200)
    for examples, value in zip(followed.examples, followed.values, strict=True):
        own = torch.linalg.eigvalsh(inputs[:examples].T @ inputs[:examples] / examples)
        assert value == pytest.approx(exponent(own, min(examples, 200)), rel=1e-9)
    assert followed.values[-1] == metrics.decay.exponent
    assert followed.extrapolation == pytest.approx(2 * followed.values[-1] - followed.values[-2])
    assert summary.not_converged["decay"] == int(followed.not_converged)


def drained(made: Workspace, params: CapacityParams) -> tuple[dict[str, Any], Any]:
    rows = Capacity(params, made).rows()
    found = {}
    while True:
        try:
            row = next(rows)
        except StopIteration as end:
            return found, end.value
        found[row.layer] = row.metrics


def two_layers(outputs: int, **options: Any) -> Workspace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(11, 9), nn.Tanh(), nn.Linear(9, outputs)).double()
    x, y = torch.randn(64, 11, dtype=torch.float64), torch.randint(0, outputs, (64,))
    options = {"batch_size": 8, **options}
    made = workspace(model, list(zip(x.split(8), y.split(8), strict=True)), "classification", nested=True, **options)
    made.inputs.examples = 64
    return made


def test_the_model_is_followed_as_one_matrix() -> None:
    made = two_layers(5)
    params = CapacityParams(rank_tolerance=1e-9)
    rows, summary = drained(made, params)
    whole = collect_or_read(made)
    followed = {each.metric: each for each in summary.model.convergence}
    sizes = [*(size.load for size in whole.nested), whole.load]
    for place, load in enumerate(sizes):
        products, damped = [], []
        for facts in whole.layers:
            factors = load(facts.ordinal)
            a, g = (torch.linalg.eigvalsh(each).clamp_min(0) for each in (factors.A, factors.G))
            if place < 3:
                # fewer rows than A has: its zeros are exact
                a[: max(0, a.numel() - 8 * 2**place)] = 0
            products.append(torch.outer(a, g).flatten())
            damped.append(products[-1] + rows[facts.name].damping)
        f, shifted = torch.cat(products), torch.cat(damped)
        share = f[f > 0] / f.sum()
        rank = int((f > 1e-9 * f.max()).sum())
        expected = {
            "trace": float(f.sum()),
            "frobenius_norm": float(f.norm()),
            "spectral_norm": float(f.max()),
            "stable_rank": float(f.square().sum() / f.max() ** 2),
            "participation_ratio": float(f.sum() ** 2 / f.square().sum()),
            "effective_rank": math.exp(-float((share * share.log()).sum())),
            "rank": rank,
            "effective_dimension": float((f / shifted).sum()),
            "logdet_damped": float(shifted.log().sum()),
            "kappa_damped": float(shifted.max() / shifted.min()),
            "decay": exponent(f, rank) if rank >= 127 else None,
        }
        for name, value in expected.items():
            assert followed[name].examples == (8, 16, 32, 64)
            found = followed[name].values[place]
            assert found == (None if value is None else pytest.approx(value, rel=1e-7)), (name, place)
    assert set(followed) == {*expected, "logdet", "kappa"}
    for name in ("effective_rank", "rank", "participation_ratio"):
        assert followed[name].values[-1] == getattr(summary.model, name)
    assert followed["effective_dimension"].values[-1] == summary.effective_dimension


def test_only_what_is_asked_for_is_followed() -> None:
    _, summary = drained(two_layers(5), CapacityParams(metrics=("trace", "quantiles")))
    assert [each.metric for each in summary.model.convergence] == ["trace"]
    _, summary = drained(two_layers(5), CapacityParams(metrics=("quantiles",)))
    assert summary.model.convergence == ()


def test_a_head_without_eigenvalues_is_followed_by_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    params = CapacityParams(damping_grid=(1e-3,))
    wide = two_layers(200)
    wide.options.woodbury = Woodbury(softmax_head=False, policy="dense")
    dense, truth = drained(wide, params)
    monkeypatch.setattr(softmax_fisher, "DENSE_ROWS", 4)
    own, summary = drained(two_layers(200), params)
    assert own["2"].no_spectrum is None
    assert "softmax_head" in own["2"].estimated
    expected = {each.metric: each for each in dense["2"].convergence}
    names = {
        "trace", "frobenius_norm", "spectral_norm", "stable_rank", "participation_ratio", "logdet_damped",
        "logdet_factored", "effective_dimension", "effective_dimension_factored", "effective_dimension_share",
    }  # fmt: skip
    for each in own["2"].convergence:
        if each.metric in names:
            assert each.values == pytest.approx(expected[each.metric].values, rel=1e-8), each.metric
    model = {each.metric: each for each in summary.model.convergence}
    for each in truth.model.convergence:
        if each.metric in ("trace", "spectral_norm", "stable_rank", "effective_dimension", "logdet_damped"):
            assert model[each.metric].values == pytest.approx(each.values, rel=1e-8), each.metric
    ranks = {each.metric: each for each in truth.model.convergence}["rank"].values
    assert model["rank"].values == pytest.approx(ranks, rel=0.02)


def test_extrapolation_is_exact_where_the_error_falls_with_the_sample() -> None:
    sizes = [100, 200, 400, 750]
    values = [7 - 30 / size for size in sizes]
    assert extrapolated(sizes, values) == pytest.approx(7, rel=1e-12)
    assert extrapolated([5, 10], [9.0, 2.0]) == -5
    assert not_converged(2.0, 0.0) is True


@pytest.mark.parametrize(
    ("metric", "values", "limit", "late"),
    [
        ("kappa", (900.0, 300.0), None, True),  # −300: a condition number of 1 was reported
        ("trace", (9.0, 2.0), None, True),
        ("rank", (10.0, 16.0), None, True),  # 22 of 20 directions
        ("rank", (19.0, 19.9), 20.0, False),  # 20.8: the end of the range is within the tolerance
        ("kappa", (1.04, 1.01), 1.0, False),
        ("logdet", (9.0, -2.0), -13.0, True),  # of either sign
        ("kappa", (900.0, 500.0), 100.0, True),
        ("kappa", (None, 500.0), None, None),
    ],
)
def test_a_limit_outside_of_the_range_is_none(
    metric: str, values: tuple[float | None, ...], limit: float | None, late: bool | None
) -> None:
    found = heading(metric, (5, 10), values, 20, 20.0 if metric == "rank" else math.inf)
    assert (found.extrapolation, found.not_converged) == (limit, late)
    assert (found.no_extrapolation is not None) == (limit is None and late is True)


@pytest.mark.parametrize(
    ("sizes", "values"), [([10], [1.0]), ([5, 10], [None, 1.0]), ([5, 10], [1.0, None]), ([10, 10], [1.0, 2.0])]
)
def test_without_two_sizes_there_is_no_direction(sizes: list[int], values: list[float | None]) -> None:
    assert extrapolated(sizes, values) is None
    assert not_converged(values[-1], None) is None


def test_a_logarithm_is_measured_by_its_dimension() -> None:
    assert not_converged(0.01, 0.3, scale=10) is False
    assert not_converged(0.01, 0.6, scale=10) is True
    assert not_converged(0.0, 0.0) is False
