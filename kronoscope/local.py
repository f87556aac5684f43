"""Local measurements, in this very process, and factors from a folder. The one door to the engine."""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from catalog import ANALYSES
from catalog.analyses.analysis import LayerResult, RefusedAnalysis, most_decomposed
from catalog.field_errors import suggestion
from catalog.requests.collection import Collection, Stabilisation
from catalog.requests.inputs import Task
from catalog.requests.memory import Memory
from catalog.requests.woodbury import Woodbury
from engine.analyses.run_analyses import run_analyses
from engine.distributed.group import join
from engine.factors.factor_files import read_factors
from engine.factors.factor_index import INDEX
from engine.memory.budget import MemoryBudget
from engine.memory.guard import Guard
from engine.model.state.usable_model import require_usable
from engine.planning.decomposition_memory import (
    eigendecomposition_bytes as eigendecomposition_bytes,  # noqa: PLC0414 - offered here
)
from engine.workspace import Artifacts, JobOptions, Machine, ModelInputs, Ports, Workspace
from kronoscope.local_artifacts import Held
from kronoscope.local_factors import LayerFactors as LayerFactors  # noqa: PLC0414 - offered here
from kronoscope.local_factors import LayersFactors, load_factors, open_against, open_gradient
from kronoscope.local_factors import load_stabilised as load_stabilised  # noqa: PLC0414 - offered here
from kronoscope.local_factors import load_structures as load_structures  # noqa: PLC0414 - offered here
from kronoscope.local_inputs import (
    Batches,
    OptionRefused,
    WrongOptionType,
    kinds_tuple,
    options_record,
    params_records,
    repeatable,
    require_document,
    task_record,
)
from kronoscope.local_operator import Operator, OperatorChoices, open_operator


class AnalysisRefused(UserWarning):
    """One analysis of several was refused; the results of the others stand without it."""


