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
from engine.merging.nearest_product import Terms, head_gradient, nearest_product_

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

    A and G in float64 and one set's factors are held; gradient rows of all sets together.
    """
    if addends[0].sums.tied is not None:
        return _merge_tied(addends, idle, precision)
    sums = _Sums(addends, idle)
    for addend in addends:
        factors = addend.load()
        sums.add_(addend.sums, (factors.A, factors.scale_A), (factors.G, factors.scale_G))
        # while the next set's are read, and the sums are rounded, these would be held for nothing
        del factors
    A, G = sums.means()
    exact = sums.facts.form in ("block", "diagonal_block")
    kept_A, scale_A = (A.to(precision.storage), 1.0) if exact else to_storage(A, precision.storage)
    del A
    kept_G: tuple[Tensor | Structured, float]
    if isinstance(G, Structured):
        kept_G = G, 1.0
    elif precision.identity:
        kept_G = torch.eye(G.shape[0], dtype=precision.storage), 1.0
    else:
        kept_G = to_storage(G, precision.storage)
    return MergedLayer(factors=sums.factors((kept_A, scale_A), kept_G))


class _Sums:
    """Running sums of one layer."""

    def __init__(self, addends: Sequence[Addend], idle: float) -> None:
        self.facts, self.first = addends[0].facts, addends[0].sums
        self._weight_A = sum(each.sums.weight_A for each in addends)
        self.weight_G = sum(each.sums.weight_G for each in addends) + idle
        self._kinds = {each.facts.representation_G for each in addends}
        _require_one_form(self.facts.name, self._kinds)
        self._A: Tensor | None = None
        self._G: Tensor | None = None
        self._sides: list[tuple[Structured, float]] = []

    def add_(self, sums: LayerSums, A: tuple[Tensor, float], G: tuple[Tensor | Structured, float]) -> None:
        """Add one set's A and G, each with its scale."""
        if self.facts.form in ("block", "diagonal_block"):
            self._A = A[0] if self._A is None else self._A
        else:
            self._A = added(self._A, A[0], sums.weight_A * A[1])
        side, scale = G
        if not isinstance(side, Structured):
            self._G = added(self._G, side, sums.weight_G * scale)
        elif len(self._kinds) == 1:
            self._sides.append((side, sums.weight_G))
        else:
            # rows here and a sum there: the sum of both is dense
            self._G = added(self._G, side.to_dense(torch.float64), sums.weight_G)

    def means(self) -> tuple[Tensor, Tensor | Structured]:
        """Normalise the sums, which are of no further use here."""
        A, G, name = self._A, self._G, self.facts.name
        if A is None:
            raise ValueError("a merge of no set")
        self._A = self._G = None
        if self.facts.form not in ("block", "diagonal_block"):
            A.div_(self._weight_A or 1.0)
        if G is None:
            return A, _joined(name, self._sides, self.weight_G or 1.0, self.first.row_dtype)
        return A, G.div_(self.weight_G or 1.0)

    def factors(
        self, A: tuple[Tensor, float], G: tuple[Tensor | Structured, float], tied: TiedParts | None = None
    ) -> Factors:
        """The layer's factors of A and G as they are kept, each with its scale."""
        facts = self.facts
        return Factors(
            layer=facts.name, form=facts.form, bias=facts.bias, A=A[0], G=G[0], scale_A=A[1], scale_G=G[1], tied=tied
        )


def added(total: Tensor | None, factor: Tensor, weight: float) -> Tensor:
    """Return ``total + weight · factor`` in float64, of a factor (n, n) or (n,) of any float dtype, on the host.

    ``total`` is the sum so far, in float64, which is overwritten; None begins it. 2 MiB are held besides.
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
    if isinstance(first, DiagonalSketch):
        return _joined_diagonals(
            layer, [(side, own) for side, own in sides if isinstance(side, DiagonalSketch)], weight
        )
    raise TypeError(f"no merge is known of sides kept as {first.kind}")


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
    lookups = sum(own.lookups for own in _tied(addends))
    sums = _Sums(addends, idle)
    name = sums.facts.name
    counts: Tensor | None = None
    moments: Tensor | None = None
    for addend, own in zip(addends, _tied(addends), strict=True):
        factors = addend.load()
        if factors.tied is None:
            raise NotMergeable(
                f"layer `{name}`: an earlier version collected it, which did not keep what its product was made "
                "of; collect the factors again",
                layer=name,
            )
        sums.add_(addend.sums, (factors.tied.A, 1.0), (head_gradient(factors, own), 1.0))
        counts = added(counts, factors.tied.counts, own.lookups)
        moments = added(moments, factors.tied.moments, addend.sums.weight_G)
        del factors
    A, head = sums.means()
    if counts is None or moments is None:
        raise ValueError("a merge of no set")
    if isinstance(head, LowRank):
        raise TypeError(f"layer `{name}`: a tied head keeps no gradient rows")
    counts.div_(lookups or 1.0)
    moments.div_(sums.weight_G or 1.0)
    if precision.identity:
        for each in (moments, head):
            if isinstance(each, Tensor):
                each.zero_().diagonal().fill_(1.0)
    kept = TiedParts(
        A=A.to(precision.sums, copy=True),
        counts=counts.to(precision.sums, copy=True),
        moments=moments.to(precision.sums, copy=True),
    )
    diagonal = head.diagonal().to(precision.sums, copy=True)
    made = nearest_product_(Terms(A=A, G=head, counts=counts, moments=moments))  # type: ignore[arg-type] # no rows
    G = (made.G, 1.0) if isinstance(made.G, Structured) else to_storage(made.G, precision.storage)
    factors = sums.factors(to_storage(made.A, precision.storage), G, kept)
    return MergedLayer(
        factors=replace(factors, head_diagonal=diagonal),
        tied=TiedSums(lookups=lookups, head_G=made.head_G, table_G=made.table_G),
        residual=made.residual,
    )


def _tied(addends: Sequence[Addend]) -> Iterator[TiedSums]:
    for each in addends:
        if each.sums.tied is None:
            raise NotMergeable(f"layer `{each.facts.name}`: it is tied in one set and not in another")
        yield each.sums.tied
