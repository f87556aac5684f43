"""G as its gradient rows: every number and product against the dense float64 sum."""

import math

import pytest
import torch
from torch import Tensor

from engine.factors.capacitance import robust_solve
from engine.factors.low_rank import LowRank, scaled_rows
from engine.factors.representation_bytes import basis_bytes, gram_bytes
from engine.linalg.eigenbasis import Eigenbasis
from tests.memory_profile import peak_bytes

T, N = 23, 61
EYE = torch.eye(N, dtype=torch.float64)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def low_rank(rows: Tensor, dtype: torch.dtype = torch.float64, weight: float = 17.0) -> LowRank:
    stored, scales = scaled_rows(rows, dtype)
    return LowRank(rows=stored, scales=scales, weight=weight)


def dense(rows: Tensor, weight: float = 17.0) -> Tensor:
    return rows.T @ rows / weight


def spread(count: int, size: int, condition: float) -> Tensor:
    """Rows whose sum of outer products has eigenvalues from 1 down to 1/condition."""
    left, _ = torch.linalg.qr(drawn(count, count))
    right, _ = torch.linalg.qr(drawn(size, count, seed=1))
    return (left * torch.logspace(0, -math.log10(condition) / 2, count, dtype=torch.float64)) @ right.T


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.to(torch.float64) - expected).norm() / expected.norm())


@pytest.mark.parametrize("count", [1, T, N, 2 * N])
def test_every_number_is_that_of_the_dense_sum(count: int) -> None:
    rows = drawn(count, N)
    rows[0] *= 30
    side, matrix = low_rank(rows), dense(rows)
    values = torch.linalg.eigvalsh(matrix)
    assert side.trace() == pytest.approx(float(matrix.trace()), rel=1e-12)
    assert error(side.diagonal(), matrix.diagonal()) < 1e-12
    assert side.frobenius_norm() == pytest.approx(float(matrix.norm()), rel=1e-12)
    assert side.spectral_norm() == pytest.approx(float(values[-1]), rel=1e-12)
    assert error(side.to_dense(torch.float64), matrix) < 1e-12
    spectrum, _ = side.spectrum("layer")
    assert spectrum.shape == (N,)
    assert error(spectrum, values) < 1e-12
    assert int((spectrum == 0).sum()) == max(N - count, 0)
    shifts = torch.tensor([1e-3, 1.0, 1e4], dtype=torch.float64)
    assert torch.allclose(side.logdets(shifts), torch.stack([torch.logdet(matrix + s * EYE) for s in shifts]))
    inverses = [torch.linalg.solve(matrix + s * EYE, matrix).trace() for s in shifts]
    assert torch.allclose(side.effective_dimensions(shifts), torch.stack(inverses), rtol=1e-9)


@pytest.mark.parametrize("count", [T, 2 * N])
def test_the_eigenbasis_is_orthonormal_and_gives_the_sum_back(count: int) -> None:
    rows = drawn(count, N)
    values, vectors = low_rank(rows).eigenbasis("layer")
    assert float((vectors.T @ vectors - torch.eye(values.numel())).abs().max()) < 1e-13
    assert error((vectors * values) @ vectors.T, dense(rows)) < 1e-13


def test_the_eigenbasis_of_a_wide_spectrum_stays_orthonormal() -> None:
    rows = spread(T, N, 1e12)
    values, vectors = low_rank(rows, weight=1.0).eigenbasis("layer")
    assert float((vectors.T @ vectors - torch.eye(values.numel())).abs().max()) < 1e-13
    assert error((vectors * values) @ vectors.T, dense(rows, 1.0)) < 1e-13


def test_products_are_those_of_the_dense_sum() -> None:
    rows, right = drawn(T, N), drawn(N, 5, seed=2)
    assert error(low_rank(rows).apply(right), dense(rows) @ right) < 1e-13
    single = low_rank(rows, torch.float32).apply(right.to(torch.float32))
    assert single.dtype == torch.float32
    assert error(single, dense(rows) @ right) < 1e-6


