"""Rows of several ranks: the gradient rows of all of them as those of one, and their Gram matrix.

Rank r holds U_r (T_r, o); the G of all data is that of the rows U = [U_0; U_1; …] (T, o), T = Σ T_r.

    gather   each rank sends its rows to all
    gram     each rank sends every other the columns that this other is to hold, a panel at a time, which makes row
             shards of the transposed U: (T, o/W) on each; the Gram matrix is the sum over shards of their own,
             K = Σ_r S_r S_rᵀ, and one triangle of it is summed in float64

Solving with the rows, or storing them, needs whole ones. Ranks of one node write their shards to memory that all
of them map, so the rows stand there once; ranks on several nodes bring them together, at f·o·T·b more each.

The sum of the ranks' own Gram matrices ``Σ_r U_r U_rᵀ`` is another matrix: all products of a row of one rank with a row
of another are missing from it (``docs/ranks.md`` shows by how much solves with it are off).

More than n rows are as good as the triangle of their QR factorisation, as on one rank: then triangles are gathered.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.accumulation.gradient_rows import GradientRows
from engine.accumulation.sketched_rows import SketchRows
from engine.distributed.group import Ranks
from engine.distributed.node_memory import Sized, hold_once
from engine.distributed.traffic import GRAM_BYTES
from engine.distributed.transfers import Label, Reduction, bounds, exchange, spread, sum_numbers, sum_triangle_
from engine.factors.kronecker_factors import packed

PANEL_NUMBERS = 2**20
"""Numbers of the columns that a rank receives at once."""
_COLUMNS_AT_ONCE = 2**20


@dataclass(frozen=True)
class RowFacts:
    """The rows that one rank holds of one layer."""

    count: int
    merged: bool
    """They are a triangle already, and the rows since."""
    largest: float
    """The largest number so far; NaN and Inf stay."""

    @classmethod
    def of(cls, rows: GradientRows) -> "RowFacts":
        """Describe rows."""
        largest = float(rows.largest.max()) if rows.largest.numel() else 0.0
        return cls(count=rows.count, merged=rows.triangle is not None, largest=largest)


def is_merged(facts: Sequence[RowFacts], size: int) -> bool:
    """Tell whether the rows of all ranks are kept as a triangle."""
    return any(each.merged for each in facts) or sum(each.count for each in facts) > size


def reduce_rows(
    ranks: Ranks,
    rows: GradientRows,
    facts: Sequence[RowFacts],
    layer: str,
    *,
    gram: bool,
    shared: Tensor | None = None,
) -> Reduction[str]:
    """Replace one rank's rows of a layer by those of all ranks, in place; yield the transfers that it waits for.

    ``facts`` are those of each rank, in order; with ``gram`` the Gram matrix is made from shards. ``shared`` (groups,
    T, n) takes the rows for all ranks of the node; None gives every rank its own. It returns `gram` or `gather`, the
    reduction that was made.
    """
    if rows.staging is not None:
        rows.staging.settle()
    largest = torch.tensor([each.largest for each in facts], dtype=torch.float64).max()
    if isinstance(rows, SketchRows):
        yield from _reduce_sketch(ranks, rows, facts, layer)
    elif is_merged(facts, rows.size):
        yield from _gather_triangles(ranks, rows, facts, layer)
    elif gram:
        yield from _shard(ranks, rows, facts, layer, shared)
    else:
        yield from _gather(ranks, rows, facts, Label(layer, "gather"))
    rows.largest = largest.to(rows.largest.device).view(1, 1)
    return "gram" if rows.grams is not None else "gather"


def _places(facts: Sequence[RowFacts]) -> list[tuple[int, int]]:
    """First and last of each rank's rows among those of all."""
    marks = [0]
    for each in facts:
        marks.append(marks[-1] + each.count)
    return list(itertools.pairwise(marks))


