"""Digests of examples: exact sums by which every later pass over the data is held to what the first one saw.

An example's digest is an integer of 64 bits over the numbers of its inputs and targets; a pass adds those of the
examples that entered, modulo 2⁶⁴, so neither their order nor their division into batches matters::

    entry    h = Σ_p ((v_p ⊕ (v_p >> 15)) · c_p mod 2³²)    v: the numbers' bits, 32 at a time; c: odd, drawn once
    example  e = q(Σ_entries (h + d) · d)                   d: an odd number of name, dtype and shape
    pass     content = Σ e        keyed = Σ q(e + i · c)    i: the index; q(s) = s · (s ⊕ (s >> 29)) mod 2⁶⁴

Where inputs bring an attention mask, a padded position counts nothing, and any other counts by its place among those
that are not padded: so an example has one digest however long the batch is padded. Without a mask padding is content,
as it is to the model.

``keyed`` differs where an example came with another index. That changes no sum over examples, but sampled labels,
which are keyed by the index.
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from catalog.requests.inputs import Task
from engine.errors import DataDiffer
from engine.model.batches import Batch, Tree

_WORD = 2**64
_AT_ONCE = 2**18
"""Numbers that are multiplied at once: they stay in a processor's cache."""
_INDEX = -0x40A7B892E31B1A47


@dataclass(frozen=True, kw_only=True)
class EnteredExamples:
    """The examples that one pass over the data let enter, by count and digest."""

    count: int = 0
    content: str = "0" * 16
    """Sum of the examples' digests, 16 hexadecimal digits."""
    keyed: str = "0" * 16
    """The same, each with its index."""

    def added(self, batch: Batch, task: Task, update: int | None) -> "EnteredExamples":
        """Return the examples with those of one more batch.

        Args:
            batch: The batch, as the model is about to see it, on any device.
            task: The task, which says which targets are ignored.
            update: The number of the batch among those that enter, where the order of batches changes the sums; else
                None.

        Memory:
            2²¹ bytes, or twice the numbers of one example.
        """
        digests = digest_examples(batch, task)
        keyed = _squared((batch.index.to(digests.device) * _INDEX).add_(digests))
        content, own = (int(word) for word in torch.stack([digests.sum(), keyed.sum()]).tolist())
        if update is not None:
            content = content * (2 * content + 1) + (content ^ _INDEX) * (update + 1)
        return self.joined(EnteredExamples(count=batch.size, content=_hexadecimal(content), keyed=_hexadecimal(own)))

    def joined(self, other: "EnteredExamples") -> "EnteredExamples":
        """Return these examples and others together.

        Args:
            other: Examples of other batches, or of another rank.
        """
        return EnteredExamples(
            count=self.count + other.count,
            content=_hexadecimal(int(self.content, 16) + int(other.content, 16)),
            keyed=_hexadecimal(int(self.keyed, 16) + int(other.keyed, 16)),
        )

    def require(self, later: "EnteredExamples", what: str, *, labels_drawn: bool = False) -> None:
        """Require that a later pass has let the same examples enter.

        Args:
            later: What entered in the later pass.
            what: Name of the later pass, for the message.
            labels_drawn: Whether labels that are keyed by the index must be the same, too.

        Raises:
            DataDiffer: If it has not; the message has both figures.
        """
        if (self.count, self.content) != (later.count, later.content):
            raise DataDiffer(
                f"the data must be the same at every pass: {self} entered the collection, and {later} {what}; "
                "seed what shuffles, drops or augments examples, so that every pass gives the same ones, or give the "
                "examples as a list",
                pointer="/data",
            )
        if labels_drawn and self.keyed != later.keyed:
            raise DataDiffer(
                f"the labels that are drawn must be the same at every pass, and are keyed by the index of each example:"
                f" {self} entered the collection and {what}, in another order (keyed digests {self.keyed} and "
                f"{later.keyed}); give the data in one order, or each example an index of its own",
                pointer="/data",
            )

    def __str__(self) -> str:
        """Return count and digest as a message names them."""
        return f"{self.count} examples with the digest {self.content}"


