"""Traffic: bytes that one rank sends and receives, by layer and operation, and bytes that it holds afterwards.

A byte counts where it leaves for another rank, or comes from one; what a rank keeps for itself moves nowhere.
Protocol (counts, outcomes, first batches) is not counted: it does not grow with the layers' sizes.

Formulas for the bytes of a reduction: sent by each rank, and held afterwards.

With W ranks, f = (W − 1)/W, T rows of all ranks of o numbers of b bytes, and sums of e bytes:

    gather   f·o·T·b                          holds o·T·b
    gram     f·o·T·b/W + f·e·T(T+1)           holds o·T·b/W and a triangle of T(T+1)/2
    dense    f·e·o(o+1), and to the layer's owner alone half of it;  holds e·o(o+1)/2, the owner alone or all

A Gram matrix is summed in float64 (e = 8), a dense G in the precision of the collection (e = 4 or 8). The
transfers that bring row shards together for ranks that need whole rows are counted apart: f·o·T·b.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Moved:
    """Bytes of one operation on one layer."""

    sent: int = 0
    received: int = 0


@dataclass
class Traffic:
    """Bytes of one rank in one job."""

    moved: dict[tuple[str, str], Moved] = field(default_factory=lambda: defaultdict(Moved))
    """By layer and operation."""
    held: dict[tuple[str, str], int] = field(default_factory=dict)
    """Bytes that stay with this rank after a reduction, by layer and side."""
    reductions: dict[str, str] = field(default_factory=dict)
    """How each layer's G was reduced."""
    positions: dict[str, int] = field(default_factory=dict)
    """Positions of this rank alone that entered each layer's A."""

    def count(self, layer: str, operation: str, *, sent: int, received: int) -> None:
        """Add the bytes of one transfer.

        Args:
            layer: The layer's name.
            operation: Name of the operation.
            sent: Bytes that leave for other ranks.
            received: Bytes that come from them.
        """
        moved = self.moved[layer, operation]
        moved.sent += sent
        moved.received += received

    def sent_of(self, layer: str) -> int:
        """Return the bytes that a layer's reductions have sent.

        Args:
            layer: The layer's name.
        """
        return sum(moved.sent for (name, _), moved in self.moved.items() if name == layer)

    def total(self, operation: str | None = None) -> Moved:
        """Return the bytes of all layers.

        Args:
            operation: The only operation that counts; None counts all.

        Returns:
            The sums of bytes sent and received.
        """
        found = [moved for (_, name), moved in self.moved.items() if operation in (None, name)]
        return Moved(sum(each.sent for each in found), sum(each.received for each in found))


Reduced = Literal["gram", "gather", "dense"]
GRAM_BYTES = 8
"""Bytes of one number of a Gram matrix."""


def sent_bytes(mode: Reduced, *, ranks: int, rows: int, size: int, item: int, to_owner: bool = False) -> float:
    """Return the bytes that each rank sends to reduce one G."""
    share = (ranks - 1) / ranks
    if mode == "gather":
        return share * size * rows * item
    if mode == "gram":
        return share * size * rows * item / ranks + share * GRAM_BYTES * rows * (rows + 1)
    return share * item * size * (size + 1) / (2 if to_owner else 1)


def held_bytes(mode: Reduced, *, ranks: int, rows: int, size: int, item: int) -> float:
    """Return the bytes of one G that each rank holds after its reduction."""
    if mode == "gather":
        return size * rows * item
    if mode == "gram":
        return size * rows * item / ranks + GRAM_BYTES * rows * (rows + 1) / 2
    return item * size * (size + 1) / 2


def choose_reduction(wanted: str, *, rows: int, size: int, ranks: int, item: int = 4) -> Reduced:
    """Choose how gradient rows are reduced.

    Args:
        wanted: `collection.reduction`.
        rows: T, of all ranks.
        size: o.
        ranks: W.
        item: Bytes of one number of the rows.

    Returns:
        `gram` or `gather`: what was asked for, or by `auto` whichever sends less.
    """
    if wanted in ("gram", "gather"):
        return "gram" if wanted == "gram" else "gather"
    gram, gather = (sent_bytes(mode, rows=rows, size=size, ranks=ranks, item=item) for mode in ("gram", "gather"))
    return "gram" if gram <= gather else "gather"
