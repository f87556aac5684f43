"""Estimates with 95 % bands from Gauss quadratures of several probes: distribution, density, trace of a function.

**Cumulative.** For a point x there is one quadrature that has x among its nodes and is as exact as the coefficients
allow (Gauss and Radau's: T is enlarged by a row whose diagonal entry makes x an eigenvalue). The inequalities of
Chebyshev, Markov and Stieltjes hold for it: its weights left of x do not exceed ``μ_v(−∞, x)``, and with the weight
at x they are not less than ``μ_v(−∞, x]``. So each probe's own measure is bracketed, without an assumption. Its mean
over m probes is a sample of the fraction p of eigenvalues up to x. For different x these samples are a Dirichlet
process: they vary and covary as a Brownian bridge does, with the variance ``2 p (1 − p) / (m (n + 2))`` of ``N = m (n
+ 2)/2`` tosses of a coin. The band reaches from the lower end of Wilson's interval of the mean lower bound to the
upper end of that of the mean upper bound, with 3.05 deviations, within which a Brownian bridge stays from p = 0.1 to
0.9: the whole curve is in it with a probability of 95 %.

**Density, traces.** For a function f the variance of ``vᵀf(F)v`` is ``2/(n + 2) · (Σ f²/n − (Σ f/n)²)``, which the
quadrature itself estimates far better than a few probes' deviation does. The band at a point is Student's, with m − 1
degrees of freedom, widened on both sides by the probes' mean distance from the quadrature of three quarters of the
steps. Where the kernel of a density is narrower than the steps resolve, the weight of a node may be anywhere within
its residual and its neighbours, and the band holds for each such place.

References:
    Karlin & Studden (1966), Tchebycheff systems, chapter IV
    Golub & Meurant (2010), Matrices, moments and quadrature with applications, chapter 6
    Chen, Trogdon & Ubaru (2021), Analysis of stochastic Lanczos quadrature for spectrum approximation
    Andrews (1993), Tests for parameter instability and structural change with unknown change point, table I
    Wilson (1927), Probable inference, the law of succession, and statistical inference
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from engine.linalg.student import student_quantile

_SUPREMUM = 3.05
"""A Brownian bridge stays within so many of its deviations from one tenth to nine tenths with a probability of 95 %."""
_AT_ONCE = 2**22
_NARROW = 2e-3
_APART = 1e-7


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The axis of a density: ``x``, ``log₁₀ x`` or ``sign(x) log₁₀(1 + |x|/threshold)``."""

    kind: Literal["linear", "log", "symlog"] = "linear"
    threshold: float = 1.0
    """Positive; on a logarithmic axis whatever is below it, zero and negative values too, stands at it."""

    def __post_init__(self) -> None:
        """Refuse what is not an axis."""
        if self.kind not in ("linear", "log", "symlog"):
            raise ValueError(f"kind must be one of linear, log, symlog (got {self.kind!r})")
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"threshold must be positive and finite (got {self.threshold})")

    def place(self, values: Tensor) -> Tensor:
        """Return where values stand on the axis.

        Args:
            values: Eigenvalues, any shape, float64.

        Returns:
            The same shape.
        """
        if self.kind == "linear":
            return values
        if self.kind == "log":
            return values.clamp_min(self.threshold).log10()
        return values.sign() * torch.log1p(values.abs() / self.threshold) / math.log(10)


_LINEAR = Axis()


