"""Every eigenvalue of G ⊗ A without making them: against the dense float64 outer product."""

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.analyses.metrics.layer_metrics import decay
from engine.linalg import kronecker_quantiles as order
from engine.linalg.kronecker_quantiles import Products, histogram, largest, quantile, quantile_rank
from engine.linalg.kronecker_spectrum import (
    Answering,
    effective_dimensions,
    effective_dimensions_structured,
    logdet_damped,
    logdet_damped_structured,
)
from engine.linalg.spectrum_quadrature import NODES, condense_spectrum

LEVELS = (0.0, 0.001, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0)


def ascending(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).sort().values


def spread(size: int, decades: float, seed: int = 0, zeros: int = 0) -> Tensor:
    drawn = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.zeros(zeros, dtype=torch.float64), (10 ** (-decades * drawn)).sort().values])


def power_law(size: int, exponent: float) -> Tensor:
    return torch.arange(size, 0, -1, dtype=torch.float64).pow(-exponent)


# nothing, the smallest denormal, denormals, what squares to nothing, ties, and what is ordinary
EIGENVALUES = st.one_of(
    st.sampled_from([0.0, 5e-324, 3e-320, 1e-200, 1e-160, 0.5, 1.0, 3.0]),
    st.floats(0, 1e150, allow_subnormal=True),
    st.floats(1e-12, 1.0),
)
SPECTRA = st.lists(EIGENVALUES, min_size=1, max_size=40).map(ascending)

CASES = {
    "decades": lambda: (spread(900, 12), spread(700, 5, 1)),
    "ties": lambda: (ascending([1.0] * 600), ascending([1.0] * 300 + [2.0] * 300)),
    "integers": lambda: (torch.arange(700).double() % 9, torch.arange(800).double() % 7),
    "zeros": lambda: (spread(600, 3, zeros=400), spread(777, 4, 2)),
    "underflow": lambda: (spread(500, 300), spread(400, 300, 3)),
    "one": lambda: (ascending([2.0]), spread(50_000, 8)),
    "power law": lambda: (power_law(1000, 1.5), power_law(600, 2.0)),
}


def case(name: str) -> tuple[Tensor, Tensor]:
    a, g = CASES[name]()
    return a.sort().values, g.sort().values


