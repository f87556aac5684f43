"""The eigenbasis of one factor, and of a layer's Kronecker product, through which functions of them are applied.

A factor ``S = Q diag(s) Qᵀ`` (n, n) may be known by r of its eigenvectors alone; the other n − r eigenvalues are zero,
and a vector's part outside of their span is carried beside its coefficients.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.linalg.panels import PANEL_NUMBERS


@dataclass(frozen=True, eq=False)
class SideBasis:
    """Eigenvalues of one factor and their eigenvectors."""

    values: Tensor
    """s (r,) float64 on the host, not negative."""
    vectors: Tensor | None
    """Q (n, r), one eigenvector a column, where the arithmetic is done; None is the identity, with r = n."""
    size: int
    """n."""

    @property
    def complete(self) -> bool:
        """Whether the vectors span the whole space: r = n."""
        return self.values.numel() == self.size

    @property
    def all_values(self) -> Tensor:
        """Every eigenvalue, shape (n,), the zeros outside of the span included."""
        missing = self.size - self.values.numel()
        return torch.cat([self.values.new_zeros(missing), self.values]) if missing else self.values

    def coefficients(self, right: Tensor) -> Tensor:
        """Return ``Qᵀ right``.

        Args:
            right: Shape (n, m).

        Returns:
            Shape (r, m).
        """
        return right if self.vectors is None else self.vectors.mT.to(right.dtype) @ right

    def combination(self, coefficients: Tensor) -> Tensor:
        """Return ``Q coefficients``.

        Args:
            coefficients: Shape (r, m).

        Returns:
            Shape (n, m).
        """
        return coefficients if self.vectors is None else self.vectors.to(coefficients.dtype) @ coefficients

    @cached_property
    def squares(self) -> Tensor | None:
        """The squares of the vectors' numbers (n, r), float64; None for the identity."""
        return None if self.vectors is None else self.vectors.to(torch.float64).square()


@dataclass(frozen=True, kw_only=True, eq=False)
class JointBasis:
    """The eigenbasis ``Q_G ⊗ Q_A`` of a layer's damped curvature.

    The eigenvalue of ``q_i ⊗ p_j`` is ``(g_i + λ_G)(a_j + λ_A) + λ``, or EK-FAC's own plus λ.

    Memory:
        16 MiB of eigenvalues at a time, in float64.
    """

    G: SideBasis
    A: SideBasis
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
        """Apply the matrix raised to a power.

        Args:
            matrices: Shape (out_dim, k, in_dim), a layer's matrices of k vectors.
            exponent: α, finite; no eigenvalue may be zero where it is not positive.

        Returns:
            The same shape.

        Memory:
            Three times ``matrices``.
        """
        out, columns, into = matrices.shape
        turned = matrices if self.A.vectors is None else matrices.reshape(-1, into) @ self.A.vectors.to(matrices.dtype)
        turned = turned.reshape(out, columns * into)
        inner = self.G.coefficients(turned)
        rest = None
        if not self.G.complete:
            outside = self._outside.pow(exponent).to(matrices)
            rest = (turned - self.G.combination(inner)).view(out, columns, into).mul_(outside).view(out, -1)
        # what was handed in is not written to
        inner = inner.clone() if self.G.vectors is None and self.A.vectors is None else inner
        self.scale_(inner.view(-1, columns, into), exponent)
        found = self.G.combination(inner)
        if rest is not None:
            found = found.add_(rest)
        found = found.view(-1, into)
        return (found if self.A.vectors is None else found @ self.A.vectors.mT.to(found.dtype)).view(out, columns, into)

    def scale_(self, coefficients: Tensor, exponent: float) -> None:
        """Multiply coefficients of the eigenvectors by their eigenvalues raised to a power.

        Args:
            coefficients: Shape (r, in_dim), or (r, k, in_dim) of k vectors; changed in place.
            exponent: α, as for ``apply``.
        """
        for rows, values in self._panels():
            powers = values.pow(exponent).to(coefficients)
            coefficients[rows].mul_(powers if coefficients.ndim == 2 else powers[:, None, :])

    def diagonal(self, exponent: float) -> Tensor:
        """Return the diagonal of the matrix raised to a power.

        Args:
            exponent: α, as for ``apply``.

        Returns:
            Shape (out_dim, in_dim), float64.

        Memory:
            The eigenvectors' squares in float64, and two matrices of that shape.
        """
        device = self._device
        squares_a, squares_g = self.A.squares, self.G.squares
        inner = torch.cat([values.pow(exponent) for _, values in self._panels()]).to(device)
        if squares_a is not None:
            inner = inner @ squares_a.mT
        if squares_g is None:
            return inner
        found = squares_g @ inner
        if not self.G.complete:
            outside = self._outside.pow(exponent).to(device)
            outside = outside if squares_a is None else squares_a @ outside
            found += torch.outer((1 - squares_g.sum(1)).clamp_min(0), outside)
        return found

    def total(self, exponent: float) -> float:
        """Return the trace of the matrix raised to a power.

        Args:
            exponent: α, as for ``apply``.

        Returns:
            The sum of all eigenvalues' powers.
        """
        return math.fsum(each * count for each, count in self._sums(lambda values: values.pow(exponent)))

    def logdet(self) -> float:
        """Return the natural logarithm of the determinant; −∞ where an eigenvalue is zero."""
        return sum(each * count for each, count in self._sums(torch.log))

    @property
    def smallest(self) -> float:
        """The smallest eigenvalue."""
        return min(float(values.min()) for values in self._all_values())

    @property
    def largest(self) -> float:
        """The largest eigenvalue."""
        return max(float(values.max()) for values in self._all_values())

    @property
    def _outside(self) -> Tensor:
        """(in_dim,) float64: eigenvalues for whatever is outside of the span of G's vectors."""
        return self.shift_G * (self._values_a + self.shift_A) + self.shift

    @cached_property
    def _values_a(self) -> Tensor:
        return self.A.all_values

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

    def _all_values(self) -> Iterator[Tensor]:
        yield from (values for _, values in self._panels())
        if not self.G.complete:
            yield self._outside

    def _sums(self, function: Callable[[Tensor], Tensor]) -> Iterator[tuple[float, int]]:
        """Sums of a function over eigenvalues, and how often each sum counts."""
        for _, values in self._panels():
            yield float(function(values).sum()), 1
        if not self.G.complete:
            yield float(function(self._outside).sum()), self.G.size - self.G.values.numel()

    @property
    def _device(self) -> torch.device:
        vectors = self.G.vectors if self.A.vectors is None else self.A.vectors
        return torch.device("cpu") if vectors is None else vectors.device
