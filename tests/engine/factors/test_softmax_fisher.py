"""A softmax head's Fisher, a diagonal minus a low rank: against autodiff, exact fractions, dense float64."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.func import hessian
from torch.profiler import ProfilerActivity, profile

from engine.errors import BrokenFactors, NonFiniteFactor
from engine.factors.low_rank import scaled_rows
from engine.factors.representation_bytes import capacitance_bytes, softmax_head_bytes
from engine.factors.softmax_fisher import SoftmaxFisher

T, V = 9, 31
EYE = torch.eye(V, dtype=torch.float64)


def drawn(*shape: int, seed: int = 0, sharp: float = 1.0) -> Tensor:
    return sharp * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(count: int = T) -> Tensor:
    found = torch.rand(count, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return found / found.sum()


def head(logits: Tensor, dtype: torch.dtype = torch.float64, *, excess: Tensor | None = None) -> SoftmaxFisher:
    rows, _ = scaled_rows(torch.softmax(logits, -1), dtype)
    return SoftmaxFisher(rows=rows, weights=weights(logits.shape[0]), excess=excess)


def autodiff(logits: Tensor) -> Tensor:
    """The Hessian of the weighted cross-entropy in one position's logits, summed over positions."""

    def loss(own: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(own[None], torch.zeros(1, dtype=torch.int64))

    each = [hessian(loss)(row) * weight for row, weight in zip(logits, weights(logits.shape[0]), strict=True)]
    return torch.stack(each).sum(0)


def laplacian(logits: Tensor) -> Tensor:
    """The same by its entries, in which nothing cancels however sharp the probabilities are."""
    p = torch.softmax(logits, -1)
    matrix = -torch.einsum("t,ti,tj->ij", weights(logits.shape[0]), p, p)
    matrix.fill_diagonal_(0)
    return matrix - torch.diag(matrix.sum(1))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.to(torch.float64) - expected).norm() / expected.norm())


@pytest.mark.parametrize("count", [1, T, 2 * V])
@pytest.mark.parametrize("tied", [False, True])
def test_every_number_is_that_of_the_loss_hessian(count: int, *, tied: bool) -> None:
    logits = drawn(count, V)
    excess = drawn(V, seed=3).abs() if tied else None
    side, matrix = head(logits, excess=excess), autodiff(logits)
    if excess is not None:
        matrix = matrix + torch.diag(excess)
    values = torch.linalg.eigvalsh(matrix)
    assert error(side.to_dense(torch.float64), matrix) < 1e-14
    assert side.trace() == pytest.approx(float(matrix.trace()), rel=1e-13)
    assert error(side.diagonal(), matrix.diagonal()) < 1e-13
    assert side.frobenius_norm() == pytest.approx(float(matrix.norm()), rel=1e-12)
    assert side.spectral_norm() == pytest.approx(float(values[-1]), rel=1e-12)
    right = drawn(V, 3, seed=7)
    assert error(side.apply(right), matrix @ right) < 1e-13
    shifts = torch.tensor([1e-3, 1.0, 1e4], dtype=torch.float64)
    assert torch.allclose(side.logdets(shifts), torch.stack([torch.logdet(matrix + s * EYE) for s in shifts]))
    inverses = [torch.linalg.solve(matrix + s * EYE, matrix).trace() for s in shifts]
    assert torch.allclose(side.effective_dimensions(shifts), torch.stack(inverses), rtol=1e-10)
    found = side.spectrum("layer")
    assert found is not None
    assert error(found[0], values) < 1e-13
    assert (float(found[0][0]) == 0) is not tied
    own, vectors = side.eigenbasis("layer")
    assert own.numel() == (V if tied else V - 1)
    assert error((vectors * own) @ vectors.T, matrix) < 1e-13


@pytest.mark.part(of=16, by=("damping",))
@pytest.mark.parametrize("sharp", [0.3, 3.0, 20.0])
@pytest.mark.parametrize("damping", [1e-4, 1e-8, 1e-10])
def test_the_inverse_holds_where_the_damping_is_small(damping: float, sharp: float) -> None:
    small = drawn(4, 9, sharp=sharp)
    side = SoftmaxFisher(rows=torch.softmax(small, -1), weights=weights(4))
    right = drawn(9, 2, seed=2)
    # without what lies along 1, which is known to be 1/λ of it and would hide the rest
    right[:, 1] -= right[:, 1].mean()
    expected = exact_solution(torch.softmax(small, -1), weights(4), right, damping)
    found = side.solve(right, damping)
    assert error(found[:, 0], expected[:, 0]) <= 1e-9
    assert error(found[:, 1], expected[:, 1]) <= 2e-7


def exact_solution(p: Tensor, share: Tensor, right: Tensor, damping: float) -> Tensor:
    """``(S + λI)⁻¹ right`` in fractions: no rounding at all."""
    size = p.shape[1]
    rows = [[Fraction(x) for x in row] for row in p.tolist()]
    rows = [[x / sum(row) for x in row] for row in rows]
    own = [Fraction(x) for x in share.tolist()]
    matrix = [
        [
            sum(w * row[i] * ((i == j) - row[j]) for w, row in zip(own, rows, strict=True))
            + (Fraction(damping) if i == j else 0)
            for j in range(size)
        ]
        + [Fraction(x) for x in right[i].tolist()]
        for i in range(size)
    ]
    for pivot in range(size):
        matrix[pivot] = [x / matrix[pivot][pivot] for x in matrix[pivot]]
        for other in range(size):
            if other != pivot and matrix[other][pivot]:
                factor = matrix[other][pivot]
                matrix[other] = [x - factor * y for x, y in zip(matrix[other], matrix[pivot], strict=True)]
    return torch.tensor([[float(x) for x in row[size:]] for row in matrix], dtype=torch.float64)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-24), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("sharp", [1.0, 6.0])
