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

from torch import Tensor

from catalog.collection import Stabilisation
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
    """Conditioning of one factor under κ_max."""

    kappa: float | None
    """λ_max/λ_min; null where the factor is singular."""
    kappa_clipped: float | None
    """The same once eigenvalues below λ_max/κ_max are raised to it."""
    clipped: int | None
    """Eigenvalues below the floor."""


def damping(mean_a: float, mean_g: float, options: Stabilisation, *, block: bool) -> Damping:
    """Return the damping of a layer, in absolute numbers.

    Args:
        mean_a: Mean eigenvalue of A.
        mean_g: Mean eigenvalue of G.
        options: Damping, its mode and its split.
        block: Whether G is the layer's exact block (A = 1), which is damped in G alone.
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

    Damped one by one (`each`), a side can be the identity where the whole is not.

    Args:
        layer: The layer's name.
        found: Its damping in absolute numbers; λ_A is 0 where A = 1.
        options: How it was split.
        largest_a: The largest eigenvalue of A, or what it cannot exceed.
        largest_g: The same of G.
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


def clipping(spectrum: Tensor | None, kappa_max: float | None) -> Clipping:
    """Condition of a factor with ascending eigenvalues (n,), before and after clipping at λ_max/κ_max."""
    if spectrum is None:
        return Clipping(kappa=None, kappa_clipped=None, clipped=None)
    smallest, largest = float(spectrum[0]), float(spectrum[-1])
    if largest <= 0:
        return Clipping(kappa=None, kappa_clipped=None, clipped=None)
    kappa = _finite(largest / smallest) if smallest > 0 else None
    if kappa_max is None:
        return Clipping(kappa=kappa, kappa_clipped=kappa, clipped=0)
    return Clipping(
        kappa=kappa,
        kappa_clipped=kappa_max if kappa is None else min(kappa, kappa_max),
        clipped=int((spectrum / largest < 1 / kappa_max).sum()),
    )


def counted_clipping(spectrum: Counted, kappa_max: float | None) -> Clipping:
    """The same of eigenvalues between bounds; κ is null where the smallest may be zero."""
    largest = float(spectrum.values[-1])
    if largest <= 0:
        return Clipping(kappa=None, kappa_clipped=None, clipped=None)
    kappa = _finite(largest / float(spectrum.values[0])) if float(spectrum.lower[0]) > 0 else None
    if kappa_max is None:
        return Clipping(kappa=kappa, kappa_clipped=kappa, clipped=0)
    return Clipping(
        kappa=kappa,
        kappa_clipped=kappa_max if kappa is None else min(kappa, kappa_max),
        clipped=spectrum.below_floor,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
