"""The curvature of one layer as an operator: ``F = G ⊗ A`` with its damping, and powers of it.

A layer's matrices stand as (out_dim, k, in_dim), k vectors between rows and columns, so that the product with either
factor is one matrix product for all of them. With V a layer's matrix, the damped curvature M is

    none        G V A                                  F alone
    exact       G V A + λ V                            F + λ I
    factored    (G + λ_G I) V (A + λ_A I)

EK-FAC has the same eigenvectors ``Q_G ⊗ Q_A`` with eigenvalues of its own, where `factored` has no meaning. Powers go
through eigenvectors. A softmax head that is too wide for them is solved by its own capacitance: once for `factored`,
once for each eigenvalue of A for `exact`.

References:
    Martens & Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature, section 6
    George et al. (2018), Fast approximate natural gradient descent in a Kronecker-factored eigenbasis
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from engine.errors import NotConverged, UsageError
from engine.linalg.damping import Damping
from engine.linalg.linear_operator import Structured
from engine.operators.eigenbasis import JointBasis, SideBasis

DampingKind = Literal["none", "exact", "factored"]


@dataclass(eq=False)
class FactorSide:
    """One factor as it is multiplied: (n, n), a diagonal (n,), or a side that is never made dense."""

    content: Tensor | Structured
    load_basis: Callable[[], SideBasis]
    """Decomposes the factor."""

    @property
    def size(self) -> int:
        """N."""
        return self.content.size if isinstance(self.content, Structured) else self.content.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Float32, or float64 where the factor is kept so."""
        own = self.content.storage_dtype if isinstance(self.content, Structured) else self.content.dtype
        return torch.promote_types(own, torch.float32)

    @cached_property
    def basis(self) -> SideBasis:
        """Eigenvalues and eigenvectors, made when they are first asked for.

        Raises:
            NotConverged: If a structured side has none without a dense matrix.
        """
        return self.load_basis()

    @property
    def has_basis(self) -> bool:
        """Whether there are eigenvectors."""
        return not isinstance(self.content, Structured) or self.content.has_basis

    def apply(self, right: Tensor) -> Tensor:
        """Return ``S right``.

        Args:
            right: Shape (n, m).

        Returns:
            Shape (n, m), in the precision of ``right``.
        """
        if isinstance(self.content, Structured):
            return self.content.apply(right).to(right.dtype)
        own = self.content.to(right.dtype)
        return own[:, None] * right if own.ndim == 1 else own @ right

    def apply_right(self, left: Tensor) -> Tensor:
        """Return ``left S`` of a dense or diagonal side.

        Args:
            left: Shape (m, n).

        Returns:
            Shape (m, n), in the precision of ``left``.
        """
        if isinstance(self.content, Structured):
            raise TypeError("A is never kept as a structured side")
        own = self.content.to(left.dtype)
        return left * own if own.ndim == 1 else left @ own

    def diagonal(self) -> Tensor:
        """Return the diagonal, shape (n,), float64."""
        if isinstance(self.content, Structured):
            return self.content.diagonal()
        own = self.content if self.content.ndim == 1 else self.content.diagonal()
        return own.to(torch.float64)

    def trace(self) -> float:
        """Return the sum of the diagonal."""
        return self.content.trace() if isinstance(self.content, Structured) else float(self.diagonal().sum())


