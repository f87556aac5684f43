"""A diagonal updated by a matrix of low rank: ``S = diag c + σ BᵀB``, σ = ±1, B (r, n).

Every answer at a shift s comes from ``D = c + s`` and the capacitance ``C = I + σ B D⁻¹ Bᵀ`` (r, r):

    ``log det(S + sI)  = Σ log D + log det C``                               the determinant lemma
    ``tr S(S + sI)⁻¹   = Σ c/D + σ s tr(C⁻¹ B D⁻² Bᵀ)``
    ``#{λ < x}         = #{c < x} − σ #{negative eigenvalues of C at s = −x}``   Sylvester's law of inertia

References:
    Woodbury (1950), Inverting modified matrices
"""

import math
from abc import abstractmethod
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from engine.factors.clipping.clipped_operator import ClippedOperator
from engine.factors.kronecker_factors import mirrored_
from engine.linalg.damping import clipping_floor
from engine.linalg.eigenbasis import ClippedSide
from engine.linalg.gram import add_gram_
from engine.linalg.lanczos import largest_eigenvalues
from engine.linalg.linear_operator import Structured
from engine.linalg.shift_interpolation import far_above, over_shifts
from engine.linalg.spectrum_counts import LARGEST_KNOWN, LARGEST_STEPS, Counted, DiagonalUpdate, counted_spectrum


class DiagonalUpdateSide(Structured):
    """A side ``diag c + σ BᵀB`` that is asked at shifts, and for counts of its eigenvalues."""

    @abstractmethod
    def update(self) -> DiagonalUpdate:
        """Return c, σ and B."""

    @abstractmethod
    def _start(self) -> Tensor:
        """Return a vector (n,), float64, that the iteration for the largest eigenvalues begins with."""

    @abstractmethod
    def _factorised(self, shift: float) -> Tensor:
        """Return the Cholesky factor (r, r) of C at a shift."""

    @override
    def spectral_norm(self) -> float:
        return largest_eigenvalues(self.apply, self._start())[0][0]

    @override
    def counted(self, kappa_max: float | None) -> Counted | None:
        # by Lanczos' iteration for the largest, by inertia counts for others
        largest, residual = largest_eigenvalues(self.apply, self._start(), count=LARGEST_KNOWN, steps=LARGEST_STEPS)
        floor = None if kappa_max is None else clipping_floor(largest[0], kappa_max)
        return counted_spectrum(self.update(), largest, residual, floor=floor)

    @override
    def clip(self, kappa_max: float, layer: str, largest: float | None = None) -> ClippedSide:
        if self.has_basis:
            return super().clip(kappa_max, layer)
        largest = self.spectral_norm() if largest is None else largest
        return ClippedOperator(side=self, floor=clipping_floor(largest, kappa_max), largest=largest)

    def count_below(self, value: float) -> int:
        """Count the eigenvalues below a number, by the inertia of C.

        Memory:
            Two (r, r) float64 matrices.
        """
        update = self.update()
        while bool((update.base == value).any()):
            value = math.nextafter(value, math.inf)
        sign = -1 if update.subtracts else 1
        capacitance = update.gram(1 / (update.base - value)).mul_(sign)
        capacitance.diagonal().add_(1)
        negative = int((torch.linalg.eigvalsh(capacitance) < 0).sum())
        return int((update.base < value).sum()) - sign * negative

    @override
    def solve(self, right: Tensor, damping: float) -> Tensor:  # (n, k) -> (n, k)
        # by Woodbury's identity in float64
        update, wide = self.update(), right.to(self.computes_on, torch.float64)
        sign, inverse = -1 if update.subtracts else 1, 1 / (update.base + damping)
        solved = wide * inverse[:, None]
        inner = torch.cholesky_solve(self._inner(solved), self._factorised(damping))
        for columns, part in update.parts():
            solved[columns] -= sign * inverse[columns, None] * (part.T @ inner)
        return solved.to(right.device, right.dtype)

    @override
    def logdets(self, shifts: Tensor) -> Tensor:
        return over_shifts(self._at, shifts)[:, 0]

    @override
    def effective_dimensions(self, shifts: Tensor) -> Tensor:
        return over_shifts(self._at, shifts)[:, 1]

    @cached_property
    def _known(self) -> dict[float, tuple[float, float]]:
        return {}

    def _at(self, shift: float) -> tuple[float, float]:
        """Log-determinant and effective dimension at one shift: of one factorisation, or of their series far above."""
        far = far_above(self.size, self.kept_trace(), self.frobenius_norm(), shift)
        if far is not None:
            return far
        if shift not in self._known:
            update = self.update()
            shifted = update.base + shift
            factor = self._factorised(shift)
            logdet = float(shifted.log().sum()) + 2 * float(factor.diagonal().log().sum())
            moved = float(torch.cholesky_solve(self._gram(shifted.pow(-2)), factor).diagonal().sum())
            sign = -1 if update.subtracts else 1
            self._known[shift] = logdet, float((update.base / shifted).sum()) + sign * shift * moved
        return self._known[shift]

    def _gram(self, weights: Tensor) -> Tensor:
        """Return ``B diag(weights) Bᵀ`` (r, r), for weights (n,) of one sign by its upper triangle."""
        if bool((weights < 0).any()):
            return self._signed_gram(weights)
        update = self.update()
        total = weights.new_zeros(update.rank, update.rank)
        for columns, part in update.parts():
            add_gram_(total, (part * weights[columns].sqrt()).T)
        return mirrored_(total)

    def _signed_gram(self, weights: Tensor) -> Tensor:
        """Return the same for weights of either sign."""
        update = self.update()
        total = weights.new_zeros(update.rank, update.rank)
        for columns, part in update.parts():
            total.addmm_(part * weights[columns], part.T)
        return total

    def _inner(self, right: Tensor) -> Tensor:
        """``B right`` (r, k), for ``right`` (n, k) in float64."""
        update = self.update()
        total = right.new_zeros(update.rank, right.shape[1])
        for columns, part in update.parts():
            total.addmm_(part, right[columns])
        return total
