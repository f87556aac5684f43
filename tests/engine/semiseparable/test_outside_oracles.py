"""Structures against other packages: celerite2's quasi-separable kernels, and a state-space layer's matrix."""

import celerite2
import numpy as np
import pytest
import torch
from celerite2 import terms
from torch import Tensor

from engine.semiseparable.construct_sss import construct_sss
from tests.engine.semiseparable.structures import REAL, Draw

PARTS = (
    terms.RealTerm(a=1.3, c=0.4),
    terms.RealTerm(a=0.7, c=0.02),
    terms.ComplexTerm(a=0.5, b=0.1, c=0.3, d=1.1),
    terms.ComplexTerm(a=0.9, b=0.05, c=0.15, d=0.6),
)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_sum_of_celerite_terms_is_solved_as_celerite_does(count: int) -> None:
    generator = np.random.default_rng(count)
    t = np.sort(generator.uniform(0, 120, 213))
    term = terms.TermSum(*PARTS[:count]) if count > 1 else PARTS[0]
    process = celerite2.GaussianProcess(term, mean=0.0)
    process.compute(t, diag=np.full(len(t), 0.1))
    dense = torch.tensor(term.get_value(t[:, None] - t[None, :])) + 0.1 * torch.eye(len(t), dtype=REAL)
    matrix = construct_sss(dense, block=16, tolerance=1e-13)
    # a real term has one state, a complex one two
    assert max(matrix.orders[0]) == min(count, 2) + 2 * max(count - 2, 0)
    y = generator.standard_normal((len(t), 3))
    solved = process.apply_inverse(y)
    assert np.abs(matrix.solve(torch.tensor(y)).numpy() - solved).max() <= 1e-10 * np.abs(solved).max()
    assert np.abs(matrix.matvec(torch.tensor(y)).numpy() - dense.numpy() @ y).max() <= 1e-10 * np.abs(y).max()
    product = process.dot_tril(y)  # L y, with the matrix L Lᵀ
    assert (
        abs((matrix.solve(torch.tensor(product)) * torch.tensor(product)).sum() - (y**2).sum()) <= 1e-10 * (y**2).sum()
    )
    sign, logarithm = matrix.slogdet()
    likelihood = process.log_likelihood(y[:, 0])
    quadratic = float(torch.tensor(y[:, 0]) @ matrix.solve(torch.tensor(y[:, 0])))
    wanted = -2 * likelihood - quadratic - len(t) * np.log(2 * np.pi)
    assert float(sign) == 1
    assert abs(float(logarithm) - wanted) <= 1e-10 * abs(wanted)


def segment_sums(decay: Tensor) -> Tensor:
    """Σ_{k=j+1}^{i} a_k for i ≥ j, −∞ above the diagonal: the state-space dual form's matrix, before exp."""
    n = decay.numel()
    sums = decay.cumsum(0)
    return (sums[:, None] - sums).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)


def test_a_scalar_state_space_layer_is_of_order_1() -> None:
    draw = Draw(4, REAL)
    decay = -torch.rand(150, generator=draw.generator, dtype=REAL) / 4
    dense = torch.exp(segment_sums(decay))
    matrix = construct_sss(dense, block=16, order=1)
    assert set(matrix.orders[1]) == {1}
    assert set(matrix.orders[0]) == {0}
    x = draw(150, 5)
    # the recurrence that the layer runs: h_t = exp(a_t) h_{t−1} + x_t
    state, rows = torch.zeros(5, dtype=REAL), []
    for a, own in zip(decay, x, strict=True):
        state = torch.exp(a) * state + own
        rows.append(state)
    assert float((matrix.matvec(x) - torch.stack(rows)).abs().max()) <= 1e-12
