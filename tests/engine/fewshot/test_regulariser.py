"""The regulariser against its dense definition, in value and gradient, and the dynamic weights against hand figures."""

import re
import time

import pytest
import torch
from torch import Tensor

from engine.fewshot.regulariser import VicWeights, covariance, variance
from tests.memory_profile import peak_bytes

SHAPES = [(2, 7), (5, 40), (25, 1600), (25, 26), (25, 25), (25, 24), (40, 9), (2, 2)]


def rows(n: int, d: int) -> Tensor:
    generator = torch.Generator().manual_seed(n * 1000 + d)
    mixed = torch.randn(n, d, dtype=torch.float64, generator=generator)
    return 0.8 * mixed + 0.6 * mixed.roll(1, 1) + 3


def dense_covariance(features: Tensor) -> Tensor:
    between = torch.cov(features.mT)
    return (between.square().sum() - between.diagonal().square().sum()) / features.shape[1]


def dense_variance(features: Tensor, threshold: float) -> Tensor:
    return torch.relu(threshold - (features.var(0) + 1e-8).sqrt()).mean()


def with_gradient(value: Tensor, features: Tensor) -> tuple[float, Tensor]:
    (gradient,) = torch.autograd.grad(value, features)
    return float(value.detach()), gradient


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_covariance_is_the_dense_one(n: int, d: int) -> None:
    features = rows(n, d).requires_grad_()
    value, gradient = with_gradient(covariance(features), features)
    wanted, wanted_gradient = with_gradient(dense_covariance(features), features)
    assert value == pytest.approx(wanted, rel=1e-12)
    assert apart(gradient, wanted_gradient) <= 1e-12


@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_covariance_of_float32_is_near_the_dense_one_of_float64(n: int, d: int) -> None:
    wide = rows(n, d).float().double().requires_grad_()
    narrow = wide.detach().float().requires_grad_()
    value, gradient = with_gradient(covariance(narrow), narrow)
    wanted, wanted_gradient = with_gradient(dense_covariance(wide), wide)
    assert value == pytest.approx(wanted, rel=1e-6)
    assert apart(gradient.double(), wanted_gradient) <= 1e-6


def test_covariance_that_float32_would_lose_is_computed_in_float64() -> None:
    features = torch.zeros(9, 40, dtype=torch.float64)
    # eight contrasts: their covariances cancel but for what is added
    features[:, :8] = torch.linalg.qr(torch.cat([torch.ones(9, 1), torch.eye(9, 8)], 1).double()).Q[:, 1:9]
    features[:, 8:] = 1e-4 * rows(9, 32)
    wide = features.float().double().requires_grad_()
    narrow = wide.detach().float().requires_grad_()
    value, gradient = with_gradient(covariance(narrow), narrow)
    wanted, wanted_gradient = with_gradient(dense_covariance(wide), wide)
    assert wanted * 40 < 1e-4 * float(torch.cov(wide.detach().mT).square().sum())
    assert value == pytest.approx(wanted, rel=1e-6)
    assert apart(gradient.double(), wanted_gradient) <= 1e-5


def test_covariance_of_nearly_uncorrelated_features_is_summed_without_a_difference() -> None:
    features = torch.linalg.qr(torch.cat([torch.ones(9, 1), torch.eye(9, 5)], 1).double()).Q[:, 1:]
    features = features + 1e-9 * rows(9, 5)
    between = features.sub(features.mean(0)).mT @ features.sub(features.mean(0)) / 8
    wanted = sum(float(between[i, j]) ** 2 for i in range(5) for j in range(5) if i != j) / 5
    assert float(covariance(features)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("n", "d"), SHAPES)
@pytest.mark.parametrize("threshold", [1e-4, 1.0, 1.3])
def test_variance_is_the_dense_one(n: int, d: int, threshold: float) -> None:
    features = rows(n, d).requires_grad_()
    value, gradient = with_gradient(variance(features, threshold), features)
    wanted, wanted_gradient = with_gradient(dense_variance(features, threshold), features)
    assert value == pytest.approx(wanted, rel=1e-12)
    assert float((gradient - wanted_gradient).norm()) <= 1e-12 * max(float(wanted_gradient.norm()), 1e-300)


@pytest.mark.parametrize(("n", "d"), [(3, 5), (5, 3)])
def test_a_constant_feature_changes_nothing_but_the_number_of_features(n: int, d: int) -> None:
    features = rows(n, d)
    features[:, 1] = 0.1
    features.requires_grad_()
    value, gradient = with_gradient(covariance(features), features)
    others = features.detach()[:, [0, *range(2, d)]]
    assert value == pytest.approx(float(dense_covariance(others)) * (d - 1) / d, rel=1e-12)
    assert torch.equal(gradient[:, 1], torch.zeros(n, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "d"), [(25, 60), (25, 7), (2, 3)])
