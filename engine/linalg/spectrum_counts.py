"""A counted spectrum: the eigenvalues of a diagonal plus or minus a matrix of low rank, between proven bounds.

For ``S = diag c + σ BᵀB``, B (r, n) and σ = ±1, and any x that is not an entry of c, the inertia of the bordered matrix
``[[diag c − x, Bᵀ], [B, −σI]]`` by either Schur complement says how many eigenvalues lie below x (Sylvester's law):

    σ = −1    N(x) = #{c_i < x} + #{negative eigenvalues of I − B (diag c − x)⁻¹ Bᵀ}
    σ = +1    N(x) = #{c_i < x} − #{negative eigenvalues of I + B (diag c − x)⁻¹ Bᵀ}

A count costs ``n r²`` operations and no memory of n². Each N(x) = k proves ``λ_k ≤ x ≤ λ_{k+1}``. Between counts two
more facts hold. The eigenvalues interlace with c (Weyl): ``c_{i−r} ≤ λ_i ≤ c_i`` for σ = −1, ``c_i ≤ λ_i ≤ c_{i+r}``
for σ = +1. And the shift ``m(x) = N(x) − #{c_i < x}`` is at most r, so that in the bulk, where n is much larger than r,
few counts leave little room. Each count is made where the bounds leave most room: at the median of
``Σ log(upper/lower)`` of the stretch between two counts that has most of it. Inside a stretch, m is taken to change
evenly, which gives the estimate; it is never outside its bounds.

The largest eigenvalues stand apart, and Lanczos' iteration knows them better than counts would. Its Ritz values θ have
as many eigenvalues within the norm of their residuals (Kahan), and one count proves that there are no others.

References:
    Golub (1973), Some modified matrix eigenvalue problems: counts for a diagonal plus a matrix of rank one
    Parlett (1998), The symmetric eigenvalue problem, chapters 3 (slicing the spectrum), 10 (interlacing), 11.5 (Kahan)
"""

import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

