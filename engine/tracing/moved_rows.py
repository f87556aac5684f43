"""Moved rows: the examples of what an operation has only put elsewhere, found by moving their numbers alike.

A slice, a selection, a list that is stacked again, a reversal: there are many ways to put the numbers of a tensor
elsewhere, and one rule for all. The same operation is run on a tensor that holds, in the place of each number, the
example that it is of. What comes out says whose each number of the result is.

Scattered rows: the examples of a result into which an index has put the rows of another tensor.

Messages along a graph's edges are summed at the nodes where the edges end, words at their bags, nodes at their graphs.
A row of the result is that of example n where everything put into it is of example n. A row that nothing is put into
(a node without neighbours) says nothing itself; it is known where the result has the layout that its source was picked
from, or the examples' own order, and every row that is written agrees with that layout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.model.torch_functions import JOINS, Operation, tensors_of, with_tensors
from engine.tracing.batch_provenance import Rows, rows_of_one

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
    """Return the example of each number of a tensor of at least one dimension: int32, of its shape."""
    shape = [-1 if dim == rows.dim else 1 for dim in range(tensor.ndim)]
    own = rows.owner_of_each(examples, tensor.device).to(torch.int32)
    return own.reshape(shape).expand(tensor.shape).contiguous()


def rows_by_owners(owners: Tensor, examples: int) -> Rows | None:
    """Return the rows of a tensor of whose shape ``owners`` hold the example of each number.

    None where the examples lie along no single dimension.
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
    """Return the rows of a tensor by the example of each index along a dimension, shape (K,).

    By a layout of examples where they have one, else by labels.
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


SCATTERS = frozenset({"scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_reduce"})
"""Operations that put the rows of a source where an index says: ``(into, dim, index, source, …)``."""


def source_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, Tensor, Tensor] | None:
    """Return dimension, index, shape (K,) or that of the source, and source, of any shape, of one of ``SCATTERS``.

    None where a number is put everywhere.
    """
    arguments = dict(zip(("dim", "index", "source"), args[1:], strict=False)) | dict(kwargs)
    source = arguments.get("source", arguments.get("src"))
    if not isinstance(arguments.get("dim"), int) or not isinstance(source, Tensor):
        return None
    return arguments["dim"], arguments["index"], source


def written_at(args: Sequence[Any]) -> tuple[int, Tensor, Tensor] | None:
    """Return the same of what is assigned to some indices of a tensor's first dimension, ``into[i] = source`` say.

    None where it is assigned to all indices alike, or no tensor is.
    """
    into, index, source = args
    first = index[0] if isinstance(index, tuple) and index else index
    if not isinstance(source, Tensor) or not isinstance(first, (int, slice, Tensor, list)) or first == slice(None):
        return None
    places = torch.arange(into.shape[0], device=into.device)[first]
    return (0, places.reshape(-1), source) if places.ndim < 2 else None


def follow_scatter(
    source: Rows, into: Rows | None, index: Tensor, dim: int, left: Tensor, examples: int
) -> Rows | None:
    """Return the rows of a result that an index put the rows of a source into.

    Args:
        source: Where the examples of the source are, along ``dim``.
        into: The same of what the source is put into; None where that is a constant.
        index: Places in the result, shape (K,) or that of the source.
        dim: The dimension along which rows are put.
        left: The result.
        examples: N.

    Returns:
        The rows of the result; None where examples meet in it.
    """
    places = index.movedim(dim, 0).flatten(1) if index.ndim > 1 else index[:, None]
    known = source.owner_of_each(examples, index.device)[: places.shape[0], None]
    for rows in (into,) if into is not None else _received_layouts(source, left, dim, examples):
        owners = rows.owner_of_each(examples, index.device)
        if owners.shape[0] == left.shape[dim] and bool((owners[places] == known).all()):
            return Rows(dim=dim, minor=rows.minor, size=rows.size, labels=rows.labels, origin=rows.origin)
    return None if into is not None else _received(places, known, left.shape[dim], dim, examples)


def _received_layouts(source: Rows, left: Tensor, dim: int, examples: int) -> Iterator[Rows]:
    """Yield the layouts that a result may have: of what the source was picked from, or example by example."""
    layout: Rows | None = source.origin
    while layout is not None:
        yield layout
        layout = layout.origin
    if source.one is None:
        yield source
    size = left.shape[dim]
    if size and size % examples == 0:
        yield Rows(dim=dim, minor=size // examples, size=size)


def _received(places: Tensor, known: Tensor, size: int, dim: int, examples: int) -> Rows | None:
    """Return the rows of a result of no known layout, each of which receives something, of one example alone."""
    least, most = (
        torch.full((size,), fill, device=places.device).scatter_reduce_(
            0, places.flatten(), known.expand_as(places).flatten(), reduction
        )
        for fill, reduction in ((examples, "amin"), (-1, "amax"))
    )
    if not torch.equal(least, most):
        return None
    return Rows(dim=dim, minor=1, size=examples, labels=least)


def follow_join(parts: Sequence[Rows], examples: int, device: torch.device) -> Rows:
    """Return the rows of tensors that are put one behind the other along the dimension of their examples."""
    owners = torch.cat([part.owner_of_each(examples, device) for part in parts])
    return rows_along(owners, parts[0].dim, examples)
