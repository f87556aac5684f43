"""Counts and densities of log10 λ against sums over every eigenvalue."""

import math

import pytest
import torch

from engine.analyses.spectra.log_density import Lattice, LogCounts, gaussian


def spectrum(size: int, seed: int, decades: float) -> torch.Tensor:
    drawn = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (10 ** (-decades * drawn)).sort().values


def smoothed(values: torch.Tensor, lattice: Lattice, dimension: int) -> torch.Tensor:
    """The definition: one Gaussian for each eigenvalue above zero."""
    positive = values[values > 0].log10()
    return gaussian(lattice.points[:, None] - positive, lattice.width).sum(1) / dimension


@pytest.mark.parametrize("points_per_decade", [1, 4, 8, 50])
def test_the_density_of_products_is_that_of_all_products(points_per_decade: int) -> None:
    a, g = spectrum(40, 0, 6), 3.7 * spectrum(23, 1, 4)
    a[:3] = 0
    every = torch.outer(g, a).flatten()
    lattice = Lattice.below(float(every.max()), points_per_decade, 12)
    expected = smoothed(every, lattice, every.numel())
    for counts in (LogCounts.of_products((a, g)), LogCounts.of_products((g, a)), LogCounts.of_values(every)):
        found = counts.smoothed(lattice, every.numel())
        assert torch.allclose(found, expected, rtol=0, atol=7e-5 * float(expected.max()))
    # those that are zero are missing
    assert float(LogCounts.of_products((a, g)).counts.sum()) == pytest.approx(37 * 23)


def test_counts_add_up_wherever_they_lie() -> None:
    low, high = 1e-9 * spectrum(11, 2, 2), spectrum(7, 3, 1)
    both = LogCounts.of_values(low).plus(LogCounts.of_values(high))
    lattice = Lattice.below(1.0, 8, 14)
    expected = smoothed(torch.cat([low, high]), lattice, 18)
    assert torch.allclose(both.smoothed(lattice, 18), expected, atol=1e-4 * float(expected.max()))
    none = LogCounts.of_values(torch.zeros(5, dtype=torch.float64))
    assert not none.counts.numel()
    assert torch.equal(none.plus(both).counts, both.counts)
    assert torch.equal(both.plus(none).counts, both.counts)


def test_points_are_of_one_lattice_and_reach_as_far_as_asked() -> None:
    for largest in (1.0, 0.37, 2.9e7, 1e-12):
        lattice = Lattice.below(largest, 8, 5)
        points = lattice.points.tolist()
        assert all(float(point * 8).is_integer() for point in points)
        assert points[0] <= math.log10(largest) - 5 < points[0] + 1 / 8
        assert points[-1] - 1 / 8 < math.log10(largest) + 3 * lattice.width <= points[-1]


def test_the_density_is_a_share_of_all_eigenvalues() -> None:
    values = torch.cat([spectrum(300, 4, 3), torch.zeros(100, dtype=torch.float64)])
    lattice = Lattice.below(1.0, 10, 6)
    area = float(LogCounts.of_values(values).smoothed(lattice, 400).sum()) / 10
    assert area == pytest.approx(0.75, abs=2e-3)
