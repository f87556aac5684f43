"""Functions of a shift, asked for at many shifts: evaluated at few of them, interpolated in between.

``log det(S + sI)`` and ``tr S(S + sI)⁻¹`` are analytic in log s but for singularities π away from the
real axis, at the negative eigenvalues. On a panel of half-width h in log s, interpolation in K Chebyshev
nodes errs by (π/h + √(1 + (π/h)²))^−K; ``K = ⌈30/asinh(π/h)⌉`` reaches e⁻³⁰ of the panel's largest value,
1e-13. Panels begin at fixed powers of two, so that what one question has evaluated serves the next.

References:
    Trefethen (2013), Approximation theory and approximation practice, theorem 8.2
    Berrut & Trefethen (2004), Barycentric Lagrange interpolation
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_OCTAVES = 8
NODES = math.ceil(30 / math.asinh(math.pi / (_OCTAVES / 2 * math.log(2))))
"""Evaluations for each panel of eight octaves, where more shifts than these lie in it."""
PANELS = 12
"""Panels of eight octaves: about as many as shifts spread over between rounding of a spectrum and far above it."""
_FAR = 1e6
"""Times the trace: beyond it the third term of a series in λ/s is below 1e-12 of the first."""


def far_above(size: int, trace: float, frobenius: float, shift: float) -> tuple[float, float] | None:
    """Return ``log det(S + sI)`` and ``tr S(S + sI)⁻¹`` by their series in λ/s.

    Args:
        size: n, rows of S.
        trace: Σλ.
        frobenius: Root of Σλ².
        shift: s, in the unit of the eigenvalues.

    Returns:
        The two numbers, to a relative 1e-12 of the first term; None unless s exceeds the trace a million times.
    """
    if shift <= _FAR * trace:
        return None
    ratio, square = trace / shift, (frobenius / shift) ** 2
    return size * math.log(shift) + ratio - square / 2, ratio - square


def over_shifts(evaluate: Callable[[float], tuple[float, float]], shifts: Tensor) -> Tensor:  # (k,) -> (k, 2)
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
