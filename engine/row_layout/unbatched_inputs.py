"""Unbatched inputs, which a batch shares: an embedding looked up once, its vectors then broadcast over the examples.

The gradient of such a lookup is summed over the batch, and the Fisher is made of single examples'
gradients. Where the vectors are put N times in their own place, one copy for each example, the
model computes the same and every copy receives the gradient of its own example alone. Both are
shown by a dry run before it is relied on: the outputs stay, and a copy that is disturbed moves
its own example's outputs and no others.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from engine.errors import EngineError

Run = Callable[[frozenset[str], str | None], Tensor]
"""Outputs (N, …) with the tables of these names spread, the last example's copy of one of them disturbed."""


def lacks_examples(ids: Tensor) -> bool:
    """Tell whether ids have no dimension for the examples.

    Args:
        ids: Ids of a lookup, of any shape.

    Returns:
        True for the shapes (1, …), (T,) and ().
    """
    return ids.ndim <= 1 or ids.shape[0] == 1


def spread(values: Tensor, ids: Tensor, examples: int) -> Tensor:
    """Repeat what was looked up once for each example, without copying it.

    Args:
        values: Vectors of the ids, or the ids themselves, shape (1, …) or (T, …).
        ids: The ids, shape (1, …) or (T,).
        examples: Examples N.

    Returns:
        A view, shape (N, …) or (N, T, …).
    """
    repeated = values.shape[1:] if ids.shape[:1] == (1,) else values.shape
    return values.expand(examples, *repeated)


def disturb_last_copy(copies: Tensor) -> Tensor:
    """Put other numbers in the last copy, which neither a shift nor a scaling undoes.

    Args:
        copies: Copies of what was looked up, shape (N, T, d).

    Returns:
        A tensor of the same shape that differs in the last example.
    """
    pattern = torch.arange(copies.shape[-1], device=copies.device).to(copies.dtype).sin() + 1
    changed = copies.clone()
    changed[-1] = -2 * changed[-1] + pattern * (1 + copies.abs().max())
    return changed


def find_spreadable_tables(tables: Iterable[str], run: Run) -> frozenset[str]:
    """Find the tables that can be spread without a change, each copy answering for its own example.

    Args:
        tables: Names of embeddings that a batch shares.
        run: Runs the model with some of them spread, and returns its outputs, shape (N, …).

    Returns:
        Names of those that can be spread together; none where the model does not return outputs by example.
    """
    spreadable: frozenset[str] = frozenset()
    try:
        plain = run(spreadable, None)
    except EngineError:
        return spreadable  # a model that returns only its own loss, say
    for table in tables:
        together = spreadable | {table}
        try:
            same = close(run(together, None), plain)
            moved = run(together, table) if same else plain
        except EngineError:
            continue  # it takes the table's shape for what it was
        if same and close(moved[:-1], plain[:-1]) and not close(moved[-1:], plain[-1:]):
            spreadable = together
    return spreadable


def close(left: Tensor, right: Tensor) -> bool:
    """Tell whether outputs are the same but for rounding.

    Args:
        left: Outputs of any shape and dtype.
        right: Outputs to compare them with; their largest number and their dtype set the tolerance, if it is floating.

    Returns:
        True where shapes agree and no number differs by more than √eps of the largest.
    """
    if left.shape != right.shape:
        return False
    if not right.is_floating_point() or right.numel() == 0:
        return bool((left == right).all())
    tolerance = math.sqrt(torch.finfo(right.dtype).eps)
    return bool((left - right).abs().max() <= tolerance * right.abs().max())
