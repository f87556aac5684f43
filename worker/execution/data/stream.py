"""A stream of data that can pass through a model any number of times, always the same; and the request for one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from catalog.requests.inputs import Task
from worker.execution.loaded_model import LoadedModel
from worker.execution.loader_context import LoaderContext

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


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """The same for every source."""

    task: Task
    loaded: LoadedModel
    batch_size: int
    """Texts are padded to the longest of this many; tensors are re-sliced to it by the engine."""
    seed: int
    context: LoaderContext
    block: Literal["data", "query"] = "data"
    """Whether they are the data, or the query of an analysis of them."""
    texts: bool = False
    """Whether the texts are asked for by their places, beside their tokens."""
