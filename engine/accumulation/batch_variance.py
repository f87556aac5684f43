"""Batch variance: how far the factors of single batches scatter about the factor of all, by Welford's recurrence.

A batch b whose sum is ``T_b`` and whose count is ``w_b`` (positions, examples or loss terms, as the factor's own
divisor) has the factor ``A_b = T_b / w_b``. With ``W`` the counts so far and ``M`` the mean of the batches before b,

    S ← S + w_b (1 − w_b / W) ‖A_b − M‖²_F        S = Σ w_b ‖A_b − A‖²_F,  A = Σ w_b A_b / Σ w_b

where A is the factor itself. A batch's own sum is made apart from those before it, so that nothing cancels. Under a
moving average each batch has the weight ``c_b = β^k w_b``, and S decays with it.

Batches may be unequal: the last one, or any with padding. If a mean over w_b has the variance ``σ²/w_b``, then with
``P = Σ c_b / w_b`` and ``Q = Σ c_b² / w_b`` (the number of batches and W, where nothing decays)

    σ² = S / (P − Q/W)        variance of a batch of mean size = σ² P / W        standard error of A = σ √Q / W

For equal batches these are ``Σ ‖A_b − A‖² / (B − 1)`` and its root over √B. Both are given relative to ‖A‖_F.

References:
    Welford (1962), Note on a method for calculating corrected sums of squares and products
    West (1979), Updating mean and variance estimates: an improved method (weights)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from engine.accumulation.sums import Sums
from engine.factors.factor_set import VarianceSums
from engine.layers.layer import TreatedLayer
from engine.layers.tied import TiedHeadLayer
from engine.linalg.eigendecomposition import is_diagonal
from engine.merging.estimates import missing_variance, relative_variance

NUMBERS_AT_ONCE = 2**18
"""Numbers of a sum that are widened to float64 together."""


@dataclass(frozen=True, kw_only=True)
class RelativeVariance:
    """The variance of one factor over batches."""

    variance: float | None = None
    """Variance of the factor of one batch, ``E‖A_b − A‖² / ‖A‖²``."""
    standard_error: float | None = None
    """Standard error of the factor of all batches, relative to ‖A‖."""
    why: str | None = None
    """The reason why the two are None."""


@dataclass(eq=False)
class BatchVariance(Sums):
    """The running variance of one side of a layer, or of each of its groups.

    Sums are (n,), (n, n) or (groups, n, n), and None where the layer has none of its own; their weight is their count.

    Memory:
        A second set of the side's sums while the pass is under way; 6 MiB for a moment.
    """

    NOT_SAVED: ClassVar[Mapping[str, str]] = {"before": "between two batches nothing is set aside"}
    DECAYED: ClassVar[Sequence[str]] = ("squares", "counts")
    JOINED: ClassVar[Mapping[str, Callable[[Sequence[Any]], Any]]] = dict.fromkeys(
        ("batches", "counts", "weights"), sum
    )

    before: Tensor | None = None
    """Sums of the batches before the one under way; None where no variance is gathered."""
    squares: Tensor | None = None
    """(groups,) float64: S."""
    batches: int = 0
    """Batches that had a factor of their own."""
    counts: float = 0.0
    """P."""
    weights: float = 0.0
    """Q."""
    weight_before: float = 0.0
    """W of the batches before the one under way."""
    totals: list[float | None] = field(default_factory=list)
    """S of each group, once the pass is done."""
    variances: list[float | None] = field(default_factory=list)
    """Relative variance of each group, once the pass is done."""
    standard_errors: list[float | None] = field(default_factory=list)
    """Relative standard error of each group, once the pass is done."""

    @classmethod
    def of(cls, sums: Tensor) -> Self:
        """Begin the variance of sums that are zeroed, with room for a second set of them."""
        groups = sums.shape[0] if sums.ndim == 3 else 1
        squares = torch.zeros(groups, dtype=torch.float64, device=sums.device)
        return cls(before=torch.zeros_like(sums), squares=squares)

    def begin_(self, sums: Tensor | None, weight: float) -> None:
        """Set the sums so far aside and zero them, so that the next batch is summed by itself."""
        if self.before is not None and sums is not None:
            self.before.copy_(sums)
            sums.zero_()
            self.weight_before = weight

    def end_(self, sums: Tensor | None, weight: float) -> None:
        """Let one batch enter the variance, and add to its sums, in place, those that were set aside.

        The weight is that of all batches, this one included.
        """
        if self.before is None or self.squares is None or sums is None:
            return
        own, past = weight - self.weight_before, self.weight_before
        if own > 0:
            if past > 0:
                self.squares += own * (past / weight) * squared_norms(sums, 1 / own, self.before, 1 / past)
            self.batches += 1
            self.counts += 1.0
            self.weights += own
        sums += self.before

    @override
    def decay_(self, past: float) -> None:
        super().decay_(past)
        self.weights *= past**2

    def end_pass_(self, sums: Tensor | None, weight: float) -> None:
        """Turn the sums of squares into relative variances, given the sums of all batches, and drop the second set."""
        if self.before is None or self.squares is None or sums is None:
            return
        self.before = None
        norms = squared_norms(sums, 1 / (weight or 1.0)).tolist()
        for squares, norm in zip(self.squares.tolist(), norms, strict=True):
            own = VarianceSums(squares=squares, batches=self.batches, weights=self.weights)
            variance, error = relative_variance(own, self.counts, weight, norm)
            self.totals.append(squares)
            self.variances.append(variance)
            self.standard_errors.append(error)
        self.squares = None

    def sums(self, group: int) -> VarianceSums | None:
        """Return the sums of a group once the pass is done; None where no variance was gathered, or it overflows."""
        squares = self.totals[group] if group < len(self.totals) else None
        if squares is None or not math.isfinite(squares):
            return None
        return VarianceSums(squares=squares, batches=self.batches, weights=self.weights)

    def relative(self, group: int, why_not: str | None) -> RelativeVariance:
        """Return the variance of one group, or why there is none; ``why_not`` is None where one was gathered."""
        if why_not is not None or group >= len(self.variances):
            return RelativeVariance(why=why_not or "it was never summed")
        if self.variances[group] is None:
            return RelativeVariance(why=missing_variance(self.batches))
        return RelativeVariance(variance=self.variances[group], standard_error=self.standard_errors[group])


def activation_refusal(layer: TreatedLayer) -> str | None:
    """Return the reason why the A of a layer has no variance over batches; None where it has one."""
    if isinstance(layer, TiedHeadLayer):
        return "A and G are those of the product nearest to the sum of two"
    return "A is 1 in this form" if layer.form in ("block", "diagonal_block") else None


def gradient_refusal(layer: TreatedLayer, kept: str, fisher: str) -> str | None:
    """Return the reason why the G of a layer has no variance over batches; None where it has one.

    ``kept`` is `dense`, or the kind of what stands for G; ``fisher`` is the collection's.
    """
    if isinstance(layer, TiedHeadLayer):
        return activation_refusal(layer)
    if fisher == "forward_only":
        return "`forward_only` sets G to the identity"
    if kept != "dense":
        return f"no sum of it is made ({kept}); `woodbury.policy: dense` makes one"
    return None


def squared_norms(sums: Tensor, scale: float, other: Tensor | None = None, other_scale: float = 0.0) -> Tensor:
    """Return ``‖scale · sums − other_scale · other‖²`` of each group, (groups,) float64 on their device.

    Sums are a diagonal (n,), or symmetric (n, n) or (groups, n, n) of which only the upper triangle is read; ``other``
    has their shape.
    """
    if is_diagonal(sums):
        found = sums.new_zeros(1, dtype=torch.float64)
        for start in range(0, sums.shape[0], NUMBERS_AT_ONCE):
            part = slice(start, start + NUMBERS_AT_ONCE)
            found += _difference(sums[part], scale, None if other is None else other[part], other_scale).square_().sum()
        return found
    matrices = sums.view(-1, *sums.shape[-2:])
    others = None if other is None else other.view(-1, *other.shape[-2:])
    groups, size, _ = matrices.shape
    found = sums.new_zeros(groups, dtype=torch.float64)
    height = max(1, NUMBERS_AT_ONCE // max(groups * size, 1))
    for start in range(0, size, height):
        stop = min(start + height, size)
        rows = None if others is None else others[:, start:stop, start:]
        squares = _difference(matrices[:, start:stop, start:], scale, rows, other_scale).square_()
        found += squares.diagonal(dim1=-2, dim2=-1).sum(-1) + 2 * squares.triu_(1).sum((-2, -1))
    return found


def _difference(sums: Tensor, scale: float, other: Tensor | None, other_scale: float) -> Tensor:
    found = sums.to(torch.float64, copy=True).mul_(scale)
    return found if other is None else found.sub_(other.to(torch.float64), alpha=other_scale)