COUNTS = 192
"""Counts at most: half as many as the shifts at which the smooth metrics ask."""
LARGEST_KNOWN = 16
"""Eigenvalues that are sought from the top by products."""
LARGEST_STEPS = 160
"""Products that are made for them at most."""
_RESOLVED = 1e-14
"""Share of the largest eigenvalue below which counts are of rounding."""
_ENOUGH = 1e-9
"""Mean of log(upper/lower) at which no more counts are made."""
_SMALLEST_HALVINGS = 24
"""Counts that are spent on the smallest eigenvalue: log(upper/lower) of it is below 2e-6 then."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Counted:
    """All n eigenvalues, ascending, float64 on the host: estimates between bounds."""

    values: Tensor
    """(n,) estimates, each between its bounds."""
    lower: Tensor
    """(n,) bounds: the i-th eigenvalue is not smaller than the i-th of these."""
    upper: Tensor
    """(n,) and not larger than the i-th of these."""
    counts: int
    """Counts that were made."""
    below_floor: int | None = None
    """Eigenvalues less than the floor that was asked about."""

    def widened(self, below: float, above: float) -> Self:
        """Return bounds that hold also for a positive semidefinite matrix between ``S − below·I`` and ``S + above·I``.

        Args:
            below: Nonnegative, in the unit of the eigenvalues.
            above: Nonnegative, likewise.

        Returns:
            The same estimates between wider bounds, the lower ones not negative.
        """
        return replace(self, lower=(self.lower - below).clamp_min_(0), upper=self.upper + above)


@dataclass(frozen=True, kw_only=True, eq=False)
class DiagonalUpdate:
    """A positive semidefinite ``diag base ± BᵀB`` that answers how many of its eigenvalues lie below a number."""

    base: Tensor
    """c (n,)."""
    rank: int
    """Rows of B."""
    subtracts: bool
    """Whether σ = −1."""
    count_below: Callable[[float], int]
    """N(x), for x > 0."""
    gram: Callable[[Tensor], Tensor]
    """``B diag(w) Bᵀ`` (r, r) float64, of weights w (n,) of either sign."""
    parts: Callable[[], Iterator[tuple[slice, Tensor]]]
    """B in float64, some columns at a time."""
    zeros: int = 0
    """Eigenvalues known to be zero, apart from those of zero entries of c."""


def counted_spectrum(
    matrix: DiagonalUpdate,
    largest: Sequence[float],
    residual: float,
    *,
    floor: float | None = None,
    counts: int = COUNTS,
) -> Counted:
    """Bound and estimate all eigenvalues of ``matrix``.

    Args:
        matrix: With n rows.
        largest: Some of the largest eigenvalues, descending, as products with the matrix found them; at least one.
        residual: Norm of their residuals together.
        floor: A value of which it is asked how many eigenvalues lie below it; None does not ask.
        counts: How many counts may be made.

    Returns:
        n eigenvalues, ascending, with their bounds.

    Memory:
        A few times n numbers, besides what a count takes.
    """
    return _Bracketed(matrix, largest[0] + residual).counted(largest, residual, floor, counts)


class _Bracketed:
    """Bounds of all eigenvalues, which each count narrows."""

    def __init__(self, matrix: DiagonalUpdate, top: float) -> None:
        base = torch.sort(matrix.base.to("cpu", torch.float64)).values
        self._base, self._count_below, self._made = base, matrix.count_below, 0
        size = base.numel()
        shifted = min(matrix.rank, size)
        aside = base.new_full((shifted,), 0.0 if matrix.subtracts else math.inf)
        if matrix.subtracts:
            self.upper, self.lower = self._base.clone(), torch.cat([aside, self._base[: size - shifted]])
        else:
            self.lower, self.upper = self._base.clone(), torch.cat([self._base[shifted:], aside])
        self._top = top
        self.upper.clamp_(0, top)
        self.lower.clamp_(0, top)
        self.lower[: matrix.zeros] = self.upper[: matrix.zeros] = 0
        self._zeros = int((self.upper <= 0).sum())
        # (x, N(x)) in ascending order
        self._knots: list[tuple[float, int]] = [(0.0, 0), (math.inf, size)]

    def counted(self, largest: Sequence[float], residual: float, floor: float | None, counts: int) -> Counted:
        """Count where it narrows most."""
        size = self._base.numel()
        if self._top <= 0 or self._zeros == size:
            nothing = torch.zeros(size, dtype=torch.float64)
            return Counted(values=nothing, lower=nothing, upper=nothing, counts=0, below_floor=0)
        below_floor = None if floor is None or floor <= 0 else self._count(floor)
        known = self._of_the_largest(largest, residual)
        for _ in range(_SMALLEST_HALVINGS):
            if not self._narrow_smallest():
                break
        while self._made < counts and self._narrow():
            pass
        values = self._estimated()
        if known:
            values[size - known :] = torch.tensor(sorted(largest[:known]), dtype=torch.float64)
        values = torch.minimum(torch.maximum(values, self.lower), self.upper).cummax(0).values
        return Counted(values=values, lower=self.lower, upper=self.upper, counts=self._made, below_floor=below_floor)

    def _count(self, x: float) -> int:
        """N(x), and what it proves."""
        number = min(max(self._count_below(x), self._zeros), self._base.numel())
        # rounding next to an eigenvalue may not turn the order round
        for other, known in self._knots:
            number = max(number, known) if other <= x else min(number, known)
        self._made += 1
        insort(self._knots, (x, number))
        self.upper[:number].clamp_(max=x)
        self.lower[number:].clamp_(min=x)
        return number

    def _of_the_largest(self, largest: Sequence[float], residual: float) -> int:
        """How many of ``largest`` are proven to be the largest eigenvalues, all of them."""
        size = self._base.numel()
        for known in dict.fromkeys((len(largest), 1)):
            below = largest[known - 1] - max(2 * residual, 1e-12 * self._top)
            if below <= 0:
                continue
            if size - self._count(below) == known:
                ascending = torch.tensor(sorted(largest[:known]), dtype=torch.float64)
                rounding = residual + 1e-13 * self._top
                tail = slice(size - known, size)
                self.lower[tail] = torch.maximum(self.lower[tail], ascending - rounding)
                self.upper[tail] = torch.minimum(self.upper[tail], ascending + rounding)
                return known
        return 0

    def _narrow_smallest(self) -> bool:
        """Halve what the smallest positive eigenvalue may be, in the logarithm."""
        low, high = float(self.lower[self._zeros]), float(self.upper[self._zeros])
        low = max(low, _RESOLVED * self._top)
        if high <= low * (1 + 1e-6):
            return False
        x = self._apart(math.sqrt(low * high), low, high)
        before = (float(self.lower[self._zeros]), float(self.upper[self._zeros]))
        self._count(x)
        return (float(self.lower[self._zeros]), float(self.upper[self._zeros])) != before

    def _narrow(self) -> bool:
        """Count once where the bounds leave most room; whether it was worth it."""
        low = self.lower.clamp(min=_RESOLVED * self._top)
        room = (self.upper.clamp(min=_RESOLVED * self._top) / low).log()
        if float(room.mean()) <= _ENOUGH:
            return False
        sums = torch.cat([room.new_zeros(1), room.cumsum(0)])
        ends = torch.tensor([number for _, number in self._knots])
        masses = sums[ends].diff()
        stretch = int(masses.argmax())
        half = (float(sums[ends[stretch]]) + float(sums[ends[stretch + 1]])) / 2
        place = min(int(torch.searchsorted(sums, half, right=True)) - 1, room.numel() - 1)
        while place > int(ends[stretch]) and float(room[place]) == 0:
            place -= 1
        left, right = float(low[place]), float(self.upper[place])
        x = self._apart(math.sqrt(left * right), left, right)
        if not left < x < right or any(x == known for known, _ in self._knots):
            # nothing between two neighbours: this room stays
            return self._made == 0
        self._count(x)
        return True

    def _apart(self, x: float, low: float, high: float) -> float:
        """``x``, or near it and between ``low`` and ``high``, a quarter of a gap from the entries of c about it."""
        place = int(torch.searchsorted(self._base, torch.tensor(x, dtype=torch.float64)))
        before = float(self._base[place - 1]) if place else 0.0
        after = float(self._base[place]) if place < self._base.numel() else max(2 * x, self._top)
        before, after = max(before, low), min(after, high) if min(after, high) > before else after
        gap = (after - before) / 4
        return min(max(x, before + gap), after - gap)

    def _estimated(self) -> Tensor:
        """The eigenvalues where the shift of the counts changes evenly from one knot to the next."""
        size = self._base.numel()
        knots = torch.tensor(
            [(min(x, self._top * (1 + 1e-9)), number) for x, number in self._knots], dtype=torch.float64
        )
        below = torch.searchsorted(self._base, knots[:, 0].contiguous()).to(torch.float64)
        below[-1] = size
        numbers = knots[:, 1]
        ranks = torch.arange(size, dtype=torch.float64) + 0.5
        stretch = (torch.searchsorted(numbers.contiguous(), ranks, right=True) - 1).clamp(0, len(numbers) - 2)
        start, stop = numbers[stretch], numbers[stretch + 1]
        share = (ranks - start) / (stop - start).clamp_min(1.0)
        # the place among the entries of c that is as far along the stretch
        place = below[stretch] + share * (below[stretch + 1] - below[stretch]) - 0.5
        first = place.floor().clamp(0, size - 1).to(torch.int64)
        after = (first + 1).clamp(max=size - 1)
        found = self._base[first] + (place - first).clamp(0, 1) * (self._base[after] - self._base[first])
        outside = (found < self.lower) | (found > self.upper)
        middle = torch.where(self.lower > 0, (self.lower * self.upper).sqrt(), self.upper / 2)
        return torch.where(outside, middle, found)