@pytest.mark.parametrize("condition", [1e4, 1e8, 1e12])
def test_push_through_keeps_its_digits_where_damping_is_tiny(condition: float) -> None:
    rows = drawn(T, N).to(torch.float32)
    inner = drawn(T, 4, seed=3).to(torch.float32)
    side = low_rank(rows, torch.float32)
    exact = rows.to(torch.float64)
    matrix, damping = dense(exact), side.spectral_norm() / condition
    gradient = exact.T @ inner.to(torch.float64) / math.sqrt(17)
    # float64 has digits enough for the dense solve here, as the rows are in general position
    expected = torch.linalg.pinv(exact / math.sqrt(17)) @ torch.linalg.solve(
        exact @ exact.T / 17 + damping * torch.eye(T, dtype=torch.float64),
        exact @ exact.T / 17 @ inner.to(torch.float64),
    )
    found, taken = side.push_through(inner, damping)
    assert error(found, expected) < 1e-5
    assert taken.rung == "cholesky"
    assert taken.jitter == 0
    textbook = (gradient - matrix @ gradient / damping) / damping
    assert error(textbook, expected) > 1


def squared_softmax_columns(positions: int, classes: int) -> Tensor:
    """What `type2` sends back: of each position as many rows as classes, which add up to nothing with weights √p."""
    p = torch.softmax(3 * drawn(positions, classes, seed=8), -1)
    jacobians = drawn(positions, classes, N, seed=5)
    return (p.sqrt()[:, :, None] * (jacobians - torch.einsum("tc,tcn->tn", p, jacobians)[:, None])).flatten(0, 1)


DEPENDENT = {
    "the same rows twice": drawn(T, N)[torch.arange(2 * T) % T],
    "rows of zeros": drawn(T, N) * (torch.arange(T) % 3 > 0)[:, None],
    "rows of all sizes": drawn(T, N) * torch.logspace(0, -8, T, dtype=torch.float64)[:, None],
    "nearly parallel rows": 1 + 1e-2 * drawn(T, N),
    "a wide spectrum": spread(T, N, 1e8),
    "as many rows as outputs": drawn(N, N),
    "the columns of type2": squared_softmax_columns(6, 5),
    "a single row": drawn(1, N),
}


