"""A stream of data that can pass through a model any number of times, always the same."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Chunk = tuple[Any, ...]
"""``(inputs, targets)`` or ``(inputs, targets, index)``."""


@dataclass(frozen=True, kw_only=True)
class DataStream:
    """Chunks of examples, in an order that never changes."""

    batches: Callable[[], Iterator[Chunk]]
    """Begins a new pass."""
    examples: int | None
    """How many there are, where it is known beforehand."""
    labels: Callable[[], Iterator[tuple[Tensor, Tensor]]] | None = None
    """The targets (n, …) with the indices (n,) of their examples, where they can be read without the inputs."""
    text_of: Callable[[int], str] | None = None
    """Returns the text of an example by its place, where texts are asked for and are there."""
