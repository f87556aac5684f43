"""Tables that a batch shares: an embedding looked up once, its vectors then broadcast over the examples.

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
    """Whether ``ids`` are (1, …), (T,) or a single one."""
    return ids.ndim <= 1 or ids.shape[0] == 1


def spread(values: Tensor, ids: Tensor, examples: int) -> Tensor:
    """``values`` of ``ids``, (1, …) or (T, …), as a view (N, …) or (N, T, …) that repeats them."""
    repeated = values.shape[1:] if ids.shape[:1] == (1,) else values.shape
    return values.expand(examples, *repeated)


def disturbed(copies: Tensor) -> Tensor:
    """``copies`` (N, T, d) with other numbers in the last one, which neither a shift nor a scaling undoes."""
    pattern = torch.arange(copies.shape[-1], device=copies.device).to(copies.dtype).sin() + 1
    changed = copies.clone()
    changed[-1] = -2 * changed[-1] + pattern * (1 + copies.abs().max())
    return changed


def proven(tables: Iterable[str], run: Run) -> frozenset[str]:
    """Those of ``tables`` that can be spread without a change, each copy answering for its own example."""
    found: frozenset[str] = frozenset()
    try:
        plain = run(found, None)
    except EngineError:
        return found  # a model that returns only its own loss, say
    for table in tables:
        together = found | {table}
        try:
            same = close(run(together, None), plain)
            moved = run(together, table) if same else plain
        except EngineError:
            continue  # it takes the table's shape for what it was
        if same and close(moved[:-1], plain[:-1]) and not close(moved[-1:], plain[-1:]):
            found = together
    return found


def close(left: Tensor, right: Tensor) -> bool:
    """Whether outputs are the same but for rounding."""
    if left.shape != right.shape:
        return False
    tolerance = math.sqrt(torch.finfo(right.dtype).eps)
    return bool((left - right).abs().max() <= tolerance * right.abs().max())
