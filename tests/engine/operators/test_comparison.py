"""Every number of two factors, and of their products, is that of explicit matrices; equal sets differ by nothing."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from catalog.analyses.compare_curvature import MatrixComparison
from engine.errors import BudgetExceeded, NonFiniteFactor
from engine.factors.dense import as_operator
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.low_rank import LowRank, scaled_rows
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.linalg.linear_operator import Structured
from engine.memory.budget import MemoryBudget
from engine.memory.guard import Guard
from engine.operators.comparison import divergence, product_metrics, side_metrics
from engine.operators.pairs import matrix_pair
from engine.operators.pairs.matrix_pair import Symmetric
from engine.operators.pairs.side_comparison import SideComparison, compare_sides

EXACT = 1e-10
KS = (1, 2, 4)
DAMPING = (0.02, 0.03)
Content = Tensor | Structured


def spread(size: int, seed: int, ratio: float = 0.7) -> Tensor:
    """A positive definite matrix whose eigenvalues are 1, 0.7, 0.7², …, in random directions."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
    return turn @ torch.diag(ratio ** torch.arange(size, dtype=torch.float64)) @ turn.T


def rows(size: int, count: int, seed: int, dtype: torch.dtype = torch.float64) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(count, size, dtype=torch.float64, generator=generator)
    stored, scales = scaled_rows(wide * 0.6 ** torch.arange(count).double()[:, None], dtype)
    return LowRank(rows=stored, scales=scales, weight=float(count))


def softmax(size: int, seed: int, *, tied: bool = False) -> SoftmaxFisher:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(5, size, dtype=torch.float64, generator=generator)
    excess = torch.rand(size, dtype=torch.float64, generator=generator) if tied else None
    return SoftmaxFisher(
        rows=torch.softmax(logits, -1), weights=torch.full((5,), 0.2, dtype=torch.float64), excess=excess
    )


def diagonal(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.8 ** torch.randperm(size, generator=generator).double()


def dense(content: Content) -> Tensor:
    if isinstance(content, Structured):
        return content.to_dense(torch.float64)
    return torch.diag(content).double() if content.ndim == 1 else content.double()


def compared(first: Content, second: Content, ks: tuple[int, ...] = KS, **options: Any) -> SideComparison:
    given: dict[str, Any] = {"vectors": ks[-1], "damping": DAMPING, "guard": Guard.unlimited()}
    return compare_sides(
        (Symmetric(side=as_operator(first)), Symmetric(side=as_operator(second))), "layer", **given | options
    )


def twin(first: Tensor, second: Tensor, damped: tuple[Tensor, Tensor], ks: tuple[int, ...] = KS) -> dict[str, Any]:
    """The same numbers from explicit matrices and linear algebra alone."""
    (x, u), (y, v) = (torch.linalg.eigh(each) for each in (first, second))
    norm = float(second.norm())

    def divergence_of(one: Tensor, two: Tensor) -> float:
        traced = float(torch.linalg.solve(one, two).trace())
        return 0.5 * (traced - len(one) + float(torch.logdet(one) - torch.logdet(two)))

    return {
        "overlaps": [float((u[:, -k:].T @ v[:, -k:]).square().sum()) / k for k in ks],
        "trace_log_ratio": math.log(float(first.trace() / second.trace())),
        "largest_log_ratio": math.log(float(x[-1] / y[-1])),
        "spectral_distance": float((x - y).norm()) / norm,
        "norm": float(first.norm()),
        "norm_against": norm,
        "distance": float((first - second).norm()),
        "relative_distance": float((first - second).norm()) / norm,
        "cosine": float((first * second).sum()) / float(first.norm()) / norm,
        "divergence": divergence_of(*damped),
        "reverse_divergence": divergence_of(*reversed(damped)),
    }


def agree(found: MatrixComparison, expected: Mapping[str, Any]) -> None:
    for name, number in expected.items():
        if name == "overlaps":
            assert [each.why for each in found.overlaps] == [None] * len(found.overlaps)
            assert [each.overlap for each in found.overlaps] == pytest.approx(number, abs=EXACT)
        else:
            assert getattr(found, name) == pytest.approx(number, rel=EXACT, abs=EXACT), name


def shifted(matrix: Tensor, damping: float) -> Tensor:
    return matrix + damping * torch.eye(len(matrix), dtype=torch.float64)


SIDES: Mapping[str, tuple[Content, Content]] = {
    "dense": (spread(12, 0), spread(12, 1) * 1.7),
    "float32": (spread(12, 0).float(), spread(12, 1).float()),
    "diagonal": (diagonal(12, 0), diagonal(12, 1) * 0.3),
    "one": (torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)),
    "rows": (rows(12, 5, 0), rows(12, 6, 1)),
    "16-bit rows": (rows(12, 5, 0, torch.float16), rows(12, 6, 1, torch.float16)),
    "many rows": (rows(12, 9, 0), rows(12, 10, 1)),
    "softmax head": (softmax(12, 0), softmax(12, 1)),
    "tied softmax head": (softmax(12, 0, tied=True), softmax(12, 1, tied=True)),
    "rows and dense": (rows(12, 5, 0), spread(12, 1)),
    "dense and diagonal": (spread(12, 1), diagonal(12, 0)),
    "softmax head and rows": (softmax(12, 0), rows(12, 5, 1)),
}


