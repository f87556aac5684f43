"""Local measurements, in this very process, and factors from a folder. The one door to the engine."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Unpack

try:
    import torch
    from torch import Tensor, nn
except ModuleNotFoundError as _absent:
    if _absent.name != "torch":
        raise
    raise ModuleNotFoundError(
        'kronoscope.local computes with PyTorch; install it by: pip install "kronoscope[local]"', name="torch"
    ) from None

from catalog import ANALYSES
from catalog.analyses.analysis import LayerResult, RefusedAnalysis, most_decomposed
from catalog.brief import count_layers
from catalog.field_errors import suggestion
from catalog.requests.collection import Collection, Stabilisation
from catalog.requests.data_sources import Pixels
from catalog.requests.inputs import Task
from catalog.requests.memory import Memory
from catalog.requests.woodbury import Woodbury
from catalog.responses.coverage import assess_coverage, coverage_warning, describe_kinds
from engine.analyses.layer_analysis import run_analyses
from engine.artifacts import Artifacts, Held
from engine.distributed.group import join
from engine.factors.factor_files import read_factors
from engine.factors.factor_index import INDEX
from engine.memory.budget import MemoryBudget
from engine.memory.guard import Guard
from engine.model.state.preserve_state import require_usable
from engine.planning.decomposition_memory import eigendecomposition_bytes
from engine.training import split_gradients as training
from engine.training.batch_statistics import BatchNormMode, require_uncoupled
from engine.training.checkpointed_chain import find_chain, require_composition
from engine.training.mixed_precision import TrainingPrecision, choose_precision
from engine.workspace import JobOptions, Machine, ModelInputs, Ports, Workspace
from kronoscope.display.progress import notebook_display
from kronoscope.local_artifacts import open_against, open_gradient
from kronoscope.local_factors import (
    LayerFactors,
    LayersFactors,
    load_factors,
    load_stabilised,
    load_structures,
)
from kronoscope.local_inputs import (
    Batches,
    OptionRefused,
    WrongOptionType,
    alone,
    argument,
    kinds_tuple,
    options_record,
    params_records,
    query_inputs,
    repeatable,
    require_document,
    require_function,
    require_model,
    scale_inputs,
    task_record,
    with_query,
)
from kronoscope.local_losses import TorchLoss, loss_task
from kronoscope.local_operator import IllConditionedWarning, Operator, OperatorChoices, open_operator
from kronoscope.local_views import MeasurementViews, Rows

__all__ = [
    "AnalysisRefused",
    "DataNotice",
    "IllConditionedWarning",
    "LayerFactors",
    "LayersFactors",
    "Measurement",
    "Operator",
    "OptionRefused",
    "eigendecomposition_bytes",
    "load_factors",
    "load_stabilised",
    "load_structures",
    "measure",
    "operator",
    "split_gradients",
]


def __dir__() -> list[str]:
    return __all__


class AnalysisRefused(UserWarning):
    """One analysis of several was refused; the results of the others stand without it."""


class PartlyCovered(UserWarning):
    """A part of the model was not measured, or more of it by diagonals and sketches than by full blocks."""


class DataNotice(UserWarning):
    """The data were read otherwise than they stand there, in a way that changes numbers."""


@dataclass(frozen=True, kw_only=True)
class Measurement(MeasurementViews):
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
    stabilisation: Stabilisation = field(default_factory=Stabilisation)
    """By which λ, λ_A and λ_G of its records follow from the factors."""

    @cached_property
    def factors(self) -> LayersFactors:
        """The factors of every covered layer, read when they are first asked for."""
        return LayersFactors(read_factors(self.artifacts))

    def __repr__(self) -> str:
        """Return one line: which analyses, of how many layers, in which forms, and what was refused."""
        measured = assess_coverage(self.summary, None)
        kinds = "" if measured is None else f"; {describe_kinds(measured)}"
        refused = f"; {', '.join(self.refused)} refused" if self.refused else ""
        return f"<Measurement: {', '.join(self.summary)} of {count_layers(self.index['layers'])}{kinds}{refused}>"

    def of(self, kind: str) -> Rows:
        """Return the rows of one analysis.

        Args:
            kind: The analysis.

        Returns:
            Its rows by layer name, with ``to_frame`` and ``plot``.

        Raises:
            OptionRefused: If the analysis was not asked for, or was refused.
        """
        if kind in [*self.refused]:
            raise OptionRefused(f"`{kind}` was refused: {self.refused[kind].message}")
        if kind not in [*self.summary]:
            near = suggestion(kind, self.summary)
            raise OptionRefused(f"`kind` must be one of {', '.join(self.summary)} (got {kind!r}){near}")
        return Rows(kind, {row.layer: row for row in self.layers if row.kind == kind})


def measure(  # noqa: PLR0913 - the blocks of the job document, as a notebook writes them
    model: nn.Module,
    batches: Batches,
    *,
    task: Task | Mapping[str, Any] | str | TorchLoss,
    kinds: str | Sequence[str] = ("capacity",),
    collection: Collection | Mapping[str, Any] | None = None,
    stabilisation: Stabilisation | Mapping[str, Any] | None = None,
    woodbury: Woodbury | Mapping[str, Any] | None = None,
    memory: Memory | Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    pixels: Pixels | Mapping[str, Any] | None = None,
    query: Batches | None = None,
    report: Callable[[str, int, int | None, str], None] | None = None,
) -> Measurement:
    """Run analyses on a model in this process; the model and its gradients are left as they were.

    Inside an initialised process group (``torch.distributed``) every rank calls this with its own part of the data, and
    gets the results of all of them. Threads take turns, and none may use the model meanwhile but by this function. The
    caller's autocast stays outside.

    Args:
        model: The model; it is measured on the device of its parameters.
        batches: Tuples ``(inputs, targets)`` or ``(inputs, targets, index)``: a list, or a callable that gives them
            anew; one pair of tensors; a PyTorch ``Dataset`` of examples, or a ``DataLoader``, which is read once.
        task: ``catalog.requests.inputs.Task``, its fields, or its type alone (``"classification"``); or a loss of torch
            that is exactly a task: ``CrossEntropyLoss``, ``BCEWithLogitsLoss`` or ``MSELoss`` with a mean.
        kinds: Analyses of the menu, over one collection; or one of them.
        collection: How curvature is collected; this and the next three may be mappings of their fields.
        stabilisation: Damping and clipping.
        woodbury: Which gradient sides are kept as rows, and how.
        memory: Budgets; none is held where this is left out.
        params: Each analysis's options, a record or a mapping of its fields, by kind.
        pixels: How uint8 images become floats, such as ``{"scale": 1 / 255}``: ``(x · scale − mean) / deviation``.
        query: The examples that `influence` explains, as ``batches``.
        report: Receives ``(stage, done, total, unit)``; where it is left out, a terminal or notebook shows the progress
            of what takes longer than a second.

    Returns:
        Rows and summaries of the analyses, with the collected factors, their index and the plan. Where one analysis of
        several is refused, an ``AnalysisRefused`` warns of it, and the others are there. A ``DataNotice`` warns of data
        that were read otherwise than they stand there. A ``PartlyCovered`` warns of a model of which a part was not
        measured, unless ``collection.min_coverage`` accepts that, or of which less than half has full blocks.

    Raises:
        EngineError: As ``engine.errors`` lists.
        OptionRefused: If a word, a field or a number of the options cannot be, or two contradict each other; before any
            data are read. It is an ``EngineError`` and a ``ValueError``.
        TypeError: If the model is not a ``torch.nn.Module``.
    """
    require_model(model)
    if report is not None:
        require_function(report, "report", ("stage", "done", "total", "unit"))
    asked = kinds_tuple(kinds)
    likelihood = loss_task(task) or task_record(task)
    limits = options_record(Memory, memory, "memory")
    options = with_query(params_records(asked, params), query)
    scaling = None if pixels is None else options_record(Pixels, pixels, "pixels")
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
    source = repeatable(batches) if scaling is None else scale_inputs(repeatable(batches), scaling)
    explained = None if query is None else query_inputs(query, scaling)
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
            query=explained,
            stored_against=stored_against,
        ),
        options=job_options,
        machine=Machine(
            budget=budget,
            guard=Guard(budget=budget, device=device, log=lambda _, __: None),
            device=device,
            ranks=join(device),
        ),
        ports=Ports(artifacts=(held := Held()), files=held, announce_plan=plan.update, notice=noticed.append),
    )
    rows: list[LayerResult] = []
    summary: dict[str, Any] = {}
    ranks = workspace.machine.ranks
    with alone(device), notebook_display(silent=report is not None or ranks.rank > 0) as display, ranks.guarding():
        workspace.ports.report = display.update if report is None else report
        refused = run_analyses(workspace, rows.append, summary.__setitem__)
    for message in dict.fromkeys(noticed):
        warnings.warn(message, DataNotice, stacklevel=2)
    for each in refused:
        warnings.warn(f"`{each.kind}` was refused: {each.message}", AnalysisRefused, stacklevel=2)
    if (partly := coverage_warning(assess_coverage(summary, job_options.collection.min_coverage))) is not None:
        warnings.warn(partly, PartlyCovered, stacklevel=2)
    return Measurement(
        layers=tuple(sorted(rows, key=lambda row: (asked.index(row.kind), row.ordinal))),
        summary=summary,
        index=workspace.ports.artifacts.load_json(INDEX),
        plan=plan,
        refused={each.kind: each for each in refused},
        artifacts=workspace.ports.artifacts,
        stabilisation=job_options.stabilisation,
    )


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
        if choices.get("stabilisation") is None:
            choices["stabilisation"] = source.stabilisation
    elif not isinstance(source, (str, Path, LayersFactors)):
        raise WrongOptionType(
            f"`source` is {type(source).__name__}; give a folder's path, or what `measure` or `load_factors` returned"
        )
    else:
        found = source if isinstance(source, LayersFactors) else load_factors(source)
    return open_operator(found.collected, **choices)


def split_gradients(
    model: nn.Module,
    loss_of_features: training.Loss,
    inputs: Tensor,
    *,
    chunk: int | None = None,
    batch_norm: BatchNormMode = "whole",
    amp: Literal["off", "auto", "bf16", "fp16"] = "off",
    scaler: torch.amp.GradScaler | None = None,
    check: bool = True,
) -> Tensor:
    """Compute the gradient of a loss over many inputs in the memory of a few, whatever couples them in the loss.

    The gradient is that of ``loss_of_features(model(inputs)).backward()``: it is added to ``.grad`` of the model and of
    what the loss has for parameters. No optimiser steps. The model runs in the mode that it is in; dropout draws its
    masks chunk by chunk. It costs one forward pass more.

    Where BatchNorm is in training mode no input has features of its own. Then ``whole`` slices no inputs, and saves
    memory by computing the model's blocks again in the backward pass; ``frozen`` slices them, by running statistics.

    Args:
        model: Maps inputs to features, shape (N, …), any float dtype.
        loss_of_features: Takes the features of all inputs, and returns a scalar; or scalars that add up to it, each of
            a graph of its own, of which a generator holds one at a time. In 16 bits features may arrive so:
            ``features.float()``.
        inputs: All inputs, shape (N, …), of any dtype.
        chunk: Inputs in memory at once; None for all of them.
        batch_norm: ``whole`` takes the statistics of all inputs; a model with BatchNorm must then be an
            ``nn.Sequential``, or have a method ``chain()`` that returns the blocks that it is composed of. ``frozen``
            runs BatchNorm alone in evaluation mode. ``per_chunk`` is refused: it is the gradient of another function.
        amp: Compute features in 16 bits: ``auto`` and ``bf16`` in bfloat16 where the device has units for it, else at
            full width with a warning.
        scaler: Scale of the loss, which ``fp16`` needs, and ``auto`` on a CUDA device without bfloat16. Gradients are
            those of ``scaler.scale(loss)``: ``scaler.step(optimiser)`` and ``scaler.update()`` follow.
        check: Measure on the first and the last chunk that the features of each input depend on itself alone, or that
            the blocks are the model, before that is relied upon. A loop may leave it out after its first step.

    Returns:
        The loss, a scalar without a graph.

    Raises:
        EngineError: If chunks would have another gradient (``TrainingRefused``, a ``ValueError``), with the measured
            difference; or shapes do not fit.
        OptionRefused: If ``fp16`` comes without a scaler, or an argument has another type than is taken.
        TypeError: If the model is not a ``torch.nn.Module``.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> optimiser = torch.optim.AdamW(model.parameters())
        >>> images, labels = torch.randn(96, 1, 8, 8), torch.arange(96) % 6
        >>> def contrastive(features):
        ...     scores = features @ features.T - 1e9 * torch.eye(len(features))
        ...     same = (labels[:, None] == labels) & ~torch.eye(len(features), dtype=torch.bool)
        ...     return -scores.log_softmax(1)[same].mean()
        >>> optimiser.zero_grad()
        >>> loss = split_gradients(model, contrastive, images, chunk=16)
        >>> optimiser.step()
    """
    require_model(model)
    require_function(loss_of_features, "loss_of_features", ("features",))
    training.require_chunks(inputs, argument(int | None, chunk, "chunk"), batch_norm)
    checked = argument(bool, check, "check")
    precision = _training_precision(amp, model, argument(torch.amp.GradScaler | None, scaler, "scaler"))
    fewer = chunk is not None and chunk < len(inputs)
    sliced = training.slices_inputs(model, batch_norm)
    if checked and chunk is not None and fewer and sliced:
        require_uncoupled(model, inputs, chunk=chunk, batch_norm=batch_norm)
    elif checked and fewer:
        require_composition(model, find_chain(model), inputs)
    return training.split_gradients(
        model,
        loss_of_features,
        inputs,
        chunk=chunk,
        batch_norm=batch_norm,
        checkpointing=fewer and not sliced,
        precision=precision,
    )


def _training_precision(
    amp: Literal["off", "auto", "bf16", "fp16"], model: nn.Module, scaler: torch.amp.GradScaler | None
) -> TrainingPrecision:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    chosen = TrainingPrecision() if amp == "off" else choose_precision(True, device, amp)
    if chosen.compute_dtype == torch.float16 and scaler is None:
        if amp == "fp16":
            raise OptionRefused("`amp` 'fp16' needs `scaler`, a torch.amp.GradScaler; or take 'bf16', which needs none")
        chosen = TrainingPrecision(reason=f"{chosen.reason}, and float16 needs `scaler`")
    if chosen.reason is not None:
        warnings.warn(f"features are computed at full width: {chosen.reason}", UserWarning, stacklevel=3)
    return replace(chosen, scaler=scaler)
