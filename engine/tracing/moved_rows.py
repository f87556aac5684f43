"""Moved rows: the examples of what an operation has only put elsewhere, found by moving their numbers alike.

A slice, a selection, a list that is stacked again, a reversal: there are many ways to put the numbers of a tensor
elsewhere, and one rule for all. The same operation is run on a tensor that holds, in the place of each number, the
example that it is of. What comes out says whose each number of the result is.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from engine.tracing.batch_provenance import Rows, rows_of_one
from engine.tracing.torch_functions import JOINS, Operation, tensors_of, with_tensors

STACKS = frozenset({"vstack", "hstack", "dstack", "row_stack", "column_stack"})
"""Operations that put tensors beside each other, with a dimension of their own choice."""
_MOVES = (
    frozenset({"getitem", "select", "unbind", "iter", "narrow", "index_select", "gather", "take_along_dim"})
    | {
        "chunk",
        "split",
        "tensor_split",
        "unsafe_split",
        "unsafe_chunk",
        "hsplit",
        "vsplit",
        "dsplit",
        "split_with_sizes",
    }
    | {"flip", "fliplr", "flipud", "roll", "rot90", "masked_select", "diagonal", "unfold", "tile", "repeat"}
    | {"repeat_interleave", "expand", "expand_as", "broadcast_to", "reshape", "view", "flatten", "unflatten", "ravel"}
    | {"squeeze", "unsqueeze", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "contiguous"}
    | {"clone", "atleast_1d", "atleast_2d", "atleast_3d"}
    | JOINS
    | STACKS
)
"""Operations whose results hold numbers of their first argument, each as it was."""


def follow_moved(operation: Operation, rows_of: Callable[[Tensor], Rows | None], examples: int) -> list[Rows | None]:
    """Return the rows of each result of an operation that only moves numbers.

    Args:
        rows_of: Returns the rows of a tensor among its arguments; None where they are not known.
        examples: N.

    Returns:
        The rows of each tensor that it returns; none at all for another operation, or where the rows of something that
        it moves are not known.
    """
    if operation.name not in _MOVES or operation.writes or not operation.args:
        return []
    owners: dict[int, Tensor] = {}
    for tensor in tensors_of((operation.args[0],)):
        rows = rows_of(tensor)
        if rows is None or tensor.ndim == 0:
            return []
        owners[id(tensor)] = owners_everywhere(rows, tensor, examples)
    moved = with_tensors(operation.args[0], lambda tensor: owners[id(tensor)])
    left = operation.func(moved, *operation.args[1:], **operation.kwargs)
    return [rows_by_owners(each, examples) for each in tensors_of((left,))]


def owners_everywhere(rows: Rows, tensor: Tensor, examples: int) -> Tensor:
    """Return the example of each number of a tensor.

    Args:
        tensor: A tensor of at least one dimension.
        examples: N.

    Returns:
        Examples, int32, of the tensor's shape.
    """
    shape = [-1 if dim == rows.dim else 1 for dim in range(tensor.ndim)]
    own = rows.owner_of_each(examples, tensor.device).to(torch.int32)
    return own.reshape(shape).expand(tensor.shape).contiguous()


def rows_by_owners(owners: Tensor, examples: int) -> Rows | None:
    """Return the rows of a tensor of which the example of each number is known.

    Args:
        owners: Examples, of the tensor's shape.
        examples: N.

    Returns:
        Its rows; None where the examples lie along no single dimension.
    """
    if owners.numel() == 0:
        return None
    if bool((owners == owners.reshape(-1)[0]).all()):
        return rows_of_one(int(owners.reshape(-1)[0]), owners, examples)
    for dim in range(owners.ndim):
        along = owners.movedim(dim, 0).flatten(1) if owners.ndim > 1 else owners[:, None]
        if bool((along == along[:, :1]).all()):
            return rows_along(along[:, 0].to(torch.int64), dim, examples)
    return None


def rows_along(owners: Tensor, dim: int, examples: int) -> Rows:
    """Return the rows of a tensor whose examples are known along a dimension.

    Args:
        owners: The example of each index along that dimension, shape (K,).
        examples: N.

    Returns:
        Its rows, by a layout of examples where they have one, else by labels.
    """
    for layout in _layouts(owners.shape[0], dim, examples):
        if torch.equal(layout.owner_of_each(examples, owners.device), owners):
            return layout
    return Rows(dim=dim, minor=1, size=examples, labels=owners)


def with_one(rows: Rows, before: Rows, examples: int) -> Rows:
    """Note where rows that were just picked are all of one example."""
    if examples == 1 or rows.labels is None or rows.labels is before.labels or not rows.labels.numel():
        return rows
    owners = rows.owner_of_each(examples, rows.labels.device)
    return replace(rows, one=int(owners[0]) if bool((owners == owners[0]).all()) else None)


def _layouts(count: int, dim: int, examples: int) -> Iterator[Rows]:
    for minor in (1, count // examples):
        if minor and count % (minor * examples) == 0:
            yield Rows(dim=dim, minor=minor, size=count)