def test_rounded_probabilities_move_no_eigenvalue_by_more_than_twice_the_rounding(
    dtype: torch.dtype, unit: float, sharp: float
) -> None:
    logits = drawn(T, V, sharp=sharp)
    side, matrix = head(logits, dtype), laplacian(logits)
    exact, found = torch.linalg.eigvalsh(matrix)[1:], side.spectrum("layer")
    assert found is not None
    # below this fp16 has no digits left: 2^-29 of a row's largest number
    seen = exact > (1e-6 if dtype == torch.float16 else 1e-14) * exact[-1]
    assert bool(((found[0][1:] / exact - 1).abs() <= 2 * unit)[seen].all())
    assert abs(side.trace() / float(matrix.trace()) - 1) <= 2 * unit
    level = drawn(V, 2, seed=2)
    level -= level.mean(0)
    for damping in (1e-4, 1e-8):
        inverse = torch.linalg.solve(matrix + damping * EYE + 1e-2 / V, level)
        assert error(side.solve(level, damping), inverse) <= 4 * unit
    # S 1 = 0 whatever was rounded
    assert float(side.to_dense(torch.float64).sum(0).abs().max()) <= 1e-15 * side.spectral_norm()


def test_sharp_probabilities_lose_nothing_to_cancellation() -> None:
    logits = drawn(T, V, sharp=1e-2)
    logits[:, 0] += 17
    side, matrix = head(logits), laplacian(logits)
    assert float(1 - torch.softmax(logits, -1)[:, 0].min()) < 1e-5
    assert side.trace() == pytest.approx(float(matrix.trace()), rel=1e-10)
    assert side.frobenius_norm() == pytest.approx(float(matrix.norm()), rel=1e-10)
    # in float32 the largest is one to the last digit, and one minus it is lost
    assert head(logits, torch.float32).trace() == pytest.approx(float(matrix.trace()), rel=1e-6)


def test_eigenvalues_are_counted_without_being_computed() -> None:
    side = head(drawn(T, V, sharp=3))
    values = torch.linalg.eigvalsh(side.to_dense(torch.float64))
    middles = (values[1:] + values[:-1]) / 2
    assert [side.count_below(float(x)) for x in middles[::5]] == list(range(1, V, 5))
    assert side.count_below(float((side.diagonal() * 0 - 1).max())) == 0
    assert side.count_below(2.0) == V
    # at an entry of d itself
    assert 0 < side.count_below(float(side._class_weights.median())) < V


def test_it_reads_back_what_it_stores() -> None:
    side = head(drawn(T, V), torch.float16, excess=drawn(V, seed=3).abs())
    again = SoftmaxFisher.read(side.tensors(), side.metadata())
    assert again.digest() == side.digest()
    assert again.trace() == side.trace()
    assert side.size_bytes == softmax_head_bytes(T, V, 2, tied=True) == T * (2 * V + 8) + 8 * V
    with pytest.raises(BrokenFactors, match="probabilities"):
        SoftmaxFisher.read({"position_weights": side.weights}, {})
    with pytest.raises(BrokenFactors, match="do not go with weights"):
        SoftmaxFisher.read(side.tensors() | {"position_weights": side.weights[:-1]}, {})


def test_nan_is_named_with_its_layer() -> None:
    rows = torch.softmax(drawn(T, V), -1)
    rows[2, 3] = math.nan
    with pytest.raises(NonFiniteFactor, match="lm_head"):
        SoftmaxFisher(rows=rows, weights=weights()).spectrum("lm_head")


def test_a_wide_head_allocates_nothing_of_the_size_of_g() -> None:
    classes, positions = 8200, 64
    rows = torch.softmax(torch.randn(positions, classes, generator=torch.Generator().manual_seed(0)), -1)
    side = SoftmaxFisher(rows=scaled_rows(rows, torch.float16)[0], weights=weights(positions))
    right = torch.ones(classes, 1).cumsum(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        assert side.spectrum("head") is None
        side.solve(right, 1e-8)
        side.logdets(torch.tensor([1e-6]))
        side.frobenius_norm()
        side.spectral_norm()
    recorded = trace.profiler.kineto_results.events()  # type: ignore[union-attr]
    largest = max(event.nbytes() for event in recorded if event.name() == "[memory]")
    assert 8 * positions**2 <= largest <= capacitance_bytes(positions, classes)
    assert largest < 0.05 * 8 * classes**2


@pytest.mark.parametrize("tied", [False, True])
def test_many_shifts_are_answered_from_few(*, tied: bool) -> None:
    excess = drawn(V, seed=3).abs() * 1e-3 if tied else None
    side, asked = head(drawn(T, V, sharp=4), excess=excess), []
    values = torch.linalg.eigvalsh(side.to_dense(torch.float64)).clamp_min(0)
    plain = SoftmaxFisher._at

    def counted(self: SoftmaxFisher, shift: float) -> tuple[float, float]:
        asked.append(shift)
        return plain(self, shift)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SoftmaxFisher, "_at", counted)
        shifts = torch.logspace(-8, 9, 3000, dtype=torch.float64)
        found, logdets = side.effective_dimensions(shifts), side.logdets(shifts)
    assert len(set(asked)) < 500
    expected = (values / (values + shifts[:, None])).sum(1)
    assert float((found / expected - 1).abs().max()) < 1e-9
    assert float((logdets - (values + shifts[:, None]).log().sum(1)).abs().max()) < 1e-9 * V
