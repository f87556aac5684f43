"""The factor side: one factor of a layer, multiplied, inverted and decomposed where it is needed.

A layer's matrices of k vectors stand as (rows, k, columns), so that the product with either factor is one matrix
product for all of them. Their rows begin at multiples of 64 bytes: a product of 1537 columns (1536 and the bias) takes
a third longer where they do not.

A factor stays where it is stored. Where the vectors are on another device, or of another precision, it visits them in
panels of 16 MiB.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.linalg.eigenbasis import Eigenbasis
from engine.linalg.linear_operator import Operator
from engine.linalg.panels import frobenius_norm

_STEPS = 20
"""Steps of a power iteration, which then knows the largest eigenvalue to a few parts in a hundred."""


@dataclass(eq=False)
class FactorSide:
    """One factor S with what was made of it: eigenbases and inverses."""

    content: Operator
    load_basis: Callable[[torch.dtype], Eigenbasis]
    """Decomposes the factor, and gives eigenvectors in that precision where it can."""
    rounding: float = 0.0
    """Eigenvalues below this share of the largest may be the rounding of the factor as it is stored."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device on which an inverse is computed."""
    stored: Tensor | None = None
    """The factor as it was read, where it must stay for others that share it."""
    _bases: dict[torch.dtype, Eigenbasis] = field(default_factory=dict, init=False)
    _inverses: dict[tuple[float, torch.dtype], Operator | None] = field(default_factory=dict, init=False)
    _least: dict[float, float] = field(default_factory=dict, init=False)

    @property
    def basis(self) -> Eigenbasis:
        """Eigenvalues and eigenvectors, made when they are first asked for.

        Raises:
            NotConverged: If a structured side has none without a dense matrix.
        """
        return self.basis_in(self.content.wide_dtype)

    @property
    def decomposed(self) -> Eigenbasis | None:
        """The eigenbasis where it was made already."""
        return next(iter(self._bases.values()), None)

    def basis_in(self, dtype: torch.dtype) -> Eigenbasis:
        """Return the eigenbasis for products in a precision; once there is one in float64, it is taken for float32 too.

        ``NotConverged`` if a structured side has none without a dense matrix.
        """
        wanted = torch.promote_types(dtype, self.content.wide_dtype)
        found = self._bases.get(wanted) or self._bases.get(torch.float64)
        if found is None:
            self._bases.clear()
            found = self._bases[wanted] = self.load_basis(wanted)
        return found

    @property
    def is_singular(self) -> bool:
        """Whether the smallest eigenvalue may be the rounding of the factor as it is stored."""
        least, most = self.basis.extremes
        return not least > self.rounding * most

    def held(self) -> dict[int, int]:
        """Return the bytes of all tensors that the side holds by now, by their identity."""
        bases = [basis.vectors for basis in self._bases.values() if basis.vectors is not None]
        tensors = [*bases, *([] if self.stored is None else [self.stored])]
        held = [self.content, *(inverse for inverse in self._inverses.values() if inverse is not None)]
        return {id(each): each.nbytes for each in tensors} | {id(each): each.size_bytes for each in held}

    def damped_inverse(self, shift: float, dtype: torch.dtype) -> Operator | None:
        """Return ``Operator.inverse`` in a precision of products, which is kept."""
        key = (shift, torch.promote_types(dtype, self.content.wide_dtype))
        if key not in self._inverses:
            self._inverses[key] = self.content.inverse(shift, self.device, key[1])
        return self._inverses[key]

    def least_damped(self, shift: float) -> float:
        """Return the smallest eigenvalue of ``S + shift I``, near enough for a warning.

        By power iteration with the inverse, where that was made; else ``shift``, which it cannot be below but by the
        rounding of S.
        """
        inverse = next((each for (known, _), each in self._inverses.items() if known == shift), None)
        if inverse is None:
            return shift
        if shift not in self._least:
            self._least[shift] = 1 / _largest_eigenvalue(inverse)
        return self._least[shift]


def _largest_eigenvalue(inverse: Operator) -> float:
    """By power iteration, in the precision of the inverse."""
    if inverse.is_diagonal:
        return inverse.spectral_norm()
    matrix = inverse.widened()
    noise = torch.randn(matrix.shape[0], 1, generator=torch.Generator().manual_seed(0), dtype=matrix.dtype)
    vector = noise.to(matrix.device)
    for _ in range(_STEPS):
        vector = matrix @ (vector / frobenius_norm(vector))
    return frobenius_norm(vector)
