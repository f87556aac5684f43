"""Batches: a stream of ``(inputs, targets[, index])`` re-sliced on dimension 0 to one size.

Whatever sizes the data arrives in, the model sees ``batch_size`` examples at a time, each with
the index that keys its sampled labels. Neighbouring chunks whose shapes differ beyond dimension
0 (texts padded to another length) are never joined: the batch before them is cut short.
"""

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from catalog.requests.inputs import Task
from engine.errors import EmptyData, WrongShape

_WHOLE = frozenset(
    (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64)
)
Tree = Any
"""A tensor, None, or a tuple, list or mapping of such."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Examples that go through the model together."""

    inputs: Tree
    targets: Tree
    index: Tensor
    """(N,) int64, unique per example."""

    @property
    def size(self) -> int:
        """Examples N."""
        return int(self.index.shape[0])

    @property
    def mask(self) -> Tensor | None:
        """The attention mask (N, T) as booleans, where the inputs bring one."""
        if isinstance(self.inputs, Mapping):
            mask = self.inputs.get("attention_mask")
            if isinstance(mask, Tensor) and mask.ndim == 2:
                return mask.bool()
        return None

    def slices(self, size: int) -> Iterator["Batch"]:
        """Slice the batch on dimension 0.

        Args:
            size: Examples of a slice, at least 1.

        Yields:
            Batches of ``size`` examples in order, the last one of those that are left.
        """
        for start in range(0, self.size, size):
            yield _sliced(self, start, min(start + size, self.size))

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        """Copy the batch to a device.

        The model may write to its inputs, and a gradient must not reach the caller's tensors.

        Args:
            device: Destination of inputs, targets and index.
            dtype: Precision of floating-point inputs and targets; integers and booleans keep their dtype.

        Returns:
            A detached copy; only the index may share memory with this batch.
        """

        def moved(tensor: Tensor) -> Tensor:
            own = tensor.detach()
            return own.to(device, dtype, copy=True) if tensor.is_floating_point() else own.to(device, copy=True)

        return Batch(
            inputs=map_tensors(self.inputs, moved),
            targets=map_tensors(self.targets, moved),
            index=self.index.to(device),
        )