def digest_examples(batch: Batch, task: Task) -> Tensor:
    """Return the digest of every example of a batch, whatever its padding.

    Args:
        batch: Inputs and targets, on any device.
        task: The task, which says which targets are ignored.

    Returns:
        Shape (N,), int64, on the device of the inputs.
    """
    mask, total, constant = batch.mask, batch.index.new_zeros(batch.size), 0
    for name, leaf in (*_leaves(batch.inputs, "inputs"), *_leaves(batch.targets, "targets")):
        if isinstance(leaf, Tensor):
            found = _entry(name, leaf.detach(), mask, task)
            total = total.to(found.device).add_(found)
        elif leaf is not None:
            constant ^= _odd(name, type(leaf).__qualname__, repr(leaf)[:1000])
    return _squared(total.add_(constant))


def _leaves(tree: Tree, name: str) -> Iterator[tuple[str, Any]]:
    """Yield whatever a tree holds with its place; the order of a mapping's keys is not part of it."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}/{key}")
    elif isinstance(tree, (tuple, list)):
        for place, value in enumerate(tree):
            yield from _leaves(value, f"{name}/{place}")
    else:
        yield name, tree


def _entry(name: str, tensor: Tensor, mask: Tensor | None, task: Task) -> Tensor:
    """Digest one tensor (N, …) by example, shape (N,)."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    dtype = str(dense.dtype)
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    if dense.ndim < 2 or mask is None or dense.shape[:2] != mask.shape:
        odd = _odd(name, dtype, *dense.shape[1:])
        return _weighted(dense.reshape(dense.shape[0], -1)).add_(odd).mul_(odd)
    examples, positions = mask.shape
    kept = mask.to(dense.device)
    sums = _weighted(dense.reshape(examples * positions, -1)).view(examples, positions)
    # of two batches the one that is padded on the left has other positions, and the same places
    coefficients = _coefficients(positions, dense.device)[kept.cumsum(1).sub_(1).clamp_(min=0)].to(torch.int64)
    if name.startswith("targets") and task.type != "causal_lm" and dense.ndim == 2:
        # a target counts in the loss wherever it stands
        kept = kept | (dense != task.ignore_index)
    odd = _odd(name, dtype, *dense.shape[2:])
    return (sums * coefficients).masked_fill_(~kept, 0).sum(1).add_(odd).mul_(odd)


def _weighted(numbers: Tensor) -> Tensor:
    """Return ``h`` of each row of numbers (R, P), shape (R,), int64."""
    size = numbers.element_size()
    # a dimension of one number is contiguous whatever its stride is, which a view by another type is not
    rows = numbers.contiguous().as_strided(numbers.shape, (numbers.shape[1], 1))
    if numbers.dtype == torch.bool or size == 1:
        words = rows.view(torch.uint8)
    else:
        words = rows.view(torch.int16 if size == 2 else torch.int32)
    coefficients = _coefficients(words.shape[1], words.device)
    if words.numel() <= _AT_ONCE:
        return _products(words, coefficients)
    parts = torch.split(words, max(_AT_ONCE // words.shape[1], 1))
    return torch.cat([_products(part, coefficients) for part in parts])


def _products(words: Tensor, coefficients: Tensor) -> Tensor:
    wide = words.to(torch.int32)
    # small whole numbers have their bits at the upper end of a float's
    return (wide >> 15).bitwise_xor_(wide).mul_(coefficients).sum(1, dtype=torch.int32).to(torch.int64)


def _coefficients(count: int, device: torch.device) -> Tensor:
    """Odd numbers of 32 bits, the same ones for every device."""
    return _table(max(count - 1, 1).bit_length(), device)[:count]


@functools.lru_cache(maxsize=8)
def _table(bits: int, device: torch.device) -> Tensor:
    drawn = torch.randint(2**31, (2**bits,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    return drawn.to(torch.int32).bitwise_or_(1).to(device)


@functools.lru_cache(maxsize=256)
def _odd(*parts: object) -> int:
    """An odd number of 64 bits, with its sign, that stands for a name with what belongs to it."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little", signed=True) | 1


def _squared(words: Tensor) -> Tensor:
    """Return ``q`` of each word: not linear, so that no exchange of entries between examples keeps the sum."""
    return (words >> 29).bitwise_xor_(words).mul_(words)


def _hexadecimal(word: int) -> str:
    return f"{word % _WORD:016x}"
