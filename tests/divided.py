"""One collection cut into pieces by example, each collected as a piece of a divided job is, and merged."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.measurement.piece_storage import store_piece
from engine.model.batches import map_tensors, tensors
from engine.workspace import DataPart, Workspace
from tests.oracles import MemoryArtifacts

Make = Callable[[], Workspace]
"""Makes the undivided job anew, its data in chunks ``(inputs, targets)`` and its examples counted."""


def indexed(chunks: Iterator[tuple[Any, ...]], begin: int, end: int) -> list[tuple[Any, ...]]:
    """The examples from ``begin`` to ``end`` by position, with their positions as indices."""
    found, start = [], 0
    for inputs, targets in chunks:
        size = tensors(inputs)[0].shape[0]
        first, last = max(begin - start, 0), min(end - start, size)
        if first < last:
            part = [map_tensors(each, itemgetter(slice(first, last))) for each in (inputs, targets)]
            found.append((*part, torch.arange(start + first, start + last)))
        start += size
    return found


def piece(make: Make, begin: int, end: int, whole: int | None = None) -> Workspace:
    """The job of one piece; ``whole`` says how many examples it is taken to be a part of."""
    made = make()
    batches, count = made.inputs.batches, made.inputs.examples
    assert batches is not None
    assert count is not None
    chunks = indexed(batches(), begin, end)
    made.inputs.part = DataPart(begin=begin, end=end, examples=whole or count, batches=batches)
    made.inputs.batches, made.inputs.examples = lambda: iter(chunks), end - begin
    return made


def stored(make: Make, begin: int, end: int, whole: int | None = None) -> MemoryArtifacts:
    """What one piece stores."""
    made = piece(make, begin, end, whole)
    store_piece(made)
    found = made.ports.artifacts
    assert isinstance(found, MemoryArtifacts)
    return found


def joining(make: Make, pieces: Sequence[MemoryArtifacts]) -> Workspace:
    """The divided job's later attempt, over the stored pieces."""
    made = make()
    made.inputs.model = made.inputs.batches = made.inputs.task = None
    made.inputs.stored_pieces = tuple(pieces)
    return made


def merged(make: Make, cuts: Sequence[int]) -> FactorSet:
    """The set of all pieces, cut before each of ``cuts``."""
    count = make().inputs.examples
    assert count is not None
    bounds = [0, *cuts, count]
    return collect_or_read(joining(make, [stored(make, begin, end) for begin, end in pairwise(bounds)]))


def difference(found: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference relative to that of the truth; of a zero, of the difference itself."""
    norm = float(truth.norm())
    return float((found.double() - truth.double()).norm()) / (norm or 1.0)