def map_tensors(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """Replace every tensor of a tree.

    Args:
        tree: A tensor of any shape, None, or a tuple, list or mapping of such.
        change: Returns what stands in a tensor's place.

    Returns:
        A tree of the same structure; mappings come back as dicts, lists as tuples, anything else as it is.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(map_tensors(value, change) for value in tree)
    return tree


def tensors(tree: Tree) -> list[Tensor]:
    """List the tensors of a tree.

    Args:
        tree: A tensor of any shape, None, or a tuple, list or mapping of such.

    Returns:
        Its tensors, depth first in the order of its entries; whatever is not a tensor is passed over.
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [tensor for value in tree.values() for tensor in tensors(value)]
    if isinstance(tree, (tuple, list)):
        return [tensor for value in tree for tensor in tensors(value)]
    return []


def make_batches(stream: Iterable[tuple[Tree, ...]], batch_size: int, *, may_be_empty: bool = False) -> Iterator[Batch]:
    """Re-slice a stream of chunks to batches of one size.

    Args:
        stream: Chunks ``(inputs, targets)`` or ``(inputs, targets, index)``, examples on dimension 0 of every tensor;
            an index is (N,) integers of any width, without it examples are numbered as they come.
        batch_size: Examples of a batch, at least 1.
        may_be_empty: Whether a stream without an example yields nothing, where other ranks may have some.

    Yields:
        Batches of ``batch_size`` examples; fewer at the end, and where the next chunk has other shapes or dtypes.

    Raises:
        WrongShape: If a chunk is not such a tuple, its tensors disagree on the number of examples, or an index holds
            anything but whole numbers, or one of them twice in a batch.
        EmptyData: If the stream holds no example.
    """
    for batch in _resliced(stream, batch_size, may_be_empty=may_be_empty):
        _require_distinct(batch.index)
        yield batch


def _resliced(stream: Iterable[tuple[Tree, ...]], batch_size: int, *, may_be_empty: bool) -> Iterator[Batch]:
    waiting: list[Batch] = []
    seen = 0
    for chunk in stream:
        piece = _read(chunk, seen)
        seen += piece.size
        if piece.size == 0:
            continue
        if waiting and _layout(waiting[-1]) != _layout(piece):
            yield from _cut(waiting, batch_size)
            waiting = []
        waiting.append(piece)
        if sum(part.size for part in waiting) >= batch_size:
            joined = _joined(waiting)
            waiting = []
            start = 0
            while joined.size - start >= batch_size:
                yield _sliced(joined, start, start + batch_size)
                start += batch_size
            if start < joined.size:
                waiting = [_sliced(joined, start, joined.size)]
    yield from _cut(waiting, batch_size)
    if seen == 0 and not may_be_empty:
        raise EmptyData("the data holds no example; give at least one", pointer="/data")


def count_examples(chunks: Iterable[tuple[Tree, ...]]) -> int | None:
    """Count the examples of chunks by their first tensors.

    Args:
        chunks: Tuples as ``make_batches`` takes them.

    Returns:
        The sum over the chunks of dimension 0 of the first tensor; None where a chunk has no tensor with dimensions.
    """
    firsts = [next(iter(tensors(chunk)), None) for chunk in chunks]
    sizes = [first.shape[0] for first in firsts if first is not None and first.ndim]
    return sum(sizes) if len(sizes) == len(firsts) else None


def _cut(waiting: list[Batch], batch_size: int) -> Iterator[Batch]:
    if waiting:
        yield from _joined(waiting).slices(batch_size)


def _read(chunk: object, start: int) -> Batch:
    if not isinstance(chunk, (tuple, list)) or len(chunk) not in (2, 3):
        raise WrongShape(
            "the data must yield (inputs, targets) or (inputs, targets, index) tuples; "
            f"it yielded {type(chunk).__name__}" + (f" of {len(chunk)}" if isinstance(chunk, (tuple, list)) else ""),
            pointer="/data",
        )
    inputs, targets = chunk[0], chunk[1]
    parts = tensors(inputs)
    if not parts:
        raise WrongShape("the data's inputs hold no tensor", pointer="/data")
    sizes = {f"inputs {tuple(part.shape)}": part.shape[0] if part.ndim else -1 for part in parts} | {
        f"targets {tuple(part.shape)}": part.shape[0] if part.ndim else -1 for part in tensors(targets)
    }
    size = parts[0].shape[0] if parts[0].ndim else -1
    if any(other != size for other in sizes.values()) or size < 0:
        raise WrongShape(
            "tensors of one chunk must agree on dimension 0, the examples; got " + ", ".join(sizes), pointer="/data"
        )
    index = _read_index(chunk[2]) if len(chunk) == 3 else torch.arange(start, start + size)
    if index.shape != (size,):
        raise WrongShape(f"index has shape {tuple(index.shape)}; it must be ({size},)", pointer="/data")
    return Batch(inputs=inputs, targets=targets, index=index)


def _read_index(given: Any) -> Tensor:  # noqa: ANN401 - a caller's own
    """Return the third entry of a chunk as int64; ``WrongShape`` if it is not whole numbers: a cast would join some."""
    if isinstance(given, (list, tuple)):
        for each in given:
            if not _is_whole_number(each):
                raise _index_refused(f"{type(each).__name__} {str(each) if isinstance(each, Tensor) else repr(each)}")
        return torch.tensor([int(each) for each in given], dtype=torch.int64)
    try:
        index = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _index_refused(f"{type(given).__name__} {given!r}") from error
    if index.dtype not in _WHOLE:
        first = ", ".join(str(each) for each in index.reshape(-1)[:3].tolist())
        raise _index_refused(f"{index.dtype} [{first}{', …' if index.numel() > 3 else ''}]")
    wide = index.to(torch.int64)
    if index.dtype == torch.uint64 and bool((wide < 0).any()):
        raise _index_refused(str(int(wide[wide < 0][0]) % 2**64))
    return wide


def _require_distinct(index: Tensor) -> None:
    """Raise ``WrongShape`` where two examples of a batch have one index: they would draw the same labels under `mc`."""
    ascending = index.sort().values
    again = ascending[1:][ascending[1:] == ascending[:-1]]
    if again.numel():
        count = int((index == again[0]).sum())
        raise _index_refused(f"{int(again[0])} for {count} examples of one batch")


def _is_whole_number(value: object) -> bool:
    """Whether a value is one integer that int64 holds."""
    if isinstance(value, bool):
        return False
    if isinstance(value, numbers.Integral):
        return -(2**63) <= int(value) < 2**63
    try:
        number = torch.as_tensor(value) if isinstance(value, Tensor) or hasattr(value, "__array__") else None
    except TypeError:
        return False
    return number is not None and number.numel() == 1 and number.dtype in _WHOLE and int(number) < 2**63


def _index_refused(got: str) -> WrongShape:
    return WrongShape(
        f"`index`, the third entry of a chunk, must hold whole numbers below 2⁶³, one per example (got {got[:80]}); "
        "give integers, such as torch.arange(examples), or leave it out: examples are then numbered as they come",
        pointer="/data",
    )


def _layout(batch: Batch) -> list[tuple[torch.dtype, torch.Size]]:
    return [(part.dtype, part.shape[1:]) for part in (*tensors(batch.inputs), *tensors(batch.targets))]


def _joined(pieces: list[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]

    def join(trees: list[Tree]) -> Tree:
        columns = [iter(tensors(tree)) for tree in trees]
        return map_tensors(trees[0], lambda _: torch.cat([next(column) for column in columns]))

    return Batch(
        inputs=join([piece.inputs for piece in pieces]),
        targets=join([piece.targets for piece in pieces]),
        index=torch.cat([piece.index for piece in pieces]),
    )


def _sliced(batch: Batch, start: int, stop: int) -> Batch:
    return Batch(
        inputs=map_tensors(batch.inputs, lambda tensor: tensor[start:stop]),
        targets=map_tensors(batch.targets, lambda tensor: tensor[start:stop]),
        index=batch.index[start:stop],
    )


def _virtual_tokens(model: nn.Module) -> int:
    config: Any = getattr(model, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False) or "PREFIX" in str(getattr(config, "peft_type", "")):
        return 0
    return int(getattr(config, "num_virtual_tokens", 0) or 0)


def with_virtual_tokens(model: nn.Module, batch: Batch, task: Task) -> Batch:
    """Extend targets and mask to the positions that prompt tuning puts in front, and no token of the data answers for.

    Their targets are ignored, and the mask counts them, as PEFT gives its own loss: then the last one answers for the
    first token, whose term a model without a prompt does not have.
    """
    count = _virtual_tokens(model) if task.type in ("causal_lm", "masked_lm", "token_classification") else 0
    ids = batch.targets
    if ids is None and isinstance(batch.inputs, dict) and task.type == "causal_lm":
        ids = batch.inputs.get("input_ids")
    if count == 0 or not isinstance(ids, Tensor) or ids.ndim != 2:
        return batch
    inputs: dict[str, Tensor] = {}
    if batch.mask is not None:
        inputs["attention_mask"] = torch.cat([batch.mask.new_ones(batch.size, count), batch.mask], 1)
    targets = torch.cat([ids.new_full((batch.size, count), task.ignore_index), ids], 1)
    return replace(batch, inputs=inputs, targets=targets)
