"""Probability rows: the outputs of a softmax head at each loss term, kept while the head is collected.

They come from the forward pass that everything else comes from, in the order in which the batches
bring them, and stand for the mean over labels of what gradients sample. A moving average weighs the
past by the terms' weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from engine.accumulation.gradient_rows import GradientRows
from engine.factors.kronecker_factors import HOST
from engine.factors.softmax_fisher import SoftmaxFisher

_NUMBERS_AT_ONCE = 2**21


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
        """Keep the probabilities of some loss terms.

        Args:
            logits: The head's outputs, shape (N, R, V).
            terms: The P loss terms that count.

        Returns:
            The trace of each term's Fisher, ``ω (1 − ‖p‖²)``, shape (P,), float64.

        Memory:
            A few times 2 Mi numbers.
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
        """Do nothing: probabilities are kept here, not gradients.

        Args:
            rows: Gradients, shape (P, V).
        """

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
    """Yield the probabilities of some loss terms, a few at a time.

    Args:
        logits: The head's outputs, shape (N, R, V), in any precision.
        terms: The loss terms that count.

    Returns:
        Which of the terms these are, and their probabilities, shape (p, V), in float32 or wider.
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
