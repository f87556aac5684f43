"""Scattered rows: the examples of a result into which an index has put the rows of another tensor.

Messages along a graph's edges are summed at the nodes where the edges end, words at their bags, nodes at their graphs.
A row of the result is that of example n where everything put into it is of example n. A row that nothing is put into
(a node without neighbours) says nothing itself; it is known where the result has the layout that its source was picked
from, or the examples' own order, and every row that is written agrees with that layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.tracing.batch_provenance import Rows
from engine.tracing.moved_rows import rows_along

SCATTERS = frozenset({"scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_reduce"})
"""Operations that put the rows of a source where an index says: ``(into, dim, index, source, …)``."""


def source_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, Tensor, Tensor] | None:
    """Read the arguments of one of ``SCATTERS``.

    Args:
        args: Its positional arguments, the first of which is written into.
        kwargs: Its keyword arguments.

    Returns:
        Dimension, index, shape (K,) or that of the source, and source, of any shape; None where a number is put
        everywhere.
    """
    arguments = dict(zip(("dim", "index", "source"), args[1:], strict=False)) | dict(kwargs)
    source = arguments.get("source", arguments.get("src"))
    if not isinstance(arguments.get("dim"), int) or not isinstance(source, Tensor):
        return None
    return arguments["dim"], arguments["index"], source


def written_at(args: Sequence[Any]) -> tuple[int, Tensor, Tensor] | None:
    """Read what is assigned to some indices of a tensor's first dimension, ``into[i] = source`` say.

    Args:
        args: Tensor, index and value of the assignment.

    Returns:
        The dimension 0, index, shape (K,), and source, of any shape; None where it is assigned to all indices alike, or
        no tensor is.
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
    for rows in (into,) if into is not None else _layouts(source, left, dim, examples):
        owners = rows.owner_of_each(examples, index.device)
        if owners.shape[0] == left.shape[dim] and bool((owners[places] == known).all()):
            return Rows(dim=dim, minor=rows.minor, size=rows.size, labels=rows.labels, origin=rows.origin)
    return None if into is not None else _received(places, known, left.shape[dim], dim, examples)


def _layouts(source: Rows, left: Tensor, dim: int, examples: int) -> Iterator[Rows]:
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
