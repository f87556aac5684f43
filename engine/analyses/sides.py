"""Scalar metrics of one layer's F = G ⊗ A, from whatever is known of the two sides."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.curvature import kronecker_spectrum as closed
from engine.curvature import kronecker_sums as sums
from engine.curvature.condensed import Condensed, condensed
from engine.curvature.kronecker_order import Products
from engine.curvature.stabilisation import Damping
from engine.curvature.structured import Structured

_RESOLVED = 1e-12
"""Of a structured side's largest eigenvalue: below, its answers are of its rounding, and its factorisations fail."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What is known of A and G at one sample size."""

    in_dim: int
    out_dim: int
    spectrum_A: Tensor | None
    """(in_dim,) float64, ascending; None where nobody asked for it."""
    spectrum_G: Tensor | None
    """(out_dim,) float64, ascending; None where nobody asked for it, or G has none without n×n."""
    trace_A: float
    trace_G: float
    frobenius_A: float | None
    frobenius_G: float | None
    """None where only the diagonal of G is kept."""
    damping: Damping
    tolerance: float
    """Share of the largest eigenvalue below which one does not count towards the rank."""
    structured_G: Structured | None = None
    """G where it has no eigenvalues to be had and answers for itself."""
    scale_G: float = 1.0
    """What ``structured_G`` is to be multiplied by."""

    @property
    def dimension(self) -> int:
        """Eigenvalues of F."""
        return self.in_dim * self.out_dim

    @property
    def spectra(self) -> tuple[Tensor, Tensor] | None:
        """Both spectra, where there are both."""
        if self.spectrum_A is None or self.spectrum_G is None:
            return None
        return self.spectrum_A, self.spectrum_G

    @property
    def trace(self) -> float:
        """Trace of F."""
        return self.trace_A * self.trace_G

    @property
    def frobenius_norm(self) -> float | None:
        """Frobenius norm of F."""
        return None if self.frobenius_A is None or self.frobenius_G is None else self.frobenius_A * self.frobenius_G

    @cached_property
    def condensed_A(self) -> Condensed | None:  # noqa: N802 - the field's own symbol
        """A's eigenvalues in few nodes, G's scale among them where G answers for itself."""
        if self.spectrum_A is None:
            return None
        return condensed(self.spectrum_A if self.structured_G is None else self.spectrum_A * self.scale_G)

    @cached_property
    def condensed_G(self) -> Condensed | None:  # noqa: N802 - the field's own symbol
        """G's eigenvalues in few nodes."""
        return None if self.spectrum_G is None else condensed(self.spectrum_G)

    @cached_property
    def lowest_shift(self) -> float:
        """What ``structured_G`` is not asked below: a side that is not made dense is known to its rounding."""
        return 0.0 if self.structured_G is None else _RESOLVED * self.structured_G.spectral_norm()

    def products(self) -> Products | None:
        """The eigenvalues of F, to be counted and ordered."""
        return None if self.spectra is None else Products([self.spectra])

    @cached_property
    def spectral_norm(self) -> float | None:
        """The largest eigenvalue of F."""
        if self.spectrum_A is None:
            return None
        if self.structured_G is not None:
            return float(self.spectrum_A[-1]) * self.structured_G.spectral_norm() * self.scale_G
        return None if self.spectrum_G is None else float(self.spectrum_A[-1]) * float(self.spectrum_G[-1])

    def effective_dimensions(self, dampings: Iterable[float]) -> list[float | None]:
        """Σ λᵢ/(λᵢ + λ) over the eigenvalues of F at each absolute λ."""
        grid = list(dampings)
        if self.condensed_A is None:
            return [None] * len(grid)
        if self.structured_G is not None:
            if self.condensed_A.nodes.numel() == 0:
                return [0.0] * len(grid)
            return sums.effective_dimensions_structured(self.condensed_A, self.structured_G, grid, self.lowest_shift)
        return (
            [None] * len(grid)
            if self.condensed_G is None
            else sums.effective_dimensions(self.condensed_A, self.condensed_G, grid)
        )


def scalars(sides: Sides, wanted: Iterable[str]) -> dict[str, float | None]:
    """The scalar metrics among ``wanted``, by name; None where one is undefined."""
    return {name: SCALARS[name](sides) for name in wanted if name in SCALARS}


def _stable_rank(sides: Sides) -> float | None:
    if sides.spectra is not None:
        return closed.stable_rank(*sides.spectra)
    largest = sides.spectral_norm
    return None if not largest or sides.frobenius_norm is None else (sides.frobenius_norm / largest) ** 2


def _participation_ratio(sides: Sides) -> float | None:
    return closed.participation_ratio((sides.trace_A, sides.trace_G), (sides.frobenius_A, sides.frobenius_G))


