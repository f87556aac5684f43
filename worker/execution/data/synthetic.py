"""Synthetic data, drawn from a seed: shapes without meaning, for trying things out."""

import math
from collections.abc import Iterator

import torch

from catalog.requests.inputs import SyntheticData
from engine.memory.plan import readable_bytes
from engine.model.state.generators import fold_seed
from worker.execution.data.byte_count import no_room
from worker.execution.data.forward_inputs import model_inputs
from worker.execution.data.stream import Chunk, DataRequest, DataStream

_CHUNK_NUMBERS = 2**22
_COPIES = 4
"""The chunk that is drawn, its batch, and what looking for numbers that are not finite takes."""


def load(source: SyntheticData, request: DataRequest) -> DataStream:
    """Draw Gaussian inputs or uniform token ids, anew from the same seed on every pass.

    Chunks of at most 4 Mi numbers, or one example; a batch is held against the job's memory before it is drawn.
    """
    shape, target_shape = tuple(source.shape), tuple(source.target_shape)
    rows = max(1, min(source.examples, _CHUNK_NUMBERS // max(1, torch.Size(shape).numel())))

    row_bytes = (8 if source.vocabulary is not None else 4) * math.prod(shape) + 8 * math.prod(target_shape)
    held = _COPIES * row_bytes * min(source.examples, max(rows, request.batch_size))
    if held > request.context.most_bytes:
        taken = f"a batch takes {readable_bytes(held)} ({readable_bytes(row_bytes)} for each example)"
        remedy = "give a smaller `shape` or `collection.batch_size`, or more memory (`memory.host`)"
        raise no_room(taken, request.context.most_bytes, "/data/shape", remedy)

    def batches() -> Iterator[Chunk]:
        generator = torch.Generator().manual_seed(fold_seed(source.seed))
        for start in range(0, source.examples, rows):
            count = min(rows, source.examples - start)
            if source.vocabulary is not None:
                inputs = torch.randint(0, source.vocabulary, (count, *shape), generator=generator)
            else:
                inputs = torch.randn((count, *shape), generator=generator)
            if request.task.type == "causal_lm":
                targets = inputs
            elif source.classes is not None:
                targets = torch.randint(0, source.classes, (count, *target_shape), generator=generator)
            else:
                targets = torch.randn((count, *target_shape), generator=generator)
            yield model_inputs(inputs, request.loaded), targets

    return DataStream(batches=batches, examples=source.examples)