@pytest.mark.parametrize("name", SIDES)
def test_a_factor_agrees_with_explicit_matrices(name: str) -> None:
    first, second = SIDES[name]
    ks = KS if name != "one" else (1,)
    damped = tuple(shifted(dense(each), added) for each, added in zip((first, second), DAMPING, strict=True))
    agree(side_metrics(compared(first, second, ks), ks), twin(dense(first), dense(second), damped, ks))  # type: ignore[arg-type]


INPUTS: Mapping[str, tuple[Content, Content]] = {
    "dense": (spread(9, 2, 0.55), spread(9, 3, 0.61)),
    "float32": (spread(9, 2, 0.55).float(), spread(9, 3, 0.61).float()),
    "diagonal": (0.7 * diagonal(9, 2) ** 1.3, diagonal(9, 3) ** 1.4),
    "one": (torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)),
}
"""Eigenvalues of A, whose products with those of G are all different."""


@pytest.mark.part(of=24, by=("name_a",))
@pytest.mark.parametrize(("name_g", "name_a"), list(itertools.product(SIDES, INPUTS)))
def test_a_product_agrees_with_the_explicit_kronecker_product(name_g: str, name_a: str) -> None:
    (g1, g2), (a1, a2) = SIDES[name_g], INPUTS[name_a]
    ks = KS if (name_g, name_a) != ("one", "one") else (1,)
    found = product_metrics(compared(g1, g2), compared(a1, a2), ks)
    damped = tuple(
        torch.kron(shifted(dense(g), added), shifted(dense(a), added))
        for g, a, added in ((g1, a1, DAMPING[0]), (g2, a2, DAMPING[1]))
    )
    agree(found, twin(torch.kron(dense(g1), dense(a1)), torch.kron(dense(g2), dense(a2)), damped, ks))  # type: ignore[arg-type]
    assert found.size == len(damped[0])


@pytest.mark.parametrize("name", SIDES)
def test_equal_factors_overlap_wholly_and_have_no_distance(name: str) -> None:
    one = SIDES[name][0]
    side = compared(one, one, (1,), damping=(0.02, 0.02))
    for found in (
        side_metrics(side, (1,)),
        product_metrics(side, compared(SIDES["dense"][0], SIDES["dense"][0]), (1,)),
    ):
        assert found.overlaps[0].overlap == pytest.approx(1, abs=1e-12)
        assert found.cosine == pytest.approx(1, abs=1e-12)
        for number in (found.distance, found.spectral_distance, found.trace_log_ratio, found.largest_log_ratio):
            assert number == pytest.approx(0, abs=1e-12)
    # of a factor against itself under one damping
    assert side.pencils is not None
    assert divergence(side.pencils[0]) == divergence(side.pencils[1]) == 0


