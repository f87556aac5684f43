"""The band of a spectrum's counts, narrowed by the eigenvalues that a search has found at one end."""

from types import SimpleNamespace
from typing import Any

import torch

from engine.analyses.spectra.found_spectrum import _narrowed


def test_within_the_bound_of_the_last_eigenvalue_others_may_lie() -> None:
    # found: 10 and 5.3, known as 5 ± 0.5; a third of 5.2 is not found, and lies beyond 5.1
    ends: Any = [
        SimpleNamespace(value=10.0, bound=0.5, converged=True),
        SimpleNamespace(value=5.0, bound=0.5, converged=True),
    ]
    lattice: Any = SimpleNamespace(magnitudes=[1.0, 5.1, 5.6, 9.0, 11.0])
    shares = torch.full((5,), 0.5), torch.zeros(5), torch.ones(5)
    value, low, high = (each.tolist() for each in _narrowed(shares, 1.0, ends, lattice, size=4))
    assert low == [0.5, 0.25, 0.25, 0.25, 0.0]
    assert high == [1.0, 1.0, 0.25, 0.25, 0.0]
    assert value == [0.5, 0.5, 0.25, 0.25, 0.0]
