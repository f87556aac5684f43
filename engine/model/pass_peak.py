"""Pass peaks: the most bytes that one pass there and back holds at once, for any number of examples.

Hooks on modules see what autograd saves, but not what a layer holds that is many operations: a recurrent
layer takes its products apart step by step, and the gradients of the steps stand beside the whole that they
are put together to. Here such a pass is made with two small numbers of examples ``n``, and every storage is
followed from the operation that makes it until it is let go of. The bytes held after each event are a line
``a + b · n``, as both passes show, and the peak for any ``n`` is the highest of these lines.
"""

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from engine.model.activation_memory import storage_identity

Line = tuple[int, int]
"""Bytes at any number of examples, and bytes that each adds."""


class PlainDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that is shown operations without torch loading its compiler for it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would load its compiler
        return False


class StorageEvents(PlainDispatchMode):
    """Notes the bytes of each storage that an operation inside makes, and again when the storage is let go of."""

    def __init__(self, label: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: list[int] = []
        """Bytes made (positive) and let go of (negative), in order."""
        self.labels: list[str] = []
        """The label of the storage of each change."""
        self.label = label
        """The label of storages that are made from now on."""
        self._living: dict[int, str] = {}

    @override
    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = {storage_identity(tensor.untyped_storage()) for tensor in _strided((args, kwargs))}
        left = func(*args, **(kwargs or {}))
        for tensor in _strided(left):
            storage = tensor.untyped_storage()
            identity = storage_identity(storage)
            if identity not in self._living and identity not in before:
                self._living[identity] = self.label
                self._note(storage.nbytes(), self.label)
                weakref.finalize(storage, self._let_go, identity, storage.nbytes()).atexit = False
        return left

    def _let_go(self, known: int, size: int) -> None:
        self._note(-size, self._living.pop(known))

    def _note(self, change: int, label: str) -> None:
        self.changes.append(change)
        self.labels.append(label)

    def relabel(self, tensor: Tensor, label: str) -> None:
        """Give the storage of a tensor another label, if an operation inside made it."""
        storage = tensor.untyped_storage()
        before = self._living.get(storage_identity(storage))
        if before is not None and before != label:
            self._living[storage_identity(storage)] = label
            self._note(-storage.nbytes(), before)
            self._note(storage.nbytes(), label)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what happens inside, without collections of garbage, which would come between at moments of chance."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            with self:
                yield
        finally:
            if collecting:
                gc.enable()

    @property
    def held(self) -> list[int]:
        """The bytes held after each event."""
        return list(accumulate(self.changes))


def parts_at_peak(changes: Sequence[int], labels: Sequence[str]) -> dict[str, int]:
    """Return the bytes of each label at the last moment when most are held, from all changes in order.

    They add up to the peak; a storage made there has its last label. Empty where no operation made any.
    """
    held = list(accumulate(changes))
    moment = max(range(len(held)), key=lambda each: (held[each], each), default=-1)
    parts: dict[str, int] = {}
    for change, label in zip(changes[: moment + 1], labels, strict=False):
        parts[label] = parts.get(label, 0) + change
    return parts if sum(parts.values()) > 0 else {}


def peak_lines(sizes: Sequence[int], held: Sequence[Sequence[int]]) -> tuple[Line, ...]:
    """Return the lines whose highest is the peak of a pass of any number of examples.

    Args:
        sizes: One or two numbers of examples that a pass was made with.
        held: Bytes held after each event of each of these passes.
    """
    if len(sizes) > 1 and len(held[0]) == len(held[-1]):
        lines = {_through(sizes, fewer, more) for fewer, more in zip(held[0], held[-1], strict=True)}
    else:
        # events that come and go with the examples cannot be matched: their maxima can
        lines = {_through(sizes, max(held[0], default=0), max(held[-1], default=0))}
    return _highest(lines)


def _through(sizes: Sequence[int], fewer: int, more: int) -> Line:
    """Return the line through both; through the origin where there is one size alone."""
    if len(sizes) == 1:
        return 0, -(-fewer // sizes[0])
    each = max(0, -((fewer - more) // (sizes[-1] - sizes[0])))
    return max(0, fewer - sizes[0] * each), each


def _highest(lines: set[Line]) -> tuple[Line, ...]:
    """Select the lines that no other line reaches or exceeds at every number of examples."""
    highest: list[Line] = []
    for fixed, each in sorted(lines, key=lambda line: (line[1], line[0]), reverse=True):
        if not highest or fixed > highest[-1][0]:
            highest.append((fixed, each))
    return tuple(highest)


def _strided(tree: object) -> Iterator[Tensor]:
    return (each for each in tree_leaves(tree) if isinstance(each, Tensor) and each.layout == torch.strided)
