"""Formulas for the bytes of a reduction: sent by each rank, and held afterwards.

With W ranks, f = (W − 1)/W, T rows of all ranks of o numbers of b bytes, and sums of e bytes:

    gather   f·o·T·b                          holds o·T·b
    gram     f·o·T·b/W + f·e·T(T+1)           holds o·T·b/W and a triangle of T(T+1)/2
    dense    f·e·o(o+1), and to the layer's owner alone half of it;  holds e·o(o+1)/2, the owner alone or all

A Gram matrix is summed in float64 (e = 8), a dense G in the precision of the collection (e = 4 or 8). The
transfers that bring row shards together for ranks that need whole rows are counted apart: f·o·T·b.
"""

from typing import Literal

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
