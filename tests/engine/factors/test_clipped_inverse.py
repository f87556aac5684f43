"""The eigenbasis applied, against dense float64 inverses; and what a rebuilt factor is said to be, against its own."""

import pytest
import torch
from torch import Tensor

from engine.errors import BrokenFactors, NonFiniteFactor
from engine.factors.clipping import clipping_check
from engine.factors.clipping.clip_eigenvalues import stabilise_
from engine.factors.clipping.clipped_inverse import StabilisedInverse
from engine.factors.clipping.clipping_check import check_clipping
from engine.linalg.eigenbasis import Eigenbasis


def psd(size: int, decades: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in float64 with its eigenvalues and eigenvectors."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]
    values = torch.logspace(-decades, 0, size, dtype=torch.float64)
    return (basis * values) @ basis.mT, values, basis


def clipped(values: Tensor, basis: Tensor, kappa_max: float) -> Tensor:
    return (basis * values.clamp_min(float(values[-1]) / kappa_max)) @ basis.mT


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found.to(torch.float64) - truth).norm() / truth.norm())


@pytest.mark.part(of=16, by=("dtype", "decades"))
@pytest.mark.parametrize("decades", [2.0, 8.0, 40.0])
@pytest.mark.parametrize("damping", [0.0, 1e-5])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 3e-6), (torch.float64, 1e-9)])
def test_the_inverse_is_that_of_the_dense_matrix(
    decades: float, damping: float, dtype: torch.dtype, most: float
) -> None:
    _, values, basis = psd(200, decades, 1)
    dense = clipped(values, basis, 1e6)
    side = Eigenbasis(values, basis).clip(1e6, dtype)
    right = torch.randn(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    damped = dense + damping * torch.eye(200, dtype=torch.float64)
    assert distance(side.solve(right.to(dtype), damping), torch.linalg.solve(damped, right)) <= most
    assert distance(side.apply(right.to(dtype)), dense @ right) <= most
    assert side.vectors is not None
    # fewer than half of 40 decades' directions are above a floor of 6
    assert side.vectors.shape[1] == (200 if decades < 12 else 30)


def test_panels_of_any_width_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, values, basis = psd(60, 8, 3)
    side = Eigenbasis(values, basis).clip(1e6, torch.float64)
    right = torch.ones(60, 2, dtype=torch.float64)
    whole = side.solve(right)
    monkeypatch.setattr("engine.linalg.eigenbasis._PANEL_BYTES", 60 * 8 * 7)
    torch.testing.assert_close(side.solve(right), whole, rtol=1e-12, atol=0)


def test_both_sides_of_a_gradient() -> None:
    _, values_a, basis_a = psd(30, 7, 4)
    _, values_g, basis_g = psd(20, 9, 5)
    gradient = torch.randn(20, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    both = StabilisedInverse(
        A=Eigenbasis(values_a, basis_a).clip(1e6, torch.float64),
        G=Eigenbasis(values_g, basis_g).clip(1e6, torch.float64),
    )
    a = clipped(values_a, basis_a, 1e6) + 1e-3 * torch.eye(30, dtype=torch.float64)
    g = clipped(values_g, basis_g, 1e6) + 1e-2 * torch.eye(20, dtype=torch.float64)
    truth = torch.linalg.solve(torch.kron(g, a), gradient.flatten()).view(20, 30)
    assert distance(both.solve(gradient, damping_A=1e-3, damping_G=1e-2), truth) <= 1e-11
    product = clipped(values_g, basis_g, 1e6) @ gradient @ clipped(values_a, basis_a, 1e6)
    assert distance(both.apply(gradient), product) <= 1e-12


def test_a_diagonal_side() -> None:
    diagonal = torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64)
    side = Eigenbasis(diagonal, None).clip(10)
    found = side.solve(torch.ones(3, 1))
    torch.testing.assert_close(found, torch.tensor([[0.5], [5.0], [1.0]]))
    assert side.size == 3


def test_stored_and_read_back() -> None:
    _, values, basis = psd(12, 4, 7)
    side = Eigenbasis(values, basis).clip(1e3)
    again = Eigenbasis.read(side.tensors("A"), "A")
    right = torch.ones(12, 1)
    assert torch.equal(again.solve(right), side.solve(right))
    with pytest.raises(BrokenFactors, match="`G_values`"):
        Eigenbasis.read(side.tensors("A"), "G")


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(NonFiniteFactor):
        Eigenbasis(torch.tensor([1.0, float("inf")], dtype=torch.float64), torch.eye(2)).clip(10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decades", [3.0, 8.0, 12.0])
def test_what_was_reached_is_told_by_either_way(
    decades: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, _, _ = psd(300, decades, 8)
    matrix = ((matrix + matrix.mT) / 2).to(dtype)
    values, basis = torch.linalg.eigh(matrix.to(torch.float64))
    found = stabilise_(matrix, values, basis, 1e6)
    exact = check_clipping(matrix, values, basis, found.floor)
    spectrum = torch.linalg.eigvalsh(matrix.to(torch.float64))
    truth = clipped(values, basis, 1e6)
    assert exact.smallest == pytest.approx(float(spectrum[0]), rel=1e-9)
    assert exact.largest == pytest.approx(float(spectrum[-1]), rel=1e-12)
    assert exact.relative_error == pytest.approx(distance(matrix, truth), rel=1e-3, abs=1e-15)
    monkeypatch.setattr(clipping_check, "EXACT_ROWS", 10)
    estimated = check_clipping(matrix, values, basis, found.floor)
    assert estimated.found_by == "lanczos"
    assert estimated.smallest == pytest.approx(float(spectrum[0]), rel=2e-3)
    assert estimated.largest == pytest.approx(float(spectrum[-1]), rel=1e-6)
    assert estimated.relative_error == pytest.approx(exact.relative_error, rel=0.2, abs=3e-15)


def test_a_floor_that_was_lost_is_seen_by_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eigenvalue at a third of the floor, and one below zero."""
    matrix, values, basis = psd(300, 8, 9)
    stabilise_(matrix, values, basis, 1e6)
    for left in (0.3e-6, -0.5e-6):
        spoilt = matrix + (left - 1e-6) * basis[:, :1] @ basis[:, :1].mT
        for rows in (1024, 10):
            monkeypatch.setattr(clipping_check, "EXACT_ROWS", rows)
            assert check_clipping(spoilt, values, basis, 1e-6).smallest == pytest.approx(left, rel=1e-3)
