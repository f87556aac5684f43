"""A diagonal updated by a matrix of low rank: ``S = diag c + σ BᵀB``, σ = ±1, B (r, n).

Every answer at a shift s comes from ``D = c + s`` and the capacitance ``C = I + σ B D⁻¹ Bᵀ`` (r, r):

    ``log det(S + sI)  = Σ log D + log det C``                               the determinant lemma
    ``tr S(S + sI)⁻¹   = Σ c/D + σ s tr(C⁻¹ B D⁻² Bᵀ)``
    ``#{λ < x}         = #{c < x} − σ #{negative eigenvalues of C at s = −x}``   Sylvester's law of inertia

The first two are analytic in log s but for singularities π away from the real axis, at the negative eigenvalues. On a
panel of half-width h in log s, interpolation in K Chebyshev nodes errs by (π/h + √(1 + (π/h)²))^−K;
``K = ⌈30/asinh(π/h)⌉`` reaches e⁻³⁰ of the panel's largest value, 1e-13. Panels begin at fixed powers of two, so that
what one question has evaluated serves the next.

References:
    Woodbury (1950), Inverting modified matrices
    Trefethen (2013), Approximation theory and approximation practice, theorem 8.2
    Berrut & Trefethen (2004), Barycentric Lagrange interpolation
"""

import math
from abc import abstractmethod
from collections.abc import Callable
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
from engine.linalg.spectrum_counts import LARGEST_KNOWN, LARGEST_STEPS, Counted, DiagonalUpdate, counted_spectrum

_OCTAVES = 8
NODES = math.ceil(30 / math.asinh(math.pi / (_OCTAVES / 2 * math.log(2))))
"""Evaluations for each panel of eight octaves, where more shifts than these lie in it."""
PANELS = 12
"""Panels of eight octaves: about as many as shifts spread over between rounding of a spectrum and far above it."""
_FAR = 1e6
"""Times the trace: beyond it the third term of a series in λ/s is below 1e-12 of the first."""


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
        if self.has_basis and largest is None:
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
        return _over_shifts(self._at, shifts)[:, 0]

    @override
    def effective_dimensions(self, shifts: Tensor) -> Tensor:
        return _over_shifts(self._at, shifts)[:, 1]

    @cached_property
    def _known(self) -> dict[float, tuple[float, float]]:
        return {}

    def _at(self, shift: float) -> tuple[float, float]:
        """Log-determinant and effective dimension at one shift: of one factorisation, or of their series far above."""
        far = _far_above(self.size, self.kept_trace(), self.frobenius_norm(), shift)
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


def _far_above(size: int, trace: float, frobenius: float, shift: float) -> tuple[float, float] | None:
    """Return ``log det(S + sI)`` and ``tr S(S + sI)⁻¹`` by their series in λ/s, from Σλ and the root of Σλ².

    To a relative 1e-12 of the first term; None unless s exceeds the trace a million times.
    """
    if shift <= _FAR * trace:
        return None
    ratio, square = trace / shift, (frobenius / shift) ** 2
    return size * math.log(shift) + ratio - square / 2, ratio - square


def _over_shifts(evaluate: Callable[[float], tuple[float, float]], shifts: Tensor) -> Tensor:  # (k,) -> (k, 2)
    """Evaluate two functions at many shifts, by interpolation where a panel of eight octaves has many of them.

    Args:
        evaluate: The two functions of one shift, analytic in its logarithm.
        shifts: Shape (k,), nonnegative, any float dtype and device.

    Returns:
        Shape (k, 2), float64 on the host: the two functions at each shift.
    """
    wide = shifts.to("cpu", torch.float64)
    found = torch.empty(wide.numel(), 2, dtype=torch.float64)
    logs = wide.log2()
    panels = (logs / _OCTAVES).floor()
    for panel in sorted(set(panels.tolist())):
        members = (panels == panel).nonzero()[:, 0]
        own, where = torch.unique(wide[members], return_inverse=True)
        if own.numel() <= NODES:
            values = torch.tensor([evaluate(shift) for shift in own.tolist()], dtype=torch.float64)
        else:
            values = _interpolated(evaluate, panel, own.log2())
        found[members] = values[where]
    return found


def _interpolated(evaluate: Callable[[float], tuple[float, float]], panel: float, logs: Tensor) -> Tensor:
    angles = (torch.arange(NODES, dtype=torch.float64) + 0.5) * (math.pi / NODES)
    nodes = (panel + 0.5 + 0.5 * angles.cos()) * _OCTAVES
    values = torch.tensor([evaluate(2.0**node) for node in nodes.tolist()], dtype=torch.float64)
    weights = angles.sin() * (-1.0) ** torch.arange(NODES)
    gaps = logs[:, None] - nodes
    at_node = gaps == 0
    quotients = weights / torch.where(at_node, 1.0, gaps)
    quotients = torch.where(at_node.any(1, keepdim=True), at_node.to(torch.float64), quotients)
    return (quotients @ values) / quotients.sum(1, keepdim=True)
