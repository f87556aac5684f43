"""Scalar metrics of one layer's F = G ⊗ A, from whatever is known of the two sides.

The entropy of a spectrum that is known by its effective dimensions alone: from ``x log x = ∫₀^∞ (x/(1 + s) − x/(x +
s)) ds`` follows, summed over the eigenvalues,

    ``tr S log S = ∫ (tr S/(1 + eᵘ) − tr S(S + eᵘ)⁻¹) eᵘ du``.

The integrand is analytic in the strip ``|Im u| < π`` and decays at both ends, so the trapezoidal rule with step h errs
by ``e^{−2π²/h}``: 1e-17 for h = 1/2. S is taken over its trace, so that the entropy is ``−tr S log S``. Below the
smallest shift that S answers, 1e-12 of its largest eigenvalue, the integrand is at most ``n s``.

References:
    Trefethen & Weideman (2014), The exponentially convergent trapezoidal rule
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from engine.linalg import kronecker_spectrum as closed
from engine.linalg.damping import Damping
from engine.linalg.kronecker_quantiles import Pair, Products
from engine.linalg.linear_operator import Structured
from engine.linalg.spectrum_counts import Counted
from engine.linalg.spectrum_quadrature import SpectrumQuadrature, condense_spectrum

_STEP = 0.5
_LOWEST = 1e-15
"""Shifts over the trace that the integral begins at, at most; n times it is what is left out."""
_HIGHEST = 1e16
"""Over the trace, where the integrand has decayed to rounding."""


def effective_rank(trace: float, effective_dimensions: Callable[[Tensor], Tensor], lowest_shift: float) -> float | None:
    """Return exp of the entropy of λ/Σλ; None for a zero matrix.

    Args:
        trace: Σ λ.
        effective_dimensions: ``Σ λ/(λ + s)`` for positive shifts s, shape (k,) -> (k,).
        lowest_shift: What it is not asked below.
    """
    if trace <= 0:
        return None
    first, last = math.log(max(_LOWEST, lowest_shift / trace)), math.log(_HIGHEST)
    shifts = (
        torch.arange(math.ceil(first / _STEP), math.floor(last / _STEP) + 1, dtype=torch.float64).mul_(_STEP).exp_()
    )
    found = effective_dimensions(shifts * trace).to("cpu", torch.float64)
    # of the far ends the terms nearly cancel: s/(1 + s) − s·d(s), by the small difference from 1
    integrand = shifts / (1 + shifts) - shifts * found
    entropy = -float(integrand.sum()) * _STEP
    return math.exp(max(entropy, 0.0))


_SETTLED = 0.01
"""Share of a damped metric that eigenvalues which may be zero decide, at most."""
_RESOLVED = 1e-12
"""Share of a structured side's largest eigenvalue below which its answers are rounding, and factorisations fail."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The spectra, traces and norms of A and G that are known at one sample size."""

    in_dim: int
    out_dim: int
    spectrum_A: Tensor | None
    """(in_dim,) float64, ascending; None where it was not asked for."""
    spectrum_G: Tensor | None
    """(out_dim,) float64, ascending; None where it was not asked for, or G has none without n×n."""
    trace_A: float
    trace_G: float
    frobenius_A: float | None
    frobenius_G: float | None
    """None where only the diagonal of G is kept."""
    damping: Damping
    tolerance: float
    """Share of the largest eigenvalue below which one does not count towards the rank."""
    rounding: float = 0.0
    """Share of the largest eigenvalue below which the others are rounding of the factors."""
    entry_rounding: tuple[float, float] = (0.0, 0.0)
    """Eigenvalues of A and of G that are no larger may be zero, since the entries of the factors are rounded."""
    structured_G: Structured | None = None
    """G where it has no eigenvalues to be had and answers for itself."""
    counted_G: Counted | None = None
    """G's eigenvalues between bounds, where ``spectrum_G`` is None and there are any."""
    answered: "Answered | None" = None
    """Answers of ``structured_G`` from before it was dropped."""

    @property
    def dimension(self) -> int:
        """Eigenvalues of F."""
        return self.in_dim * self.out_dim

    @property
    def spectra(self) -> tuple[Tensor, Tensor] | None:
        """Both spectra, shapes ``(in_dim,)`` and ``(out_dim,)``, float64, ascending; None where one is missing."""
        if self.spectrum_A is None or self.spectrum_G is None:
            return None
        return self.spectrum_A, self.spectrum_G

    @property
    def ordered_spectra(self) -> Pair | None:
        """Both spectra for what follows from the eigenvalues' order, G's as it was counted where there is no other."""
        if self.spectra is not None or self.spectrum_A is None or self.counted_G is None:
            return self.spectra
        return self.spectrum_A, self.counted_G.values

    @property
    def bounds(self) -> tuple[Pair, Pair] | None:
        """The same from below and from above; None where there are no eigenvalues."""
        pair = self.ordered_spectra
        if pair is None or self.counted_G is None:
            return None if pair is None else (pair, pair)
        return (pair[0], self.counted_G.lower), (pair[0], self.counted_G.upper)

    @cached_property
    def variants(self) -> "tuple[Sides, Sides, Sides]":
        """The sides as computed, and with the eigenvalues that rounding may have drawn all zero, or all as large."""
        (low_a, high_a), (low_g, high_g) = (
            (None, None) if own is None else closed.ends_of_drawn(own, zero)
            for own, zero in zip((self.spectrum_A, self.spectrum_G), self.entry_rounding, strict=True)
        )
        if low_a is high_a and low_g is high_g:
            return self, self, self
        low = replace(self, spectrum_A=low_a, spectrum_G=low_g)
        return self, low, replace(self, spectrum_A=high_a, spectrum_G=high_g)

    @property
    def singular(self) -> tuple[bool, bool]:
        """Whether the smallest eigenvalue of A is zero, or may be, and that of G."""
        if self.bounds is None:
            return True, True
        (left, right), (zero_a, zero_g) = self.bounds[0], self.entry_rounding
        return float(left[0]) <= zero_a, float(right[0]) <= zero_g

    def without_structure(self, wanted: Collection[str]) -> "Sides":
        """Return the sides without ``structured_G``, which holds factors, but with its answers."""
        if self.structured_G is None:
            return self
        answered = Answered(
            effective_rank=_structured_rank(self) if "effective_rank" in wanted else None,
            logdet=_logdet_of_structured(self) if "logdet" in wanted else None,
        )
        return replace(self, structured_G=None, answered=answered)

    @property
    def trace(self) -> float:
        """Trace of F."""
        return self.trace_A * self.trace_G

    @property
    def frobenius_norm(self) -> float | None:
        """Frobenius norm of F."""
        return None if self.frobenius_A is None or self.frobenius_G is None else self.frobenius_A * self.frobenius_G

    @cached_property
    def quadrature_A(self) -> SpectrumQuadrature | None:  # noqa: N802 - the field's own symbol
        """A's eigenvalues in few nodes."""
        return None if self.spectrum_A is None else condense_spectrum(self.spectrum_A)

    @cached_property
    def quadrature_G(self) -> SpectrumQuadrature | None:  # noqa: N802 - the field's own symbol
        """G's eigenvalues in few nodes."""
        return None if self.spectrum_G is None else condense_spectrum(self.spectrum_G)

    @cached_property
    def lowest_shift(self) -> float:
        """Smallest shift at which ``structured_G`` is asked: a side that is not made dense is known to its rounding."""
        return 0.0 if self.structured_G is None else _RESOLVED * self.structured_G.spectral_norm()

    def answering(self, side: Structured) -> closed.Answering:
        """Return a structured G together with its counted eigenvalues, which answer below ``lowest_shift``."""
        counted = None if self.counted_G is None else condense_spectrum(self.counted_G.values)
        return closed.Answering(side=side, lowest=self.lowest_shift, counted=counted)

    def products(self) -> Products | None:
        """The eigenvalues of F, to be counted and ordered."""
        return None if self.ordered_spectra is None else Products([self.ordered_spectra])

    @cached_property
    def spectral_norm(self) -> float | None:
        """The largest eigenvalue of F."""
        if self.spectrum_A is None:
            return None
        if self.structured_G is not None:
            return float(self.spectrum_A[-1]) * self.structured_G.spectral_norm()
        return None if self.spectrum_G is None else float(self.spectrum_A[-1]) * float(self.spectrum_G[-1])

    def effective_dimensions(self, dampings: Iterable[float]) -> list[float | None]:
        """Return Σ λᵢ/(λᵢ + λ) over the eigenvalues λᵢ of F at each damping λ."""
        grid = list(dampings)
        if self.quadrature_A is None:
            return [None] * len(grid)
        if self.structured_G is not None:
            if self.quadrature_A.nodes.numel() == 0:
                return [0.0] * len(grid)
            return closed.effective_dimensions_structured(self.quadrature_A, self.answering(self.structured_G), grid)
        return (
            [None] * len(grid)
            if self.quadrature_G is None
            else closed.effective_dimensions(self.quadrature_A, self.quadrature_G, grid)
        )


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The answers of a G without eigenvalues."""

    effective_rank: float | None
    logdet: float | None
    """Log-determinant of G; None where it is singular, to within the tolerance of the rank."""


def settled(values: Sequence[float | None], scale: float = 0.0) -> float | None:
    """Return the first of the values at ``Sides.variants``; None where the others are more than 1 % of it apart.

    ``scale`` stands for a smaller value, as that of a logarithm near zero.
    """
    known = [each for each in values if each is not None]
    if len(known) < len(values):
        return None
    return known[0] if max(known) - min(known) <= _SETTLED * max(abs(known[0]), scale) else None


def scalars(sides: Sides, wanted: Iterable[str]) -> dict[str, float | None]:
    """Compute the scalar metrics of one layer."""
    return {name: SCALARS[name](sides) for name in wanted if name in SCALARS}


def _stable_rank(sides: Sides) -> float | None:
    if sides.spectra is not None:
        return closed.stable_rank(*sides.spectra)
    largest = sides.spectral_norm
    return None if not largest or sides.frobenius_norm is None else (sides.frobenius_norm / largest) ** 2


def _participation_ratio(sides: Sides) -> float | None:
    return closed.participation_ratio((sides.trace_A, sides.trace_G), (sides.frobenius_A, sides.frobenius_G))


def _effective_rank(sides: Sides) -> float | None:
    left, right = _rank_of(sides.spectrum_A), _rank_of_G(sides)
    return None if left is None or right is None else left * right


def _rank_of(spectrum: Tensor | None) -> float | None:
    return None if spectrum is None else closed.entropy_effective_rank(spectrum)


def _rank_of_G(sides: Sides) -> float | None:  # noqa: N802 - the field's own symbol
    if sides.spectrum_G is not None:
        return closed.entropy_effective_rank(sides.spectrum_G)
    return _structured_rank(sides) if sides.answered is None else sides.answered.effective_rank


def _structured_rank(sides: Sides) -> float | None:
    side = sides.structured_G
    return None if side is None else effective_rank(side.kept_trace(), side.effective_dimensions, sides.lowest_shift)


def _rank(sides: Sides) -> int | None:
    return None if sides.ordered_spectra is None else closed.rank(*sides.ordered_spectra, sides.tolerance)


def _logdet(sides: Sides) -> float | None:
    # what is rounding in either factor would count with its logarithm; their products reach further down
    if any((*within_tolerance(sides), *sides.singular)):
        return None
    if sides.spectra is not None:
        return closed.logdet(*sides.spectra)
    own = _logdet_of_structured(sides) if sides.answered is None else sides.answered.logdet
    if own is None or sides.spectrum_A is None:
        return None
    return sides.out_dim * float(sides.spectrum_A.log().sum()) + sides.in_dim * own


def within_tolerance(sides: Sides) -> tuple[bool, bool]:
    """Tell which factors are singular to within the tolerance of the rank."""
    if sides.bounds is None:
        return True, True
    lower, _ = sides.bounds
    found = [float(own[0]) <= sides.tolerance * float(own[-1]) for own in lower]
    return found[0], found[1]


def _logdet_of_structured(sides: Sides) -> float | None:
    side = sides.structured_G
    if side is None or within_tolerance(sides)[1]:
        return None
    return float(side.logdets(torch.zeros(1, dtype=torch.float64)))


def _logdet_damped(sides: Sides) -> float | None:
    damping = sides.damping.joint
    if damping is None or sides.quadrature_A is None:
        return None
    if sides.structured_G is not None:
        return closed.logdet_damped_structured(sides.quadrature_A, sides.answering(sides.structured_G), damping)
    return None if sides.quadrature_G is None else closed.logdet_damped(sides.quadrature_A, sides.quadrature_G, damping)


def _logdet_factored(sides: Sides) -> float | None:
    damped_a, damped_g = sides.damping.A, sides.damping.G
    if damped_a is None or damped_g is None or sides.spectrum_A is None:
        return None
    if sides.spectrum_G is not None:
        return closed.logdet_factored(sides.spectrum_A, sides.spectrum_G, damped_a, damped_g)
    asked = _asked(sides, damped_g)
    if asked is None:
        return None
    answering, shift = asked
    left, right = float((sides.spectrum_A + damped_a).log().sum()), float(answering.logdets(shift))
    return sides.out_dim * left + sides.in_dim * right


def _effective_dimension(sides: Sides) -> float | None:
    damping = sides.damping.joint
    return None if damping is None else sides.effective_dimensions([damping])[0]


def _effective_dimension_factored(sides: Sides) -> float | None:
    damped_a, damped_g = sides.damping.A, sides.damping.G
    if damped_a is None or damped_g is None or sides.spectrum_A is None:
        return None
    if sides.spectrum_G is not None:
        return closed.effective_dimension_factored(sides.spectrum_A, sides.spectrum_G, damped_a, damped_g)
    asked = _asked(sides, damped_g)
    if asked is None:
        return None
    answering, shift = asked
    left = float((sides.spectrum_A / (sides.spectrum_A + damped_a)).nan_to_num(0).sum())
    return left * float(answering.effective_dimensions(shift))


def _asked(sides: Sides, damping: float) -> tuple[closed.Answering, Tensor] | None:
    """Structured G and ``damping`` as it is asked at, (1,); None where it does not know."""
    if sides.structured_G is None:
        return None
    answering = sides.answering(sides.structured_G)
    shift = torch.tensor([damping], dtype=torch.float64)
    return (answering, shift) if bool(answering.reached(shift).all()) else None


def _kappa(sides: Sides) -> float | None:
    return None if sides.ordered_spectra is None or any(sides.singular) else closed.kappa(*sides.ordered_spectra)


def _kappa_damped(sides: Sides) -> float | None:
    damping = sides.damping.joint
    if damping is None or sides.ordered_spectra is None:
        return None
    return closed.kappa_damped(*sides.ordered_spectra, damping)


def _kappa_factored(sides: Sides) -> float | None:
    damped_a, damped_g = sides.damping.A, sides.damping.G
    if damped_a is None or damped_g is None or sides.ordered_spectra is None:
        return None
    return closed.kappa_factored(*sides.ordered_spectra, damped_a, damped_g)


DAMPED: Mapping[str, Callable[[Sides], float | None]] = {
    "logdet_damped": _logdet_damped,
    "logdet_factored": _logdet_factored,
    "effective_dimension": _effective_dimension,
    "effective_dimension_factored": _effective_dimension_factored,
    "kappa_damped": _kappa_damped,
    "kappa_factored": _kappa_factored,
}
"""Scalars at a damping, of one of ``Sides.variants``."""


def _at_damping(name: str, sides: Sides) -> float | None:
    if sides.variants[1] is sides:
        return DAMPED[name](sides)
    scale = sides.dimension if name.startswith("logdet") else 0.0
    return settled([DAMPED[name](each) for each in sides.variants], scale)


SCALARS: Mapping[str, Callable[[Sides], float | None]] = {
    "trace": lambda sides: sides.trace,
    "frobenius_norm": lambda sides: sides.frobenius_norm,
    "spectral_norm": lambda sides: sides.spectral_norm,
    "stable_rank": _stable_rank,
    "participation_ratio": _participation_ratio,
    "effective_rank": _effective_rank,
    "rank": _rank,
    "logdet": _logdet,
    "kappa": _kappa,
    "trace_A": lambda sides: sides.trace_A,
    "trace_G": lambda sides: sides.trace_G,
    "effective_rank_A": lambda sides: _rank_of(sides.spectrum_A),
    "effective_rank_G": _rank_of_G,
} | {name: partial(_at_damping, name) for name in DAMPED}
