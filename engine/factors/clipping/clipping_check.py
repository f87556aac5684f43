"""Clipping check: the extreme eigenvalues of a stabilised factor as it came out, and its distance from its definition.

Up to ``EXACT_ROWS`` rows the eigenvalues of the result and its difference from ``Q max(Λ, f) Qᵀ`` are
computed in float64. Beyond, the result N is compared with its definition D through ``D^-½ N D^-½``,
whose eigenvalues are 1 but for rounding: Lanczos finds the smallest, θ, in a few dozen products, where on N
itself it would take some √κ of them; ``θ · f`` bounds N's own from below. The difference is then estimated by what
both do to a few random vectors.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.linalg.lanczos import smallest_eigenvalue
from engine.linalg.panels import PANEL_NUMBERS, wide_product, wide_transposed_product

EXACT_ROWS = 1024
_STEPS = 32
_PROBES = 8
_LEAST_NORM = 1e-137
"""A norm whose squares, and those of a difference of 1e-16 of it, are normal numbers."""


@dataclass(frozen=True, kw_only=True)
class ClippingCheck:
    """One stabilised factor, as it is."""

    smallest: float
    """Its smallest eigenvalue; negative if rounding made it indefinite."""
    largest: float
    relative_error: float
    """‖N − D‖_F / ‖D‖_F, D being ``Q max(Λ, f) Qᵀ``."""
    found_by: Literal["eigenvalues", "lanczos"]
    """``lanczos``: smallest eigenvalue and error are estimates."""


def checking_bytes(size: int, dtype: torch.dtype) -> int:
    """Return the bytes of the check beside the result and its basis.

    Args:
        size: n, rows of the factor.
        dtype: Precision of the result.

    Returns:
        Bytes on the host.
    """
    rows = min(size, EXACT_ROWS)
    widened = 0 if dtype == torch.float64 else min(PANEL_NUMBERS, size * size)
    vectors = 0 if size <= EXACT_ROWS else 2 * (_STEPS + _PROBES) * size + widened
    return 8 * ((4 * rows * rows if size <= EXACT_ROWS else 0) + vectors)


def check_clipping(matrix: Tensor, values: Tensor, vectors: Tensor, floor: float) -> ClippingCheck:
    """Compare a stabilised matrix with its definition.

    Args:
        matrix: The result, shape (n, n), as it is kept.
        values: Eigenvalues of the factor before clipping, shape (n,), float64, ascending.
        vectors: Its eigenvectors, shape (n, n), or (n, r) of the r largest values.
        floor: f, in the unit of the eigenvalues.

    Returns:
        The extreme eigenvalues and the relative error, exact or estimated.

    Memory:
        Up to ``EXACT_ROWS`` rows four matrices in float64; beyond, 2 · (32 + 8) vectors, and 16 MiB of widened rows.
    """
    size = matrix.shape[0]
    kept = int((values >= floor).sum())
    definition = _Definition(
        vectors=vectors[:, vectors.shape[1] - kept :], values=values[size - kept :].to(vectors.device), floor=floor
    )
    if size <= EXACT_ROWS:
        wide = matrix.to("cpu", torch.float64)
        spectrum = torch.linalg.eigvalsh(wide)
        truth = definition.dense().to("cpu")
        return ClippingCheck(
            smallest=float(spectrum[0]),
            largest=float(spectrum[-1]),
            relative_error=relative_difference(wide, truth),
            found_by="eigenvalues",
        )
    here = vectors.device
    draws = torch.randn(size, _PROBES, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(here)
    wanted = definition.power(draws, 1.0)
    found = wide_product(matrix, draws.to(matrix.device)).to(here)
    top = definition.vectors[:, -1:].to(torch.float64)
    # a floor that float64 rounds to zero clipped nothing, and divides by nothing
    ratio = _smallest_ratio(matrix, definition, draws[:, :1]) if floor > 0 else 1.0
    smallest = max(float(values[0]), floor) * ratio
    return ClippingCheck(
        smallest=smallest,
        largest=float((top * wide_product(matrix, top.to(matrix.device)).to(here)).sum() / top.square().sum()),
        relative_error=relative_difference(found, wanted),
        found_by="lanczos",
    )


def relative_difference(found: Tensor, truth: Tensor) -> float:
    """Return ‖found − truth‖_F / ‖truth‖_F.

    Squares of entries near the ends of float64 are beyond it, so there all is divided by the largest entry.

    Args:
        found: Any shape, float64, of any magnitude.
        truth: The same shape and dtype.

    Returns:
        The ratio; 0 where both are zero, and the scaled norm of ``found`` where ``truth`` alone is.
    """
    norm = float(truth.norm())
    if _LEAST_NORM < norm < math.inf:
        return float((found - truth).norm()) / norm
    unit = float(truth.abs().max()) or float(found.abs().max()) or 1.0
    scaled = truth / unit
    difference, norm = float((found / unit - scaled).norm()), float(scaled.norm())
    return difference / norm if norm > 0 else difference


@dataclass(frozen=True, kw_only=True)
class _Definition:
    """``f·I + Q_u (Λ_u − f) Q_uᵀ`` and its powers."""

    vectors: Tensor
    values: Tensor
    floor: float

    def power(self, right: Tensor, exponent: float) -> Tensor:
        """Its power times ``right`` (n, k)."""
        base = float(self.floor**exponent)
        inside = wide_transposed_product(self.vectors, right)
        return wide_product(self.vectors, inside * (self.values.pow(exponent) - base)[:, None]).add_(right, alpha=base)

    def dense(self) -> Tensor:
        basis = self.vectors.to(torch.float64)
        matrix = (basis * (self.values - self.floor)) @ basis.mT
        matrix.diagonal().add_(self.floor)
        return matrix


def _smallest_ratio(matrix: Tensor, definition: _Definition, start: Tensor) -> float:
    """Smallest eigenvalue of ``D^-½ N D^-½``."""

    def apply(column: Tensor) -> Tensor:
        inner = definition.power(column, -0.5).to(matrix.device)
        return definition.power(wide_product(matrix, inner).to(start.device), -0.5)

    return smallest_eigenvalue(apply, start, steps=_STEPS)
