"""Stabilisation: what damping and a condition number's limit mean for one layer's spectra.

Damping is relative by default, λ = damping · mean eigenvalue of F = G ⊗ A: against mean-reduced
gradients an absolute 1e-4 exceeds λ_max(G) by orders of magnitude, and the preconditioner is
then the identity. The factored form (A + λ_A I) ⊗ (G + λ_G I) takes it by `damping_split`:

    pi      λ_A = π√λ, λ_G = √λ/π with π = √(mean(A)/mean(G)), so that λ_A λ_G = λ
    each    λ_A = damping · mean(A), λ_G = damping · mean(G); absolute: λ_A = λ_G = damping

Scripts that add one number to the diagonals of A and of G mean `each` and `absolute`: by `pi` an
absolute 1e-4 is 9.1 beside an A of large inputs, and 1.1e-5 beside its G.

References:
    Martens & Grosse (2015), section 6.3, factored Tikhonov regularisation
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from catalog.requests.collection import Stabilisation
from engine.linalg.spectrum_counts import Counted


@dataclass(frozen=True, kw_only=True)
class Damping:
    """Damping of one layer in absolute numbers; null where there is no curvature, or none that float64 can hold."""

    joint: float | None
    """λ of F + λI."""
    A: float | None
    G: float | None
    relative_A: float | None
    relative_G: float | None


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """Conditioning of one factor under κ_max; null throughout where the factor is zero or its spectrum unknown."""

    kappa: float | None
    """λ_max/λ_min; null where the factor is singular, to the rounding of its entries."""
    kappa_clipped: float | None
    """The same once eigenvalues below λ_max/κ_max are raised to it."""
    clipped: int | None
    """Eigenvalues below the floor."""

    @classmethod
    def at(cls, spectrum: Tensor | Counted | None, kappa_max: float | None, rounding: float = 0.0) -> Self:
        """Return the condition of a factor before and after clipping at κ_max.

        Args:
            spectrum: Its eigenvalues, shape (n,), float64, ascending; or all of them between bounds, counted with
                ``clipping_floor`` as the floor. None if they are unknown.
            kappa_max: Largest condition number after clipping, above 1; None clips nothing.
            rounding: Eigenvalues that are no larger may be zero.

        Returns:
            The condition numbers and how many eigenvalues are raised. κ of a counted spectrum is null where the
            smallest eigenvalue may be zero.
        """
        values = spectrum.values if isinstance(spectrum, Counted) else spectrum
        if values is None or float(values[-1]) <= 0:
            return cls(kappa=None, kappa_clipped=None, clipped=None)
        smallest, largest = float(values[0]), float(values[-1])
        surely_positive = float(spectrum.lower[0]) > 0 if isinstance(spectrum, Counted) else smallest > rounding
        kappa = _finite(largest / smallest) if surely_positive else None
        if kappa_max is None:
            return cls(kappa=kappa, kappa_clipped=kappa, clipped=0)
        if isinstance(spectrum, Counted):
            clipped = spectrum.below_floor
        else:
            clipped = int((values < clipping_floor(largest, kappa_max)).sum())
        return cls(
            kappa=kappa,
            kappa_clipped=kappa_max if kappa is None else min(kappa, kappa_max),
            clipped=clipped,
        )


def clipping_floor(largest: float, kappa_max: float) -> float:
    """Return f = max(λ_max, 0)/κ_max: an eigenvalue is clipped, that is raised to f, if and only if it is below f.

    Every comparison is with this float64 number, because it is what the result is rebuilt with and what an inertia
    count is asked about. Comparing λ/λ_max with 1/κ_max rounds otherwise: at the boundary it would count an
    eigenvalue as clipped that is not below f.

    Args:
        largest: λ_max of the factor, in any unit; negative by rounding alone.
        kappa_max: Condition number to clip at, above 1.

    Returns:
        f, in the unit of ``largest``; 0, below which no eigenvalue lies, if it underflows.
    """
    return max(largest, 0.0) / kappa_max


def damping(mean_a: float, mean_g: float, options: Stabilisation, *, block: bool) -> Damping:
    """Return the damping of a layer, in absolute numbers.

    Args:
        mean_a: Mean eigenvalue of A.
        mean_g: Mean eigenvalue of G.
        options: Damping, its mode and its split.
        block: Whether G is the layer's exact block (A = 1), which is damped in G alone.

    Returns:
        λ, λ_A and λ_G in the units of F, A and G, and the last two relative to the mean eigenvalues; all null where a
        factor is zero or λ is outside of float64's normal range.
    """
    if mean_a <= 0 or mean_g <= 0:
        return Damping(joint=None, A=None, G=None, relative_A=None, relative_G=None)
    relative = options.damping_mode == "relative"
    joint = options.damping * mean_a * mean_g if relative else options.damping
    if not sys.float_info.min <= joint <= sys.float_info.max:
        return Damping(joint=None, A=None, G=None, relative_A=None, relative_G=None)
    if block:
        damped_a, damped_g = 0.0, joint
    elif options.damping_split == "each":
        damped_a = options.damping * (mean_a if relative else 1)
        damped_g = options.damping * (mean_g if relative else 1)
    else:
        pi = math.sqrt(mean_a) / math.sqrt(mean_g)
        damped_a, damped_g = pi * math.sqrt(joint), math.sqrt(joint) / pi
    if options.damping_A is not None:
        damped_a = options.damping_A * (mean_a if relative else 1)
    if options.damping_G is not None:
        damped_g = options.damping_G * (mean_g if relative else 1)
    return Damping(joint=joint, A=damped_a, G=damped_g, relative_A=damped_a / mean_a, relative_G=damped_g / mean_g)


def identity_warnings(
    layer: str, found: Damping, options: Stabilisation, largest_a: float, largest_g: float
) -> Iterator[str]:
    """Yield a sentence where a damping exceeds the largest eigenvalue: the damped inverse is the identity there.

    With the split `each`, one side's inverse can be the identity although that of the whole is not.

    Args:
        layer: The layer's name.
        found: Its damping in absolute numbers; λ_A is 0 where A = 1.
        options: How it was split.
        largest_a: The largest eigenvalue of A, or an upper bound of it.
        largest_g: The same of G.

    Yields:
        One sentence per side with the split `each`, at most one otherwise.
    """
    if options.damping_split == "each" and found.A:
        for name, value, largest in (("A", found.A, largest_a), ("G", found.G, largest_g)):
            if value is not None and value > largest:
                yield (
                    f"layer `{layer}`: λ_{name} = {value:.3g} exceeds λ_max({name}) = {largest:.3g}; the damped "
                    f"inverse of {name} is the identity there: lower `stabilisation.damping_{name}` or take `relative`"
                )
        return
    largest = largest_a * largest_g
    if found.joint is not None and found.joint > largest:
        yield (
            f"layer `{layer}`: λ = {found.joint:.3g} exceeds λ_max = {largest:.3g}; "
            "the damped inverse is the identity there: lower `stabilisation.damping` or take `relative`"
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