def _gather(ranks: Ranks, rows: GradientRows, facts: Sequence[RowFacts], label: Label) -> Reduction[None]:
    groups, _, size = rows.rows.shape
    places = _places(facts)
    total = places[-1][1]
    everything = rows.rows.new_empty(groups, total, size)
    scales = rows.scales.new_empty(groups, total)
    for source, (first, last) in enumerate(places):
        if ranks.rank == source:
            everything[:, first:last] = rows.rows[:, : rows.count]
            scales[:, first:last] = rows.scales[:, : rows.count]
        for whole in (everything, scales):
            # of one group a slice is in one piece already
            piece = whole[:, first:last].contiguous()
            transfer = spread(ranks, piece, source, label)
            yield transfer
            transfer.wait()
            if piece.data_ptr() != whole[:, first:last].data_ptr():
                whole[:, first:last] = piece
    rows.rows, rows.scales, rows.count = everything, scales, total
    ranks.traffic.held[label.layer, label.operation] = everything.numel() * everything.element_size()


def shared_rows(ranks: Ranks, wanted: Sequence[tuple[GradientRows, Sequence[RowFacts]]]) -> list[Tensor] | None:
    """Allocate the rows of all ranks of some layers once on their node, for every rank to write its columns.

    Each layer's are (groups, T, n) on the host; None where the ranks have no memory in common.
    """
    sizes = []
    for rows, facts in wanted:
        groups, _, size = rows.rows.shape
        sizes.append(Sized((groups, sum(each.count for each in facts), size), rows.rows.dtype))
    return hold_once(ranks, sizes)