@pytest.mark.part(of=24, by=("rows",))
@pytest.mark.parametrize("rows", DEPENDENT)
@pytest.mark.parametrize("condition", [1e4, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_push_through_keeps_its_digits_whatever_the_rows_depend_on(
    rows: str, condition: float, dtype: torch.dtype
) -> None:
    # in float32 they would depend on each other but for their rounding, of which the rest is then made
    stored = torch.float64 if rows == "the columns of type2" and dtype == torch.float32 else dtype
    side = low_rank(DEPENDENT[rows], stored)
    exact = side.rows.to(torch.float64) * side.scales[:, None]
    inner = drawn(exact.shape[0], 4, seed=3).to(torch.float32)
    damping = side.spectral_norm() / condition
    left, roots, right = torch.linalg.svd(exact / math.sqrt(17), full_matrices=False)
    roots = torch.where(roots > 1e-13 * roots[0], roots, 0.0)
    expected = right.T @ ((roots / (damping + roots**2))[:, None] * (left.T @ inner.to(torch.float64)))
    found, taken = side.push_through(inner, damping)
    assert found.dtype == torch.float32
    assert error(found, expected) < 1e-5
    assert taken.jitter == 0


@pytest.mark.parametrize("condition", [1e4, 1e8, 1e12])
def test_any_right_hand_side_is_solved_for(condition: float) -> None:
    rows, right = drawn(T, N), drawn(N, 3, seed=4)
    side = low_rank(rows)
    damping = side.spectral_norm() / condition
    values, vectors = torch.linalg.eigh(dense(rows))
    values[: N - T] = 0
    expected = vectors @ ((vectors.T @ right) / (values + damping)[:, None])
    assert error(side.solve(right, damping), expected) < 1e-9
    inside = rows.T @ drawn(T, 3, seed=5)
    within = vectors[:, N - T :]
    solved = within @ ((within.T @ inside) / (values[N - T :] + damping)[:, None])
    # the part along the null space is rounding over the damping: small beside what it would be unprojected
    assert error(side.solve(inside, damping), solved) < 1e-15 * condition * 10 + 1e-9


def test_what_is_left_beside_the_eigenvectors_is_projected_twice() -> None:
    """Once leaves rounding that the damping multiplies: 5e-5 here."""
    rows, inner = spread(T, N, 1e6), drawn(T, 3, seed=5)
    side = low_rank(rows)
    damping = side.spectral_norm() / 1e12
    left, roots, right = torch.linalg.svd(rows / math.sqrt(17), full_matrices=False)
    expected = right.T @ ((roots / (damping + roots**2))[:, None] * (left.T @ inner))
    assert error(side.solve(rows.T @ inner / math.sqrt(17), damping), expected) < 1e-6


def test_no_rows_at_all_are_a_zero_matrix() -> None:
    side = low_rank(torch.zeros(0, 5, dtype=torch.float64))
    right = drawn(5, 2)
    assert torch.equal(side.spectrum("layer")[0], torch.zeros(5, dtype=torch.float64))
    assert (side.trace(), side.frobenius_norm(), side.spectral_norm()) == (0, 0, 0)
    assert torch.equal(side.apply(right), torch.zeros_like(right))
    assert torch.allclose(side.solve(right, 0.5), 2 * right)
    assert side.factorised(0.5, 1e-6).rung == "cholesky"
    assert side.eigenbasis("layer")[1].shape == (5, 0)
    assert LowRank.read(side.tensors(), side.metadata()).digest() == side.digest()


def test_the_eigenvectors_take_one_copy_of_themselves() -> None:
    side = low_rank(drawn(200, 20_000).to(torch.float32), torch.float32)
    assert peak_bytes(lambda: side.eigenbasis("layer")) < basis_bytes(200, 20_000) + gram_bytes(200, 20_000)


def test_a_failing_cholesky_is_jittered_and_says_by_how_much() -> None:
    rows = drawn(4, N)
    gram = rows.T @ rows - 1e-3 * EYE
    solved, taken = robust_solve(gram, drawn(N, 2, seed=6), 1e-6, 1e-6)
    assert taken.rung == "cholesky_jittered"
    assert 1e-3 < taken.jitter < 1e-1
    shifted = gram + (1e-6 + taken.jitter) * EYE
    assert error(solved, torch.linalg.solve(shifted, drawn(N, 2, seed=6))) < 1e-8


def test_the_pseudo_inverse_is_the_last_rung() -> None:
    gram = torch.diag(torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64))
    right = drawn(3, 1)
    solved, taken = robust_solve(gram, right, 0.0, 1e-6)
    assert taken.rung == "pseudo_inverse"
    assert torch.allclose(solved, right / gram.diagonal()[:, None])


@pytest.mark.parametrize("positions", [4096, 65536])
def test_sixteen_bits_with_scales_lose_no_gradient_of_a_mean_loss(positions: int) -> None:
    rows = (drawn(64, 256) / positions * 1e-3).to(torch.float32)
    assert float((rows.to(torch.float16) == 0).to(torch.float64).mean()) > 0.05
    side = low_rank(rows, torch.float16)
    restored = side.rows.to(torch.float64) * side.scales[:, None]
    assert float((side.rows == 0).to(torch.float64).mean()) < 1e-3
    assert error(restored, rows.to(torch.float64)) < 3e-4
    assert error(side.to_dense(torch.float64), dense(rows.to(torch.float64))) < 3e-4
    assert torch.equal(side.scales, torch.exp2(side.scales.log2().round()))


def test_what_is_stored_reads_back_with_the_same_digest() -> None:
    side = low_rank(drawn(T, N), torch.float16)
    again = LowRank.read(side.tensors(), side.metadata())
    assert again.digest() == side.digest()
    changed = LowRank(rows=side.rows, scales=side.scales * 2, weight=side.weight)
    assert changed.digest() != side.digest()
    assert LowRank(rows=side.rows, scales=side.scales, weight=2.0).digest() != side.digest()


@pytest.mark.parametrize("kappa_max", [1e6, 1e30])
@pytest.mark.parametrize("rows", ["the same rows twice", "the columns of type2", "zeros"])
def test_clipping_keeps_no_more_directions_than_there_are(rows: str, kappa_max: float) -> None:
    """Beside what is rounding of the Gram matrix any floor is low, and of a factor that is zero there is none."""
    exact = torch.zeros(T, N, dtype=torch.float64) if rows == "zeros" else DEPENDENT[rows]
    side = low_rank(exact).clip(kappa_max, "layer")
    again, right = Eigenbasis.read(side.tensors("G"), "G"), drawn(N, 3, seed=4)
    clipped = torch.linalg.eigvalsh(dense(exact))[-1] / kappa_max
    _, roots, directions = torch.linalg.svd(exact / math.sqrt(17))
    values = torch.zeros(N, dtype=torch.float64)
    values[: len(roots)] = torch.where(roots > 1e-13 * roots[0], roots**2, 0.0)
    values = values.clamp_min(clipped) + 1e-3
    assert error(again.solve(right, 1e-3), directions.T @ ((directions @ right) / values[:, None])) < 1e-9
