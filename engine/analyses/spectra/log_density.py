"""The density of log10 |λ| on one lattice for every curvature: fine counts, smoothed with one Gaussian.

At a point x the smoothed density is ``ρ(x) = Σ_i K(x − log10 |λ_i|) / n``, K a Gaussian of ``width`` decades and n the
number of all eigenvalues: a share of the eigenvalues in a decade. Points are whole multiples of 1/points_per_decade,
whatever the matrix, so that two curves are compared point by point.

The eigenvalues of ``G ⊗ A`` are products λμ, whose logarithms are sums: where λ and μ are counted in bins of 1/256
decade, the products' counts are the convolution of the two. An eigenvalue between two bin centres is shared by them in
proportion, which keeps its mean and adds at most h²/4 to its variance, h = 1/256. For a product that is h²/2, against
the width an error of ``h² / (4 width²)``, or 6e-5 of the density at most; and no product is made.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from engine.linalg.kronecker_quantiles import Pair

FINE = 256
"""Bins of a decade."""
_WIDTH = 0.25
_AT_ONCE = 2**18
_LEAST = 1e-300
"""Below, float64 loses digits, and what is smaller is as good as zero."""


@dataclass(frozen=True, kw_only=True)
class LogCounts:
    """Eigenvalues above zero, counted in bins of log10 λ."""

    first: int
    """The first bin's centre, in units of 1/256 decade."""
    counts: Tensor
    """(bins,) float64; an eigenvalue between two centres is shared by them."""

    @classmethod
    def none(cls) -> Self:
        """Return the counts of no eigenvalue."""
        return cls(first=0, counts=torch.zeros(0, dtype=torch.float64))

    @classmethod
    def of_values(cls, values: Tensor) -> Self:
        """Count those of the values (n,), float64, that are above zero; some 2¹⁸ numbers and the bins are held."""
        total = cls.none()
        for part in torch.split(values, _AT_ONCE):
            positive = part[part > _LEAST]
            if not positive.numel():
                continue
            place = positive.log10() * FINE
            left = place.floor()
            share = place - left
            first = int(left.min())
            bins = torch.zeros(int(left.max()) - first + 2, dtype=torch.float64)
            index = (left - first).to(torch.int64)
            bins.index_add_(0, index, 1 - share)
            bins.index_add_(0, index + 1, share)
            total = total.plus(cls(first=first, counts=bins))
        return total

    @classmethod
    def of_products(cls, pair: Pair) -> Self:
        """Count the products of two spectra, without making them."""
        left, right = (cls.of_values(side) for side in pair)
        if not left.counts.numel() or not right.counts.numel():
            return cls.none()
        size = left.counts.numel() + right.counts.numel() - 1
        made = torch.zeros(size, dtype=torch.float64)
        short, long = sorted((left.counts, right.counts), key=torch.Tensor.numel)
        for place in short.nonzero()[:, 0].tolist():
            made[place : place + long.numel()].add_(long, alpha=float(short[place]))
        return cls(first=left.first + right.first, counts=made)

    def plus(self, other: "LogCounts") -> Self:
        """Return the counts of the eigenvalues of two matrices together."""
        parts = [each for each in (self, other) if each.counts.numel()]
        if not parts:
            return self
        first = min(each.first for each in parts)
        size = max(each.first + each.counts.numel() for each in parts) - first
        made = torch.zeros(size, dtype=torch.float64)
        for each in parts:
            start = each.first - first
            made[start : start + each.counts.numel()] += each.counts
        return type(self)(first=first, counts=made)

    def smoothed(self, lattice: "Lattice", dimension: int) -> Tensor:
        """Return the density at the points of a lattice, (points,) in float64: shares of the eigenvalues in a decade.

        ``dimension`` counts all eigenvalues of the matrix, those that are zero among them.
        """
        if not self.counts.numel():
            return torch.zeros(lattice.last - lattice.first + 1, dtype=torch.float64)
        centres = (torch.arange(self.counts.numel(), dtype=torch.float64) + self.first) / FINE
        return (gaussian(lattice.points[:, None] - centres, lattice.width) @ self.counts) / dimension


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """Points of log10 |λ|: multiples of 1/points_per_decade."""

    points_per_decade: int
    first: int
    """The first point, in units of 1/points_per_decade."""
    last: int
    """The last one."""

    @classmethod
    def below(cls, largest: float, points_per_decade: int, decades: int) -> Self:
        """Return the points from a matrix's largest magnitude downwards."""
        top = math.log10(largest)
        last = math.ceil((top + 3 * width_of(points_per_decade)) * points_per_decade)
        return cls(
            points_per_decade=points_per_decade,
            first=math.floor((top - decades) * points_per_decade),
            last=last,
        )

    @property
    def width(self) -> float:
        """Standard deviation of the Gaussian, in decades."""
        return width_of(self.points_per_decade)

    @property
    def points(self) -> Tensor:
        """(points,) float64, ascending."""
        return torch.arange(self.first, self.last + 1, dtype=torch.float64) / self.points_per_decade

    @property
    def magnitudes(self) -> list[float]:
        """|λ| at each point."""
        return [10.0**point for point in self.points.tolist()]


def width_of(points_per_decade: int) -> float:
    """Return the width of the smoothing: a quarter of a decade, or the distance of two points if that is more."""
    return max(_WIDTH, 1 / points_per_decade)


def gaussian(distances: Tensor, width: float) -> Tensor:
    """Return the density of a normal distribution of standard deviation ``width`` at distances from its mean."""
    return torch.exp(-0.5 * (distances / width) ** 2) / (width * math.sqrt(2 * math.pi))
