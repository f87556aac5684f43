"""Synthetic data, drawn from a seed: shapes without meaning, for trying things out."""

from collections.abc import Iterator

import torch

from catalog.requests.inputs import SyntheticData
from worker.execution.data.forward_inputs import model_inputs
from worker.execution.data.request import DataRequest
from worker.execution.data.stream import Chunk, DataStream

_CHUNK_NUMBERS = 2**22


def load(source: SyntheticData, request: DataRequest) -> DataStream:
    """Draw Gaussian inputs or uniform token ids, anew from the same seed on every pass.

    Memory:
        One chunk of at most 4 Mi numbers, or one example.
    """
    shape, target_shape = tuple(source.shape), tuple(source.target_shape)
    rows = max(1, min(source.examples, _CHUNK_NUMBERS // max(1, torch.Size(shape).numel())))

    def batches() -> Iterator[Chunk]:
        generator = torch.Generator().manual_seed(source.seed % 2**63)
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
