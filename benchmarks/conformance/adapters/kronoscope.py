"""Kronoscope itself, through ``engine.collect.collect_or_read``, as every job calls it; a whole job by ``measure``."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch

from benchmarks.conformance.problem import Factors, Problem, Stream
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.collect import collect_or_read
from engine.workspace import JobOptions, ModelInputs, Ports, Workspace
from kronoscope.local import measure

PACKAGE = "kronoscope"
_BESIDES = {"exact_trace": False}
"""What Kronoscope measures beside A and G and no peer does."""


def _keyed(problem: Problem, stream: Stream) -> Iterator[tuple[Any, ...]]:
    """Batches, with the examples' own keys where the problem has some."""
    start = 0
    for inputs, targets in stream:
        stop = start + problem.examples
        yield (inputs, targets) if problem.keys is None else (inputs, targets, problem.keys[start:stop])
        start = stop


class Accounted(Factors):
    """Factors beside the account of what has none."""

    declared_parameters: int = 0
    """Trainable numbers that are declared, each layer with its reason."""


def collect(problem: Problem, stream: Stream, **options: object) -> Factors:
    """A and G of every layer with trainable parameters; ``options`` override the collection's."""
    known = {field.name for field in fields(Collection)}
    wide = next(problem.model.parameters()).dtype == torch.float64
    chosen = {"fisher": problem.fisher, "dtype": "float64" if wide else "float32", "batch_size": problem.examples}
    chosen |= {name: value for name, value in {**_BESIDES, **options}.items() if name in known}
    whole = collect_or_read(
        Workspace(
            inputs=ModelInputs(
                model=problem.model,
                batches=lambda: _keyed(problem, stream),
                task=Task(type=problem.task, ignore_index=problem.ignore_index),
            ),
            options=JobOptions(collection=Collection(**chosen)),
            ports=Ports(artifacts=None),
        )
    )
    loaded = {facts.name: whole.load(facts.ordinal) for facts in whole.layers}
    found = Accounted({name: (factors.A, factors.G) for name, factors in loaded.items()})
    found.declared_parameters = sum(layer.parameter_count for layer in whole.declared)
    return found


def whole_job(problem: Problem, batches: list[tuple[Any, Any]], **options: Any) -> Factors:  # noqa: ANN401 - of a collection
    """A and G as a user gets them: one call of ``measure`` for `factors` alone, the self-check on by default."""
    chosen = {"fisher": problem.fisher, "dtype": "float32", "batch_size": problem.examples, **_BESIDES, **options}
    found = measure(
        problem.model, batches, task=Task(type=problem.task), kinds=("factors",), collection=Collection(**chosen)
    )
    return {name: (found.factors[name].A, found.factors[name].G) for name in found.factors}
