"""Picked rows: whose rows a product holds that an index has picked, as routers of experts do."""

from torch import Tensor

from engine.tracing.batch_provenance import Rows


def routing(rows: Rows, count: int, examples: int, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the owners of the positions of one product, and which of them count.

    Args:
        rows: Where the examples of the product's input are.
        count: Positions that entered the product.
        examples: Examples of the batch.
        mask: (N, T) booleans of the batch; None where all positions count.

    Returns:
        (count,) the example of each position, None where they lie example by example; and (count,) booleans of the
        positions that count, None where all do.
    """
    owners, kept = rows.owners(examples), None
    if rows.labels is None or owners is None:
        return None, mask.reshape(-1) if mask is not None and mask.numel() == count else None
    each = count // max(owners.shape[0], 1)
    if mask is not None and rows.size == mask.numel() == rows.minor * examples:
        kept = mask.reshape(-1)[rows.labels].repeat_interleave(each)
    return owners.repeat_interleave(each), kept
