"""Quantiles of the products λᵢμⱼ of one layer or of many: counts, order statistics, histogram, largest.

The eigenvalues of F = G ⊗ A are the float64 products themselves, as an outer product would hold
them, and what is found here is what sorting all of them would give, bit for bit, without making
them. A product grows with each of its factors, also after rounding. So in row i, with the μ
ascending, those at most t come first, and where they end is found by bisection; n bisections count
all n·m products at most t.

The k-th smallest is sought among the float64 numbers, whose bits ascend with their values, in a
bracket that each count narrows. A sorted sample of the products says where to count next, since
between the bracket's ends it is spread as they are; where it does not help, the bracket is halved.
Once few products are left between the ends they are made, and the k-th is picked.

Where a pair has few products, as each channel of a depthwise convolution, all of them are made
and sorted at the beginning, those of many such pairs together. They are one pair then, 1 and the
products; and where no other is left, questions are answered by a look into the sorted list.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

_MADE_AT_ONCE = 2**15
"""Products that are made once a bracket holds no more."""
_SORTED = 2**17
"""Products that are made and sorted at the beginning."""
_SAMPLED = 2**16
_REMEMBERED = 4
"""Thresholds whose positions are kept: a bracket's last ends are asked for again."""

Pair = tuple[Tensor, Tensor]
"""One layer's eigenvalues, ascending, float64: (n,) and (m,)."""


def _positions(rows: Tensor, columns: Tensor, threshold: float) -> Tensor:
    """How many of ``columns`` times each of ``rows`` are at most ``threshold`` ≥ 0: (n,) int64."""
    last = columns.numel() - 1
    # a zero row is below every threshold: 0/0 is not
    found = torch.searchsorted(columns, (threshold / rows).nan_to_num_(nan=math.inf), right=True)
    # the quotient is rounded, and so are the products: see what stands at the end, and before it
    over = (found > 0) & (rows * columns[(found - 1).clamp_(min=0)] > threshold)
    under = (found <= last) & (rows * columns[found.clamp(max=last)] <= threshold)
    wrong = (over | under).nonzero().squeeze(1)
    if wrong.numel():
        found[wrong] = _bisected(rows[wrong], columns, threshold)
    return found


def _bisected(rows: Tensor, columns: Tensor, threshold: float) -> Tensor:
    """The same by the products alone."""
    low, high = torch.zeros_like(rows, dtype=torch.int64), torch.full_like(rows, columns.numel(), dtype=torch.int64)
    while bool((low < high).any()):
        middle = torch.div(low + high, 2, rounding_mode="floor")
        below = (rows * columns[middle.clamp(max=columns.numel() - 1)] <= threshold) & (low < high)
        low = torch.where(below, middle + 1, low)
        high = torch.where(below, high, torch.minimum(high, middle))
    return low