@dataclass(eq=False)
class LayerOperator:
    """The damped curvature M of one layer."""

    name: str
    G: FactorSide
    A: FactorSide
    kind: DampingKind
    damping: Damping
    """Zero throughout, or null, where there is none."""
    corrected: Tensor | None = None
    """EK-FAC's eigenvalues (out_dim, in_dim), float64, in the basis of both sides."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision that products are computed in, at least: that of the factors, float32 or float64."""
        return torch.promote_types(self.G.dtype, self.A.dtype)

    def apply(self, matrices: Tensor, exponent: float = 1.0) -> Tensor:
        """Apply M raised to a power.

        Args:
            matrices: Shape (out_dim, k, in_dim).
            exponent: α, finite.

        Returns:
            The same shape, in the precision of ``matrices``.

        Raises:
            UsageError: If α is not positive and M is singular.
            NotConverged: If α is neither 1 nor −1 and the layer's G has no eigenvectors.
        """
        if exponent == 1 and self.corrected is None:
            return self._product(matrices)
        if exponent == -1 and not self.G.has_basis:
            return self._solved(matrices)
        self.require_power(exponent)
        return self.joint.apply(matrices, exponent)

    def require_power(self, exponent: float) -> None:
        """Check that M can be raised to a power.

        Args:
            exponent: α, finite.

        Raises:
            UsageError: If α is not positive and an eigenvalue of M is zero, or no more than rounding.
        """
        if exponent > 0:
            return
        if not self.G.has_basis:
            self._require_damped()
            return
        rounding = self.G.size * self.A.size * torch.finfo(torch.float64).eps * self.joint.largest
        if not self.joint.smallest > (0.0 if self.kind != "none" else rounding):
            raise UsageError(
                f"layer `{self.name}`: its curvature is singular (smallest eigenvalue {self.joint.smallest:.3g}, "
                f"largest {self.joint.largest:.3g}), so its power {exponent:g} is not defined; damp it: take `exact` "
                "or `factored` damping with a positive number",
                layer=self.name,
            )

    def trace(self, exponent: float = 1.0) -> float:
        """Return the trace of M raised to a power.

        Args:
            exponent: α, finite.

        Returns:
            The trace.

        Raises:
            UsageError: As for ``apply``.
            NotConverged: As for ``apply``, and for −1.
        """
        if exponent != 1 or self.corrected is not None:
            self.require_power(exponent)
            return self.joint.total(exponent)
        trace_g, trace_a = self.G.trace(), self.A.trace()
        if self.kind == "factored":
            return (trace_g + self._lambda_g * self.G.size) * (trace_a + self._lambda_a * self.A.size)
        return trace_g * trace_a + self._lambda * self.G.size * self.A.size

    def logdet(self) -> float:
        """Return the natural logarithm of M's determinant; −∞ where M is singular."""
        if self.G.has_basis:
            return self.joint.logdet()
        self._require_damped()
        side = self.G.content
        assert isinstance(side, Structured)  # noqa: S101 - only such a side has no basis
        values = self.A.basis.all_values
        if self.kind == "factored":
            own = float(side.logdets(torch.tensor([self._lambda_g], dtype=torch.float64))[0])
            return own * self.A.size + float((values + self._lambda_a).log().sum()) * self.G.size
        positive = values[values > 0]
        zeros = values.numel() - positive.numel()
        total = float(side.logdets(self._lambda / positive).sum()) if positive.numel() else 0.0
        return total + self.G.size * (float(positive.log().sum()) + zeros * math.log(self._lambda))

    def diagonal(self, exponent: float = 1.0) -> Tensor:
        """Return the diagonal of M raised to a power.

        Args:
            exponent: α, finite.

        Returns:
            Shape (out_dim, in_dim), float64.

        Raises:
            UsageError: As for ``apply``.
            NotConverged: As for ``apply``, and for −1.
        """
        if exponent != 1 or self.corrected is not None:
            self.require_power(exponent)
            return self.joint.diagonal(exponent)
        diagonal_g, diagonal_a = self.G.diagonal(), self.A.diagonal()
        if self.kind == "factored":
            return torch.outer(diagonal_g + self._lambda_g, (diagonal_a + self._lambda_a).to(diagonal_g.device))
        return torch.outer(diagonal_g, diagonal_a.to(diagonal_g.device)) + self._lambda

    @cached_property
    def joint(self) -> JointBasis:
        """The eigenbasis of M."""
        return JointBasis(
            G=self.G.basis,
            A=self.A.basis,
            corrected=self.corrected,
            shift=self._lambda,
            shift_A=self._lambda_a,
            shift_G=self._lambda_g,
        )

    def _product(self, matrices: Tensor) -> Tensor:
        out, columns, into = matrices.shape
        flat = matrices.reshape(out, columns * into)
        left = self.G.apply(flat)
        if self.kind == "factored":
            left = left.add_(flat, alpha=self._lambda_g)
        rows = left.view(out * columns, into)
        found = self.A.apply_right(rows)
        if self.kind == "factored":
            found = found.add_(rows, alpha=self._lambda_a)
        found = found.view(out, columns, into)
        return found.add_(matrices, alpha=self._lambda) if self.kind == "exact" else found

    def _solved(self, matrices: Tensor) -> Tensor:
        """``M⁻¹ V`` where G answers by solves alone."""
        self._require_damped()
        side = self.G.content
        assert isinstance(side, Structured)  # noqa: S101 - only such a side has no basis
        out, columns, into = matrices.shape
        basis = self.A.basis
        turned = matrices.reshape(-1, into)
        turned = turned if basis.vectors is None else turned @ basis.vectors.to(turned.dtype)
        turned = turned.reshape(out, columns, into)
        values = basis.all_values
        if self.kind == "factored":
            found = side.solve(turned.reshape(out, columns * into), self._lambda_g).view(out, columns, into)
            found = found / (values + self._lambda_a).to(found.device, found.dtype)
        else:
            found = torch.empty_like(turned)
            for place, value in enumerate(values.tolist()):
                column = turned[:, :, place]
                if value * side.trace() <= self._lambda * torch.finfo(torch.float64).eps:
                    found[:, :, place] = column / self._lambda
                else:
                    found[:, :, place] = side.solve(column, self._lambda / value) / value
        rows = found.reshape(-1, into)
        return (rows if basis.vectors is None else rows @ basis.vectors.mT.to(rows.dtype)).view(out, columns, into)

    def _require_damped(self) -> None:
        if self.kind == "none" or not self._least > 0:
            kept = self.G.content.kind if isinstance(self.G.content, Structured) else "a matrix"
            raise NotConverged(
                f"layer `{self.name}`: its G is kept as `{kept}`, which has no eigenvectors; without damping only "
                "products with it are to be had, and powers other than 1 and −1 not at all",
                layer=self.name,
            )

    @property
    def _least(self) -> float:
        return min(self._lambda_g, self._lambda_a) if self.kind == "factored" else self._lambda

    @property
    def _lambda(self) -> float:
        return (self.damping.joint or 0.0) if self.kind == "exact" else 0.0

    @property
    def _lambda_a(self) -> float:
        return (self.damping.A or 0.0) if self.kind == "factored" else 0.0

    @property
    def _lambda_g(self) -> float:
        return (self.damping.G or 0.0) if self.kind == "factored" else 0.0
