"""The curvature of one layer as an operator: ``F = G ⊗ A`` with its damping, and powers of it.

A layer's matrices stand as (out_dim, k, in_dim), k vectors between rows and columns, so that the product with either
factor is one matrix product for all of them. With V a layer's matrix, the damped curvature M is

    none        G V A                                  F alone
    exact       G V A + λ V                            F + λ I
    factored    (G + λ_G I) V (A + λ_A I)

EK-FAC has the same eigenvectors ``Q_G ⊗ Q_A`` with eigenvalues of its own, where `factored` has no meaning. Powers go
through eigenvectors, but for the inverse of `factored`, which is that of each factor, by Cholesky's. A softmax head
that is too wide for eigenvectors is solved by its own capacitance: once for `factored`, once for each eigenvalue of A
for `exact`. What cancels in float32 where G is kept as its rows is computed again in float64 (``eigenbasis``).

References:
    Martens & Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature, section 6
    George et al. (2018), Fast approximate natural gradient descent in a Kronecker-factored eigenbasis
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from engine.errors import NotConverged, UsageError
from engine.linalg.damping import Damping
from engine.linalg.eigenbasis import Eigenbasis
from engine.linalg.layer_matrices import aligned, arranged, as_columns, right_product
from engine.operators.kronecker.eigenbasis import JointBasis
from engine.operators.kronecker.factor_side import FactorSide

DampingKind = Literal["none", "exact", "factored"]
_MOST_CANCELLED = 16.0
"""Up to here float32 keeps six digits."""


@dataclass(eq=False)
class LayerOperator:
    """The damped curvature M of one layer.

    Powers take a finite exponent α. ``UsageError`` if it is not positive and M is singular; ``NotConverged`` if the
    layer's G has no eigenvectors and α is not 1, nor −1 of a product.
    """

    name: str
    G: FactorSide
    A: FactorSide
    kind: DampingKind
    damping: Damping
    """Zero throughout, or null, where there is none."""
    corrected: Tensor | None = None
    """EK-FAC's eigenvalues (out_dim, in_dim), in the basis of both sides."""
    _joint: dict[torch.dtype, JointBasis] = field(default_factory=dict, init=False)

    @property
    def dtype(self) -> torch.dtype:
        """The precision that products are computed in, at least: that of the factors, float32 or float64."""
        return torch.promote_types(self.G.content.wide_dtype, self.A.content.wide_dtype)

    def apply(self, matrices: Tensor, exponent: float = 1.0) -> Tensor:
        """Apply M raised to a power to matrices (out_dim, k, in_dim): a new tensor of their shape and precision."""
        if exponent == 1 and self.corrected is None:
            return self._product(arranged(matrices))
        if exponent == -1 and not self.G.content.has_basis:
            self.require_power(exponent)
            return self._solved(matrices)
        if exponent == -1 and self._inverts:
            found = self._inverted(arranged(matrices))
            if found is not None:
                return found
        # before anything asks for eigenvalues, which come with vectors of some precision
        joint = self.joint_in(matrices.dtype)
        self.require_power(exponent)
        if exponent == 0:
            return matrices.clone()
        found, cancelled = joint.apply_counting(matrices, exponent)
        if cancelled <= _MOST_CANCELLED or matrices.dtype == torch.float64:
            return found
        wide = matrices.to(torch.float64)
        return found.copy_(self.joint_in(torch.float64).apply(wide, exponent))

    def require_power(self, exponent: float) -> None:
        """Raise ``UsageError`` for a power that is not positive where M is singular to the rounding of its factors."""
        if exponent > 0:
            return
        if self._singular:
            remedy = "damp it: take `exact` or `factored` damping"
            if self.kind != "none":
                remedy = "its damping comes to 0: leave the layer out, or take a larger `stabilisation.damping`"
                remedy += ", or `collection.dtype: float64` where float32 has lost its moments"
            ends = "at least one eigenvalue is zero"
            if self.G.content.has_basis:
                ends = f"smallest eigenvalue {self.joint.smallest:.3g}, largest {self.joint.largest:.3g}"
            raise UsageError(
                f"layer `{self.name}`: its curvature is singular to the rounding of its factors ({ends}), so its power "
                f"{exponent:g} is not defined; {remedy}",
                layer=self.name,
            )
        if not self.G.content.has_basis:
            self._require_damped()

    def bounds(self) -> tuple[float, float]:
        """Return how far the eigenvalues of M reach.

        Returns:
            The smallest and the largest; where they are not known an estimate, or a lower bound, of the one, and an
            upper bound of the other.
        """
        decomposed = self.G.decomposed is not None and self.A.decomposed is not None
        if self.corrected is not None or (self.G.content.has_basis and (decomposed or not self._inverts)):
            return self.joint.smallest, self.joint.largest
        largest = (self.G.content.frobenius_norm() + self._lambda_g) * (
            self.A.content.frobenius_norm() + self._lambda_a
        ) + self._lambda
        return self.G.least_damped(self._lambda_g) * self.A.least_damped(self._lambda_a) + self._lambda, largest

    def trace(self, exponent: float = 1.0) -> float:
        """Return the trace of M raised to a power."""
        if exponent != 1 or self.corrected is not None:
            self.require_power(exponent)
            return self.joint.total(exponent)
        trace_g, trace_a = self.G.content.trace(), self.A.content.trace()
        if self.kind == "factored":
            return (trace_g + self._lambda_g * self.G.content.size) * (trace_a + self._lambda_a * self.A.content.size)
        return trace_g * trace_a + self._lambda * self.G.content.size * self.A.content.size

    def logdet(self) -> float:
        """Return the natural logarithm of M's determinant; −∞ where M is singular to the rounding of its factors."""
        if self.G.content.has_basis:
            return -math.inf if self._singular else self.joint.logdet()
        if self._singular:
            return -math.inf
        self._require_damped()
        side = self.G.content
        values = self.A.basis.all_values
        if self.kind == "factored":
            own = float(side.logdets(torch.tensor([self._lambda_g], dtype=torch.float64))[0])
            return own * self.A.content.size + float((values + self._lambda_a).log().sum()) * self.G.content.size
        positive = values[values > 0]
        zeros = values.numel() - positive.numel()
        total = float(side.logdets(self._lambda / positive).sum()) if positive.numel() else 0.0
        return total + self.G.content.size * (float(positive.log().sum()) + zeros * math.log(self._lambda))

    def diagonal(self, exponent: float = 1.0) -> Tensor:
        """Return the diagonal of M raised to a power, shape (out_dim, in_dim), float64."""
        if exponent != 1 or self.corrected is not None:
            self.require_power(exponent)
            return self.joint.diagonal(exponent)
        diagonal_g, diagonal_a = self.G.content.diagonal(), self.A.content.diagonal()
        if self.kind == "factored":
            return torch.outer(diagonal_g + self._lambda_g, diagonal_a + self._lambda_a)
        return torch.outer(diagonal_g, diagonal_a) + self._lambda

    @property
    def _has_zeros(self) -> bool:
        """Whether G has eigenvalues that are zero by what it is made of."""
        update = self.G.content.update()
        return update is not None and update.zeros > 0

    @property
    def _singular(self) -> bool:
        """Whether an eigenvalue of M is zero, or no more than the rounding of the factors as they are stored."""
        if not self.G.content.has_basis:
            return not self._least > 0 and (self.kind != "none" or self._has_zeros or self.A.is_singular)
        if self.kind != "none":
            return not self.joint.nearest.smallest > 0
        if self.corrected is not None:
            # what no gradient has comes of the rounding of the eigenvectors alone, squared
            return not self.joint.smallest > self.joint.largest * (self.G.rounding + self.A.rounding) ** 2
        return self.G.is_singular or self.A.is_singular

    @property
    def joint(self) -> JointBasis:
        """The eigenbasis of M."""
        return self.joint_in(self.dtype)

    def joint_in(self, dtype: torch.dtype) -> JointBasis:
        """Return the eigenbasis of M for products in a precision, which is kept."""
        wanted = torch.promote_types(dtype, self.dtype)
        sides = self.G.basis_in(wanted), self.A.basis_in(wanted)
        known = self._joint.get(wanted)
        if known is None or known.G is not sides[0] or known.A is not sides[1]:
            known = JointBasis(
                G=sides[0],
                A=sides[1],
                corrected=self.corrected,
                shift=self._lambda,
                shift_A=self._lambda_a,
                shift_G=self._lambda_g,
            )
            self._joint = {wanted: known}
        return known

    @property
    def _inverts(self) -> bool:
        """Whether M's inverse is that of either factor, and needs no eigenvectors of A."""
        return self.kind == "factored" and self.corrected is None

    def _product(self, matrices: Tensor) -> Tensor:
        left = self.G.content.left(matrices)
        if self.kind == "factored":
            left.add_(matrices, alpha=self._lambda_g)
        found = self.A.content.right(left)
        if self.kind == "factored":
            found.add_(left, alpha=self._lambda_a)
        return found.add_(matrices, alpha=self._lambda) if self.kind == "exact" else found

    def _inverted(self, matrices: Tensor) -> Tensor | None:
        """``(G + λ_G I)⁻¹ V (A + λ_A I)⁻¹``; None where a sum is not positive definite to rounding."""
        right = self.A.damped_inverse(self._lambda_a, matrices.dtype)
        if right is None:
            return None
        left = self.G.damped_inverse(self._lambda_g, matrices.dtype)
        if left is not None:
            return right.right(left.left(matrices))
        if self.G.content.kind == "dense" or not self._lambda_g > 0:
            return None
        # one after the other: what is applied to A's side is the identity in the first
        solved, cancelled = self._of_g(matrices.dtype).apply_counting(matrices, -1.0)
        if cancelled > _MOST_CANCELLED and matrices.dtype != torch.float64:
            solved = self._of_g(torch.float64).apply(matrices.to(torch.float64), -1.0)
            wide = self.A.damped_inverse(self._lambda_a, torch.float64)
            if wide is None:
                return None
            return wide.right(solved).to(matrices.dtype)
        return right.right(solved)

    def _of_g(self, dtype: torch.dtype) -> JointBasis:
        ones = torch.ones(self.A.content.size, dtype=torch.float64)
        return JointBasis(G=self.G.basis_in(dtype), A=Eigenbasis(ones, None), shift_G=self._lambda_g)

    def _solved(self, matrices: Tensor) -> Tensor:
        """``M⁻¹ V`` where G answers by solves alone, which compute in float64."""
        side = self.G.content
        basis = self.A.basis_in(torch.float64)
        wide = arranged(matrices.to(torch.float64))
        turned = wide if basis.vectors is None else right_product(wide, basis.vectors)
        values = basis.all_values
        found = aligned(*turned.shape, like=turned)
        if self.kind == "factored":
            as_columns(found).copy_(side.solve(as_columns(turned), self._lambda_g))
            found.div_((values + self._lambda_a).to(found))
        else:
            trace = side.trace()
            for place, value in enumerate(values.tolist()):
                column = turned[:, :, place]
                if value * trace <= self._lambda * torch.finfo(torch.float64).eps:
                    found[:, :, place] = column / self._lambda
                else:
                    found[:, :, place] = side.solve(column, self._lambda / value) / value
        solved = found if basis.vectors is None else right_product(found, basis.vectors.mT)
        return solved.to(matrices.dtype)

    def _require_damped(self) -> None:
        if self.kind == "none" or not self._least > 0:
            raise NotConverged(
                f"layer `{self.name}`: its G is kept as `{self.G.content.kind}`, which has no eigenvectors; without "
                "damping only products with it are to be had, and powers other than 1 and −1 not at all",
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
