"""Sketch rows: the exact diagonal of a G that does not fit, and a sketch of its rows with a known error.

Frequent directions: rows fill a buffer of 2ℓ. When it is full, the eigenvalues ``σ²`` of its Gram matrix
are lowered by the (ℓ+1)-th largest, δ, which leaves ℓ rows ``√(1 − δ/σ_i²) v_iᵀ B``. What is taken off
lies between 0 and δ in every direction, so the sum of all δ bounds the whole error, whatever the order
of the rows; ℓ rows or fewer are kept exactly. What is left is rounded each time, and were all rows in a space of
ℓ dimensions, that would be the whole error: a bound of it is in the sum too.

References:
    Ghashami, Liberty, Phillips & Woodruff (2016), Frequent directions: simple and deterministic matrix sketching
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from engine.accumulation.gradient_rows import GradientRows, Terms, chunks
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.kronecker_factors import HOST
from engine.linalg.gram import require_real

_NUMBERS_AT_ONCE = 2**21
_SHORTENED = 1 - 2.0**-20
"""Factor of a subtracted sketch, so that rounding leaves the difference positive semidefinite."""


@dataclass(eq=False, kw_only=True)
class SketchRows(GradientRows):
    """Diagonal and sketch of one layer, or of each of its groups.

    Memory:
        (groups, 2ℓ, n) numbers in the sums' precision, and 2n in float64; while it is lowered, 4ℓ² and 32 MiB more.
    """

    NOT_SAVED: ClassVar[Mapping[str, str]] = {
        **GradientRows.NOT_SAVED,
        "rank": "it follows from the plan",
        "of_terms": "it follows from the plan",
    }

    DECAYED: ClassVar[Sequence[str]] = ("diagonals", "means", "lowered")

    rank: int
    """ℓ; none but the diagonal where it is 0."""
    of_terms: bool
    """Rows are probabilities, whose outer products are subtracted from their mean."""
    diagonals: Tensor
    """(groups, n) float64 sums of the diagonal."""
    means: Tensor
    """(groups, n) float64 sums of the probabilities."""
    lowered: Tensor
    """(groups,) float64 sum of all δ, and of what rounding may have moved."""

    @classmethod
    def sketching(
        cls, groups: int, size: int, rank: int, dtype: torch.dtype, device: torch.device, *, of_terms: bool
    ) -> Self:
        """Allocate the empty sums of a G (n, n) that is sketched by ``rank`` rows; 0 keeps the diagonal alone.

        ``of_terms``: probabilities enter, whose outer products are subtracted from their mean.
        """
        return cls(
            rows=torch.zeros(groups, 2 * rank, size, dtype=dtype, device=device),
            scales=torch.ones(groups, 2 * rank, dtype=torch.float64, device=device),
            largest=torch.zeros((), dtype=torch.float64, device=device),
            working=dtype,
            rank=rank,
            of_terms=of_terms,
            diagonals=torch.zeros(groups, size, dtype=torch.float64, device=device),
            means=torch.zeros(groups, size, dtype=torch.float64, device=device),
            lowered=torch.zeros(groups, dtype=torch.float64, device=device),
        )

    @override
    def add_(self, rows: Tensor) -> None:
        if self.of_terms:
            return
        require_real(rows)
        diagonals = self.diagonals
        height = max(1, _NUMBERS_AT_ONCE // max(rows.shape[1], 1))
        for start in range(0, rows.shape[0], height):
            piece = rows[start : start + height]
            diagonals += piece.to(torch.float64).square().sum(0).view_as(diagonals)
            self.enter_(piece.view(piece.shape[0], -1, self.size))

    def add_terms_(self, logits: Tensor, terms: Terms) -> Tensor:  # (N, R, V) -> (P,)
        """Let the probabilities of some loss terms enter; returns their traces, as ``ProbabilityRows.add_terms_``."""
        traces = torch.empty_like(terms.weights)
        for span, probabilities in chunks(logits, terms):
            wide, weights = probabilities.to(torch.float64), terms.weights[span, None]
            spread = wide * (wide.sum(1, keepdim=True) - wide) * weights
            traces[span] = spread.sum(1)
            self.diagonals[0] += spread.sum(0)
            self.means[0] += (wide * weights).sum(0)
            self.enter_((wide * weights.sqrt()).to(self.rows.dtype)[:, None])
        return traces

    @override
    def finished(
        self, weight: float, wide: torch.dtype | None = None, place: torch.device = HOST
    ) -> Sequence[DiagonalSketch]:
        del wide, place
        if self.count > self.rank:
            self.merge_()
        sides = []
        for group, diagonal in enumerate((self.diagonals / weight).cpu()):
            if self.rank == 0:
                sides.append(DiagonalSketch(exact_diagonal=diagonal))
                continue
            rows = self._wide(group, slice(None)) / weight**0.5
            bound = float(self.lowered[group]) / weight
            if self.of_terms:
                bound += (
                    (1 - _SHORTENED**2) * float(torch.linalg.matrix_norm((rows @ rows.T).cpu(), 2))
                    if self.count
                    else 0.0
                )
                rows *= _SHORTENED
                base = (self.means[group] / weight).cpu()
            else:
                base = (diagonal - rows.square().sum(0).cpu()).clamp_min_(0)
            kept = rows.to("cpu", self.rows.dtype)
            sides.append(
                DiagonalSketch(exact_diagonal=diagonal, base=base, rows=kept, subtracts=self.of_terms, bound=bound)
            )
        return sides

    def enter_(self, rows: Tensor) -> None:
        """Append rows (P, groups, n), in the precision of the sketch, whose diagonal is left as it is."""
        start = 0
        if self.rank == 0:
            self.largest = torch.maximum(self.largest, rows.abs().amax().to(torch.float64))
            return
        while start < rows.shape[0]:
            if self.count == 2 * self.rank:
                self.merge_()
            stop = min(rows.shape[0], start + 2 * self.rank - self.count)
            self._keep_(rows[start:stop])
            start = stop

    @override
    def merge_(self) -> None:
        held, self.count = self.count, self.rank
        width = max(1, _NUMBERS_AT_ONCE // (2 * self.rank))
        for group in range(self.rows.shape[0]):
            gram = self.diagonals.new_zeros(held, held)
            for start in range(0, self.size, width):
                part = self._wide(group, slice(start, start + width), held)
                gram.addmm_(part, part.T)
            # small ones are slow on a device, which would be waited for besides
            values, vectors = (found.to(gram.device) for found in torch.linalg.eigh(gram.cpu()))
            values, vectors = values.clamp_min(0).flip(0), vectors.flip(1)
            lowest = values[self.rank]
            # rounded once as they entered and once as they are left, a row moves by 2u of its length each time
            rounded = 2 * torch.finfo(self.rows.dtype).eps * (values[0] * values.sum()).sqrt()
            self.lowered[group] += lowest + rounded
            kept = values[: self.rank]
            shrunk = (1 - lowest / torch.where(kept > 0, kept, 1.0)).clamp_min(0).sqrt()
            turn = (vectors[:, : self.rank] * shrunk).T
            for start in range(0, self.size, width):
                columns = slice(start, start + width)
                part = turn @ self._wide(group, columns, held)
                self.rows[group, : self.rank, columns] = part.to(self.rows.dtype)
            self.scales[group, : self.rank] = 1

    def _wide(self, group: int, columns: slice, held: int | None = None) -> Tensor:
        """Rows of the sketch with their scales, float64."""
        count = self.count if held is None else held
        rows = self.rows[group, :count, columns].to(torch.float64)
        return rows * self.scales[group, :count, None]
