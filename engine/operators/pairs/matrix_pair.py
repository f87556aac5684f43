"""A matrix pair: one factor from each of two sets, in coordinates in which both can be computed with.

Two sides that are kept as gradient rows, ``S_i = U_iᵀ U_i`` (n, n), act within the span of all rows alone. With the
reduced factorisation ``[U_1ᵀ U_2ᵀ] = Q [R_1 R_2]``, Q (n, r) orthonormal, they are ``Q (R_i R_iᵀ) Qᵀ``, and every
distance, angle and eigenvalue is that of the two (r, r) matrices and of n − r zeros. Other structured sides are made
dense up to ``DENSE_ROWS`` rows; beyond, their rows are computed a panel at a time, and eigenvectors are not to be had.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from engine.errors import NotConverged
from engine.factors.dense import Dense
from engine.factors.low_rank import LowRank
from engine.linalg.linear_operator import Operator
from engine.linalg.panels import PANEL_NUMBERS
from engine.memory.guard import Fallback, FallbackFailed, Guard

DENSE_ROWS = 8192
"""Up to here a structured side other than gradient rows is made dense: 512 MiB in float64."""
STAGE = "compare_curvature"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Symmetric:
    """One positive semidefinite factor S of a set, on the host."""

    side: Operator
    """As it is stored."""
    rank_bound: int | None = None
    """Most nonzero eigenvalues there can be; None where that is not known."""
    stored: torch.dtype | None = None
    """Precision that S was rounded to when it was stored; None is that of ``side``."""

    @property
    def epsilon(self) -> float:
        """Distance of 1 and the next number in the precision that S was stored in."""
        return float(torch.finfo(self.stored or self.side.storage_dtype).eps)

    def dense(self, unit: float) -> Tensor:
        """Return S/unit as a new matrix, shape (n, n), float64.

        Args:
            unit: A power of two.

        Memory:
            8 n² bytes, and of a structured side 16 MiB.
        """
        if self.side.kind != "dense":
            return self.side.to_dense(torch.float64).to("cpu") / unit
        rows = self.side.panel(slice(0, self.side.size), unit)
        return torch.diag(rows) if self.side.is_diagonal else rows


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixPair:
    """Two factors of one layer in common coordinates; in ``outside`` further directions both are zero."""

    first: Symmetric
    second: Symmetric
    size: int
    """n, of the factors themselves."""
    unit: float
    """Power of two near the largest number of both diagonals; what is computed is divided by it."""
    traces: tuple[float, float]
    """In absolute numbers."""
    unknown: str | None = None
    """Why nothing but the traces is known."""

    @property
    def outside(self) -> int:
        """Directions, n − r of them, beyond the common coordinates."""
        return self.size - self.first.side.size

    @property
    def is_diagonal(self) -> bool:
        """Whether both are held as their diagonals."""
        return self.first.side.is_diagonal and self.second.side.is_diagonal

    @property
    def is_dense(self) -> bool:
        """Whether both are matrices or diagonals, of which all can be computed."""
        return self.first.side.kind == self.second.side.kind == "dense"

    def panels(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the rows of both, a few at a time: each (b, r), or (b,) of diagonals, float64, in ``unit``."""
        rows = self.first.side.size
        height = rows if self.is_diagonal else max(1, PANEL_NUMBERS // (8 * rows))
        for start in range(0, rows, height):
            span = slice(start, min(start + height, rows))
            yield self.first.side.panel(span, self.unit), self.second.side.panel(span, self.unit)


def pair_of(first: Symmetric, second: Symmetric, layer: str, guard: Guard) -> MatrixPair:
    """Bring two factors into common coordinates.

    Memory:
        Of two sides kept as gradient rows, three times the rows of both in float64; a structured side beside a dense
        one, and one of up to 8192 rows, as a matrix in float64.
    """
    traces, size = (first.side.trace(), second.side.trace()), first.side.size
    pair = MatrixPair(first=first, second=second, size=size, unit=_unit(first, second), traces=traces)
    for each, which in ((first, "first set"), (second, "set compared with")):
        side = each.side
        if side.approximate or not side.complete:
            kept = "a sketch of it" if side.complete else "its diagonal"
            reason = f"of the {which}'s G only {kept} is kept (`{side.kind}`): nothing but its trace is known"
            return replace(pair, unknown=reason)
    rows = [each.side for each in (first, second) if isinstance(each.side, LowRank)]
    if len(rows) == 2 and sum(each.count for each in rows) < size:
        taken = 24 * size * sum(each.count for each in rows)
        return guarded(lambda: _compressed(pair, rows[0], rows[1]), taken, "3 · n · (T₁ + T₂) · 8", layer, guard)
    large = size > DENSE_ROWS and "dense" not in (first.side.kind, second.side.kind)
    if (pair.is_dense and first.side.is_diagonal == second.side.is_diagonal) or (large and len(rows) < 2):
        return pair
    return guarded(lambda: _made_dense(pair), 3 * 8 * size**2, "3 · n² · 8", layer, guard)


def guarded(work: Callable[[], T], host_bytes: int, formula: str, layer: str, guard: Guard) -> T:
    """Do a piece of the comparison once its memory is known to be free."""
    only = Fallback(name="host_float64", formula=formula, device_bytes=0, host_bytes=host_bytes, run=work)
    try:
        return guard.run_with_fallbacks([only], what="the comparison", layer=layer, stage=STAGE).value
    except FallbackFailed as error:
        raise NotConverged(f"layer `{layer}`: {error}", layer=layer) from error


def _unit(first: Symmetric, second: Symmetric) -> float:
    largest = max(float(each.side.diagonal().abs().max()) for each in (first, second))
    return 2.0 ** math.frexp(largest)[1] if sys.float_info.min <= largest <= sys.float_info.max / 4 else 1.0


def _compressed(pair: MatrixPair, first: LowRank, second: LowRank) -> MatrixPair:
    rows = [first.scaled(torch.float64).to("cpu"), second.scaled(torch.float64).to("cpu")]
    if rows[0].shape == rows[1].shape and torch.equal(rows[0], rows[1]):
        # else the same rows would come out different by rounding
        triangle = torch.linalg.qr(rows[0].mT, mode="r").R
        parts = [triangle, triangle]
    else:
        triangle = torch.linalg.qr(torch.cat(rows).mT, mode="r").R
        parts = [triangle[:, : first.count], triangle[:, first.count :]]
    made = [
        Symmetric(
            side=Dense(stored=(part @ part.mT) / pair.unit, scale=pair.unit),
            rank_bound=_least(each.rank_bound, own.count),
            stored=own.storage_dtype,
        )
        for part, each, own in zip(parts, (pair.first, pair.second), (first, second), strict=True)
    ]
    return replace(pair, first=made[0], second=made[1])


def _made_dense(pair: MatrixPair) -> MatrixPair:
    made = [
        Symmetric(
            side=Dense(stored=each.dense(pair.unit), scale=pair.unit),
            rank_bound=each.rank_bound,
            stored=each.side.storage_dtype,
        )
        for each in (pair.first, pair.second)
    ]
    return replace(pair, first=made[0], second=made[1])


def _least(bound: int | None, rows: int) -> int:
    return rows if bound is None else min(bound, rows)
