"""Gradients of single examples: statistics of a layer's input and output gradient together.

The gradient of one example's loss with respect to a weight sums over its positions *and* over all
calls of the module, before anything is squared: ``∇W ℓ_n = Σ_calls Σ_t g_t a_tᵀ``. A ``Meeting``
therefore waits, in each backward pass, until every call of the forward pass has its gradient.

Squared norms never need the gradients of all examples at once. ``‖∇W ℓ_n‖²`` is
``Σ_{s,t} (a_s·a_t)(g_s·g_t)``, two Gram matrices of T positions, or the product itself, squared
and dropped; whichever takes fewer multiplications is taken, a few examples at a time. With one
position both are ``‖a‖²‖g‖²``.

References:
    Goodfellow (2015), Efficient per-example gradient computations
    Li et al. (2022), Large language models can be strong differentially private learners (the Gram form)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.layers.layer import BlockLayer, TreatedLayer, Use, of_examples
from engine.layers.tied import TiedHeadLayer

NUMBERS_AT_ONCE = 2**22
"""Numbers of one temporary."""
_STRIPS = 4
"""Strips of a Gram matrix of positions, each from its diagonal on: 5/8 of the full product."""
_EVEN = 0.8
"""Examples with at least this part of the longest one's positions are padded to it and go together."""

Met = Sequence[tuple[Use, Tensor]]
"""Calls of one layer in one forward pass, each with the gradient of its output in one direction."""


@dataclass
class Meeting:
    """Collects the calls of one layer until all of them have their gradients."""

    receive: Callable[[Met], None]
    """Gets all calls of one direction together."""
    _met: list[tuple[Use, Tensor]] = field(default_factory=list)

    def arrive(self, use: Use, gradient: Tensor, calls: int) -> None:
        """Take one call's gradient; the last of all ``calls`` of this forward pass hands them on."""
        self._met.append((use, gradient))
        # the last to arrive closes the meeting, so that a layer called once holds nothing longer
        if len(self._met) >= calls:
            self.close()

    def close(self) -> None:
        """Hand on the gradients that have arrived; calls that the direction does not reach have none."""
        met, self._met = self._met, []
        if met:
            self.receive(met)


@dataclass(frozen=True)
class Rows:
    """Positions of some examples; the groups of a layer as if they were examples of their own."""

    examples: slice | Tensor
    """Which of the batch's examples these are."""
    a: Tensor
    """(n·groups, T, d_in), without the ones; d_in is 0 where the weight is frozen."""
    g: Tensor
    """(n·groups, T, d_out), zero where a position does not count or an example has fewer."""


def block_gradients(layer: BlockLayer, met: Met) -> Tensor:
    """Return each example's gradient by (weight, bias) of an exact block, all calls summed, shape (N, out_dim)."""
    total, *others = (layer.example_gradients(use, gradient) for use, gradient in met)
    for other in others:
        total = total + other
    return total


def squared_norms(layer: TreatedLayer, met: Met, dtype: torch.dtype) -> Tensor:
    """Compute ``‖∇ℓ_n‖²`` over weight and bias of every example, (N, groups) float64, by products in ``dtype``.

    Memory:
        A few times ``NUMBERS_AT_ONCE`` numbers; for a table of vectors two copies of the gradient.
    """
    if isinstance(layer, TiedHeadLayer):
        return _tied_squared_norms(layer, met, dtype)
    if layer.form == "diagonal":
        vectors = summed_by_id(layer, met, dtype)
        squares = vectors.sums.square().sum(1).to(torch.float64)
        return squares.new_zeros(met[0][0].examples).index_add_(0, vectors.examples, squares)[:, None]
    total = torch.zeros(met[0][0].examples, layer.groups, dtype=torch.float64, device=met[0][1].device)
    for rows in example_rows(layer, met, dtype, _numbers(layer)):
        total[rows.examples] = _squares(layer, rows).view(-1, layer.groups)
        # or they would be held while the next ones are written
        del rows
    return total


