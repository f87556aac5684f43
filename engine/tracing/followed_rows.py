"""Followed rows: rules by which an operation hands on the place of the examples, from a tensor to its result."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.model.activation_memory import storage_of
from engine.model.torch_functions import Operation
from engine.tracing.batch_provenance import Rows

_PLACES = frozenset(
    {
        "gather",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "index_copy",
        "index_add",
        "index_fill",
        "index_put",
        "put",
        "take",
    }
    | {"take_along_dim", "sort", "msort", "unique", "flip", "fliplr", "flipud", "roll", "setitem", "masked_scatter"}
)
"""Operations that may put numbers where those of another example were."""
_RESHAPES = frozenset({"reshape", "view", "flatten", "unflatten", "reshape_as", "view_as", "contiguous", "ravel"})


def follow_rows(operation: Operation, entered: Tensor, rows: Rows, left: Tensor, examples: int) -> Rows | None:
    """Follow the rows of a tensor through an operation.

    Args:
        entered: Data among its tensors, of any shape.
        rows: The rows of ``entered``.
        left: What the operation returned, of any shape.
        examples: N.

    Returns:
        The rows of ``left``; None where they are not known.
    """
    name, args, kwargs = operation.name, operation.args, operation.kwargs
    if name in _PLACES and _rearranges(operation, left.ndim, rows.dim):
        back = _puts_back(operation, entered, rows, left)
        return replace(rows, labels=None, one=None) if back else _gathered(operation, entered, rows)
    packing = _PACKINGS.get(name)
    if left is entered or packing is not None:
        return rows if packing is None else packing(rows, args, left)
    special = {"getitem": _indexed_by, "index_select": _selected, "repeat_interleave": _repeated}.get(name)
    picked = special(entered, rows, args, kwargs) if special is not None and args and args[0] is entered else None
    if picked is not None or special in (_selected, _repeated):
        return picked
    if _same_storage(entered, left):
        viewed = _viewed(entered.shape, entered.stride(), rows, left.shape, left.stride(), examples)
        return viewed if viewed is not None else _cut(entered, rows, left)
    if name in _RESHAPES and entered.numel() == left.numel():
        return _viewed(entered.shape, _steps(entered.shape), rows, left.shape, _steps(left.shape), examples)
    return _kept(operation, entered, rows, left)


def _indexed_by(entered: Tensor, rows: Rows, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows | None:
    return None if kwargs else _indexed(entered, rows, args[1])


def _selected(entered: Tensor, rows: Rows, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows | None:
    dim, index = args[1] if len(args) > 1 else kwargs["dim"], args[2] if len(args) > 2 else kwargs["index"]
    # a number in a tensor leaves one index, and not none
    return _picked(rows, index.reshape(-1), rows.dim) if dim % entered.ndim == rows.dim else rows


def _gathered(operation: Operation, entered: Tensor, rows: Rows) -> Rows | None:
    """Return the rows of whole slices that an index has gathered; None where it takes other places for some columns."""
    args = operation.args
    if operation.name not in ("gather", "take_along_dim") or len(args) != 3 or args[0] is not entered:
        return None
    index = args[2] if operation.name == "gather" else args[1]
    places = index.movedim(rows.dim, 0).flatten(1)
    return _picked(rows, places[:, 0], rows.dim) if places.numel() and bool((places == places[:, :1]).all()) else None


def _puts_back(operation: Operation, entered: Tensor, rows: Rows, left: Tensor) -> bool:
    """Tell whether what was picked is put to the very places that it was picked from."""
    args = operation.args
    if operation.name not in ("index_add", "index_copy") or rows.labels is None or len(args) < 4:
        return False
    if args[3] is not entered or args[2] is not rows.labels:
        return False
    return bool(args[1] == rows.dim and left.shape[rows.dim] == rows.size)


def _rearranges(operation: Operation, dimensions: int, dim: int) -> bool:
    """Tell whether one of ``_PLACES`` works along ``dim``, or may."""
    name, args, kwargs = operation.name, operation.args, operation.kwargs
    if name == "setitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return _part_at(list(index), dimensions, dim)[0] != slice(None)
    if name in ("index_put", "put", "take", "masked_scatter", "msort", "fliplr", "flipud"):
        return True
    at = 2 if name in ("roll", "take_along_dim") else 1
    along = kwargs.get("dim", kwargs.get("dims", args[at] if len(args) > at else None))
    along = along if isinstance(along, (tuple, list)) else (-1 if along is None and name == "sort" else along,)
    return any(not isinstance(place, int) or place % dimensions == dim for place in along)


def _kept(operation: Operation, entered: Tensor, rows: Rows, left: Tensor) -> Rows | None:
    """Apply the rule of all other operations: a dimension that keeps its place and size keeps its meaning."""
    name, args, kwargs = operation.name, operation.args, operation.kwargs
    here, dim = entered.shape[rows.dim], rows.dim
    if left.ndim < entered.ndim:
        reduced = kwargs.get("dim", args[1] if len(args) > 1 else None)
        gone = {reduced} if isinstance(reduced, int) else set(reduced) if isinstance(reduced, (tuple, list)) else None
        if gone is None or not all(isinstance(place, int) for place in gone):
            return None
        gone = {place % entered.ndim for place in gone}
        if dim in gone:
            return None
        dim -= sum(place < dim for place in gone)
    elif name == "stack":
        place = kwargs.get("dim", args[1] if len(args) > 1 else 0) % left.ndim
        dim += place <= dim
    elif left.ndim > entered.ndim and name not in ("embedding", "one_hot"):
        # broadcast against something with more dimensions, which are added in front
        dim += left.ndim - entered.ndim
    if dim >= left.ndim:
        return None
    if left.shape[dim] == here:
        return replace(rows, dim=dim)
    if name == "repeat" and rows.labels is None and left.shape[dim] % here == 0:
        return replace(rows, dim=dim, size=left.shape[dim])
    return None


def _cut(entered: Tensor, rows: Rows, left: Tensor) -> Rows | None:
    """Return the rows of a slice of neighbours along the dimension of the examples."""
    if left.ndim != entered.ndim:
        return None
    same = [
        entered.stride(place) == left.stride(place) and (entered.shape[place] == left.shape[place] or place == rows.dim)
        for place in range(entered.ndim)
    ]
    step, beyond = entered.stride(rows.dim), left.storage_offset() - entered.storage_offset()
    if not all(same) or step == 0 or beyond % step:
        return None
    start, count = beyond // step, left.shape[rows.dim]
    if not 0 <= start <= entered.shape[rows.dim] - count:
        return None
    own = torch.arange(rows.size, device=left.device) if rows.labels is None else rows.labels
    return replace(rows, labels=own[start : start + count], origin=rows)


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.layout == other.layout == torch.strided and storage_of(one) == storage_of(other)


def _steps(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def _viewed(
    shape: Sequence[int],
    strides: Sequence[int],
    rows: Rows,
    new_shape: Sequence[int],
    new_strides: Sequence[int],
    examples: int,
) -> Rows | None:
    """Find the dimension along which neighbouring examples are as far apart as before."""
    here = shape[rows.dim]
    if rows.labels is not None:
        places = [
            place
            for place in range(len(new_shape))
            if new_shape[place] == here and (new_strides[place] == strides[rows.dim] or here == 1)
        ]
        return replace(rows, dim=places[0]) if places else None
    if examples == 1 and new_shape:
        return Rows(dim=0, minor=new_shape[0], size=new_shape[0])
    step = strides[rows.dim] * rows.minor
    for place, (size, stride) in enumerate(zip(new_shape, new_strides, strict=True)):
        if 0 < stride <= step and step % stride == 0 and size % (step // stride * examples) == 0:
            return Rows(dim=place, minor=step // stride, size=size)
    return None


def _picked(rows: Rows, index: Tensor, dim: int) -> Rows:
    index = index.to(torch.int64)
    labels = index if rows.labels is None else _unless_in_order(rows.labels[index], rows.size)
    return replace(rows, dim=dim, labels=labels, origin=None if labels is None else rows)


def _unless_in_order(labels: Tensor, size: int) -> Tensor | None:
    """Return ``labels``, or None where everything was picked as it was: sorted for packing, say, and put back."""
    same = labels.shape == (size,) and torch.equal(labels, torch.arange(size, device=labels.device))
    return None if same else labels


def _packed(rows: Rows, args: Sequence[Any], left: Tensor) -> Rows | None:
    """Return the rows of padded sequences, put step after step without their padding."""
    if rows.minor == rows.size:
        # one example alone
        return Rows(dim=0, minor=left.shape[0], size=left.shape[0])
    lengths = args[1].tolist()
    if rows.dim != (0 if args[2] else 1) or left.shape[0] != sum(lengths):
        # or it is how many run at each step
        return None
    own = torch.arange(rows.size, device=left.device) if rows.labels is None else rows.labels
    running = [sum(length > step for length in lengths) for step in range(max(lengths))]
    return replace(rows, dim=0, labels=torch.cat([own[:count] for count in running]))


def _padded(rows: Rows, args: Sequence[Any], left: Tensor) -> Rows | None:
    """Return the rows of packed sequences, padded again, or of their lengths."""
    if rows.minor == rows.size:
        return Rows(dim=0, minor=left.shape[0], size=left.shape[0])
    if rows.labels is None or rows.dim != 0:
        return None
    own = rows.labels[: int(args[1][0])]
    return replace(rows, dim=0 if args[2] or left.ndim == 1 else 1, labels=_unless_in_order(own, rows.size))


def _indexed(entered: Tensor, rows: Rows, index: object) -> Rows | None:
    """Return the rows after indexing by tensors; None where the index is made of slices and numbers only."""
    parts = [
        # a number in a tensor selects like a number
        0 if isinstance(part, Tensor) and part.ndim == 0 and part.dtype != torch.bool else part
        for part in (index if isinstance(index, tuple) else (index,))
    ]
    if not any(isinstance(part, (Tensor, list)) for part in parts):
        return None
    selector, dim = _part_at(parts, entered.ndim, rows.dim)
    if isinstance(selector, slice):
        return replace(rows, dim=dim) if selector == slice(None) else None
    if not isinstance(selector, Tensor) or selector.ndim > 2:
        return None
    chosen = selector.dtype == torch.bool
    if selector.ndim == 1:
        return _picked(rows, selector.nonzero()[:, 0] if chosen else selector, dim)
    if not chosen or rows.dim > 0 or rows.labels is not None:
        return None
    # each of N·r times T places, counted row by row
    width = selector.shape[1]
    flat = Rows(dim=0, minor=rows.minor * width, size=rows.size * width)
    return _picked(flat, selector.reshape(-1).nonzero()[:, 0], dim)


def _part_at(parts: list[Any], dimensions: int, dim: int) -> tuple[object, int]:
    """Return the part of an index that is for dimension ``dim``, and the place of what it leaves of it."""
    if any(part is Ellipsis for part in parts):
        spot = next(place for place, part in enumerate(parts) if part is Ellipsis)
        used = sum(_width(part) for part in parts if part is not Ellipsis)
        parts = [*parts[:spot], *[slice(None)] * (dimensions - used), *parts[spot + 1 :]]
    at = before = 0
    for part in parts:
        width = _width(part)
        if at <= dim < at + width:
            return part, before
        at += width
        # a tensor leaves one dimension for those it takes
        before += not isinstance(part, int)
    return slice(None), before + dim - at


def _width(part: object) -> int:
    """Dimensions that one part of an index takes."""
    return 0 if part is None else part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _repeated(entered: Tensor, rows: Rows, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows | None:
    times = args[1] if len(args) > 1 else kwargs.get("repeats")
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(times, int) or not isinstance(dim, int):
        return None
    if dim % entered.ndim != rows.dim:
        return rows
    if rows.labels is None:
        return replace(rows, minor=rows.minor * times, size=rows.size * times)
    return replace(rows, labels=rows.labels.repeat_interleave(times))


_PACKINGS = {"pack_padded_sequence": _packed, "pad_packed_sequence": _padded}