@pytest.mark.parametrize("angle", [1e-7, 0.3, 1.2])
def test_a_known_rotation_gives_the_known_overlap_and_distance(angle: float) -> None:
    # eigenvectors 2 and 3 of six turned towards each other: k = 2 loses sin², all other spans stay
    values = torch.tensor([5.0, 4.0, 2.0, 1.0, 0.5, 0.25], dtype=torch.float64)
    turn = torch.eye(6, dtype=torch.float64)
    turn[1, 1] = turn[2, 2] = math.cos(angle)
    turn[2, 1], turn[1, 2] = math.sin(angle), -math.sin(angle)
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))).Q
    first = basis @ torch.diag(values) @ basis.T
    second = basis @ turn @ torch.diag(values) @ turn.T @ basis.T
    found = side_metrics(compared(first, second, (1, 2, 3, 6), damping=(0.1, 0.1)), (1, 2, 3, 6))
    sine = math.sin(angle) ** 2
    assert [each.overlap for each in found.overlaps] == pytest.approx([1, (2 - sine) / 2, 1, 1], abs=EXACT)
    assert [each.gap for each in found.overlaps[:3]] == pytest.approx([1 / 5, 2 / 5, 1 / 5])
    assert found.distance == pytest.approx(math.sqrt(2) * 2 * math.sin(angle), rel=1e-7, abs=1e-15)
    assert found.spectral_distance == pytest.approx(0, abs=1e-12)
    # in the plane of the two: ½ (tr P⁻¹ R P R⁻¹ … ) with both determinants equal
    high, low = 4.1, 2.1
    assert found.divergence == pytest.approx(0.5 * sine * (high / low + low / high - 2), rel=1e-6, abs=1e-14)
    assert found.reverse_divergence == pytest.approx(found.divergence, rel=1e-6, abs=1e-14)


@pytest.mark.parametrize("compensating", [False, True])
def test_sets_that_are_nearly_equal_keep_the_digits_of_their_difference(compensating: bool) -> None:
    G, A = spread(7, 4), spread(9, 5)
    turned_g, turned_a = spread(7, 6), spread(9, 7)
    if compensating:  # the scales of both cancel to first order
        turned_g, turned_a = G, -A
    g1, a1 = G + 2.0**-30 * turned_g, A + 2.0**-30 * turned_a
    found = product_metrics(compared(g1, G), compared(a1, A), KS)
    exact = np.kron(*(np.asarray(each.numpy(), np.longdouble) for each in (g1, a1)))
    exact -= np.kron(*(np.asarray(each.numpy(), np.longdouble) for each in (G, A)))
    expected = float(np.sqrt((exact**2).sum()))
    assert expected < 1e-8
    # float64 rounds the two scales themselves to 2^-53: what is left of their difference has that much
    assert found.distance == pytest.approx(expected, rel=EXACT, abs=1e-15 if compensating else 0)


def test_divergences_of_nearly_equal_sets_are_second_order() -> None:
    X, E = spread(8, 0), spread(8, 1)
    P = np.asarray(shifted(X, 0.1).numpy())
    for step in (1e-4, 1e-7, 1e-10):
        moved = X + step * E
        found = compared(X, moved, damping=(0.1, 0.1))
        assert found.pencils is not None
        # ¼ tr Q² − ⅙ tr Q³ of Q = P⁻¹ (Y − X), which float64 holds exactly, and the next order
        quotient = np.linalg.solve(P, (moved - X).numpy())
        second, third = (float(np.trace(np.linalg.matrix_power(quotient, power))) for power in (2, 3))
        expected = second / 4 - third / 6
        assert 0 < expected < 1e2 * step**2
        assert divergence(found.pencils[0]) == pytest.approx(expected, rel=1e2 * step**2 + 1e-10, abs=0)