def test_equal_rows_give_exactly_0_and_no_gradient(n: int, d: int, dtype: torch.dtype) -> None:
    features = rows(1, d).to(dtype).expand(n, d).clone().requires_grad_()
    value, gradient = with_gradient(covariance(features), features)
    assert value == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))
    value, gradient = with_gradient(variance(features, 1.0), features)
    assert value == pytest.approx(1 - 1e-4, rel=1e-6)
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize(("n", "d"), [(3, 7), (7, 3), (2, 4)])
def test_gradients_are_those_of_differences(n: int, d: int) -> None:
    features = rows(n, d).requires_grad_()
    assert torch.autograd.gradcheck(covariance, (features,))
    assert torch.autograd.gradgradcheck(covariance, (features,))
    assert torch.autograd.gradcheck(lambda each: variance(each, 1.1), (features,))


def test_16_bits_and_autocast_are_computed_at_full_width() -> None:
    features = (300 * rows(6, 50)).half()
    wanted = dense_covariance(features.double())
    assert float(wanted) > 65504
    with torch.autocast("cpu", torch.bfloat16):
        assert covariance(features).dtype == torch.float32
        assert float(covariance(features)) == pytest.approx(float(wanted), rel=1e-6)
        assert float(variance(features.float() / 300, 1.0)) == pytest.approx(
            float(dense_variance(features.double() / 300, 1.0)), rel=1e-5
        )


def test_maps_are_rows_of_all_their_numbers() -> None:
    features = rows(6, 24)
    assert float(covariance(features.reshape(6, 4, 3, 2))) == float(covariance(features))


@pytest.mark.parametrize("shape", [(1, 5), (0, 5)])
def test_fewer_than_two_rows_are_refused(shape: tuple[int, int]) -> None:
    for penalty in (covariance, lambda each: variance(each, 1.0)):
        with pytest.raises(ValueError, match=re.escape(f"at least 2 rows of features (got {shape[0]})")):
            penalty(torch.zeros(shape))


def test_of_25_rows_of_25088_numbers_no_matrix_of_features_is_made() -> None:
    features = torch.randn(25, 25088, requires_grad=True)
    # the dense matrix takes 2,401 MiB
    assert peak_bytes(lambda: covariance(features).backward()) <= 32 * 2**20
    # nearly all of the difference cancels: float64 is taken
    lone = torch.zeros(25, 25088).index_fill_(0, torch.tensor(0), 1e-9)
    lone[:, 0] = torch.arange(25)
    lone.requires_grad_()
    assert peak_bytes(lambda: covariance(lone).backward()) <= 64 * 2**20
    for each in (features, lone):
        seconds = []
        for _ in range(5):
            begun = time.process_time()
            covariance(each).backward()
            seconds.append(time.process_time() - begun)
        assert min(seconds) <= 0.05


def test_dynamic_weights_are_those_by_hand() -> None:
    # shares 0.1, 0.4 and 0.5: aims 0.7, 6.75 and 1.3
    after = VicWeights().after(variance=0.2, covariance=0.8, cross_entropy=1.0)
    assert (after.alpha, after.beta, after.gamma) == pytest.approx((0.52, 8.775, 0.58), abs=1e-7)
    # shares 0, 0 and 1: aims 0.5, 4.5 and 0.5
    after = after.after(variance=0.0, covariance=0.0, cross_entropy=2.0)
    assert (after.alpha, after.beta, after.gamma) == pytest.approx((0.518, 8.3475, 0.572), abs=1e-7)
    # all values 0: aims 0.5, 9 and 0.5
    after = VicWeights(alpha=1.0, beta=4.0, gamma=2.0).after(0.0, 0.0, 0.0)
    assert (after.alpha, after.beta, after.gamma) == pytest.approx((0.95, 4.5, 1.85), abs=1e-12)


def test_dynamic_weights_stay_within_their_bounds() -> None:
    after = VicWeights(alpha=0.0, beta=0.0, gamma=9.0).after(0.0, 0.0, 1.0)
    assert (after.alpha, after.beta, after.gamma) == (0.1, 1.0, 5.0)
    assert VicWeights(alpha=9.0, beta=30.0, gamma=0.0).after(0.0, 0.0, 1.0) == VicWeights(5.0, 20.0, 0.1)