def _shard(
    ranks: Ranks, rows: GradientRows, facts: Sequence[RowFacts], layer: str, shared: Tensor | None
) -> Reduction[None]:
    """Exchange rows for columns, and sum the Gram matrix of the shards; every rank writes its shard to ``shared``."""
    groups, _, size = rows.rows.shape
    places, columns = _places(facts), bounds(size, ranks.size)
    total, (first, last) = places[-1][1], columns[ranks.rank]
    label = Label(layer, "gram")
    scales = rows.scales.new_empty(groups, total)
    for source, (start, stop) in enumerate(places):
        piece = (
            rows.scales[:, : rows.count].contiguous()
            if ranks.rank == source
            else scales.new_empty(groups, stop - start)
        )
        transfer = spread(ranks, piece, source, label)
        yield transfer
        transfer.wait()
        scales[:, start:stop] = piece
    shard = rows.rows.new_empty(groups, total, last - first) if shared is None else shared[:, :, first:last]
    grams = torch.zeros(groups, total, total, dtype=torch.float64, device=rows.rows.device)
    width = max(1, PANEL_NUMBERS // max(groups * total, 1))
    for start in range(0, max(b - a for a, b in columns), width):
        spans = [(min(a + start, b), min(a + start + width, b)) for a, b in columns]
        wide = spans[ranks.rank][1] - spans[ranks.rank][0]
        sent = [rows.rows[:, : rows.count, a:b].reshape(-1) for a, b in spans]
        transfer = exchange(ranks, sent, [groups * wide * (b - a) for a, b in places], label)
        del sent
        yield transfer
        panel = rows.rows.new_empty(groups, total, wide)
        for piece, (a, b) in zip(transfer.wait(), places, strict=True):
            panel[:, a:b] = piece.view(groups, b - a, wide)
        add_gram_(grams, panel)
        shard[:, :, start : start + wide] = panel
        del transfer, panel
    scale_gram_(grams, scales)
    yield from sum_triangle_(ranks, grams, label)
    rows.grams = torch.stack([packed(gram) for gram in grams])
    ranks.traffic.held[layer, "gram"] = shard.numel() * shard.element_size() + rows.grams.numel() * GRAM_BYTES
    del grams
    if shared is None:
        rows.rows = yield from _brought_together(ranks, shard, size, layer)
    else:
        rows.rows = shared
    rows.scales, rows.count = scales, total


def _brought_together(ranks: Ranks, shard: Tensor, size: int, layer: str) -> Reduction[Tensor]:
    """Bring the shards of all ranks to each of them."""
    groups, total, _ = shard.shape
    everything = shard.new_empty(groups, total, size)
    for source, (a, b) in enumerate(bounds(size, ranks.size)):
        piece = shard if ranks.rank == source else shard.new_empty(groups, total, b - a)
        transfer = spread(ranks, piece, source, Label(layer, "rows"))
        yield transfer
        transfer.wait()
        everything[:, :, a:b] = piece
    ranks.traffic.held[layer, "rows"] = everything.numel() * everything.element_size()
    return everything


def add_gram_(grams: Tensor, columns: Tensor) -> None:
    """Add the products of some columns (groups, T, c) of unscaled rows to float64 ``grams`` (groups, T, T), in place.

    Columns are of any float dtype, on the same device; 8 MiB of them are widened at a time.
    """
    width = max(1, _COLUMNS_AT_ONCE // max(columns.shape[1], 1))
    for own, rows in zip(grams, columns, strict=True):
        for start in range(0, columns.shape[2], width):
            wide = rows[:, start : start + width].to(torch.float64)
            own.addmm_(wide, wide.T)


def scale_gram_(grams: Tensor, scales: Tensor) -> None:
    """Multiply the Gram matrices (groups, T, T) of unscaled rows by the scales (groups, T) of both rows, in place.

    Both are in float64; the scales may be on any device.
    """
    own = scales.to(grams.device)
    grams.mul_(own[:, :, None]).mul_(own[:, None, :])


def _gather_triangles(ranks: Ranks, rows: GradientRows, facts: Sequence[RowFacts], layer: str) -> Reduction[None]:
    """Gather every rank's rows, or the triangle of them, in working precision, and make them one triangle."""
    groups, _, size = rows.rows.shape
    if rows.triangle is not None or rows.count > size:
        rows.merge_()
    whole = torch.zeros(groups, size, size, dtype=rows.working, device=rows.rows.device)
    for source, each in enumerate(facts):
        height = size if each.merged or each.count > size else each.count
        if ranks.rank == source:
            piece = rows.triangle if rows.triangle is not None else _widened(rows)
        else:
            piece = whole.new_empty(groups, height, size)
        transfer = spread(ranks, piece.contiguous(), source, Label(layer, "gather"))
        yield transfer
        (arrived,) = transfer.wait()
        for group, made in enumerate(whole):
            upper = torch.linalg.qr(torch.cat([made, arrived[group]]), mode="r").R
            made.zero_()[: upper.shape[0]] = upper
    rows.triangle, rows.count = whole, 0


def _widened(rows: GradientRows) -> Tensor:
    """Rows times their scales (groups, count, n), in working precision."""
    wide = rows.rows[:, : rows.count].to(torch.float64) * rows.scales[:, : rows.count, None].to(rows.rows.device)
    return wide.to(rows.working)


def _reduce_sketch(ranks: Ranks, rows: SketchRows, facts: Sequence[RowFacts], layer: str) -> Reduction[None]:
    """Add diagonals, and let the sketches of all ranks enter one, in the order of the ranks."""
    label = Label(layer, "gather")
    for held in (rows.diagonals, rows.means, rows.lowered):
        held.copy_((yield from sum_numbers(ranks, held.reshape(-1), label)).view_as(held))
    groups, _, size = rows.rows.shape
    own = _widened(rows)
    rows.count = 0
    for source, each in enumerate(facts):
        if not each.count:
            # of a diagonal alone no rank has rows
            continue
        piece = own if ranks.rank == source else own.new_empty(groups, each.count, size)
        transfer = spread(ranks, piece, source, label)
        yield transfer
        (arrived,) = transfer.wait()
        rows.enter_(arrived.transpose(0, 1))