class DataNotice(UserWarning):
    """The data were read otherwise than they stand there, in a way that changes numbers."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The results of ``measure``."""

    layers: Sequence[LayerResult]
    """All rows of all analyses, as a job would store them."""
    summary: Mapping[str, Any]
    """Each analysis's summary record, by kind."""
    index: Mapping[str, Any]
    """`factors.index.json` as a job would write it: facts and digests of every layer."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, RefusedAnalysis] = field(default_factory=dict)
    """Analyses that were refused while others were done, by kind: each with its sentence."""
    artifacts: Artifacts = field(default_factory=Held, repr=False)
    """The files of the measurement, in memory."""

    @cached_property
    def factors(self) -> LayersFactors:
        """The factors of every covered layer, read when they are first asked for."""
        return LayersFactors(read_factors(self.artifacts))

    def __repr__(self) -> str:
        """Return one line: which analyses, of how many layers, and what was refused."""
        refused = f"; {', '.join(self.refused)} refused" if self.refused else ""
        return f"<Measurement: {', '.join(self.summary)} of {len(self.index['layers'])} layers{refused}>"

    def of(self, kind: str) -> dict[str, LayerResult]:
        """Return the rows of one analysis.

        Args:
            kind: The analysis.

        Returns:
            Its rows by layer name.

        Raises:
            OptionRefused: If the analysis was not asked for, or was refused.
        """
        if kind in self.refused:
            raise OptionRefused(f"`{kind}` was refused: {self.refused[kind].message}")
        if kind not in self.summary:
            near = suggestion(kind, self.summary)
            raise OptionRefused(f"`kind` must be one of {', '.join(self.summary)} (got {kind!r}){near}")
        return {row.layer: row for row in self.layers if row.kind == kind}


def measure(  # noqa: PLR0913 - the blocks of the job document, as a notebook writes them
    model: nn.Module,
    batches: Batches,
    *,
    task: Task | Mapping[str, Any] | str,
    kinds: Sequence[str] = ("capacity",),
    collection: Collection | Mapping[str, Any] | None = None,
    stabilisation: Stabilisation | Mapping[str, Any] | None = None,
    woodbury: Woodbury | Mapping[str, Any] | None = None,
    memory: Memory | Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    report: Callable[[str, int, int | None, str], None] | None = None,
) -> Measurement:
    """Run analyses on a model in this process; the model and its gradients are left as they were.

    Inside an initialised process group (``torch.distributed``) every rank calls this with its own part of the data, and
    gets the results of all of them.

    Args:
        model: The model; it is measured on the device of its parameters.
        batches: Tuples ``(inputs, targets)`` or ``(inputs, targets, index)``: a list, or a callable that gives them
            anew; one pair of tensors; a PyTorch ``Dataset`` of examples, or a ``DataLoader``, which is read once.
        task: ``catalog.requests.inputs.Task``, its fields, or its type alone (``"classification"``).
        kinds: Analyses of the menu, over one collection.
        collection: How curvature is collected; this and the next three may be mappings of their fields.
        stabilisation: Damping and clipping.
        woodbury: Which gradient sides are kept as rows, and how.
        memory: Budgets; none is held where this is left out.
        params: Each analysis's options, a record or a mapping of its fields, by kind.
        report: Receives ``(stage, done, total, unit)``.

    Returns:
        Rows and summaries of the analyses, with the collected factors, their index and the plan. Where one analysis of
        several is refused, an ``AnalysisRefused`` warns of it, and the others are there. A ``DataNotice`` warns of data
        that were read otherwise than they stand there.

    Raises:
        EngineError: As ``engine.errors`` lists.
        OptionRefused: If a word, a field or a number of the options cannot be, or two contradict each other; before any
            data are read. It is an ``EngineError`` and a ``ValueError``.
        TypeError: If the model is not a ``torch.nn.Module``.
    """
    _require_objects(model, report)
    asked = kinds_tuple(kinds)
    likelihood = task_record(task)
    limits = options_record(Memory, memory, "memory")
    options = params_records(asked, params)
    job_options = JobOptions(
        collection=options_record(Collection, collection, "collection"),
        stabilisation=options_record(Stabilisation, stabilisation, "stabilisation"),
        woodbury=options_record(Woodbury, woodbury, "woodbury"),
        memory=limits,
        kinds=asked,
        keep=("factors",),
        decomposition=most_decomposed(own or ANALYSES[kind] for kind, own in options.items()),
        params=options,
    )
    require_document(likelihood, job_options)
    require_usable(model)
    stored_against, gradient = open_against(options), open_gradient(options)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    source = repeatable(batches)
    plan: dict[str, Any] = {}
    noticed: list[str] = []
    budget = MemoryBudget.unlimited() if memory is None else MemoryBudget.measure(limits, device)
    workspace = Workspace(
        inputs=ModelInputs(
            model=model,
            batches=source.read,
            task=likelihood,
            examples=source.examples,
            gradient=gradient,
            stored_against=stored_against,
        ),
        options=job_options,
        machine=Machine(
            budget=budget,
            guard=Guard(budget=budget, device=device, log=lambda _, __: None),
            device=device,
            ranks=join(device),
        ),
        ports=Ports(artifacts=Held(), announce_plan=plan.update, notice=noticed.append),
    )
    if report is not None:
        workspace.ports.report = report
    rows: list[LayerResult] = []
    summary: dict[str, Any] = {}
    ranks = workspace.machine.ranks
    with contextlib.nullcontext() if ranks is None else ranks.guarding():
        refused = run_analyses(workspace, rows.append, summary.__setitem__)
    for message in dict.fromkeys(noticed):
        warnings.warn(message, DataNotice, stacklevel=2)
    for each in refused:
        warnings.warn(f"`{each.kind}` was refused: {each.message}", AnalysisRefused, stacklevel=2)
    return Measurement(
        layers=tuple(sorted(rows, key=lambda row: (asked.index(row.kind), row.ordinal))),
        summary=summary,
        index=workspace.ports.artifacts.load_json(INDEX),
        plan=plan,
        refused={each.kind: each for each in refused},
        artifacts=workspace.ports.artifacts,
    )


def _require_objects(model: object, report: object) -> None:
    if report is not None and not callable(report):
        raise WrongOptionType(f"`report` is {type(report).__name__}; give a function of (stage, done, total, unit)")
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        of_export = ", the one that was exported" if isinstance(model, torch.export.ExportedProgram) else ""
        message = f"`model` is {given}; give a torch.nn.Module{of_export}"
        raise TypeError(message)


def operator(source: str | Path | Measurement | LayersFactors, **choices: Unpack[OperatorChoices]) -> Operator:
    """Return the curvature of a model as a linear operator on vectors of its parameters.

    Args:
        source: A folder with factors, as ``load_factors`` takes it; what ``measure`` or ``load_factors`` returned.
        **choices: ``OperatorChoices``: which curvature, its damping, its layers, and where it is computed.

    Returns:
        The operator: ``operator @ v``, ``solve``, ``power``, ``sqrt``, ``trace``, ``logdet``, ``diagonal``, ``scipy``.

    Raises:
        EngineError: If the factors are broken, or cannot be used so.
        OptionRefused: If a choice is none of its words.
    """
    if isinstance(source, Measurement):
        found = source.factors
    else:
        found = source if isinstance(source, LayersFactors) else load_factors(source)
    return open_operator(found.collected, **choices)
