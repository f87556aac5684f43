"""Representation: how a layer's G is kept, chosen before the pass from the dry run's sizes.

T gradient rows of o outputs, as much again while they are worked on, and their T×T Gram matrix take
no more than G while ``T² + 2 T·o ≤ o²``: for ``T ≤ (√2 − 1) o``. A G that is not kept as rows is dense here, and
says why; for the loss's head ``engine.planning.choose_plan`` chooses probabilities or a sketch besides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from catalog.requests.collection import Collection
from catalog.requests.woodbury import Woodbury
from engine.errors import BrokenFactors
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.low_rank import LowRank
from engine.factors.representation_bytes import diagonal_sketch_bytes, low_rank_bytes
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.layers.layer import BlockLayer, TreatedLayer
from engine.layers.tied import TiedHeadLayer
from engine.linalg.linear_operator import Kind, Structured
from engine.row_layout.layer_calls import Call

RATIO = 2**0.5 - 1
"""Rows over outputs up to which `auto` keeps rows."""
LARGE_BYTES = 500 * 10**6
"""Rows of a layer from which `auto` stands them on the host, and narrows them."""
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_READERS: Mapping[str, type[Structured]] = {
    "woodbury": LowRank,
    "softmax_head": SoftmaxFisher,
    "diagonal_sketch": DiagonalSketch,
}
KINDS = frozenset({"dense", *_READERS})
"""How a stored G may be kept."""


@dataclass(frozen=True, kw_only=True)
class Representation:
    """How one layer's G is kept."""

    kind: Kind
    why: str
    """Why so; empty where nothing was to be chosen."""
    rows: int = 0
    """Rows of gradients, or of probabilities, that are foreseen of each group, at most."""
    dtype: torch.dtype = torch.float32
    """Dtype of the rows."""
    sums: torch.dtype = torch.float32
    """Dtype of the QR that reduces more rows than G has."""
    on_host: bool = False
    """The rows stand on the host."""
    basis: bool = False
    """An analysis asks for its eigenvectors."""
    rank: int = 0
    """Rank of a sketch; 0 keeps the diagonal alone."""
    shards: int = 1
    """Ranks of one node that hold the rows together, each a part of the columns."""
    of_terms: bool = False
    """The representation comes from the probabilities of the loss's terms, not from gradients."""

    def place(self, sums: torch.device) -> str | None:
        """Return where rows are kept: `host` or `device`; None where none are."""
        if self.kind == "dense":
            return None
        return "host" if self.on_host or sums.type == "cpu" else "device"

    def held_rows(self, size: int) -> int:
        """Return the rows of each group held at once: as many as come, or as G has (``size``)."""
        return min(self.rows, size)

    def gram_rows(self, size: int) -> int:
        """Return the rows of each group's largest Gram matrix: the held ones, or twice the rank of a sketch."""
        return 2 * self.rank if self.kind == "diagonal_sketch" else self.held_rows(size)

    def held_bytes(self, layer: TreatedLayer) -> int:
        """Return the bytes of the rows of all groups, and of the triangles that take in more of them."""
        return self._bytes(layer, self.held_rows(layer.out_dim))

    def share_bytes(self, layer: TreatedLayer) -> int:
        """Return the bytes that one rank holds: its part of rows that several hold together, and their Gram matrix."""
        if self.shards == 1:
            return self.held_bytes(layer)
        rows = self.held_rows(layer.out_dim)
        return self._bytes(layer, -(-rows // self.shards)) + layer.groups * 4 * rows * (rows + 1)

    def _bytes(self, layer: TreatedLayer, rows: int) -> int:
        size = layer.out_dim
        if self.kind == "diagonal_sketch":
            return layer.groups * diagonal_sketch_bytes(size, self.rank, self.dtype.itemsize)
        triangle = size * size * self.sums.itemsize if self.rows > size else 0
        return layer.groups * (low_rank_bytes(rows, size, self.dtype.itemsize) + triangle)


DENSE = Representation(kind="dense", why="")


@dataclass(frozen=True, kw_only=True)
class WorkloadEstimate:
    """An estimate of the data before the pass."""

    calls: Sequence[Call]
    """Calls of a dry run."""
    seen: int
    """Its examples."""
    outputs: int
    """Numbers in the model's outputs for all of them."""
    examples: int | None
    """Examples of the data; None where they are not known."""

    def rank_bound(self, layer: TreatedLayer, collection: Collection, side: Literal["A", "G"]) -> int | None:
        """Return the most nonzero eigenvalues that A or G of each group can have, by ``rows``; None if that is unknown.

        None too where rows bound nothing.
        """
        if isinstance(layer, TiedHeadLayer) or (side == "A" and layer.form != "kronecker"):
            return None
        return self._entering(layer, collection, 1) if side == "A" else self.rows(layer, collection)

    def rows(self, layer: TreatedLayer, collection: Collection) -> int | None:
        """Return the gradient rows of each group that will enter G; None where the data's size is unknown.

        All examples are taken to be as long as the first.
        """
        directions = {"mc": collection.samples, "empirical": 1}.get(collection.fisher, self.outputs // self.seen)
        return self._entering(layer, collection, directions)

    @cached_property
    def _calls_of(self) -> dict[TreatedLayer, list[Call]]:
        found: dict[TreatedLayer, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.layer, []).append(call)
        return found

    def _entering(self, layer: TreatedLayer, collection: Collection, directions: int) -> int | None:
        """Rows of each group, so many for each position."""
        if self.examples is None:
            return None
        batches = -(-self.examples // collection.batch_size)
        updates = -(-batches // collection.update_freq)
        entering = min(self.examples, updates * collection.batch_size)
        if isinstance(layer, BlockLayer):
            return entering * directions
        own = [call for role in dict.fromkeys((layer, *layer.roles)) for call in self._calls_of.get(role, ())]
        if collection.sharing == "reduce" and layer.form == "kronecker":
            return entering * directions * len(own)
        width = layer.fan_out * layer.groups
        positions = sum(call.output.numel() // width for call in own)
        return -(-entering * positions * directions // self.seen)


def choose(
    layer: TreatedLayer, options: Woodbury, collection: Collection, foreseen: WorkloadEstimate, sums: torch.dtype
) -> Representation:
    """Choose how a layer keeps its G.

    Args:
        layer: A covered layer.
        options: The document's `woodbury`.
        collection: Options that decide how many rows enter, and their storage precision.
        foreseen: Sizes of the calls and of the data.
        sums: Precision of the sums.

    Returns:
        Rows where they take less than a dense G and nothing forbids them; else a dense G with the reason.
    """
    if options.policy == "dense" or layer.form == "diagonal_block":
        return DENSE
    size, rows = layer.out_dim, foreseen.rows(layer, collection)
    refused = _refusal(layer, options, collection, rows)
    if refused is not None:
        return Representation(kind="dense", why=f"G is dense: {refused}")
    # of data without a count, more than G has itself
    foretold = rows or 2 * size
    kept = Representation(
        kind="woodbury",
        why=f"G is kept as its gradient rows: {foretold} are foreseen, for {size} outputs",
        rows=foretold,
        sums=sums,
    )
    return of_rows(kept, layer, options, collection, sums)


def of_rows(
    kept: Representation, layer: TreatedLayer, options: Woodbury, collection: Collection, sums: torch.dtype
) -> Representation:
    """Choose the precision and the place of rows.

    Args:
        kept: A representation as rows.
        layer: The layer whose G is kept so.
        options: The document's `woodbury`.
        collection: The storage precision of all factors.
        sums: Precision of the sums, which is the rows' unless another is named.

    Returns:
        The same representation with both; rows of 500 MB and more are narrowed and kept on the host.
    """
    plain = sums if collection.storage_dtype is None else getattr(torch, collection.storage_dtype)
    held = layer.groups * low_rank_bytes(kept.held_rows(layer.out_dim), layer.out_dim, plain.itemsize)
    large = held >= LARGE_BYTES
    kept = replace(kept, dtype=_DTYPES.get(options.dtype, torch.float16 if large and plain.itemsize > 2 else plain))
    if options.store_device == "auto":
        return replace(kept, on_host=kept.held_bytes(layer) >= LARGE_BYTES)
    return replace(kept, on_host=options.store_device == "host")


def _refusal(layer: TreatedLayer, options: Woodbury, collection: Collection, rows: int | None) -> str | None:
    """Why its G is not kept as ``rows`` rows; None where it is."""
    size = layer.out_dim
    reasons = (
        (collection.fisher == "forward_only", "`forward_only` has no gradients, and sets it to the identity"),
        (collection.ekfac, "EK-FAC's correction needs all of its eigenvectors"),
        (isinstance(layer, TiedHeadLayer), "head and table share one weight, and their two products become one"),
        (
            options.policy == "hybrid" and size < options.hybrid_from,
            f"it has {size} outputs, and `woodbury.hybrid_from` is {options.hybrid_from}",
        ),
        (rows == 0, "the dry run did not call the layer"),
        (options.policy == "auto" and rows is None, "the data do not say how many examples they hold"),
        (
            options.policy == "auto" and rows is not None and rows > RATIO * size,
            f"{rows} gradient rows are foreseen, more than {RATIO:.3f} of {size} outputs",
        ),
    )
    return next((reason for holds, reason in reasons if holds), None)


def read_structured(kind: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Structured:
    """Restore a structured side that was stored.

    Args:
        kind: Its representation.
        tensors: The stored tensors, in the shapes of that kind.
        metadata: The strings stored with them.

    Returns:
        A side that computes on the host.

    Raises:
        BrokenFactors: If the kind is unknown, or something is missing.
    """
    reader = _READERS.get(kind)
    if reader is None:
        raise BrokenFactors(f"a stored G is of kind `{kind}`, which this version does not know", pointer="/factors")
    return reader.read(tensors, metadata)