class Products:
    """All products of several pairs of spectra; what one question has counted serves the next."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        # bisections are made in the longer spectrum, as many as the shorter has
        self._pairs = [(a, g) if a.numel() <= g.numel() else (g, a) for a, g in pairs if a.numel() and g.numel()]
        self.size = sum(_size(pair) for pair in self._pairs)
        """All products."""
        self.largest = max((float(rows[-1]) * float(columns[-1]) for rows, columns in self._pairs), default=0.0)
        # bits of thresholds, ascending, and how many products are at most each
        self._thresholds, self._counts = [-1], [0]
        self._recent: dict[int, list[Tensor]] = {}
        self._pairs = _with_small_ones_together(self._pairs)
        self._all: Tensor | None = None
        """All products, ascending, where they are few."""
        if len(self._pairs) == 1 and self.size <= _SORTED:
            self._all = self._pairs[0][1]
        if not self._pairs or self._all is not None:
            return
        self._know(_bits(self.largest), self.size)
        zeros = self.at_most(0.0)
        if zeros < self.size:
            self.smallest_positive = min(map(_smallest_positive, self._pairs))
            self._know(_bits(self.smallest_positive) - 1, zeros)
        # where to count next
        self._sample, self._ranks = self._sampled()

    def at_most(self, threshold: float) -> int:
        """Count the products that do not exceed a threshold.

        Args:
            threshold: Any float; no product is negative.

        Returns:
            Their number, between 0 and ``size``; it is remembered.
        """
        if threshold < 0:
            return 0
        if self._all is not None:
            return int(torch.searchsorted(self._all, threshold, right=True))
        bits = _bits(threshold)
        place = bisect_left(self._thresholds, bits)
        if place == len(self._thresholds):
            return self.size
        if self._thresholds[place] != bits:
            self._know(bits, sum(int(found.sum()) for found in self._positions_at(bits)))
        return self._counts[place]

    def smallest(self, rank: int) -> float:
        """Return the product of a given rank, exactly as a full sort would have it.

        Args:
            rank: From 1, for the smallest, to ``size``.

        Returns:
            The ``rank``-th smallest product.

        Memory:
            At most 32 Ki products at once.
        """
        if self._all is not None:
            return float(self._all[rank - 1])
        slow = 0
        while True:
            place = bisect_left(self._counts, rank)
            low, high = self._thresholds[place - 1], self._thresholds[place]
            below, among = self._counts[place - 1], self._counts[place] - self._counts[place - 1]
            if high - low == 1:
                return _value(high)
            if among <= _MADE_AT_ONCE:
                return self._picked(rank - below, self._positions_at(low), self._positions_at(high))
            # where one end is near enough, a little beyond the rank: the other end shall come near too
            beyond = _MADE_AT_ONCE // 4
            aim = rank - below + (beyond if rank - below <= 2 * beyond else 0)
            aim -= beyond if below + among - rank <= 2 * beyond else 0
            probe = low + (high - low) // 2 if slow == 2 else self._between(low, high, aim / among)
            count = self.at_most(_value(min(max(probe, low + 1), high - 1)))
            left = count - below if count >= rank else below + among - count
            slow = 0 if slow == 2 or left <= among / 2 else slow + 1

    def top(self, count: int) -> Tensor:
        """Return the largest products.

        Args:
            count: How many, k.

        Returns:
            Shape (min(k, size),), float64, descending.
        """
        found = [largest(pair, count) for pair in self._pairs]
        together = torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)
        return together.topk(min(count, together.numel())).values

    def _know(self, bits: int, count: int) -> None:
        place = bisect_left(self._thresholds, bits)
        if place == len(self._thresholds) or self._thresholds[place] != bits:
            self._thresholds.insert(place, bits)
            self._counts.insert(place, count)

    def _between(self, low: int, high: int, share: float) -> int:
        """Bits of a number that about ``share`` of the products between two others do not exceed."""
        ends = torch.tensor([_value(max(low, 0)), _value(high)], dtype=torch.float64)
        first, last = torch.searchsorted(self._sample, ends, right=True).tolist()
        start = float(self._ranks[first - 1]) if first else 0.0
        stop = float(self._ranks[last - 1]) if last else 0.0
        place = int(torch.searchsorted(self._ranks, start + share * (stop - start)))
        if not first < place < last - 1:
            return low + int((high - low) * share)
        return _bits(float(self._sample[place]))

    def _sampled(self) -> tuple[Tensor, Tensor]:
        """Products of evenly spaced eigenvalues, ascending, and about how many products reach up to each."""
        side = max(8, math.isqrt(_SAMPLED // len(self._pairs)))
        values, weights = [], []
        for rows, columns in self._pairs:
            made = torch.outer(_thinned(rows, side), _thinned(columns, side)).flatten()
            values.append(made)
            weights.append(torch.full_like(made, rows.numel() * columns.numel() / made.numel()))
        ordered = torch.cat(values).sort()
        return ordered.values, torch.cat(weights)[ordered.indices].cumsum(0)

    def _positions_at(self, bits: int) -> list[Tensor]:
        """Return the ends of the products up to a threshold in each pair's rows."""
        if bits not in self._recent:
            if len(self._recent) == _REMEMBERED:
                del self._recent[next(iter(self._recent))]
            self._recent[bits] = (
                [_positions(rows, columns, _value(bits)) for rows, columns in self._pairs]
                if bits >= 0
                else [torch.zeros(rows.numel(), dtype=torch.int64) for rows, _ in self._pairs]
            )
        return self._recent[bits]

    def _picked(self, rank: int, starts: list[Tensor], stops: list[Tensor]) -> float:
        """The ``rank``-th smallest of the products between two positions in every row."""
        made = []
        for (rows, columns), start, stop in zip(self._pairs, starts, stops, strict=True):
            counts = stop - start
            row = torch.repeat_interleave(counts)
            first = torch.cumsum(counts, 0) - counts
            column = torch.arange(row.numel()) - (first - start)[row]
            made.append(rows[row] * columns[column])
        return float(torch.cat(made).kthvalue(rank).values)


