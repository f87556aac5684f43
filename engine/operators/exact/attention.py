"""Attention by scaled dot products with its first and second derivatives, in blocks that are computed anew each time.

For queries q, keys k, values v and a bias M, with ``S = s q kᵀ + M``, ``P = softmax S`` and ``O = P v``:

- tangent:   ``dS = s (dq kᵀ + q dkᵀ) + dM``, ``dP = P ∘ (dS − rows(P ∘ dS))``, ``dO = dP v + P dv``
- pullback:  ``R = gO vᵀ``, ``C = P ∘ (R − rows(P ∘ R))``, ``gq = s C k``, ``gk = s Cᵀ q``, ``gv = Pᵀ gO``, ``gM = C``
- the pullback's own tangent, of which ``⟨a, pullback⟩`` has the same derivative, since the pullback is a gradient

Torch's fused kernels have the first pullback alone. Here P of a block of batch entries, heads and queries is made from
q, k and the rows' ``log Σ exp S``, used, and dropped, so that no tensor of (B, H, L, S) numbers is ever held.

References:
    Dao et al. (2022), FlashAttention: Fast and memory-efficient exact attention with IO-awareness
    Rabe & Staats (2021), Self-attention does not need O(n²) memory
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_NUMBERS_AT_ONCE = 2**19
"""Scores of one block: a few MiB, which a cache holds."""


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Queries (B, K, g, L, E), keys (B, K, 1, S, E), values (B, K, 1, S, V), a bias that broadcasts to (B, K, g, L, S).

    K counts the heads of the keys, g the heads of the queries that share one of them. None stands in the place of an
    operand without a tangent.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The operands of one call, and how they attend.

    ``rows`` are ``log Σ exp S`` as ``forward`` returns it; a ``gradient`` gO is one of the outputs, (B, K, g, L, V).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    """Added to the scores; broadcasts to (B, K, g, L, S)."""
    mask: Tensor | None
    """Booleans, True where a query sees a key; broadcasts alike."""
    causal: bool
    """Query i sees keys 0 to i alone."""
    scale: float
    at_once: int = _NUMBERS_AT_ONCE
    """Scores of one block."""

    def forward(self) -> tuple[Tensor, Tensor]:
        """Compute the outputs.

        Returns:
            O (B, K, g, L, V) in the dtype of the queries, and ``log Σ exp S`` of each row (B, K, g, L, 1), 0 where a
            query sees no key.
        """
        return self.forward_with_tangents([])[:2]

    def forward_with_tangents(self, tangents: "list[Operands]") -> tuple[Tensor, Tensor, list[Tensor]]:
        """Compute the outputs and their tangents, block by block.

        Args:
            tangents: Tangents of the operands, as many as are wanted.

        Returns:
            O, the rows' ``log Σ exp S``, and dO for each of ``tangents``, shape (B, K, g, L, V).
        """
        value = self.value
        shape = (*self.query.shape[:-1], value.shape[-1])
        output = self.query.new_empty(shape)
        rows = torch.empty(*shape[:-1], 1, dtype=_wide(value), device=value.device)
        pushed = [torch.empty_like(output) for _ in tangents]
        for block in self._blocks():
            scores = self._scores(block)
            peak = scores.amax(-1, keepdim=True)
            # a query that sees nothing gets nothing
            peak.masked_fill_(peak == -math.inf, 0.0)
            chances = scores.sub_(peak).exp_()
            total = chances.sum(-1, keepdim=True)
            total.masked_fill_(total == 0, 1.0)
            chances.div_(total)
            block.write(rows, total.log_().add_(peak))
            block.write(output, chances @ block.keys_of(value))
            for own, tangent in zip(pushed, tangents, strict=True):
                block.write(own, self._pushed(block, chances, tangent))
        return output, rows, pushed

    def tangent(self, rows: Tensor, tangent: Operands) -> Tensor:
        """Compute dO, the outputs' tangent, (B, K, g, L, V)."""
        pushed = self.query.new_empty(*self.query.shape[:-1], self.value.shape[-1])
        for block in self._blocks():
            block.write(pushed, self._pushed(block, self._chances(block, rows), tangent))
        return pushed

    def pullback(self, rows: Tensor, gradient: Tensor) -> Operands:
        """Compute the gradients of ``⟨gO, O⟩``, each of its operand's shape; of a bias if there is one."""
        into = self._zeros()
        for block in self._blocks():
            chances, g = self._chances(block, rows), block.of(gradient)
            key, query = block.keys_of(self.key), block.of(self.query)
            slope = _centred_(g @ block.keys_of(self.value).mT, chances)
            self._add(
                into, block, (slope @ key).mul_(self.scale), (slope.mT @ query).mul_(self.scale), chances.mT @ g, slope
            )
        return self._cast(into)

    def pullback_tangent(self, rows: Tensor, gradient: Tensor, tangent: Operands) -> Operands:
        """Compute the derivative of ``pullback`` along tangents of the operands, with gO held.

        These are the gradients' tangents, each of its operand's shape; by symmetry also the pullback of ``tangent``
        through ``pullback``.
        """
        into = self._zeros()
        for block in self._blocks():
            chances, g = self._chances(block, rows), block.of(gradient)
            key, query, value = block.keys_of(self.key), block.of(self.query), block.keys_of(self.value)
            received = g @ value.mT
            centred = received - (chances * received).sum(-1, keepdim=True)
            slope = chances * centred
            moved = self._chance_tangent(block, chances, tangent)
            change = torch.zeros_like(chances) if tangent.value is None else g @ block.keys_of(tangent.value).mT
            change -= (moved * received + chances * change).sum(-1, keepdim=True)
            bend = moved * centred + chances * change
            of_query, of_key = bend @ key, bend.mT @ query
            if tangent.key is not None:
                of_query += slope @ block.keys_of(tangent.key)
            if tangent.query is not None:
                of_key += slope.mT @ block.of(tangent.query)
            self._add(into, block, of_query * self.scale, of_key * self.scale, moved.mT @ g, bend)
        return self._cast(into)

    # ---- one block

    def _scores(self, block: "_Block") -> Tensor:
        scores = (block.of(self.query) * self.scale) @ block.keys_of(self.key).mT
        if self.bias is None and self.mask is None and not self.causal:
            return scores
        pairs = block.spread(scores)
        if self.bias is not None:
            pairs += block.pairs_of(self.bias)
        if self.mask is not None:
            pairs.masked_fill_(~block.pairs_of(self.mask), -math.inf)
        if self.causal:
            pairs.masked_fill_(block.later(scores.device), -math.inf)
        return scores

    def _chances(self, block: "_Block", rows: Tensor) -> Tensor:
        return self._scores(block).sub_(block.of(rows)).exp_()

    def _chance_tangent(self, block: "_Block", chances: Tensor, tangent: Operands) -> Tensor:
        left, right = [], []
        if tangent.query is not None:
            left.append(block.of(tangent.query))
            right.append(block.keys_of(self.key))
        if tangent.key is not None:
            left.append(block.of(self.query))
            right.append(block.keys_of(tangent.key))
        # both summands in one product
        moved = (torch.cat(left, -1) * self.scale) @ torch.cat(right, -1).mT if left else torch.zeros_like(chances)
        if tangent.bias is not None:
            pairs = block.spread(moved)
            pairs += block.pairs_of(tangent.bias)
        return _centred_(moved, chances)

    def _pushed(self, block: "_Block", chances: Tensor, tangent: Operands) -> Tensor:
        pushed = self._chance_tangent(block, chances, tangent) @ block.keys_of(self.value)
        return pushed if tangent.value is None else pushed.baddbmm_(chances, block.keys_of(tangent.value))

    # ---- all blocks

    def _blocks(self) -> Iterator["_Block"]:
        batch, heads, group, length, _ = self.query.shape
        keys = self.key.shape[-2]
        entries = max(1, min(batch, self.at_once // max(1, heads * group * length * keys)))
        at_once = max(1, min(heads, self.at_once // max(1, group * length * keys)))
        queries = max(1, min(length, self.at_once // max(1, group * keys)))
        for first in range(0, batch, entries):
            for head in range(0, heads, at_once):
                for query in range(0, length, queries):
                    stop = min(query + queries, length)
                    yield _Block(
                        entries=slice(first, min(first + entries, batch)),
                        heads=slice(head, min(head + at_once, heads)),
                        group=group,
                        rows=slice(query, stop),
                        keys=slice(0, min(stop, keys) if self.causal else keys),
                    )

    def _zeros(self) -> list[Tensor]:
        wide = _wide(self.query)
        zeros = [torch.zeros(part.shape, dtype=wide, device=part.device) for part in self._parts]
        if self.bias is not None:
            zeros.append(torch.zeros(self.bias.shape, dtype=wide, device=self.bias.device))
        return zeros

    @property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def _add(
        self, into: list[Tensor], block: "_Block", query: Tensor, key: Tensor, value: Tensor, pairs: Tensor
    ) -> None:
        block.write(into[0], query)
        for whole, own in ((into[1], key), (into[2], value)):
            seen = whole[block.entries, block.heads, :, block.keys]
            seen += own.view(seen.shape)
        if self.bias is not None:
            seen = block.pairs_of(into[3])
            seen += block.spread(pairs).sum_to_size(seen.shape)

    def _cast(self, into: list[Tensor]) -> Operands:
        query, key, value = (own.to(part.dtype) for own, part in zip(into, self._parts, strict=False))
        bias = None if self.bias is None else into[3].to(self.bias.dtype)
        return Operands(query=query, key=key, value=value, bias=bias)


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Batch entries, heads, queries, and the keys that any of them may see."""

    entries: slice
    heads: slice
    group: int
    rows: slice
    keys: slice

    @property
    def queries(self) -> tuple[slice, ...]:
        return self.entries, self.heads, slice(None), self.rows

    def of(self, tensor: Tensor) -> Tensor:
        """The block's queries, heads that share keys below each other: (entries · heads, g · queries, E)."""
        own = tensor[self.queries]
        return own.reshape(own.shape[0] * own.shape[1], -1, own.shape[-1]).to(_wide(own))

    def write(self, tensor: Tensor, queries: Tensor) -> None:
        """Write what ``of`` would read."""
        own = tensor[self.queries]
        own.copy_(queries.view(own.shape))

    def keys_of(self, tensor: Tensor) -> Tensor:
        """The block's keys: (entries · heads, S, E)."""
        own = tensor[self.entries, self.heads, :, self.keys]
        return own.reshape(-1, *own.shape[3:]).to(_wide(own))

    def spread(self, pairs: Tensor) -> Tensor:
        """Scores by entry, head, g, query and key: a view."""
        entries, queries = self.entries.stop - self.entries.start, self.rows.stop - self.rows.start
        return pairs.view(entries, -1, self.group, queries, pairs.shape[-1])

    def pairs_of(self, tensor: Tensor) -> Tensor:
        place = (self.entries, self.heads, slice(None), self.rows, self.keys)
        return tensor[tuple(slice(None) if size == 1 else own for size, own in zip(tensor.shape, place, strict=True))]

    def later(self, device: torch.device) -> Tensor:
        """Pairs whose key comes after the query."""
        queries = torch.arange(self.rows.start, self.rows.stop, device=device)
        return torch.arange(self.keys.start, self.keys.stop, device=device)[None, :] > queries[:, None]


def _centred_(moved: Tensor, chances: Tensor) -> Tensor:
    """``P ∘ (X − rows(P ∘ X))`` in the memory of X: how a softmax moves, and how its gradient does."""
    moved.mul_(chances)
    return moved.addcmul_(chances, moved.sum(-1, keepdim=True), value=-1)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype that scores are made in: 16 bits hold too few for a sum."""
    return torch.promote_types(tensor.dtype, torch.float32)
