"""Picked rows: whose rows a product holds that an index has picked, as routers of experts do."""

from dataclasses import replace

import torch
from torch import Tensor

from engine.layers.layer import Use
from engine.row_layout.attention_masks import KeptPositions
from engine.tracing.batch_provenance import Rows


def routed(rows: Rows, use: Use, known: KeptPositions | None) -> Use:
    """Mark the owners of the positions of one product, and which of them count.

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
