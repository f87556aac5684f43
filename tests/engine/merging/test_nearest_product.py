"""The coefficients of the product that is nearest to a sum of two."""

import pytest
import torch

from engine.merging.nearest_product import _leading_pair


@pytest.mark.parametrize("seed", range(5))
def test_the_pair_is_the_leading_eigenvector_and_what_belongs_to_it(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # inner products of two positive semidefinite matrices each, none of them negative
    P, Q = (rows @ rows.T for rows in (torch.rand(2, 6, dtype=torch.float64, generator=generator) for _ in range(2)))
    x, y = _leading_pair(P, Q)
    values, vectors = torch.linalg.eig(Q @ P)
    leading = vectors[:, values.real.argmax()].real
    assert float(torch.nn.functional.cosine_similarity(x, leading, dim=0).abs()) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(y, P @ x / (x @ P @ x), rtol=1e-12, atol=0)
