"""Search options for extreme eigenvalues, the memory that they ask for, vectors to begin with, and bounds on the found.

For m vectors X with ``R = F X − X Θ`` and ``C = (I − XXᵀ) F (I − XXᵀ)``, Weyl's theorem for ``[Θ + XᵀR, Rᵀ; R, C]``
beside ``diag(Θ, C)`` bounds the error of the i-th value, counted from its end, by

    ``joint = 2/√3 · (‖R‖_F + √m ρ) / σ_min(X) + δ``

where ρ bounds the rounding of one product and δ how far C may reach beyond the last wanted value; 2/√3 is the most
that the norm of ``[XᵀR, Rᵀ; R, 0]`` can be over that of its first column. A value whose neighbours on both sides are
known to be further away than ``joint`` has an interval of its own, in which Kato and Temple's bound ``r²/gap + ρ``
holds, with its own residual ``r = ‖F x − θ x‖ + ρ``.

References:
    Parlett (1998), The symmetric eigenvalue problem, sections 10.3, 10.4 and 11.7
    Cao, Xie & Li (1996), A sharp version of Kahan's theorem on clustered eigenvalues
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.linalg.lanczos import PANEL_BYTES, WIDTH
from engine.model.counter_rng import normals

_DRAWN = 2**18
"""Random numbers that are drawn at once; each takes some ten float64 and int64 numbers on the way."""


def gaussian(seed: int, draws: range, size: int, device: torch.device) -> Tensor:
    """Draw vectors of independent standard normal numbers, keyed by seed, draw and place.

    Args:
        seed: Of the search.
        draws: Numbers of the vectors.
        size: n.
        device: Where they are wanted.

    Returns:
        Shape (len(draws), n), float64; the same on every device up to rounding.
    """
    made = torch.empty(len(draws), size, dtype=torch.float64, device=device)
    numbers = torch.arange(draws.start, draws.stop, device=device)[:, None]
    rows, width = max(1, _DRAWN // size), min(_DRAWN, size)
    for top in range(0, len(draws), rows):
        for first in range(0, size, width):
            places = torch.arange(first, min(first + width, size), device=device)
            made[top : top + rows, first : first + width] = normals(seed, numbers[top : top + rows], places)
    return made


ENDS = ("largest", "smallest", "both")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The eigenvalues that are searched for, and the means of the search."""

    count: int
    """Eigenvalues wanted at each end."""
    end: Literal["largest", "smallest", "both"]
    tolerance: float | None
    """Residual over the largest magnitude at which a value has converged; None is the root of the precision."""
    seed: int
    dtype: torch.dtype
    """Precision of the vectors, float32 or float64; coefficients are float64."""
    most_products: int
    """Products of one vector, at most; the search ends with what it has."""
    length: int | None
    """Basis vectors kept; a longer search restarts from its best ones. None keeps all."""

    @property
    def wanted(self) -> int:
        """Eigenvalues wanted at both ends together."""
        return self.count * (2 if self.end == "both" else 1)

    def room(self, size: int) -> int:
        """Return the vectors that the basis has room for."""
        most = self.most_products + WIDTH if self.length is None else self.length
        return min(size, max(most, self.wanted + 4))


def search_bytes(size: int, options: SearchOptions) -> int:
    """Return the bytes that a search holds at its peak, beside the products of its caller."""
    rows = options.room(size) + 2
    return rows * size * options.dtype.itemsize + 3 * WIDTH * size * 8 + 3 * PANEL_BYTES + 10 * rows * rows * 8


def require(size: int, options: SearchOptions) -> None:
    """Refuse what cannot be searched for."""
    if not 1 <= options.count <= size:
        raise ValueError(f"count must be between 1 and the {size} rows of the matrix (got {options.count})")
    if options.end not in ENDS:
        raise ValueError(f"end must be one of {', '.join(ENDS)} (got {options.end!r})")
    if options.most_products < 1:
        raise ValueError(f"most_products must be at least 1 (got {options.most_products})")
    if options.tolerance is not None and not 0 < options.tolerance < 1:
        raise ValueError(f"tolerance must lie between 0 and 1 (got {options.tolerance})")
    least = min(options.wanted + 4, size)
    if options.length is not None and options.length < least:
        raise ValueError(
            f"length must be at least {least}, four more than the eigenvalues wanted (got {options.length}); "
            "give it more vectors, or ask for fewer eigenvalues"
        )


@dataclass(frozen=True, kw_only=True)
class Eigenvalue:
    """One eigenvalue found."""

    value: float
    bound: float
    """Distance within which the eigenvalue of the same place lies, counted from its end; else some eigenvalue."""
    converged: bool
    """Whether place and multiplicity are settled."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The eigenvalues found at both ends."""

    largest: tuple[Eigenvalue, ...]
    """Descending, each as often as its multiplicity; empty where not asked for."""
    smallest: tuple[Eigenvalue, ...]
    """Ascending."""


def joint_bounds(
    values: Tensor, residuals: Tensor, rounding: float, gram: Tensor, slip: float, unknown: tuple[int, ...]
) -> Tensor:
    """Return bounds on the errors of values that are the outermost ones, each in its place.

    Args:
        values: Θ, shape (m,), float64, ascending.
        residuals: ``‖F x − θ x‖`` of each unit vector, shape (m,).
        rounding: ρ.
        gram: ``XᵀX``, shape (m, m), float64.
        slip: δ, not negative.
        unknown: Places beside which an eigenvalue of C may lie.

    Returns:
        Shape (m,), float64.
    """
    least = float(torch.linalg.eigvalsh(gram)[0])
    # vectors that depend on each other bound nothing
    smallest = math.sqrt(least) if least > 0 else torch.finfo(torch.float64).tiny
    own = residuals + rounding
    joint = 2 / math.sqrt(3) * (float(residuals.norm()) + math.sqrt(len(values)) * rounding) / smallest + slip
    far = torch.full((1,), math.inf, dtype=torch.float64)
    beside = values.diff()
    gap = torch.minimum(torch.cat([far, beside]), torch.cat([beside, far])) - joint
    gap[list(unknown)] = 0
    alone = torch.where(gap > 0, own.square() / gap.clamp_min(torch.finfo(torch.float64).tiny) + rounding, math.inf)
    return alone.clamp_max(joint)
