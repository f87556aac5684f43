"""Whether a metric has arrived: layers whose inputs have a known power law for their spectrum."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.capacity import CapacityParams
from engine.analyses.capacity import measure_capacity
from engine.curvature.extrapolation import extrapolated, not_converged
from tests.oracles import workspace


def law(size: int, exponent: float) -> Tensor:
    return torch.arange(1, size + 1, dtype=torch.float64).pow(-exponent)


def effective_rank(spectrum: Tensor) -> float:
    share = spectrum / spectrum.sum()
    return math.exp(-float((share * share.log()).sum()))


def measured(size: int, exponent: float, examples: int, seed: int = 0) -> tuple[dict[str, Any], Any, Any]:
    """A linear layer fed with ``examples`` draws from the law: A is their covariance, G one number."""
    drawn = torch.randn(examples, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    inputs = drawn * law(size, exponent).sqrt()
    torch.manual_seed(0)
    model = nn.Linear(size, 1, bias=False).double()
    chunks = [(part, torch.zeros(len(part), 1).double()) for part in inputs.split(math.ceil(examples / 8))]
    made = workspace(model, chunks, "regression", nested=True)
    made.examples = examples
    rows = measure_capacity(CapacityParams(), made)
    row = next(rows)
    try:
        next(rows)
    except StopIteration as end:
        return {each.metric: each for each in row.metrics.convergence}, row.metrics, end.value
    raise AssertionError("one layer gives one row")


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


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_enough_examples_are_not_flagged(exponent: float) -> None:
    truth = effective_rank(law(40, exponent))
    found, metrics, summary = measured(40, exponent, 6000)
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


def test_extrapolation_is_exact_where_the_error_falls_with_the_sample() -> None:
    sizes = [100, 200, 400, 750]
    values = [7 - 30 / size for size in sizes]
    assert extrapolated(sizes, values) == pytest.approx(7, rel=1e-12)
    assert extrapolated(sizes, values, ceiling=6.98) == 6.98


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
