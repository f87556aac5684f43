"""The factor side: one factor of a layer, multiplied, inverted and decomposed where it is needed.

A layer's matrices of k vectors stand as (rows, k, columns), so that the product with either factor is one matrix
product for all of them. Their rows begin at multiples of 64 bytes: a product of 1537 columns (1536 and the bias) takes
a third longer where they do not.

A factor stays where it is stored. Where the vectors are on another device, or of another precision, it visits them in
panels of 16 MiB.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.linalg.layer_matrices import aligned, as_columns, left_product, right_product
from engine.linalg.linear_operator import Structured
from engine.operators.kronecker.eigenbasis import SideBasis

_STEPS = 20
"""Steps of a power iteration, which then knows the largest eigenvalue to a few parts in a hundred."""


@dataclass(eq=False)
class FactorSide:
    """One factor S as it is multiplied: (n, n), a diagonal (n,), or a side that is never made dense."""

    content: Tensor | Structured
    load_basis: Callable[[torch.dtype], SideBasis]
    """Decomposes the factor, and gives eigenvectors in that precision where it can."""
    rounding: float = 0.0
    """Eigenvalues below this share of the largest may be the rounding of the factor as it is stored."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device on which an inverse is computed."""
    stored: Tensor | None = None
    """The factor as it was read, where it must stay for others that share it."""
    _bases: dict[torch.dtype, SideBasis] = field(default_factory=dict, init=False)
    _inverses: dict[tuple[float, torch.dtype], Tensor | None] = field(default_factory=dict, init=False)
    _least: dict[float, float] = field(default_factory=dict, init=False)

    @property
    def size(self) -> int:
        """N."""
        return self.content.size if isinstance(self.content, Structured) else self.content.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Float32, or float64 where the factor is kept so."""
        own = self.content.storage_dtype if isinstance(self.content, Structured) else self.content.dtype
        return torch.promote_types(own, torch.float32)

    @property
    def basis(self) -> SideBasis:
        """Eigenvalues and eigenvectors, made when they are first asked for.

        Raises:
            NotConverged: If a structured side has none without a dense matrix.
        """
        return self.basis_in(self.dtype)

    @property
    def decomposed(self) -> SideBasis | None:
        """The eigenbasis where it was made already."""
        return next(iter(self._bases.values()), None)

    def basis_in(self, dtype: torch.dtype) -> SideBasis:
        """Return the eigenbasis for products in a precision.

        Args:
            dtype: Precision of the product. That of float64 is taken for float32 too, once there is one.

        Returns:
            The basis.

        Raises:
            NotConverged: If a structured side has none without a dense matrix.
        """
        wanted = torch.promote_types(dtype, self.dtype)
        found = self._bases.get(wanted) or self._bases.get(torch.float64)
        if found is None:
            self._bases.clear()
            found = self._bases[wanted] = self.load_basis(wanted)
        return found

    @property
    def has_basis(self) -> bool:
        """Whether there are eigenvectors."""
        return not isinstance(self.content, Structured) or self.content.has_basis

    @property
    def has_zeros(self) -> bool:
        """Whether a side that is never made dense has eigenvalues that are zero by what it is made of."""
        update = self.content.update() if isinstance(self.content, Structured) else None
        return update is not None and update.zeros > 0

    @property
    def is_singular(self) -> bool:
        """Whether the smallest eigenvalue may be the rounding of the factor as it is stored."""
        least, most = self.basis.extremes
        return not least > self.rounding * most

    def held(self) -> Iterator[Tensor | Structured]:
        """Yield all tensors that the side holds by now."""
        yield self.content
        if self.stored is not None:
            yield self.stored
        yield from (basis.vectors for basis in self._bases.values() if basis.vectors is not None)
        yield from (inverse for inverse in self._inverses.values() if inverse is not None)

    def apply(self, matrices: Tensor) -> Tensor:
        """Return ``S V``.

        Args:
            matrices: V of k vectors, shape (n, k, m).

        Returns:
            The same shape, in the precision and on the device of ``matrices``; a new tensor.
        """
        if isinstance(self.content, Structured):
            found = aligned(*matrices.shape, like=matrices)
            as_columns(found).copy_(self.content.apply(as_columns(matrices)))
            return found
        return left_product(self.content, matrices)

    def apply_right(self, matrices: Tensor) -> Tensor:
        """Return ``V S`` of a dense or diagonal side.

        Args:
            matrices: V of k vectors, shape (m, k, n).

        Returns:
            The same shape, in the precision and on the device of ``matrices``; a new tensor.
        """
        if isinstance(self.content, Structured):
            raise TypeError("A is never kept as a structured side")
        return right_product(matrices, self.content)

    def damped_inverse(self, shift: float, dtype: torch.dtype) -> Tensor | None:
        """Return ``(S + shift I)⁻¹`` of a dense or diagonal side, computed in float64 by Cholesky's factors and kept.

        Args:
            shift: Positive; 0 will do for a diagonal that is positive.
            dtype: Precision of the products.

        Returns:
            Shape (n, n), or (n,) of a diagonal; None where the sum is not positive definite to rounding, or the side
            is structured.

        Memory:
            Three times n² in float64 while it is computed.
        """
        if isinstance(self.content, Structured):
            return None
        key = (shift, torch.promote_types(dtype, self.dtype))
        if key not in self._inverses:
            self._inverses[key] = self._inverted(self.content, *key)
        return self._inverses[key]

    def least_damped(self, shift: float) -> float:
        """Return the smallest eigenvalue of ``S + shift I``, near enough for a warning.

        Args:
            shift: Not negative.

        Returns:
            By power iteration with the inverse, where that was made; else ``shift``, which it cannot be below but by
            the rounding of S.
        """
        inverse = next((each for (known, _), each in self._inverses.items() if known == shift), None)
        if inverse is None:
            return shift
        if shift not in self._least:
            self._least[shift] = 1 / _largest_eigenvalue(inverse)
        return self._least[shift]

    def _inverted(self, content: Tensor, shift: float, dtype: torch.dtype) -> Tensor | None:
        wide = content.to(self.device, torch.float64, copy=True)
        if wide.ndim == 1:
            damped = wide.add_(shift)
            return damped.reciprocal_().to(content.device, dtype) if bool((damped > 0).all()) else None
        wide.diagonal().add_(shift)
        factor, failed = torch.linalg.cholesky_ex(wide)
        del wide
        if int(failed):
            return None
        return torch.cholesky_inverse(factor).to(content.device, dtype)

    def diagonal(self) -> Tensor:
        """Return the diagonal, shape (n,), float64."""
        if isinstance(self.content, Structured):
            return self.content.diagonal()
        own = self.content if self.content.ndim == 1 else self.content.diagonal()
        return own.to(torch.float64)

    def trace(self) -> float:
        """Return the sum of the diagonal."""
        return self.content.trace() if isinstance(self.content, Structured) else float(self.diagonal().sum())

    def norm(self) -> float:
        """Return a bound of the largest eigenvalue from above: the Frobenius norm."""
        if isinstance(self.content, Structured):
            return self.content.frobenius_norm()
        return float(torch.linalg.vector_norm(self.content, dtype=torch.float64))


def _largest_eigenvalue(matrix: Tensor) -> float:
    """By power iteration, of a positive definite (n, n) or a diagonal (n,)."""
    if matrix.ndim == 1:
        return float(matrix.max())
    noise = torch.randn(matrix.shape[0], 1, generator=torch.Generator().manual_seed(0), dtype=matrix.dtype)
    vector = noise.to(matrix.device)
    for _ in range(_STEPS):
        vector = matrix @ (vector / vector.norm())
    return float(vector.norm())