def test_a_span_that_ends_among_equal_eigenvalues_is_not_compared() -> None:
    values = torch.tensor([3.0, 2.0, 2.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))).Q
    degenerate = basis @ torch.diag(values) @ basis.T
    ks = (1, 2, 3, 4, 5, 6, 7)
    found = side_metrics(compared(degenerate, spread(6, 0), ks), ks)
    assert [each.overlap is None for each in found.overlaps] == [False, True, False, False, True, False, True]
    assert "eigenvalues 2 and 3 of a set differ by no more than rounding" in str(found.overlaps[1].why)
    assert found.overlaps[1].gap == pytest.approx(0, abs=1e-14)
    assert found.overlaps[5].overlap == 1
    assert found.overlaps[6].why == "there are 6 eigenvectors"
    # g₁ a₂ = g₂ a₁: the third product is one of two
    twice = compared(torch.diag(torch.tensor([2.0, 1.0])).double(), torch.diag(torch.tensor([3.0, 1.0])).double())
    product = product_metrics(twice, twice, (1, 2, 3, 4))
    assert [each.overlap for each in product.overlaps] == [1.0, None, 1.0, 1.0]


def test_stored_precision_decides_what_a_gap_is() -> None:
    near = torch.tensor([1.0, 0.5, 0.5 - 1e-9, 0.1], dtype=torch.float64)
    wide = Symmetric(side=as_operator(torch.diag(near)), stored=torch.float32)
    options: dict[str, Any] = {"vectors": 2, "damping": DAMPING, "guard": Guard.unlimited()}
    assert side_metrics(compared(torch.diag(near), torch.diag(near), (2,)), (2,)).overlaps[0].overlap == 1
    rounded = side_metrics(compare_sides((wide, wide), "layer", **options), (2,)).overlaps[0]
    assert (rounded.overlap, rounded.gap) == (None, pytest.approx(1e-9, rel=1e-6))


def test_of_a_sketch_nothing_but_the_trace_is_known() -> None:
    exact, other = torch.rand(9, dtype=torch.float64), spread(9, 0)
    diagonal_alone = DiagonalSketch(exact_diagonal=exact)
    sketched = DiagonalSketch(
        exact_diagonal=exact, base=exact / 2, rows=torch.rand(2, 9, dtype=torch.float64), bound=0.5
    )
    for side, kept in ((diagonal_alone, "its diagonal"), (sketched, "a sketch of it")):
        G = compared(side, other)
        A = compared(*SIDES["dense"])
        for found in (side_metrics(G, KS), product_metrics(G, A, KS)):
            expected = math.log(float(exact.sum() / other.trace()))
            if found.size > 9:
                expected -= math.log(1.7)
            assert found.trace_log_ratio == pytest.approx(expected)
            assert found.why == (
                f"of the first set's G only {kept} is kept (`diagonal_sketch`): nothing but its trace is known"
            )
            assert all(each.overlap is None and each.why == found.why for each in found.overlaps)
            for name in ("distance", "cosine", "divergence", "spectral_distance", "largest_log_ratio"):
                assert getattr(found, name) is None


