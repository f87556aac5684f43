"""Provenance: the example of each row of a tensor, as it is followed from the model's inputs through its operations.

Examples lie along one dimension of an activation: index ``i`` along it belongs to example
``(i // minor) % N``. That covers batch first (minor 1), time before batch, and either flattened with
its neighbours, example by example or position by position. Rows picked by an index (tokens routed to
an expert) carry the places they were picked from as ``labels``. What was made of one example alone, as
in a loop over them, is that example's along every dimension.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.layers.layer import Use
from engine.row_layout.attention_masks import KeptPositions


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The place of the N examples in a tensor of any shape."""

    dim: int
    """The dimension along which they lie."""
    minor: int
    """Consecutive indices along it that belong to one example."""
    size: int
    """Indices along it, before any were picked."""
    labels: Tensor | None = None
    """(K,) which of the ``size`` indices each one is, where they were picked; else None."""
    origin: "Rows | None" = field(default=None, compare=False)
    """The rows that these were picked from, where they were."""
    one: int | None = None
    """The example that everything in the tensor is of, along whatever dimension; None where they are several."""

    def owners(self, examples: int) -> Tensor | None:
        """Return the example of each picked index, shape (K,), int64; None where none were picked."""
        return None if self.labels is None else (self.labels // self.minor) % examples

    def owner_of_each(self, examples: int, device: torch.device) -> Tensor:
        """Return the example of each index along ``dim``, shape (K,), int64, on ``device`` where none were picked."""
        own = self.owners(examples)
        return own if own is not None else torch.arange(self.size, device=device) // self.minor % examples

    def fits(self, tensor: Tensor) -> bool:
        """Tell whether a tensor has as many indices along ``dim`` as were picked; False where none were."""
        return self.labels is not None and self.dim < tensor.ndim and tensor.shape[self.dim] == self.labels.shape[0]

    def example_first(self, tensor: Tensor, examples: int) -> Tensor:
        """Return the tensor, or another of its shape up to ``dim``, with its examples leading, shape (N, …).

        As it is where they lead, or its rows were picked.
        """
        if self.labels is not None or (self.dim == 0 and self.size == self.minor * examples):
            return tensor
        major = self.size // (self.minor * examples)
        shape = (*tensor.shape[: self.dim], major, examples, self.minor, *tensor.shape[self.dim + 1 :])
        return tensor.reshape(shape).movedim(self.dim + 1, 0)

    def of_example(self, tensor: Tensor, example: int, examples: int) -> Tensor:
        """Return the indices of one example, from 0 to N − 1, along ``dim`` of a tensor that is placed alike."""
        owners = self.owners(examples)
        if owners is not None:
            return tensor.index_select(self.dim, (owners == example).nonzero()[:, 0])
        major = self.size // (self.minor * examples)
        if major == 1:
            return tensor.narrow(self.dim, example * self.minor, self.minor)
        shape = (*tensor.shape[: self.dim], major, examples, self.minor, *tensor.shape[self.dim + 1 :])
        return tensor.reshape(shape).select(self.dim + 1, example).flatten(self.dim, self.dim + 1)

    def per_example(self, tensor: Tensor, examples: int) -> Tensor:
        """Sum a tensor that is placed alike over each example: shape (N, …), the other dimensions in order."""
        front = tensor.movedim(self.dim, 0)
        owners = self.owners(examples)
        if owners is not None:
            return front.new_zeros(examples, *front.shape[1:]).index_add_(0, owners, front)
        major = self.size // (self.minor * examples)
        return front.reshape(major, examples, self.minor, *front.shape[1:]).sum(dim=(0, 2))


def batch_first(tensor: Tensor, examples: int) -> Rows | None:
    """Return the rows of a tensor of which nothing is known but that its N examples lead.

    For the shapes (N, …), (N · l,) and (N · l, d); None where they cannot lead.
    """
    if tensor.ndim == 0 or tensor.shape[0] % examples:
        return None
    if tensor.ndim > 2 and tensor.shape[0] != examples:
        return None
    return Rows(dim=0, minor=tensor.shape[0] // examples, size=tensor.shape[0])


def rows_of_one(example: int, tensor: Tensor, examples: int) -> Rows:
    """Return the rows of a tensor that was made of one of N examples alone, along its first dimension."""
    count = tensor.shape[0] if tensor.ndim else 1
    labels = torch.full((count,), example, device=tensor.device)
    return Rows(dim=0, minor=1, size=examples, labels=labels, one=example)


def routed(rows: Rows, use: Use, known: KeptPositions | None) -> Use:
    """Mark the owners of the positions of one product, which an index may have picked, and which of them count.

    Args:
        rows: Where the examples of the product's input are.
        use: The product with its input, shape (…, in), its examples in front where no rows were picked.
        known: The positions of the batch's mask; None where all positions count.

    Returns:
        The product with the example of each position, where they do not lie example by example, and its positions that
        count.
    """
    owners, leading = rows.owners(use.examples), use.input.shape[:-1]
    if rows.labels is None or owners is None:
        whole = known is not None and known.kept.numel() == leading.numel()
        return known.laid_on(use) if known is not None and whole else use
    along = [-1 if dim == rows.dim else 1 for dim in range(len(leading))]

    def spread(each: Tensor) -> Tensor:
        return each.reshape(along).expand(leading).reshape(-1)

    kept = None
    if known is not None and rows.size == known.kept.numel() == rows.minor * use.examples:
        kept = spread(known.kept[rows.labels])
    elif known is not None and known.mask.ndim == 2:
        kept = _of_whole_texts(owners, leading, rows.dim, known.mask)
    return replace(use, owners=spread(owners), kept=kept)


def _of_whole_texts(owners: Tensor, leading: torch.Size, dim: int, mask: Tensor) -> Tensor | None:
    """Return (P,) which positions count, where these are whole texts that were picked; None where they are not."""
    if len(leading) == 2 and leading[1 - dim] == mask.shape[1]:
        kept = mask[owners]
        return (kept if dim == 0 else kept.T).reshape(-1)
    if len(leading) == 1 and owners.shape[0] == mask.shape[1] and bool((owners == owners[0]).all()):
        return mask[owners[0]]
    return None
