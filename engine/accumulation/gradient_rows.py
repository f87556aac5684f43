"""Gradient rows: the rows that enter G, kept one by one instead of summed, while a layer is collected.

Rows come in the order in which the batches bring them. Where more come than G has rows itself, a QR
factorisation replaces n of them, and the triangle before, by the triangle R with the same sum,
``RᵀR = UᵀU``: exact, and bounded by n rows. R stays in the precision of the sums until the end,
or what storing it rounds off would add up. A moving average weighs the past by ``√β`` each time:
rows by their scales, R itself.

Probability rows are the outputs of a softmax head at each loss term instead. They come from the forward pass that
everything else comes from, and stand for the mean over labels of what gradients sample; a moving average weighs the
past by the terms' weights.

References:
    Golub & Van Loan (2013), Matrix computations, 6.5.2: updating a QR factorisation by rows
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from engine.accumulation.sums import Sums
from engine.factors.kronecker_factors import HOST
from engine.factors.low_rank import LowRank, scaled_rows
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.linalg.gram import require_real
from engine.linalg.linear_operator import Structured
from engine.memory.host_accumulation import Staging

_NUMBERS_AT_ONCE = 2**21


@dataclass(frozen=True, kw_only=True)
class RowStorage:
    """The memory in which the rows of one layer are kept."""

    capacity: int
    """Rows of each group that are foreseen."""
    dtype: torch.dtype
    """Precision of the rows."""
    working: torch.dtype
    """Precision in which rows are merged."""
    arrive: torch.device
    """Device on which the rows arrive."""
    stand: torch.device
    """Device on which they are kept."""
    staging: Staging | None = None
    """The way from one to the other, where they differ."""


@dataclass(eq=False)
class GradientRows(Sums):
    """The rows of one layer, or of each of its groups.

    Memory:
        (groups, capacity, n) numbers in the storage dtype; where more than n rows come, n² of each group in the
        sums' precision, and while they are made one 4 n² of one group.
    """

    NOT_SAVED: ClassVar[Mapping[str, str]] = {
        "working": "an option of the collection",
        "staging": "a way to the host, empty between two batches",
        "grams": "made when a pass has ended on all ranks, and kept with the factors",
    }

    rows: Tensor
    """(groups, capacity, n); what lies beyond ``count`` means nothing."""
    scales: Tensor
    """(groups, capacity) float64, where gradients arrive."""
    largest: Tensor
    """(groups, n) float64: the largest number of each column so far, where gradients arrive; NaN and Inf stay."""
    working: torch.dtype
    """Precision in which rows are made one."""
    triangle: Tensor | None = None
    """(groups, n, n) R of the rows that were made one; None where none were."""
    staging: Staging | None = None
    """How rows reach the host, where they stand there and arrive elsewhere."""
    count: int = 0
    grams: Tensor | None = None
    """(groups, count·(count+1)/2) float64 on the host: upper triangles of the Gram matrices of the scaled rows, where
    several ranks have summed them."""

    @classmethod
    def empty(cls, groups: int, size: int, storage: RowStorage) -> Self:
        """Allocate room for rows of n numbers (``size``), no more than n of a group, without any entry."""
        room = min(storage.capacity, size)
        return cls(
            rows=torch.empty(groups, room, size, dtype=storage.dtype, device=storage.stand),
            scales=torch.ones(groups, room, dtype=torch.float64, device=storage.arrive),
            largest=torch.zeros(groups, size, dtype=torch.float64, device=storage.arrive),
            working=storage.working,
            staging=storage.staging,
        )

    @property
    def size(self) -> int:
        """Rows and columns of G."""
        return self.rows.shape[2]

    def add_(self, rows: Tensor) -> None:
        """Keep gradients (P, groups · n), any float dtype, where they arrive; ``TypeError`` if they are complex."""
        require_real(rows)
        for start in range(0, rows.shape[0], self.size):
            piece = rows[start : start + self.size]
            if self.count + piece.shape[0] > self.size:
                self.merge_()
            self._make_room_(self.count + piece.shape[0])
            self._keep_(piece.view(piece.shape[0], -1, self.size))

    @override
    def decay_(self, past: float) -> None:
        # rows enter as their squares
        super().decay_(past)
        self.scales[:, : self.count] *= math.sqrt(past)
        if self.triangle is not None:
            self.triangle *= math.sqrt(past)

    def finished(
        self, weight: float, wide: torch.dtype | None = None, place: torch.device = HOST
    ) -> Sequence[Structured]:
        """Make each group's G, a structured side; the rows are of no further use here.

        Args:
            weight: Loss terms that G is divided by.
            wide: Precision of rows that were made one; None is that of all rows.
            place: Where the rows are to stand, of a kind that can stand elsewhere than on the host.
        """
        if self.triangle is not None:
            self.merge_()
            found = []
            for triangle in self.triangle:
                rows, scales = scaled_rows(triangle, wide or self.rows.dtype)
                found.append(LowRank(rows=rows.to(place), scales=scales.to(place), weight=weight))
            return found
        rows = self.rows[:, : self.count].to(place)
        scales = self.scales[:, : self.count].to(place)
        grams = [None] * len(rows) if self.grams is None else list(self.grams.div_(weight))
        return [
            LowRank(rows=own, scales=beside, weight=weight, known_gram=gram)
            for own, beside, gram in zip(rows, scales, grams, strict=True)
        ]

    @override
    def state(self) -> dict[str, Any]:
        return {**super().state(), "rows": self.rows[:, : self.count], "scales": self.scales[:, : self.count]}

    @override
    def put(self, entry: str, value: Any, device: torch.device) -> None:
        super().put(entry, value, self.rows.device)

    def _keep_(self, rows: Tensor) -> None:
        """Append ``rows`` (P, groups, n)."""
        start, stop = self.count, self.count + rows.shape[0]
        if rows.numel():
            # a NaN is the maximum of whatever it is compared with
            columns = torch.linalg.vector_norm(rows, math.inf, dim=0).to(torch.float64)
            self.largest = torch.maximum(self.largest, columns)
        for group, own in enumerate(rows.unbind(1)):
            stored, scales = scaled_rows(own, self.rows.dtype)
            self.scales[group, start:stop] = scales
            target = self.rows[group, start:stop]
            if self.staging is None:
                target.copy_(stored)
            else:
                self.staging.copy_(target, stored.contiguous())
        self.count = stop

    def _make_room_(self, wanted: int) -> None:
        room = self.rows.shape[1]
        if wanted <= room:
            return
        if self.staging is not None:
            self.staging.settle()
        # more came than was foreseen: a quarter more at a time
        room = max(wanted, min(room + room // 4, self.size))
        rows = self.rows.new_empty(self.rows.shape[0], room, self.size)
        rows[:, : self.count] = self.rows[:, : self.count]
        scales = self.scales.new_ones(self.scales.shape[0], room)
        scales[:, : self.count] = self.scales[:, : self.count]
        self.rows, self.scales = rows, scales

    def merge_(self) -> None:
        """Let the triangle take in all rows."""
        if self.staging is not None:
            self.staging.settle()
        held, self.count = self.count, 0
        before = 0 if self.triangle is None else self.size
        if self.triangle is None:
            shape = self.rows.shape[0], self.size, self.size
            self.triangle = torch.zeros(shape, dtype=self.working, device=self.rows.device)
        for group, made in enumerate(self.triangle):
            wide = torch.empty(before + held, self.size, dtype=self.working, device=self.scales.device)
            wide[:before] = made[:before]
            wide[before:].copy_(self.rows[group, :held]).mul_(self.scales[group, :held, None])
            upper = torch.linalg.qr(wide, mode="r").R
            del wide
            made[: upper.shape[0]] = upper


@dataclass(frozen=True)
class Terms:
    """Loss terms of one batch that count, in the order of its examples."""

    example: Tensor
    """(P,)"""
    term: Tensor
    """(P,) of its example."""
    weights: Tensor
    """ω (P,) float64."""
    squares: Tensor | None
    """(P,) float64 ``‖[a 1]‖²`` of what entered the head, where the exact trace is wanted."""


@dataclass(eq=False)
class ProbabilityRows(GradientRows):
    """Rows of one head; a row's scale is the weight of its loss term, and the row is as good as any multiple of it.

    Memory:
        (capacity, V) numbers in the storage dtype, and more where more come than were foreseen.
    """

    def add_terms_(self, logits: Tensor, terms: Terms) -> Tensor:  # (N, R, V) -> (P,)
        """Keep the probabilities of P loss terms, by the head's outputs (N, R, V).

        Returned is the trace of each term's Fisher, ``ω (1 − ‖p‖²)``, (P,) float64. It takes a few times 2 Mi numbers.
        """
        traces = torch.empty_like(terms.weights)
        for span, probabilities in chunks(logits, terms):
            traces[span] = _spread(probabilities) * terms.weights[span]
            first = self.count
            self._make_room_(first + probabilities.shape[0])
            self._keep_(probabilities[:, None])
            self.scales[0, first : self.count] = terms.weights[span]
        return traces

    def add_(self, rows: Tensor) -> None:
        """Do nothing: probabilities are kept here, not gradients."""

    @override
    def decay_(self, past: float) -> None:
        self.scales[:, : self.count] *= past

    @override
    def finished(
        self, weight: float, wide: torch.dtype | None = None, place: torch.device = HOST
    ) -> Sequence[SoftmaxFisher]:
        del wide, place
        rows, weights = self.rows[0, : self.count].to("cpu"), self.scales[0, : self.count].to("cpu")
        return [SoftmaxFisher(rows=rows, weights=weights / weight)]


def chunks(logits: Tensor, terms: Terms) -> Iterator[tuple[slice, Tensor]]:
    """Yield the probabilities of some loss terms, a few at a time, by the head's outputs (N, R, V), in any precision.

    Each comes as a slice of the terms with their probabilities (p, V), in float32 or wider.
    """
    height = max(1, _NUMBERS_AT_ONCE // logits.shape[-1])
    for start in range(0, terms.weights.shape[0], height):
        span = slice(start, min(start + height, terms.weights.shape[0]))
        # half precision would round what the loss itself computes in float32
        dtype = torch.promote_types(logits.dtype, torch.float32)
        yield span, torch.softmax(logits[terms.example[span], terms.term[span]], -1, dtype=dtype)


def _spread(probabilities: Tensor) -> Tensor:
    """``Σ p (1 − p)`` of each row, float64, from the sum of the others: ``1 − p`` has no digits where p is near one."""
    wide = probabilities.to(torch.float64)
    return (wide * (wide.sum(1, keepdim=True) - wide)).sum(1)