def gauss(diagonal: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
    """Return Gauss's quadrature of each probe.

    Args:
        diagonal: Of T, shape (m, s), float64.
        beside: Next to the diagonal, shape (m, s); the last is outside of T. A zero ends the probe.

    Returns:
        Nodes and weights, (m, s) each, the nodes ascending; what a probe lacks repeats its last node with weight 0.
    """
    nodes, weights = torch.zeros_like(diagonal), torch.zeros_like(diagonal)
    for probe in range(diagonal.shape[0]):
        ends = (beside[probe] == 0).nonzero()
        length = int(ends[0]) + 1 if len(ends) else diagonal.shape[1]
        values, vectors = torch.linalg.eigh(_tridiagonal(diagonal[probe, :length], beside[probe, : length - 1]))
        nodes[probe, :length], nodes[probe, length:] = values, values[-1]
        weights[probe, :length] = vectors[0].square()
    return nodes, weights


def _tridiagonal(diagonal: Tensor, beside: Tensor) -> Tensor:  # (…, s), (…, s − 1) -> (…, s, s)
    return diagonal.diag_embed() + beside.diag_embed(1) + beside.diag_embed(-1)


@dataclass(frozen=True, kw_only=True)
class Quadrature:
    """Gauss quadratures of the spectral measures of m probes."""

    size: int
    """n, the number of eigenvalues."""
    nodes: Tensor
    """(m, s), float64, ascending."""
    weights: Tensor
    """(m, s), float64, not negative; each probe's add up to 1."""
    diagonal: Tensor
    """(m, s): Lanczos's coefficients."""
    beside: Tensor
    """(m, s)."""
    precision: float
    """Unit of the last place of the vectors."""
    _coarse: tuple[Tensor, Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the quadrature of three quarters of the steps, to be compared with."""
        fewer = -(-3 * self.nodes.shape[1] // 4)
        object.__setattr__(self, "_coarse", gauss(self.diagonal[:, :fewer], self.beside[:, :fewer]))

    def cumulative(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the fraction of eigenvalues up to each point.

        Args:
            points: Shape (q,), float64.

        Returns:
            Estimate, lower and upper end of the 95 % band of the whole curve, (q,) each, within [0, 1].

        Memory:
            Matrices of s + 1 rows for 4 Mi numbers at a time, and a few arrays of m · q.
        """
        points = points.to(torch.float64)
        below, lower, upper = self._nodal(points)
        probes, places = (upper - lower > _NARROW).nonzero(as_tuple=True)
        at_once = max(1, _AT_ONCE // (self.nodes.shape[1] + 1) ** 2)
        for first in range(0, len(probes), at_once):
            probe, place = probes[first : first + at_once], places[first : first + at_once]
            low, high = self._bracket(probe, points[place])
            lower[probe, place] = torch.maximum(lower[probe, place], low)
            upper[probe, place] = torch.minimum(upper[probe, place], high)
        tosses = self.nodes.shape[0] * (self.size + 2) / 2
        estimate = below.mean(0)
        low = torch.minimum(_wilson(lower.mean(0), tosses, -1), estimate)
        high = torch.maximum(_wilson(upper.mean(0), tosses, 1), estimate)
        return estimate, low, high

    def _nodal(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights up to each point, and the inequalities at the nodes to both sides of it, (m, q) each."""
        sums = torch.cat([torch.zeros_like(self.weights[:, :1]), self.weights.cumsum(1).clamp_max(1)], 1)
        spread, slack = points.expand(len(self.nodes), -1), self._slack[:, None]
        # nodes within rounding of x may belong to either side
        below, lower, upper = (
            torch.searchsorted(self.nodes, (spread + shift).contiguous(), right=True)
            for shift in (0 * slack, -slack, slack)
        )
        steps = self.nodes.shape[1]
        return (
            sums.gather(1, below),
            sums.gather(1, (lower - 1).clamp_min(0)),
            sums.gather(1, (upper + 1).clamp_max(steps)),
        )

    @property
    def _slack(self) -> Tensor:
        """Rounding of each probe's nodes, (m,)."""
        return 16 * self.precision * self.nodes.abs().amax(1)

    def _bracket(self, probe: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on the probe's measure up to its point, (k,) each, of the quadrature that has it among its nodes."""
        diagonal, beside = self.diagonal[probe], self.beside[probe]
        inner = _tridiagonal(diagonal, beside[:, :-1])
        slack = self._slack[probe]
        last = torch.zeros_like(diagonal)
        last[:, -1] = 1
        # near a node the entry has no bound, and the inequalities at the nodes are all there is
        shifted = inner - points[:, None, None] * torch.eye(inner.shape[-1], dtype=inner.dtype)
        solved, failed = torch.linalg.solve_ex(shifted, last)
        corner = points + beside[:, -1].square() * solved[:, -1]
        distance = (self.nodes[probe] - points[:, None]).abs().amin(1)
        sound = (failed == 0) & (distance > _APART * self.nodes.abs().amax(1)[probe])
        corner = torch.where(sound, corner, points)
        values, vectors = torch.linalg.eigh(_tridiagonal(torch.cat([diagonal, corner[:, None]], 1), beside))
        weights = vectors[:, 0].square()
        low = (weights * (values < (points - slack)[:, None])).sum(1)
        high = (weights * (values <= (points + slack)[:, None])).sum(1)
        return torch.where(sound, low, 0.0), torch.where(sound, high, 1.0)

    def density(self, points: Tensor, width: float, axis: Axis = _LINEAR) -> tuple[Tensor, Tensor, Tensor]:
        """Return the density of eigenvalues along an axis, smoothed by a Gaussian.

        Args:
            points: Places on the axis, shape (q,), float64: ``axis.place`` of eigenvalues.
            width: Standard deviation of the Gaussian, in units of the axis.
            axis: Linear, or logarithmic.

        Returns:
            Estimate, lower and upper end of the pointwise 95 % band, (q,) each, in eigenvalues' fraction per unit of
            the axis.

        Raises:
            ValueError: If the width is not positive.
        """
        if not 0 < width < math.inf:
            raise ValueError(f"width must be positive and finite (got {width})")
        places = points.to(torch.float64)

        def bell(distance: Tensor) -> Tensor:
            return torch.exp(-(distance / width).square() / 2) / (width * math.sqrt(2 * math.pi))

        mean, low, high = self._means(lambda values: bell(places - axis.place(values)[..., None]))
        near, here, far = (axis.place(values)[..., None] for values in self._reaches())
        movable = self.weights[..., None] * (torch.maximum(here - near, far - here) > width)
        kernel = bell(places - here)
        most = bell(torch.maximum(near - places, places - far).clamp_min(0)) - kernel
        least = kernel - bell(torch.maximum((places - near).abs(), (places - far).abs()))
        below, above = ((movable * part).sum(1).mean(0) for part in (least, most))
        return mean, (low - below).clamp_min(0), high + above

    def _reaches(self) -> tuple[Tensor, Tensor, Tensor]:
        """How far to the left the weight of each node may be, the nodes, and how far to the right, (m, s) each.

        An eigenvalue lies within a node's residual of it, and the inequalities at the nodes end at its neighbours.
        """
        inner = _tridiagonal(self.diagonal, self.beside[:, :-1])
        residuals = torch.zeros_like(self.nodes)
        for probe, row in enumerate(inner):
            if self.beside[probe].min() > 0:
                residuals[probe] = self.beside[probe, -1] * torch.linalg.eigh(row).eigenvectors[-1].abs()
        near, far = self.nodes - residuals, self.nodes + residuals
        near[:, 1:] = torch.maximum(near[:, 1:], self.nodes[:, :-1])
        far[:, :-1] = torch.minimum(far[:, :-1], self.nodes[:, 1:])
        return near, self.nodes, far

    def trace_of(self, function: Callable[[Tensor], Tensor]) -> tuple[float, float, float]:
        """Return the trace of a function of the matrix, ``Σ f(λ_i)``.

        Args:
            function: f, elementwise on float64 tensors.

        Returns:
            Estimate, lower and upper end of its 95 % interval.
        """
        mean, low, high = self._means(lambda values: function(values)[..., None])
        return self.size * float(mean), self.size * float(low), self.size * float(high)

    def _means(self, functions: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Means over the eigenvalues of q functions, (q,), with bands; they map (m, s) to (m, s, q)."""
        made = functions(self.nodes)
        each = torch.einsum("ms,msq->mq", self.weights, made)
        mean = each.mean(0)
        square = torch.einsum("ms,msq->mq", self.weights, made.square()).mean(0)
        nodes, weights = self._coarse
        coarse = torch.einsum("ms,msq->mq", weights, functions(nodes))
        probes = self.nodes.shape[0]
        variance = (square - mean.square()).clamp_min(0) * 2 / ((self.size + 2) * probes)
        half = student_quantile(probes - 1) * variance.sqrt() + (each - coarse).abs().mean(0)
        return mean, mean - half, mean + half


def _wilson(fraction: Tensor, tosses: float, side: int) -> Tensor:
    """One end of Wilson's 95 % interval: −1 the lower, 1 the upper one."""
    square = _SUPREMUM**2 / tosses
    spread = _SUPREMUM * (fraction * (1 - fraction) / tosses + square / (4 * tosses)).clamp_min(0).sqrt()
    return ((fraction + square / 2 + side * spread) / (1 + square)).clamp(0, 1)
