"""Weighted sides: A and G of one layer over several sets of examples, from each set's own.

A factor is a sum over a count, ``A_k = T_k / w_k``, so that over disjoint examples

    A = Σ w_k A_k / Σ w_k,

and G likewise, each with its own counts. Sums are made in float64, one set after the other in the order that is
given, and rounded once. What stands for G is merged in its own form:

    gradient rows     the rows behind each other; more than G has itself are made one by QR, as they are collected
    probabilities     the rows behind each other, their weights in proportion to the counts
    exact diagonal    as any sum; a sketch only where it left nothing out
    head and table    the four terms of the sum by themselves, and the nearest product of them anew

References:
    Golub & Van Loan (2013), Matrix computations, 6.5.2: updating a QR factorisation by rows
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import NotMergeable
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.factor_set import LayerFacts, LayerSums, TiedSums
from engine.factors.kronecker_factors import Factors, TiedParts, to_storage
from engine.factors.low_rank import LowRank, scaled_rows
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.linalg.linear_operator import Structured
from engine.merging.nearest_product import HeadSide, Terms, head_gradient, nearest_product_

_NUMBERS_AT_ONCE = 2**18


@dataclass(frozen=True, kw_only=True)
class Addend:
    """One set's part of one layer."""

    facts: LayerFacts
    sums: LayerSums
    load: Callable[[], Factors]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precisions of a merge."""

    sums: torch.dtype
    """Dtype that the sets were collected in, and the diagonal of a head is kept in."""
    storage: torch.dtype
    """Dtype that factors are kept in."""
    identity: bool = False
    """G is the identity, which the loss has no part in."""


@dataclass(frozen=True, kw_only=True)
class MergedLayer:
    """One layer over all examples."""

    factors: Factors
    tied: TiedSums | None = None
    """Coefficients of the nearest product of head and table; None of any other layer."""
    residual: float = 0.0
    """Residual of that product, relative to the sum."""


def merge_layer(addends: Sequence[Addend], idle: float, precision: Precision) -> MergedLayer:
    """Return one layer's factors over the examples of all sets.

    Memory:
        A and G in float64 and one set's factors; gradient rows of all sets together.
    """
    if addends[0].sums.tied is not None:
        return _merge_tied(addends, idle, precision)
    sums = _Sums(addends, idle)
    for addend in addends:
        sums.add_(addend.sums, addend.load())
    return MergedLayer(factors=sums.finished(precision))


class _Sums:
    """Running sums of one layer."""

    def __init__(self, addends: Sequence[Addend], idle: float) -> None:
        self._facts, self._first = addends[0].facts, addends[0].sums
        self._weight_A = sum(each.sums.weight_A for each in addends)
        self._weight_G = sum(each.sums.weight_G for each in addends) + idle
        self._kinds = {each.facts.representation_G for each in addends}
        _require_one_form(self._facts.name, self._kinds)
        self.A: Tensor | None = None
        self.G: Tensor | None = None
        self.sides: list[tuple[Structured, float]] = []

    def add_(self, sums: LayerSums, factors: Factors) -> None:
        """Add one set's factors."""
        if self._facts.form in ("block", "diagonal_block"):
            self.A = factors.A if self.A is None else self.A
        else:
            self.A = added(self.A, factors.A, sums.weight_A * factors.scale_A)
        side = factors.G
        if isinstance(side, Structured) and len(self._kinds) == 1:
            self.sides.append((side, sums.weight_G))
        elif isinstance(side, Structured):
            # rows here and a sum there: the sum of both is dense
            self.G = added(self.G, side.to_dense(torch.float64), sums.weight_G)
        else:
            self.G = added(self.G, side, sums.weight_G * factors.scale_G)

    def finished(self, precision: Precision) -> Factors:
        """Normalise the sums, and round them once."""
        A, G, facts = self.A, self.G, self._facts
        if A is None:
            raise ValueError("a merge of no set")
        self.A = self.G = None
        if facts.form in ("block", "diagonal_block"):
            kept_A, scale_A = A.to(precision.storage), 1.0
        else:
            kept_A, scale_A = to_storage(A.div_(self._weight_A or 1.0), precision.storage)
        del A
        kept_G: Tensor | Structured
        if G is None:
            kept_G, scale_G = _joined(facts.name, self.sides, self._weight_G or 1.0, self._first.row_dtype), 1.0
        elif precision.identity:
            kept_G, scale_G = torch.eye(G.shape[0], dtype=precision.storage), 1.0
        else:
            kept_G, scale_G = to_storage(G.div_(self._weight_G or 1.0), precision.storage)
        return Factors(
            layer=facts.name,
            form=facts.form,
            bias=facts.bias,
            A=kept_A,
            G=kept_G,
            scale_A=scale_A,
            scale_G=scale_G,
        )