def _size(pair: Pair) -> int:
    return pair[0].numel() * pair[1].numel()


def _with_small_ones_together(pairs: Sequence[Pair]) -> list[Pair]:
    """``pairs``, the smallest of them, of ``_SORTED`` products in all, made into one: 1 and their products, sorted.

    Memory:
        1 MiB, and as much while they are sorted.
    """
    order = sorted(pairs, key=_size)
    reach = list(itertools.takewhile(lambda count: count <= _SORTED, itertools.accumulate(map(_size, order))))
    small = order[: len(reach)]
    if not small:
        return order
    made = torch.cat([torch.outer(*pair).flatten() for pair in small]).sort().values
    return [(made.new_ones(1), made), *order[len(reach) :]]


def _smallest_positive(pair: Pair) -> float:
    rows, columns = pair
    found = _positions(rows, columns, 0.0)
    positive = found < columns.numel()
    return float((rows[positive] * columns[found[positive]]).min()) if bool(positive.any()) else math.inf


def _thinned(spectrum: Tensor, count: int) -> Tensor:
    """At most ``count`` of the eigenvalues, evenly spaced."""
    size = spectrum.numel()
    if size <= count:
        return spectrum
    return spectrum[((torch.arange(count) + 0.5) * (size / count)).long()]


def quantile_rank(level: float, size: int) -> int:
    """Return the rank of a quantile: ⌈level · size⌉, computed with the decimal that ``level`` is written as."""
    # 0.1 of 10 is the first, though the float64 nearest to 0.1 is a little more
    return max(1, math.ceil(Fraction(repr(level)) * size))


def quantile(products: Products, level: float) -> float | None:
    """Return a quantile of the products.

    Args:
        products: All products of one or more layers.
        level: Between 0 and 1.

    Returns:
        The smallest product that at least ``level`` of them do not exceed; None where there are none.
    """
    return products.smallest(quantile_rank(level, products.size)) if products.size else None


def largest(pair: Pair, count: int) -> Tensor:
    """Return the largest products of one pair of spectra.

    The p-th largest of one times the q-th largest of the other is exceeded by p·q − 1 products at
    least, so only those with p·q ≤ k can be among them.

    Args:
        pair: Eigenvalues (n,) and (m,), ascending, float64.
        count: How many, k.

    Returns:
        Shape (min(k, n·m),), descending.

    Memory:
        About k·log k products.
    """
    a, g = (side.flip(0)[:count] for side in pair)
    made = [a[place] * g[: count // (place + 1)] for place in range(a.numel())]
    candidates = torch.cat(made) if made else a
    return candidates.topk(min(count, candidates.numel())).values


def histogram(products: Products, decades: int, bins: int) -> tuple[list[float], list[int], int]:
    """Count products in equal steps of the logarithm, so many decades down from the largest.

    Edges (bins + 1), counts in (left, right], and how many products lie at or below the first edge; no edges and no
    counts if all products are zero.
    """
    if products.largest <= 0:
        return [], [], products.size
    edges = [products.largest * 10 ** (decades * (place / bins - 1)) for place in range(bins)] + [products.largest]
    counted = [products.at_most(edge) for edge in edges]
    return edges, [right - left for left, right in itertools.pairwise(counted)], counted[0]


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float64).view(torch.int64))


def _value(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int64).view(torch.float64))
