"""The eigenbasis of one factor, and of a layer's Kronecker product, through which functions of them are applied.

A factor ``S = Q diag(s) Qᵀ`` (n, n) may be known by r of its eigenvectors alone; the other n − r eigenvalues are zero.
With w the function of an eigenvalue and w₀ that of a zero, one side is then

    w(S) v = w₀ v + Q ((w − w₀) ∘ Qᵀ v)

which takes two products. A v within the span of Q, as the gradient of the very rows that G is kept as, cancels in it
where w₀ is large: the difference of both summands is then a small part of either. How small says ``apply_counting``;
in float64 v is split instead, and projected twice (Parlett), which keeps its digits:

    w(S) v = Q (w ∘ c) + w₀ (v − Q c),    c = Qᵀ v + Qᵀ (v − Q Qᵀ v)

A singular factor that was rounded when it was stored has eigenvalues on either side of zero. In float64 they are taken
as they are, so that a solve inverts what a product multiplies by, wherever the damped product stays positive; elsewhere
those below zero count as zero.

References:
    Parlett (1998), The symmetric eigenvalue problem, 6.9: twice is enough
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from engine.linalg.eigenbasis import Eigenbasis
from engine.linalg.layer_matrices import aligned, arranged, left_product, right_product
from engine.linalg.panels import PANEL_NUMBERS

_WEIGHTS_AT_ONCE = 2**18
"""Numbers that the nearest caches hold."""
_FLOAT32_REACH = 1e25
"""Eigenvalues between its inverse and it are raised to their powers in float32, others in float64."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JointBasis:
    """The eigenbasis ``Q_G ⊗ Q_A`` of a layer's damped curvature.

    The eigenvalue of ``q_i ⊗ p_j`` is ``(g_i + λ_G)(a_j + λ_A) + λ``, or EK-FAC's own plus λ. An ``exponent`` α is
    finite, and no eigenvalue may be zero where it is not positive.
    """

    G: Eigenbasis
    A: Eigenbasis
    """Complete, or with zeros for what is missing."""
    corrected: Tensor | None = None
    """EK-FAC's eigenvalues (out_dim, in_dim); None takes the products."""
    shift: float = 0.0
    """λ."""
    shift_A: float = 0.0
    """λ_A."""
    shift_G: float = 0.0
    """λ_G."""

    def apply(self, matrices: Tensor, exponent: float) -> Tensor:
        """Apply the matrix raised to a power to a layer's matrices of k vectors, shape (out_dim, k, in_dim).

        Memory:
            Three times ``matrices``.
        """
        return self.apply_counting(matrices, exponent)[0]

    def apply_counting(self, matrices: Tensor, exponent: float) -> tuple[Tensor, float]:
        """Apply the matrix raised to a power, as ``apply`` does, and say how much of the numbers has cancelled.

        Returns:
            The product, and by how much the norm of its summands exceeds its own, at most over the k vectors; 0 where
            nothing cancels. That times the rounding of ``matrices`` is about the product's relative error.
        """
        if self.nearest is not self and not (matrices.dtype == torch.float64 and self._has_power(exponent)):
            return self.nearest.apply_counting(matrices, exponent)
        source = arranged(matrices)
        turned = source if self.A.vectors is None else right_product(source, self.A.vectors)
        inner = turned if self.G.vectors is None else left_product(self.G.vectors.mT, turned)
        cancelled = 0.0
        if self.G.vectors is None or self.G.complete:
            # what was handed in is not written to
            inner = aligned(*inner.shape, like=inner).copy_(inner) if inner is source or inner is matrices else inner
            self.scale_(inner, exponent)
            found = inner if self.G.vectors is None else left_product(self.G.vectors, inner)
        elif turned.dtype == torch.float64:
            found = self._split(turned, inner, exponent)
        else:
            found, cancelled = self._textbook(turned, inner, exponent)
        return found if self.A.vectors is None else right_product(found, self.A.vectors.mT), cancelled

    def scale_(self, coefficients: Tensor, exponent: float, less: Tensor | None = None) -> None:
        """Multiply coefficients of the eigenvectors by their eigenvalues raised to a power.

        Args:
            coefficients: Shape (r, in_dim), or (r, k, in_dim) of k vectors; changed in place.
            less: What is taken from each power, shape (in_dim,), in the precision of ``coefficients``; None takes
                nothing.

        Memory:
            1 MiB, or 2 MiB where the eigenvalues are beyond float32.
        """
        for rows, powers in self._powers(exponent, coefficients):
            weights = powers if less is None else powers.sub_(less)
            coefficients[rows].mul_(weights if coefficients.ndim == 2 else weights[:, None, :])

    def diagonal(self, exponent: float) -> Tensor:
        """Return the diagonal of the matrix raised to a power, shape (out_dim, in_dim), float64, on the host.

        Memory:
            Two matrices of that shape, and 16 MiB.
        """
        if not self._has_power(exponent):
            return self.nearest.diagonal(exponent)
        inner = torch.cat([values.pow(exponent) for _, values in self._panels()])
        if self.A.vectors is not None:
            inner = torch.cat([inner @ squares.mT for squares in _squares(self.A.vectors)], 1)
        if self.G.vectors is None:
            return inner
        outside = None if self.G.complete else self._outside.pow(exponent)
        if outside is not None and self.A.vectors is not None:
            outside = torch.cat([squares @ outside for squares in _squares(self.A.vectors)])
        parts = []
        for squares in _squares(self.G.vectors):
            part = squares @ inner
            if outside is not None:
                part += torch.outer((1 - squares.sum(1)).clamp_min(0), outside)
            parts.append(part)
        return torch.cat(parts)

    def total(self, exponent: float) -> float:
        """Return the trace of the matrix raised to a power: the sum of all eigenvalues' powers."""
        basis = self if self._has_power(exponent) else self.nearest
        return math.fsum(each * count for each, count in basis.sums(lambda values: values.pow(exponent)))

    def logdet(self) -> float:
        """Return the natural logarithm of the determinant; −∞ where an eigenvalue is zero."""
        basis = self if self.smallest > 0 else self.nearest
        return math.fsum(each * count for each, count in basis.sums(torch.log))

    @cached_property
    def nearest(self) -> "JointBasis":
        """The basis without eigenvalues of the factors below zero, which count as zero; itself where there are none."""
        sides = self.G.nearest, self.A.nearest
        return self if sides == (self.G, self.A) else replace(self, G=sides[0], A=sides[1])

    def _has_power(self, exponent: float) -> bool:
        """Whether every eigenvalue has that power: an integer power of any number, others of positive ones."""
        return self.nearest is self or self.smallest > 0 or float(exponent).is_integer()

    @property
    def smallest(self) -> float:
        """The smallest eigenvalue, below zero where the factors' rounding exceeds the damping."""
        return self._extremes[0]

    @property
    def largest(self) -> float:
        """The largest eigenvalue."""
        return self._extremes[1]

    @cached_property
    def _extremes(self) -> tuple[float, float]:
        if self.corrected is not None:
            least, most = (float(each) for each in torch.aminmax(self.corrected))
            return max(least, 0.0) + self.shift, max(most, 0.0) + self.shift
        sides = [[end + self.shift_G for end in self.G.extremes], [end + self.shift_A for end in self.A.extremes]]
        corners = [g * a + self.shift for g in sides[0] for a in sides[1]]
        return min(corners), max(corners)

    @property
    def _outside(self) -> Tensor:
        """(in_dim,) float64: eigenvalues for whatever is outside of the span of G's vectors."""
        return self.shift_G * (self._values_a + self.shift_A) + self.shift

    @cached_property
    def _values_a(self) -> Tensor:
        return self.A.all_values

    def _textbook(self, turned: Tensor, inner: Tensor, exponent: float) -> tuple[Tensor, float]:
        """``w₀ v + Q ((w − w₀) ∘ c)``, and how much of it has cancelled."""
        vectors = self._incomplete
        outside = self._outside.pow(exponent).to(turned)
        found = torch.mul(turned, outside, out=aligned(*turned.shape, like=turned))
        before = _norms(found)
        self.scale_(inner, exponent, less=outside)
        found = left_product(vectors, inner, into=found)
        after = _norms(found)
        # comparisons that NaN fails; of zeros nothing cancels
        ratios = torch.where(before > 0, before / after, 0.0)
        return found, float(ratios.max()) if ratios.numel() else 0.0

    def _split(self, turned: Tensor, inner: Tensor, exponent: float) -> Tensor:
        """``Q (w ∘ c) + w₀ (v − Q c)``, projected twice."""
        vectors = self._incomplete
        rest = aligned(*turned.shape, like=turned).copy_(turned).sub_(left_product(vectors, inner))
        again = left_product(vectors.mT, rest)
        rest.sub_(left_product(vectors, again)).mul_(self._outside.pow(exponent).to(turned))
        inner.add_(again)
        self.scale_(inner, exponent)
        return left_product(vectors, inner, into=rest)

    @property
    def _incomplete(self) -> Tensor:
        if self.G.vectors is None:
            raise TypeError("the identity spans the whole space")
        return self.G.vectors

    def _powers(self, exponent: float, like: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Eigenvalues' powers (h, in_dim) of h of G's eigenvectors at a time, in the precision of ``like``."""
        if not (like.dtype == torch.float32 and self._within_float32(exponent)):
            for rows, values in self._panels():
                yield rows, values.pow(exponent).to(like)
            return
        height = max(1, _WEIGHTS_AT_ONCE // max(self.A.size, 1))
        # either factor may be beyond float32 where the products are not
        unit = max(self.G.extremes[1] + self.shift_G, sys.float_info.min)
        left = ((self.G.values + self.shift_G) / unit).to(like)
        right = ((self._values_a + self.shift_A) * unit).to(like)
        for start in range(0, self.G.values.numel(), height):
            rows = slice(start, start + height)
            if self.corrected is None:
                values = torch.outer(left[rows], right)
            else:
                values = self.corrected[rows].to(like, copy=True).clamp_min_(0)
            yield rows, _power_(values.add_(self.shift), exponent)

    def _within_float32(self, exponent: float) -> bool:
        ends = [self.smallest, self.largest]
        if ends[1] <= 0:
            return False
        reached = [end for end in ends if end > 0]
        powers = [abs(exponent * math.log(end)) for end in reached]
        limit = math.log(_FLOAT32_REACH)
        return max(*powers, *(abs(math.log(end)) for end in reached)) < limit

    def _panels(self) -> Iterator[tuple[slice, Tensor]]:
        """Eigenvalues (h, in_dim), float64, of h of G's eigenvectors at a time."""
        height = max(1, PANEL_NUMBERS // max(self.A.size, 1))
        for start in range(0, self.G.values.numel(), height):
            rows = slice(start, start + height)
            if self.corrected is None:
                yield rows, torch.outer(self.G.values[rows] + self.shift_G, self._values_a + self.shift_A) + self.shift
            else:
                # means of squares, which rounding may leave below zero
                yield rows, self.corrected[rows].to("cpu", torch.float64).clamp_min(0) + self.shift

    def sums(self, function: Callable[[Tensor], Tensor]) -> Iterator[tuple[float, int]]:
        """Yield sums of a function over eigenvalues, and how often each sum counts.

        Args:
            function: Of each number of a tensor, whatever its shape.
        """
        for _, values in self._panels():
            yield float(function(values).sum()), 1
        if not self.G.complete:
            yield float(function(self._outside).sum()), self.G.size - self.G.values.numel()


def _norms(matrices: Tensor) -> Tensor:
    """Norms of the matrices of k vectors, shape (k,)."""
    found: Tensor = torch.linalg.vector_norm(matrices, dim=(0, 2))
    return found


def _power_(values: Tensor, exponent: float) -> Tensor:
    """``values`` raised to a power in place, by the cheapest operation."""
    if exponent == 1:
        return values
    if exponent == -1:
        return values.reciprocal_()
    if exponent == 0.5:
        return values.sqrt_()
    return values.rsqrt_() if exponent == -0.5 else values.pow_(exponent)


def _squares(vectors: Tensor) -> Iterator[Tensor]:
    """Squares (h, r), float64, on the host, of h rows of eigenvectors at a time."""
    parts = torch.split(vectors, max(1, PANEL_NUMBERS // max(vectors.shape[1], 1)))
    return (part.to("cpu", torch.float64).square() for part in parts)