def check(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """What sorting says, of products that are sorted at the beginning, and of those that are not, or only some."""
    dense = torch.cat([torch.outer(a, g).flatten() for a, g in pairs]).sort().values
    for together in (order._SORTED, 0, 3 * min(a.numel() * g.numel() for a, g in pairs)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(order, "_SORTED", together)
            check_as_set(pairs, dense)


def check_as_set(pairs: list[tuple[Tensor, Tensor]], dense: Tensor) -> None:
    """What all products in their order say."""

    def at_most(threshold: float) -> int:
        return int(torch.searchsorted(dense, threshold, right=True))

    products = Products(pairs)
    assert (products.size, products.largest) == (dense.numel(), float(dense[-1]))
    for level in LEVELS:
        expected = dense[quantile_rank(level, dense.numel()) - 1]
        assert quantile(products, level) == float(expected), level
    some = torch.cat([dense[:: max(1, dense.numel() // 9)], dense[-1:], torch.tensor([0.0, 1e-3]).double()])
    for threshold in some.tolist():
        assert products.at_most(threshold) == at_most(threshold)
    assert torch.equal(products.top(25), dense.flip(0)[:25])
    edges, counts, below = histogram(products, 16, 12)
    if float(dense[-1]) > 0:
        assert edges[-1] == float(dense[-1])
        assert counts == [at_most(right) - at_most(left) for left, right in pairwise(edges)]
        assert below == at_most(edges[0])
    assert below + sum(counts) == dense.numel()


@given(SPECTRA, SPECTRA)
@settings(max_examples=60, deadline=None)
def test_order_statistics_are_those_of_the_sorted_outer_product(a: Tensor, g: Tensor) -> None:
    check([(a, g)])


@pytest.fixture(params=[2**15, 200])
def made_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(order, "_MADE_AT_ONCE", request.param)
    return


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("name", CASES)
def test_quantiles_are_bitwise_those_of_a_sort(name: str, made_at_once: None) -> None:
    check([case(name)])


def test_layers_are_searched_together_without_being_joined(made_at_once: None) -> None:
    check([case(name) for name in CASES])


def test_a_quotient_that_rounds_across_a_product_is_seen() -> None:
    # thresholds that are products themselves: t/λ is then μ, one step above it or one below
    a, g = spread(200, 0.3), spread(180, 0.3, 5)
    dense = torch.outer(a, g).flatten()
    products = Products([(a, g)])
    sorted_products = dense.sort().values
    off = 0
    for threshold in dense[::97].tolist():
        off += int(torch.searchsorted(g, threshold / a, right=True).sum()) != products.at_most(threshold)
        assert products.at_most(threshold) == int(torch.searchsorted(sorted_products, threshold, right=True))
    assert off > 0, "no quotient was rounded across: the test shows nothing"


def test_ranks_of_quantiles_are_those_of_the_number_as_it_is_written() -> None:
    assert [quantile_rank(level, 10) for level in (0.0, 0.1, 0.3, 0.31, 1.0)] == [1, 1, 3, 4, 10]
    assert quantile_rank(0.7, 10**18) == math.ceil(Fraction(7, 10) * 10**18)


def test_a_product_of_nothing_has_no_order() -> None:
    nothing = Products([])
    assert quantile(nothing, 0.5) is None
    assert nothing.top(3).numel() == 0
    zeros = Products([(ascending([0.0, 0.0]), ascending([0.0, 1.0]))])
    assert (quantile(zeros, 1.0), histogram(zeros, 16, 8)) == (0.0, ([], [], 4))


def test_few_counts_find_a_quantile(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = 0
    plain = order._positions

    def counting(rows: Tensor, columns: Tensor, threshold: float) -> Tensor:
        nonlocal counted
        counted += 1
        return plain(rows, columns, threshold)

    monkeypatch.setattr(order, "_positions", counting)
    products = Products([(spread(4000, 12), spread(4000, 12, 1))])
    for level in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
        quantile(products, level)
    # bisection of the bits alone takes some fifty each
    assert counted <= 7 * 8


def exact_sums(a: Tensor, g: Tensor, damping: float) -> tuple[float, float]:
    """The log-determinant and the effective dimension, each product's term added without rounding."""
    products = torch.outer(a, g).flatten()
    large = torch.maximum(products, torch.tensor(damping, dtype=torch.float64))
    small = torch.minimum(products, torch.tensor(damping, dtype=torch.float64))
    logarithms = large.log() + torch.log1p(small / large)
    return math.fsum(logarithms.tolist()), exact_dimension(products, damping)


def exact_dimension(products: Tensor, damping: float) -> float:
    return math.fsum((products / (products + damping)).tolist())


SPIKE = (ascending([1e-12] * 2000 + [1.0]), ascending([3e-12] * 500 + [1.0]))


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("relative", [1e-16, 1e-9, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("name", [*(name for name in CASES if name != "underflow"), "spike"])
def test_sums_under_damping_equal_the_dense_ones(name: str, relative: float) -> None:
    a, g = SPIKE if name == "spike" else case(name)
    damping = relative * float(a[-1]) * float(g[-1])
    logdet, effective = exact_sums(a, g, damping)
    sides = condense_spectrum(a), condense_spectrum(g)
    assert effective_dimensions(*sides, [damping])[0] == pytest.approx(effective, rel=1e-14)
    # the terms' own rounding is what a sum near zero is exact to
    scale = a.numel() * g.numel() * abs(math.log(damping))
    assert logdet_damped(*sides, damping) == pytest.approx(logdet, rel=1e-14, abs=1e-15 * scale)


def test_many_eigenvalues_take_few_nodes() -> None:
    a = spread(20_000, 12)
    sides = condense_spectrum(a), condense_spectrum(spread(30_000, 12, 1))
    assert all(side.nodes.numel() <= 7 * NODES for side in sides)
    assert float(sides[0].weights.sum()) == pytest.approx(20_000, rel=1e-13)
    few = spread(NODES, 2)
    assert torch.equal(condense_spectrum(few).values.sort().values, few)


@given(SPECTRA, SPECTRA, st.floats(1e-30, 1e30))
@settings(max_examples=60, deadline=None)
def test_sums_of_small_spectra_equal_the_dense_ones(a: Tensor, g: Tensor, damping: float) -> None:
    logdet, effective = exact_sums(a, g, damping)
    sides = condense_spectrum(a), condense_spectrum(g)
    found = effective_dimensions(*sides, [damping])[0]
    if found is None:
        # beside eigenvalues more than 300 decades above it float64 does not hold λ
        assert float(a[-1]) * float(g[-1]) / damping > 1e290
        return
    # the outer product loses what lies below the smallest denormal, the sums do not
    assert found == pytest.approx(effective, rel=1e-12, abs=1e-285)
    scale = a.numel() * g.numel() * abs(math.log(damping))
    assert logdet_damped(*sides, damping) == pytest.approx(logdet, rel=1e-12, abs=1e-14 * scale + 1e-285)


class Known:
    """A structured side whose eigenvalues the test knows."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.size = values.numel()

    def logdets(self, shifts: Tensor) -> Tensor:
        return torch.log(self.values + shifts[:, None]).sum(1)

    def effective_dimensions(self, shifts: Tensor) -> Tensor:
        return (self.values / (self.values + shifts[:, None])).sum(1)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("relative", [1e-10, 1e-4, 1.0])
@pytest.mark.parametrize("name", ["decades", "zeros", "power law"])
def test_a_side_without_eigenvalues_is_asked_at_shifts(name: str, relative: float) -> None:
    a, g = case(name)
    damping = relative * float(a[-1]) * float(g[-1])
    logdet, effective = exact_sums(a, g, damping)
    # G answers for all its rows at once, which is exact to the rounding of that
    scale = a.numel() * g.numel() * math.log(float(a[-1] / a[a > 0][0]))
    side = Known(g)
    grid = [damping * 10.0**half for half in range(-12, 13)]
    lowest = 1e-12 * float(g[-1])
    answering = Answering(side=side, lowest=0.0, counted=None)  # type: ignore[arg-type]
    assert logdet_damped_structured(condense_spectrum(a), answering, damping) == pytest.approx(
        logdet, rel=1e-10, abs=1e-12 * scale
    )
    found = effective_dimensions_structured(
        condense_spectrum(a),
        Answering(side=side, lowest=lowest, counted=None),
        grid,  # type: ignore[arg-type]
    )
    # rounding beside the side's largest eigenvalue is not asked for
    reached = [value / float(condense_spectrum(a).values.max()) >= lowest for value in grid]
    assert [each is not None for each in found] == reached
    products = torch.outer(a, g).flatten()
    for each, value in zip(found, grid, strict=True):
        assert each is None or each == pytest.approx(exact_dimension(products, value), rel=1e-10)
    assert found[12] == pytest.approx(effective, rel=1e-10)


def test_decay_is_the_exponent_of_a_power_law() -> None:
    one = ascending([1.0])
    found = decay(Products([(power_law(20_000, 1.37), one)]), 20_000)
    assert found is not None
    assert found.exponent == pytest.approx(1.37, rel=1e-12)
    assert found.r_squared == pytest.approx(1.0, rel=1e-12)
    assert (found.first_rank, found.last_rank) == (10, 5000)


def test_decay_of_products_is_that_of_all_of_them_sorted() -> None:
    a, g = spread(300, 6), power_law(200, 0.8)
    dense = torch.outer(a, g).flatten().sort(descending=True).values
    found = decay(Products([(a, g)]), 60_000)
    assert found is not None
    ranks = [round(10 * 1500 ** (place / 11)) for place in range(12)]
    # least squares by the normal equations
    x, y = torch.tensor(ranks).double().log(), dense[torch.tensor(ranks) - 1].log()
    design = torch.stack([x, torch.ones_like(x)], 1)
    slope, _ = torch.linalg.lstsq(design, y[:, None]).solution.flatten().tolist()
    assert found.exponent == pytest.approx(-slope, rel=1e-10)


def test_decay_is_undefined_over_a_short_range_and_without_error_where_all_are_equal() -> None:
    equal = Products([(ascending([1.0] * 30), ascending([1.0] * 40))])
    assert decay(equal, 127) is None
    found = decay(equal, 1200)
    assert found is not None
    assert (found.exponent, found.r_squared) == (0.0, None)
    # equal but for a decomposition's rounding: 1e10 and the next number have one logarithm
    rounded = Products([(ascending([1e10] * 260 + [math.nextafter(1e10, math.inf)] * 40), ascending([1.0]))])
    found = decay(rounded, 300)
    assert found is not None
    assert (found.exponent, found.r_squared) == (0.0, None)


def test_the_largest_products_of_a_pair() -> None:
    a, g = case("decades")
    dense = torch.outer(a, g).flatten().sort(descending=True).values
    for count in (1, 7, 500):
        assert torch.equal(largest((a, g), count), dense[:count])
