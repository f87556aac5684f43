"""The trial run of one example before a model is trained: data that cannot match is refused at once.

Training a builtin model takes seconds to half a minute, and no weight changes which inputs it takes and which
classes it has. Any other model is tried by the engine's dry run, before a pass over the data is made.
"""

from collections.abc import Callable

import torch
from torch import nn

from catalog.requests.inputs import Task
from engine.collection.nan_check import require_known_labels
from engine.model.batches import make_batches
from engine.model.outputs import predict
from worker.execution.data.stream import DataStream


def try_untrained(make: Callable[[], nn.Module], data: DataStream, task: Task) -> None:
    """Run an untrained model on the first example, and compare the labels with its classes."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = make().eval()
        batch = next(make_batches(data.batches(), 1)).to(torch.device("cpu"), torch.float32)
        classes = predict(model, batch, task).outputs.shape[-1]
    require_known_labels(data.labels, classes, task)
