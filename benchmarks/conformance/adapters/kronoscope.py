"""Kronoscope itself, through ``engine.curvature.collection.collected``, as every job calls it."""

from dataclasses import fields

import torch

from benchmarks.conformance.problem import Factors, Problem, Stream
from catalog.collection import Collection
from catalog.inputs import Task
from engine.curvature.collection import collected
from engine.workspace import Workspace

PACKAGE = "kronoscope"
_BESIDES = {"exact_trace": False}
"""What Kronoscope measures beside A and G and no peer does."""


def collect(problem: Problem, stream: Stream, **options: object) -> Factors:
    """A and G of every layer with trainable parameters; ``options`` override the collection's."""
    known = {field.name for field in fields(Collection)}
    wide = next(problem.model.parameters()).dtype == torch.float64
    chosen = {"fisher": problem.fisher, "dtype": "float64" if wide else "float32", "batch_size": problem.examples}
    chosen |= {name: value for name, value in {**_BESIDES, **options}.items() if name in known}
    whole = collected(
        Workspace(
            model=problem.model,
            batches=lambda: iter(stream),
            task=Task(type=problem.task, ignore_index=problem.ignore_index),
            artifacts=None,  # type: ignore[arg-type] # nothing is written
            collection=Collection(**chosen),  # type: ignore[arg-type]
        )
    )
    loaded = {facts.name: whole.load(facts.ordinal) for facts in whole.layers}
    return {name: (factors.A, factors.G) for name, factors in loaded.items()}