def added(total: Tensor | None, factor: Tensor, weight: float) -> Tensor:
    """Return ``total + weight · factor`` in float64.

    Args:
        total: The sum so far, in float64, which is overwritten; None begins it.
        factor: Shape (n, n), or (n,), of any float dtype, on the host.
        weight: Its count.

    Returns:
        The sum, of the factor's shape, float64.

    Memory:
        2 MiB besides.
    """
    if total is None:
        total = torch.zeros(factor.shape, dtype=torch.float64)
    height = max(1, _NUMBERS_AT_ONCE * factor.shape[0] // max(factor.numel(), 1))
    for start in range(0, factor.shape[0], height):
        part = slice(start, start + height)
        total[part].add_(factor[part].to(torch.float64), alpha=weight)
    return total


def _require_one_form(layer: str, kinds: set[str]) -> None:
    if len(kinds) > 1 and not kinds <= {"dense", "woodbury"}:
        raise NotMergeable(
            f"layer `{layer}`: G is kept as {' and as '.join(sorted(kinds))}, which cannot be merged; collect all "
            "parts with one memory budget",
            layer=layer,
        )


def _joined(layer: str, sides: Sequence[tuple[Structured, float]], weight: float, row_dtype: str | None) -> Structured:
    """The sides of one kind, each with its count, as one."""
    first = sides[0][0]
    if isinstance(first, LowRank):
        return _joined_rows([(side, own) for side, own in sides if isinstance(side, LowRank)], weight, row_dtype)
    if isinstance(first, SoftmaxFisher):
        return _joined_terms([(side, own) for side, own in sides if isinstance(side, SoftmaxFisher)], weight)
    return _joined_diagonals(layer, [(side, own) for side, own in sides if isinstance(side, DiagonalSketch)], weight)


def _joined_rows(weighted: Sequence[tuple[LowRank, float]], weight: float, row_dtype: str | None) -> LowRank:
    # of a sum the two weights are one; of a mean, its rows are taken as many times as it counts
    sides = [replace(side, scales=side.scales * math.sqrt(own / side.weight)) for side, own in weighted if side.count]
    size = weighted[0][0].size
    dtype = weighted[0][0].rows.dtype if row_dtype is None else getattr(torch, row_dtype)
    if not sides:
        return replace(weighted[0][0], weight=weight)
    if sum(side.count for side in sides) <= size:
        rows, scales = zip(*(_of_dtype(side, dtype) for side in sides), strict=True)
        return LowRank(rows=torch.cat(rows), scales=torch.cat(scales), weight=weight)
    triangle = torch.zeros(0, size, dtype=torch.float64)
    for side in sides:
        wide = side.rows.to(torch.float64) * side.scales[:, None]
        triangle = torch.linalg.qr(torch.cat([triangle, wide]), mode="r").R
    kept, powers = scaled_rows(triangle, dtype)
    return LowRank(rows=kept, scales=powers, weight=weight)


def _of_dtype(side: LowRank, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and scales; those that were made one are wider until now."""
    if side.rows.dtype == dtype:
        return side.rows, side.scales
    rows, scales = scaled_rows(side.rows, dtype)
    return rows, scales * side.scales


def _joined_terms(sides: Sequence[tuple[SoftmaxFisher, float]], weight: float) -> SoftmaxFisher:
    return SoftmaxFisher(
        rows=torch.cat([side.rows for side, _ in sides]),
        weights=torch.cat([side.weights * (own / weight) for side, own in sides]),
    )


def _joined_diagonals(layer: str, sides: Sequence[tuple[DiagonalSketch, float]], weight: float) -> DiagonalSketch:
    if any(side.approximate for side, _ in sides):
        raise NotMergeable(
            f"layer `{layer}`: a sketch of its G cannot be merged exactly; set `woodbury.approximate: false` to keep "
            "its diagonal alone, or raise the memory budget, so that its rows are kept",
            layer=layer,
        )
    diagonal = sum(((side.exact_diagonal * (own / weight)) for side, own in sides), torch.zeros(()))
    if any(side.rows is None for side, _ in sides):
        return DiagonalSketch(exact_diagonal=diagonal)
    rows = torch.cat([side.rows * (own / weight) ** 0.5 for side, own in sides if side.rows is not None])
    base = (diagonal - rows.to(torch.float64).square().sum(0)).clamp_min_(0)
    return DiagonalSketch(exact_diagonal=diagonal, base=base, rows=rows, bound=0.0)


def _merge_tied(addends: Sequence[Addend], idle: float, precision: Precision) -> MergedLayer:
    """Merge the four terms of a head and its table, and make them one product anew."""
    facts = addends[0].facts
    weight_A = sum(each.sums.weight_A for each in addends)
    weight_G = sum(each.sums.weight_G for each in addends) + idle
    lookups = sum(sums.lookups for sums in _tied(addends))
    _require_one_form(facts.name, {each.facts.representation_G for each in addends})
    A: Tensor | None = None
    G: Tensor | None = None
    counts: Tensor | None = None
    moments: Tensor | None = None
    sides: list[tuple[Structured, float]] = []
    for addend, own in zip(addends, _tied(addends), strict=True):
        factors, sums = addend.load(), addend.sums
        if factors.tied is None:
            raise NotMergeable(
                f"layer `{facts.name}`: an earlier version collected it, which did not keep what its product was made "
                "of; collect the factors again",
                layer=facts.name,
            )
        side = head_gradient(factors, own)
        A = added(A, factors.tied.A, sums.weight_A)
        counts = added(counts, factors.tied.counts, own.lookups)
        moments = added(moments, factors.tied.moments, sums.weight_G)
        if isinstance(side, Tensor):
            G = added(G, side, sums.weight_G)
        else:
            sides.append((side, sums.weight_G))
        del factors, side
    if A is None or counts is None or moments is None:
        raise ValueError("a merge of no set")
    head: HeadSide | Structured
    if G is None:
        head = _joined(facts.name, sides, weight_G or 1.0, None)
    else:
        head = torch.eye(G.shape[0], dtype=torch.float64) if precision.identity else G.div_(weight_G or 1.0)
    if isinstance(head, LowRank):
        raise TypeError(f"layer `{facts.name}`: a tied head keeps no gradient rows")
    if precision.identity:
        moments.zero_().diagonal().fill_(1.0)
    else:
        moments.div_(weight_G or 1.0)
    A.div_(weight_A or 1.0)
    counts.div_(lookups or 1.0)
    kept = TiedParts(
        A=A.to(precision.sums, copy=True),
        counts=counts.to(precision.sums, copy=True),
        moments=moments.to(precision.sums, copy=True),
    )
    diagonal = head.diagonal().to(precision.sums, copy=True)
    made = nearest_product_(Terms(A=A, G=head, counts=counts, moments=moments))  # type: ignore[arg-type] # no rows
    kept_A, scale_A = to_storage(made.A, precision.storage)
    kept_G, scale_G = (made.G, 1.0) if isinstance(made.G, Structured) else to_storage(made.G, precision.storage)
    factors = Factors(
        layer=facts.name,
        form=facts.form,
        bias=facts.bias,
        A=kept_A,
        G=kept_G,
        scale_A=scale_A,
        scale_G=scale_G,
        head_diagonal=diagonal,
        tied=kept,
    )
    return MergedLayer(
        factors=factors,
        tied=TiedSums(lookups=lookups, head_G=made.head_G, table_G=made.table_G),
        residual=made.residual,
    )


def _tied(addends: Sequence[Addend]) -> Iterator[TiedSums]:
    for each in addends:
        if each.sums.tied is None:
            raise NotMergeable(f"layer `{each.facts.name}`: it is tied in one set and not in another")
        yield each.sums.tied