def test_a_wide_head_is_compared_by_panels_without_its_eigenvectors(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SIDES["softmax head"]
    monkeypatch.setattr(matrix_pair, "DENSE_ROWS", 8)
    monkeypatch.setattr(matrix_pair, "PANEL_NUMBERS", 12 * 32)  # four rows at a time
    found = side_metrics(compared(first, second), KS)
    expected = twin(dense(first), dense(second), (shifted(dense(first), 1), shifted(dense(second), 1)))
    left_out = {"overlaps", "spectral_distance", "divergence", "reverse_divergence"}
    agree(found, {name: number for name, number in expected.items() if name not in left_out})
    assert all(getattr(found, name) is None for name in left_out - {"overlaps"})
    assert found.overlaps[0].why == found.why
    assert "kept as `softmax_head`, no eigenvectors" in str(found.why)


def test_rows_of_both_sets_are_compared_in_their_own_span_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("an n×n matrix was made")

    first, second = rows(500, 4, 0), rows(500, 5, 1)
    both = dense(first), dense(second)
    monkeypatch.setattr(LowRank, "to_dense", refuse)
    found = side_metrics(compared(first, second), KS)
    agree(found, twin(*both, (shifted(both[0], DAMPING[0]), shifted(both[1], DAMPING[1]))))


def test_a_damping_within_rounding_gives_no_divergence() -> None:
    found = side_metrics(compared(spread(12, 0), spread(12, 1), damping=(1e-13, 0.1)), KS)
    assert (found.divergence, found.reverse_divergence) == (None, None)
    assert "the damping of the first set, 1e-13, is within rounding of its largest eigenvalue, 1" in str(found.why)
    assert found.distance is not None
    nothing = torch.zeros(12, 12, dtype=torch.float64)
    zero = side_metrics(compared(spread(12, 0), nothing, damping=(0.1, None)), KS)
    assert (zero.why, zero.relative_distance, zero.trace_log_ratio) == (
        "the set compared with has no curvature here, so nothing to damp", None, None,
    )  # fmt: skip
    assert zero.distance == pytest.approx(float(spread(12, 0).norm()))
    assert zero.overlaps[0].why == "a set has no curvature here"
    product = product_metrics(compared(spread(12, 0), nothing), compared(*SIDES["dense"]), KS)
    assert product.distance == pytest.approx(float(spread(12, 0).norm() * spread(12, 0).norm()))


@pytest.mark.parametrize("scale", [2.0**-400, 2.0**300])
def test_factors_of_any_magnitude_are_compared(scale: float) -> None:
    first, second = SIDES["dense"]
    damping = DAMPING[0] * scale, DAMPING[1] * scale
    small = side_metrics(compared(first * scale, second * scale, damping=damping), KS)  # type: ignore[operator]
    plain = side_metrics(compared(first, second), KS)
    for name in ("distance", "norm", "norm_against"):
        assert getattr(small, name) == pytest.approx(getattr(plain, name) * scale, rel=EXACT)
    for name in ("relative_distance", "divergence", "reverse_divergence", "cosine", "largest_log_ratio"):
        assert getattr(small, name) == pytest.approx(getattr(plain, name), rel=EXACT)


def test_a_power_of_two_beside_a_stored_matrix_is_part_of_it() -> None:
    stored = spread(8, 0).half()
    options: dict[str, Any] = {"vectors": 2, "damping": DAMPING, "guard": Guard.unlimited()}
    given = Symmetric(side=as_operator(stored, 0.25)), Symmetric(side=as_operator(spread(8, 1)))
    found = side_metrics(compare_sides(given, "layer", **options), (1, 2))
    first, second = stored.double() / 4, spread(8, 1)
    agree(found, twin(first, second, (shifted(first, DAMPING[0]), shifted(second, DAMPING[1])), (1, 2)))


def test_numbers_that_are_not_finite_are_refused_by_name() -> None:
    broken = spread(5, 0)
    broken[2, 3] = math.nan
    with pytest.raises(NonFiniteFactor, match="layer `layer`: a factor that is compared holds NaN or Inf"):
        compared(spread(5, 1), broken)


def test_what_does_not_fit_is_refused_before_it_is_allocated() -> None:
    budget = dataclasses.replace(MemoryBudget.unlimited(), host_bytes=1)
    guard = Guard(budget=budget, device=torch.device("cpu"), log=lambda _, __: None)
    with pytest.raises(BudgetExceeded, match="layer `layer` does not fit"):
        compared(*SIDES["softmax head"], guard=guard)


def test_another_damping_makes_no_second_eigendecomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SIDES["dense"]
    known = compared(first, second)
    monkeypatch.setattr("engine.operators.pairs.side_comparison.decompose", None)
    again = compared(first, second, damping=(0.5, 0.6), known=known)
    assert again.pencils is not None
    assert known.pencils is not None
    expected = twin(dense(first), dense(second), (shifted(dense(first), 0.5), shifted(dense(second), 0.6)))
    agree(side_metrics(again, KS), expected)
    assert not torch.equal(again.pencils[0], known.pencils[0])
