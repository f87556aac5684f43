"""A request to a data loader: for which model and task, in which batches."""

from dataclasses import dataclass
from typing import Literal

from catalog.requests.inputs import Task
from worker.execution.loaded_model import LoadedModel
from worker.execution.loader_context import LoaderContext


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