def squared_norms_numbers(layer: TreatedLayer, examples: int, positions: int) -> int:
    """Return the numbers that ``squared_norms`` holds at most besides: rows of a few examples, and their products.

    Positions are those of one example in all calls of the layer.
    """
    products = _numbers(layer)(positions)
    if positions > 1 and gram_is_cheaper(positions, layer.fan_in, layer.fan_out):
        # a strip of each Gram matrix, and the last one
        products = 3 * positions * -(-positions // _STRIPS)
    each = positions * (layer.fan_in + layer.fan_out) + products
    return min(examples, _examples_at_once(layer, positions, _numbers(layer))) * each * layer.groups


def _tied_squared_norms(layer: TiedHeadLayer, met: Met, dtype: torch.dtype) -> Tensor:
    """The same of a table of vectors that is a head's weight too, the cross terms of one example's two uses included.

    ``⟨Σ_t g_t a_tᵀ, Σ_s e_{id_s} v_sᵀ⟩ = Σ_{t,s} g_t[id_s] (a_t·v_s)``.
    """
    table = [each for each in met if each[0].role is layer.table]
    head = [each for each in met if each[0].role is layer.head]
    total = torch.zeros(met[0][0].examples, 1, dtype=torch.float64, device=met[0][1].device)
    for role, own in ((layer.table, table), (layer.head, head)):
        if own:
            total += squared_norms(role, own, dtype)
    for looked_up, applied in tied_rows(layer, met, dtype, 0):
        if looked_up is None or applied is None:
            continue
        places = looked_up.a.squeeze(-1)[:, None, :].expand(-1, applied.g.shape[1], -1)
        crossed = torch.bmm(applied.a, looked_up.g.transpose(1, 2)).mul_(applied.g.gather(2, places))
        total[applied.examples, 0] += 2 * crossed.sum((1, 2)).to(torch.float64)
    return total


def tied_rows(
    layer: TiedHeadLayer, met: Met, dtype: torch.dtype, numbers: int
) -> Iterator[tuple[Rows | None, Rows | None]]:
    """Yield the rows of a table and of the head that holds its weight, a few of the same examples at a time."""
    parts = [(role, [each for each in met if each[0].role is role]) for role in layer.roles]
    examples = met[0][0].examples
    widest = sum(gradient.numel() for _, gradient in met) // examples + numbers
    step = max(1, NUMBERS_AT_ONCE // widest)
    for start in range(0, examples, step):
        span = start, min(start + step, examples)
        table, head = (
            Rows(slice(*span), *(_joined(side) for side in _even(role, own, span, dtype))) if own else None
            for role, own in parts
        )
        yield table, head


def _numbers(layer: TreatedLayer) -> Callable[[int], int]:
    """Numbers that the squared norm of one example with so many positions needs besides its rows."""

    def numbers(positions: int) -> int:
        if positions == 1:
            return 0
        gram = gram_is_cheaper(positions, layer.fan_in, layer.fan_out)
        return 2 * positions * positions if gram else layer.fan_in * layer.fan_out

    return numbers


def _squares(layer: TreatedLayer, rows: Rows) -> Tensor:
    a, g = rows.a, rows.g
    if g.shape[1] == 1:
        return _norms(g[:, 0]) * (_norms(a[:, 0]) + int(layer.bias))
    total = _norms(g.sum(1)) if layer.bias else torch.zeros(g.shape[0], dtype=torch.float64, device=g.device)
    if layer.weight:
        total += _by_gram(a, g) if gram_is_cheaper(g.shape[1], a.shape[2], g.shape[2]) else _by_product(a, g)
    return total


def _norms(rows: Tensor) -> Tensor:
    """Squared norm of each row, float64."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.to(torch.float64).square()


def gram_is_cheaper(positions: int, fan_in: int, fan_out: int) -> bool:
    """Tell whether two Gram matrices of positions take fewer multiplications than the gradient itself."""
    return positions * (fan_in + fan_out) * (_STRIPS + 1) < 2 * _STRIPS * fan_in * fan_out


def _by_gram(a: Tensor, g: Tensor) -> Tensor:
    """``Σ_{s,t} (a_s·a_t)(g_s·g_t)`` of each example, (n,) float64."""
    examples, positions = g.shape[:2]
    total = torch.zeros(examples, dtype=torch.float64, device=g.device)
    height = max(1, min(-(-positions // _STRIPS), NUMBERS_AT_ONCE // (examples * positions)))
    for start in range(0, positions, height):
        stop = min(start + height, positions)
        products = torch.bmm(a[:, start:stop], a[:, start:].transpose(1, 2))
        products.mul_(torch.bmm(g[:, start:stop], g[:, start:].transpose(1, 2)))
        # right of the strip's own square every product stands for its mirror image too
        square = products[:, :, : stop - start].sum((1, 2)).to(torch.float64)
        total += 2 * products.sum((1, 2)).to(torch.float64) - square
    return total


def _by_product(a: Tensor, g: Tensor) -> Tensor:
    """``‖Σ_t g_t a_tᵀ‖²`` of each example, (n,) float64."""
    examples, fan_out = g.shape[0], g.shape[2]
    total = torch.zeros(examples, dtype=torch.float64, device=g.device)
    height = max(1, NUMBERS_AT_ONCE // (examples * a.shape[2]))
    for start in range(0, fan_out, height):
        gradients = torch.bmm(g[:, :, start : start + height].transpose(1, 2), a)
        total += _norms(gradients.flatten(1))
    return total


def example_rows(layer: TreatedLayer, met: Met, dtype: torch.dtype, numbers: Callable[[int], int]) -> Iterator[Rows]:
    """Yield the rows of all calls, concatenated along each example's positions, a few examples at a time."""
    if any(use.owners is not None or use.kept is not None for use, _ in met):
        yield from _uneven_rows(layer, met, dtype, numbers)
        return
    examples = met[0][0].examples
    positions = sum(gradient.numel() for _, gradient in met) // (examples * layer.groups * layer.fan_out)
    if positions == 0:
        # an expert that no token chose
        return
    step = _examples_at_once(layer, positions, numbers)
    for start in range(0, examples, step):
        stop = min(start + step, examples)
        sides = (_joined(side) for side in _even(layer, met, (start, stop), dtype))
        yield Rows(slice(start, stop), *(_by_group(side, layer.groups) for side in sides))


def _examples_at_once(layer: TreatedLayer, positions: int, numbers: Callable[[int], int]) -> int:
    each = positions * (layer.fan_in + layer.fan_out) + numbers(positions)
    return max(1, NUMBERS_AT_ONCE // max(each * layer.groups, 1))


def _even(layer: TreatedLayer, met: Met, span: tuple[int, int], dtype: torch.dtype) -> Iterator[Sequence[Tensor]]:
    """``a`` (n, T, d_in) of each call for the examples from ``span[0]`` to ``span[1]``, then ``g`` (n, T, d_out)."""
    pairs = []
    for use, gradient in met:
        part = use.of_examples(*span)
        a, g = _rows(layer, part, of_examples(gradient, use.examples, *span), dtype)
        if part.kept is not None:
            g = g * part.kept[:, None]
        g = g.view(part.examples, -1, g.shape[-1])
        pairs.append((a.view(*g.shape[:2], a.shape[-1] if a.ndim > 1 else 1), g))
    yield from zip(*pairs, strict=True)


def _rows(layer: TreatedLayer, use: Use, gradient: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not layer.weight:
        g = layer.gradient_rows(gradient).to(dtype)
        return g[:, :0], g
    a, g = layer.pair(use, gradient)
    return a.to(dtype) if a.is_floating_point() else a, g.to(dtype)


def _joined(sides: Sequence[Tensor]) -> Tensor:
    return sides[0] if len(sides) == 1 else torch.cat(list(sides), 1)


def _by_group(rows: Tensor, groups: int) -> Tensor:
    """(n, T, groups · d) as (n · groups, T, d)."""
    if groups == 1:
        return rows
    count, positions = rows.shape[:2]
    return rows.view(count, positions, groups, rows.shape[-1] // groups).transpose(1, 2).flatten(0, 1)


def _uneven_rows(layer: TreatedLayer, met: Met, dtype: torch.dtype, numbers: Callable[[int], int]) -> Iterator[Rows]:
    """Rows of examples with unequal numbers of positions: those of about one length together, filled up with zeros."""
    a, g, which, owners = _flat(layer, met, dtype)
    counts = _positions_of_examples(met, owners)
    firsts = counts.cumsum(0) - counts
    # one gathering of the rows themselves, whatever was dropped or mixed
    order = which[torch.argsort(owners, stable=True)]
    lengths, longest_first = torch.sort(counts, descending=True, stable=True)
    for start, stop, most in _runs(_known_lengths(met) or lengths.tolist(), layer, numbers):
        examples = longest_first[start:stop]
        place = torch.arange(most, device=g.device)[None, :]
        real = place < counts[examples, None]
        chosen = order[torch.where(real, firsts[examples, None] + place, 0)]
        sides = (a[chosen], g[chosen].mul_(real.unsqueeze(-1)))
        yield Rows(examples, *(_by_group(side, layer.groups) for side in sides))


def _positions_of_examples(met: Met, owners: Tensor) -> Tensor:
    """(N,) positions of each example that count, over all calls."""
    masks = [use.kept for use, _ in met if use.kept is not None and use.lengths is not None]
    if len(masks) < len(met):
        return torch.bincount(owners, minlength=met[0][0].examples)
    # a device would wait for the largest number, to know how many to count
    counts = [mask.view(met[0][0].examples, -1).sum(1) for mask in masks]
    return counts[0] if len(counts) == 1 else torch.stack(counts).sum(0)


def _known_lengths(met: Met) -> list[int]:
    """The same numbers, descending, without asking the device; empty where they are not known."""
    lengths = [use.lengths for use, _ in met if use.lengths is not None]
    return sorted(map(sum, zip(*lengths, strict=True)), reverse=True) if len(lengths) == len(met) else []


def _runs(lengths: list[int], layer: TreatedLayer, numbers: Callable[[int], int]) -> Iterator[tuple[int, int, int]]:
    """Cut descending ``lengths`` into runs (start, stop, the first's length) of little waste; zeros are left out."""
    start = 0
    while start < len(lengths) and lengths[start] > 0:
        most, stop = lengths[start], start + 1
        least = max(1, int(most * _EVEN))
        limit = min(len(lengths), start + _examples_at_once(layer, most, numbers))
        while stop < limit and lengths[stop] >= least:
            stop += 1
        yield start, stop, most
        start = stop


def _flat(layer: TreatedLayer, met: Met, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``a`` and ``g`` over all calls; which of their rows count, and the example of each of those."""
    parts = []
    before = 0
    for use, gradient in met:
        a, g = _rows(layer, use, gradient, dtype)
        owners = use.owners
        if owners is None:
            owners = torch.arange(use.examples, device=g.device).repeat_interleave(g.shape[0] // use.examples)
        which = torch.arange(g.shape[0], device=g.device)
        which, owners = use.picked(which), use.picked(owners)
        parts.append((a, g, which + before, owners))
        before += g.shape[0]
    if len(parts) == 1:
        return parts[0]
    a, g, which, owners = (torch.cat(sides) for sides in zip(*parts, strict=True))
    return a, g, which, owners


@dataclass(frozen=True)
class SummedVectors:
    """Gradients of a table's vectors: those of one id in one example are one."""

    sums: Tensor
    """(P, d): one row for each pair of example and id, zeros behind the last."""
    examples: Tensor
    """(P,) the example of each row."""
    ids: Tensor
    """(P,) the id of each row."""


def summed_by_id(layer: TreatedLayer, met: Met, dtype: torch.dtype) -> SummedVectors:
    """Sum the gradients of equal ids of one example, over all calls."""
    ids, g, which, owners = _flat(layer, met, dtype)
    key = owners * layer.fan_in + ids[which]
    order = torch.argsort(key, stable=True)
    ordered = key[order]
    # no count of the pairs is asked for, which would wait for the device
    slot = torch.zeros_like(ordered)
    slot[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    sums = g.new_zeros(which.numel(), g.shape[1]).index_add_(0, slot, g[which[order]])
    first = torch.zeros_like(ordered).scatter_(0, slot, ordered)
    return SummedVectors(sums, first // layer.fan_in, first % layer.fan_in)
