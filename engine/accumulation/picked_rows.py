"""Picked rows: whose rows a product holds that an index has picked, as routers of experts do."""

import torch
from torch import Tensor

from engine.tracing.batch_provenance import Rows


def routing(rows: Rows, entered: Tensor, examples: int, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the owners of the positions of one product, and which of them count.

    Args:
        rows: Where the examples of the product's input are.
        entered: What entered the product, shape (…, in), its examples in front where no rows were picked.
        examples: Examples of the batch.
        mask: (N, T) booleans of the batch; None where all positions count.

    Returns:
        (P,) the example of each position, None where they lie example by example; and (P,) booleans of the positions
        that count, None where all do.
    """
    owners, leading = rows.owners(examples), entered.shape[:-1]
    if rows.labels is None or owners is None:
        whole = mask is not None and mask.numel() == leading.numel()
        return None, mask.reshape(-1) if mask is not None and whole else None
    along = [-1 if dim == rows.dim else 1 for dim in range(len(leading))]

    def spread(each: Tensor) -> Tensor:
        return each.reshape(along).expand(leading).reshape(-1)

    kept = None
    if mask is not None and rows.size == mask.numel() == rows.minor * examples:
        kept = spread(mask.reshape(-1)[rows.labels])
    elif mask is not None and mask.ndim == 2:
        kept = _of_whole_texts(owners, leading, rows.dim, mask)
    return spread(owners), kept


def _of_whole_texts(owners: Tensor, leading: torch.Size, dim: int, mask: Tensor) -> Tensor | None:
    """Return (P,) which positions count, where these are whole texts that were picked; None where they are not."""
    if len(leading) == 2 and leading[1 - dim] == mask.shape[1]:
        kept = mask[owners]
        return (kept if dim == 0 else kept.T).reshape(-1)
    if len(leading) == 1 and owners.shape[0] == mask.shape[1] and bool((owners == owners[0]).all()):
        return mask[owners[0]]
    return None
