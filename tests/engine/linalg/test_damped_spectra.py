"""Damping, clipping, and what holds of spectra at the ends of float64."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.capacity import CapacityParams
from catalog.requests.collection import Stabilisation
from engine.analyses.capacity import Capacity
from engine.analyses.factors import KeptFactors
from engine.factors.clipping.clip_eigenvalues import stabilise_
from engine.factors.dense import as_operator
from engine.factors.low_rank import LowRank, scaled_rows
from engine.linalg import kronecker_spectrum
from engine.linalg import kronecker_spectrum as spectrum
from engine.linalg.damping import Clipping, clipping_floor, damping, identity_warnings
from engine.linalg.eigendecomposition import decompose
from engine.linalg.kronecker_spectrum import effective_dimensions, logdet_damped
from engine.linalg.spectrum_quadrature import condense_spectrum
from engine.measurement.decompose_layer import rounded
from tests.oracles import workspace


def covariance(size: int, rank: int, seed: int = 0) -> Tensor:
    rows = torch.randn(rank, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows.T @ rows / rank


@pytest.fixture(params=["full", "singular"])
def pair(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor, Tensor]:
    rank = 9 if request.param == "full" else 3
    left, right = covariance(6, rank), covariance(4, 11, seed=1)
    a, g = decompose(left, "a", rank_bound=rank).values, decompose(right, "g", rank_bound=11).values
    return a, g, torch.kron(right, left)


def test_factored_damping_is_another_quantity(pair: tuple[Tensor, Tensor, Tensor]) -> None:
    a, g, dense = pair
    found = damping(float(a.mean()), float(g.mean()), Stabilisation(damping=1e-2), block=False)
    assert found.joint == pytest.approx(1e-2 * float(torch.trace(dense)) / 24)
    assert found.A is not None
    assert found.G is not None
    assert pytest.approx(found.joint) == found.A * found.G
    # the split equalises the two sides: λ_A relative to A's mean equals λ_G relative to G's
    assert found.relative_A == pytest.approx(found.relative_G)
    truth = sum(float(x / (x + found.A)) * float(y / (y + found.G)) for x in a for y in g)
    assert spectrum.effective_dimension_factored(a, g, found.A, found.G) == pytest.approx(truth, rel=1e-12)
    (joint,) = effective_dimensions(condense_spectrum(a), condense_spectrum(g), [found.joint])
    assert joint != pytest.approx(truth, rel=1e-3)


def test_absolute_damping_and_overrides() -> None:
    assert damping(2.0, 4.0, Stabilisation(damping=0.5, damping_mode="absolute"), block=False).joint == 0.5
    overridden = damping(2.0, 4.0, Stabilisation(damping_A=0.1, damping_G=0.2), block=False)
    assert pytest.approx(0.2) == overridden.A
    assert pytest.approx(0.8) == overridden.G
    assert damping(0.0, 4.0, Stabilisation(), block=False).joint is None


@pytest.mark.parametrize(
    ("mode", "split", "expected"),
    [
        ("absolute", "each", (1e-4, 1e-4)),
        ("absolute", "pi", (math.sqrt(1e-4 * 2 / 8), math.sqrt(1e-4 * 8 / 2))),
        ("relative", "each", (2e-4, 8e-4)),
        ("relative", "pi", (2e-2, 8e-2)),
    ],
)
def test_damping_is_split_by_scale_or_stands_on_each_side_as_it_is(
    mode: Literal["absolute", "relative"], split: Literal["each", "pi"], expected: tuple[float, float]
) -> None:
    options = Stabilisation(damping=1e-4, damping_mode=mode, damping_split=split)
    found = damping(2.0, 8.0, options, block=False)
    assert pytest.approx(expected, rel=1e-14) == (found.A, found.G)
    assert (found.relative_A, found.relative_G) == pytest.approx((expected[0] / 2, expected[1] / 8), rel=1e-14)
    # λ of F + λI is another question, which the split does not touch
    assert found.joint == pytest.approx(1e-4 * (16 if mode == "relative" else 1))
    block = damping(1.0, 8.0, options, block=True)
    assert (0, block.joint) == (block.A, block.G)


def test_a_side_whose_own_damping_exceeds_it_is_warned_of() -> None:
    def warnings(split: Literal["each", "pi"], largest_a: float, largest_g: float) -> list[str]:
        options = Stabilisation(damping=1e-4, damping_mode="absolute", damping_split=split)
        found = damping(largest_a / 2, largest_g / 2, options, block=False)
        return list(identity_warnings("fc", found, options, largest_a, largest_g))

    assert warnings("pi", 1e3, 1e-5) == []
    (line,) = warnings("each", 1e3, 1e-5)
    assert line.startswith("layer `fc`: λ_G = 0.0001 exceeds λ_max(G) = 1e-05")
    assert len(warnings("each", 1e-5, 1e-5)) == 2
    (line,) = warnings("pi", 1e-3, 1e-2)
    assert "λ = 0.0001 exceeds λ_max = 1e-05" in line


def test_clipping_counts_what_lies_below_the_floor() -> None:
    values = torch.tensor([0.0, 1e-9, 1e-5, 1.0]).double()
    found = Clipping.at(values, 1e6)
    assert (found.kappa, found.clipped) == (None, 2)
    assert found.kappa_clipped == pytest.approx(1e6)
    assert Clipping.at(values[2:], 1e6).kappa == pytest.approx(1e5)
    assert Clipping.at(values, None).clipped == 0


def test_clipping_compares_with_the_floor_that_it_raises_to() -> None:
    """At the boundary λ/λ_max < 1/κ_max rounds otherwise than λ < λ_max/κ_max."""
    for largest in (1.0 + torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).tolist():
        floor = clipping_floor(largest, 1e6)
        around = [math.nextafter(floor, 0.0), floor, math.nextafter(floor, 1.0), largest]
        values = torch.tensor(around, dtype=torch.float64)
        done = stabilise_(values.clone(), values, None, 1e6)
        assert (Clipping.at(values, 1e6).clipped, done.clipped, done.floor) == (1, 1, floor)
        assert done.mass > 0


def test_products_are_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [condense_spectrum(torch.rand(size).double().sort().values) for size in (37, 11)]
    whole = *effective_dimensions(*sides, [0.1]), logdet_damped(*sides, 0.1)
    monkeypatch.setattr(kronecker_spectrum, "_PRODUCTS_AT_ONCE", 25)
    cut = *effective_dimensions(*sides, [0.1]), logdet_damped(*sides, 0.1)
    assert cut == pytest.approx(whole, rel=1e-13)


@pytest.mark.parametrize(
    ("a", "g", "rank"),
    [([1e-300, 1e-300], [1e-300, 1e-299], 4), ([1e-200, 1e-150], [1e-200, 1e-160], 1), ([1e-300], [1e300], 1)],
)
def test_extreme_spectra_give_null_and_no_error(a: list[float], g: list[float], rank: int) -> None:
    left, right = (torch.tensor(values, dtype=torch.float64) for values in (a, g))
    found = damping(float(left.mean()), float(right.mean()), Stabilisation(), block=False)
    product = float(left.mean()) * float(right.mean()) * 1e-4
    assert found.joint == (pytest.approx(product) if product > 1e-307 else None)
    assert spectrum.rank(left, right, 1e-15) == rank
    assert Clipping.at(left, 1e30).kappa_clipped == pytest.approx(min(float(left[-1] / left[0]), 1e30))
    assert Clipping.at(torch.tensor([0.0, 1e-300], dtype=torch.float64), 1e30).kappa_clipped == 1e30


@pytest.mark.parametrize("analysis", ["factors", "both"])
def test_damping_above_every_eigenvalue_is_warned_of_whatever_is_measured(analysis: str) -> None:
    def warnings_at(damping: float) -> list[str]:
        torch.manual_seed(0)
        made = workspace(nn.Linear(4, 3), [(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))], "classification")
        made.options.stabilisation = Stabilisation(damping=damping, damping_mode="absolute")
        lines: list[str] = []
        made.ports.log = lambda level, message: lines.append(message) if level == "warning" else None
        list(KeptFactors(None, made).rows())
        if analysis == "both":
            list(Capacity(CapacityParams(), made).rows())
        return lines

    (line,) = warnings_at(1e3)
    assert "exceeds λ_max" in line
    assert warnings_at(1e-4) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(8))
def test_a_singular_matrix_is_singular_whatever_the_rounding_of_its_entries(dtype: torch.dtype, seed: int) -> None:
    """G of a softmax: Σ (diag p − p pᵀ), whose null vector is known; and one just as rounded whose κ is known."""
    generator = torch.Generator().manual_seed(seed)
    classes = 3 + 4 * seed
    p = torch.softmax(3 * torch.randn(50, classes, dtype=torch.float64, generator=generator), 1)
    softmax = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).mean(0)
    basis, _ = torch.linalg.qr(torch.randn(classes, classes, dtype=torch.float64, generator=generator))
    known = (basis * torch.logspace(-5, 0, classes, dtype=torch.float64)) @ basis.T
    for matrix, condition in ((softmax, None), (known, pytest.approx(1e5, rel=0.02))):
        stored = matrix.to(dtype)
        values = torch.linalg.eigvalsh(stored.double())
        rounding = rounded(as_operator(stored), float(stored.double().trace()), float(stored.double().norm()))
        assert Clipping.at(values, None, rounding).kappa == condition
    assert rounded(as_operator(torch.diagonal(softmax)), 1.0, 1.0) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [24, 60])
def test_gradient_rows_are_singular_to_the_square_of_their_rounding(count: int, dtype: torch.dtype) -> None:
    """Rows that add up to zero, and others whose κ of G is known."""
    size, generator = 20, torch.Generator().manual_seed(count)
    rows = torch.randn(count, size, dtype=torch.float64, generator=generator)
    left, right = (torch.linalg.qr(each)[0] for each in (rows, torch.randn_like(rows[:size])))
    known = (left * torch.logspace(-2, 0, size, dtype=torch.float64)) @ right.T
    for exact, condition in ((rows - rows.mean(1, keepdim=True), None), (known, pytest.approx(1e4, rel=0.1))):
        stored, scales = scaled_rows(exact, dtype)
        side = LowRank(rows=stored, scales=scales, weight=1.0)
        values, _ = side.spectrum("")
        rounding = rounded(side, side.trace(), side.frobenius_norm())
        assert Clipping.at(values, None, rounding).kappa == condition
        # what κ needs is far below what sums of the same precision would leave
        assert rounding < 1e-2 * torch.finfo(dtype).eps * float(values[-1])
    # of fewer rows than outputs the other zeros stay exact
    few = LowRank(rows=rows[:4].float(), scales=torch.ones(4, dtype=torch.float64), weight=1.0)
    values = few.spectrum("")[0]
    low, high = spectrum.ends_of_drawn(values, rounded(few, few.trace(), few.frobenius_norm()))
    assert torch.equal(low, values)
    assert torch.equal(high, values)
    assert int((values == 0).sum()) == size - 4
