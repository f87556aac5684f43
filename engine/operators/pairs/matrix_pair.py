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
from engine.factors.low_rank import LowRank
from engine.linalg.linear_operator import Structured
from engine.linalg.panels import PANEL_NUMBERS
from engine.memory.guard import Fallback, FallbackFailed, Guard

DENSE_ROWS = 8192
"""Up to here a structured side other than gradient rows is made dense: 512 MiB in float64."""
STAGE = "compare_curvature"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Symmetric:
    """One positive semidefinite factor S of a set, on the host."""

    content: Tensor | Structured
    """(n, n), a diagonal (n,), or a side that is never made dense, as it is stored."""
    scale: float = 1.0
    """Power of two that the stored tensor is to be multiplied by."""
    rank_bound: int | None = None
    """Most nonzero eigenvalues there can be; None where that is not known."""
    stored: torch.dtype | None = None
    """Precision that S was rounded to when it was stored; None is that of ``content``."""

    @property
    def size(self) -> int:
        """Rows and columns of S."""
        return self.content.size if isinstance(self.content, Structured) else self.content.shape[0]

    @property
    def is_diagonal(self) -> bool:
        """Whether S is held as its diagonal."""
        return not isinstance(self.content, Structured) and self.content.ndim == 1

    @property
    def epsilon(self) -> float:
        """Distance of 1 and the next number in the precision that S was stored in."""
        content = self.content
        dtype = content.storage_dtype if isinstance(content, Structured) else content.dtype
        return float(torch.finfo(self.stored or dtype).eps)

    def diagonal(self) -> Tensor:
        """Return the diagonal of S, shape (n,), float64."""
        if isinstance(self.content, Structured):
            return self.content.diagonal()
        found = self.content if self.content.ndim == 1 else self.content.diagonal()
        return found.to(torch.float64) * self.scale

    def trace(self) -> float:
        """Return the sum of the diagonal; of a sketch the exact one."""
        return self.content.trace() if isinstance(self.content, Structured) else float(self.diagonal().sum())

    def rows(self, span: slice, unit: float) -> Tensor:
        """Return some rows of S/unit.

        Args:
            span: Which rows, b of them.
            unit: A power of two.

        Returns:
            Shape (b, n), or (b,) of a diagonal, float64.
        """
        if not isinstance(self.content, Structured):
            return self.content[span].to(torch.float64) * (self.scale / unit)
        columns = torch.zeros(self.size, span.stop - span.start, dtype=torch.float64)
        columns[span] = torch.eye(span.stop - span.start, dtype=torch.float64)
        return self.content.apply(columns).mT / unit

    def dense(self, unit: float) -> Tensor:
        """Return S/unit as a new matrix, shape (n, n), float64.

        Args:
            unit: A power of two.

        Memory:
            8 n² bytes, and of a structured side 16 MiB.
        """
        if isinstance(self.content, Structured):
            return self.content.to_dense(torch.float64).to("cpu") / unit
        if self.content.ndim == 1:
            return torch.diag(self.rows(slice(0, self.size), unit))
        return self.rows(slice(0, self.size), unit)


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
        return self.size - self.first.size

    @property
    def is_diagonal(self) -> bool:
        """Whether both are held as their diagonals."""
        return self.first.is_diagonal and self.second.is_diagonal

    @property
    def is_dense(self) -> bool:
        """Whether both are matrices or diagonals, of which all can be computed."""
        return not any(isinstance(each.content, Structured) for each in (self.first, self.second))

    def panels(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the rows of both, a few at a time: each (b, r), or (b,) of diagonals, float64, in ``unit``."""
        rows = self.first.size
        height = rows if self.is_diagonal else max(1, PANEL_NUMBERS // (8 * rows))
        for start in range(0, rows, height):
            span = slice(start, min(start + height, rows))
            yield self.first.rows(span, self.unit), self.second.rows(span, self.unit)


def pair_of(first: Symmetric, second: Symmetric, layer: str, guard: Guard) -> MatrixPair:
    """Bring two factors into common coordinates.

    Memory:
        Of two sides kept as gradient rows, three times the rows of both in float64; a structured side beside a dense
        one, and one of up to 8192 rows, as a matrix in float64.
    """
    traces = first.trace(), second.trace()
    pair = MatrixPair(first=first, second=second, size=first.size, unit=_unit(first, second), traces=traces)
    for each, which in ((first, "first set"), (second, "set compared with")):
        side = each.content
        if isinstance(side, Structured) and (side.approximate or not side.complete):
            kept = "a sketch of it" if side.complete else "its diagonal"
            reason = f"of the {which}'s G only {kept} is kept (`{side.kind}`): nothing but its trace is known"
            return replace(pair, unknown=reason)
    rows = [each.content for each in (first, second) if isinstance(each.content, LowRank)]
    if len(rows) == 2 and sum(each.count for each in rows) < first.size:
        taken = 24 * first.size * sum(each.count for each in rows)
        return guarded(lambda: _compressed(pair, rows[0], rows[1]), taken, "3 · n · (T₁ + T₂) · 8", layer, guard)
    large = first.size > DENSE_ROWS and not any(isinstance(each.content, Tensor) for each in (first, second))
    if (pair.is_dense and first.is_diagonal == second.is_diagonal) or (large and len(rows) < 2):
        return pair
    return guarded(lambda: _made_dense(pair), 3 * 8 * first.size**2, "3 · n² · 8", layer, guard)


def guarded(work: Callable[[], T], host_bytes: int, formula: str, layer: str, guard: Guard) -> T:
    """Do a piece of the comparison once its memory is known to be free."""
    only = Fallback(name="host_float64", formula=formula, device_bytes=0, host_bytes=host_bytes, run=work)
    try:
        return guard.run_with_fallbacks([only], what="the comparison", layer=layer, stage=STAGE).value
    except FallbackFailed as error:
        raise NotConverged(f"layer `{layer}`: {error}", layer=layer) from error


def _unit(first: Symmetric, second: Symmetric) -> float:
    largest = max(float(each.diagonal().abs().max()) for each in (first, second))
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
            content=(part @ part.mT) / pair.unit,
            scale=pair.unit,
            rank_bound=_least(each.rank_bound, own.count),
            stored=own.storage_dtype,
        )
        for part, each, own in zip(parts, (pair.first, pair.second), (first, second), strict=True)
    ]
    return replace(pair, first=made[0], second=made[1])


def _made_dense(pair: MatrixPair) -> MatrixPair:
    made = [
        Symmetric(
            content=each.dense(pair.unit),
            scale=pair.unit,
            rank_bound=each.rank_bound,
            stored=each.content.storage_dtype if isinstance(each.content, Structured) else each.content.dtype,
        )
        for each in (pair.first, pair.second)
    ]
    return replace(pair, first=made[0], second=made[1])


def _least(bound: int | None, rows: int) -> int:
    return rows if bound is None else min(bound, rows)