def _effective_rank(sides: Sides) -> float | None:
    left, right = _rank_of(sides.spectrum_A), _rank_of(sides.spectrum_G)
    return None if left is None or right is None else left * right


def _rank_of(spectrum: Tensor | None) -> float | None:
    return None if spectrum is None else closed.entropy_effective_rank(spectrum)


def _rank(sides: Sides) -> int | None:
    return None if sides.spectra is None else closed.rank(*sides.spectra, sides.tolerance)


def _logdet(sides: Sides) -> float | None:
    # what is rounding in either factor would count with its logarithm; their products reach further down
    if sides.spectra is None or any(float(own[0]) <= sides.tolerance * float(own[-1]) for own in sides.spectra):
        return None
    return closed.logdet(*sides.spectra)


def _logdet_damped(sides: Sides) -> float | None:
    damping = sides.damping.joint
    if damping is None or sides.condensed_A is None:
        return None
    if sides.structured_G is not None:
        return sums.logdet_damped_structured(sides.condensed_A, sides.structured_G, damping, sides.lowest_shift)
    return None if sides.condensed_G is None else sums.logdet_damped(sides.condensed_A, sides.condensed_G, damping)


def _logdet_factored(sides: Sides) -> float | None:
    damped_a, damped_g = sides.damping.A, sides.damping.G
    if damped_a is None or damped_g is None or sides.spectrum_A is None:
        return None
    if sides.spectrum_G is not None:
        return closed.logdet_factored(sides.spectrum_A, sides.spectrum_G, damped_a, damped_g)
    shift = _own_shift(sides, damped_g)
    if sides.structured_G is None or shift is None:
        return None
    right = float(sides.structured_G.logdets(shift)) + sides.out_dim * math.log(sides.scale_G)
    return sides.out_dim * float((sides.spectrum_A + damped_a).log().sum()) + sides.in_dim * right


def _effective_dimension(sides: Sides) -> float | None:
    damping = sides.damping.joint
    return None if damping is None else sides.effective_dimensions([damping])[0]


def _effective_dimension_factored(sides: Sides) -> float | None:
    damped_a, damped_g = sides.damping.A, sides.damping.G
    if damped_a is None or damped_g is None or sides.spectrum_A is None:
        return None
    if sides.spectrum_G is not None:
        return closed.effective_dimension_factored(sides.spectrum_A, sides.spectrum_G, damped_a, damped_g)
    shift = _own_shift(sides, damped_g)
    if sides.structured_G is None or shift is None:
        return None
    left = float((sides.spectrum_A / (sides.spectrum_A + damped_a)).nan_to_num(0).sum())
    return left * float(sides.structured_G.effective_dimensions(shift))


def _own_shift(sides: Sides, damping: float) -> Tensor | None:
    """``damping`` of G as its structured side is asked at, (1,); None below what it resolves."""
    shift = damping / sides.scale_G
    return None if shift < sides.lowest_shift else torch.tensor([shift], dtype=torch.float64)


def _kappa(sides: Sides) -> float | None:
    return None if sides.spectra is None else closed.kappa(*sides.spectra)


def _kappa_damped(sides: Sides) -> float | None:
    damping = sides.damping.joint
    return None if damping is None or sides.spectra is None else closed.kappa_damped(*sides.spectra, damping)


def _kappa_factored(sides: Sides) -> float | None:
    damped_a, damped_g = sides.damping.A, sides.damping.G
    if damped_a is None or damped_g is None or sides.spectra is None:
        return None
    return closed.kappa_factored(*sides.spectra, damped_a, damped_g)


SCALARS: Mapping[str, Callable[[Sides], float | None]] = {
    "trace": lambda sides: sides.trace,
    "frobenius_norm": lambda sides: sides.frobenius_norm,
    "spectral_norm": lambda sides: sides.spectral_norm,
    "stable_rank": _stable_rank,
    "participation_ratio": _participation_ratio,
    "effective_rank": _effective_rank,
    "rank": _rank,
    "logdet": _logdet,
    "logdet_damped": _logdet_damped,
    "logdet_factored": _logdet_factored,
    "effective_dimension": _effective_dimension,
    "effective_dimension_factored": _effective_dimension_factored,
    "kappa": _kappa,
    "kappa_damped": _kappa_damped,
    "kappa_factored": _kappa_factored,
    "trace_A": lambda sides: sides.trace_A,
    "trace_G": lambda sides: sides.trace_G,
    "effective_rank_A": lambda sides: _rank_of(sides.spectrum_A),
    "effective_rank_G": lambda sides: _rank_of(sides.spectrum_G),
}
