"""Collection: from a model and data to A and G of every treated layer.

A dry run of a few examples comes first: it shows which layers are called, which are fed by the
same tensor (they share one A), and how large everything will be, so that the plan is made and
checked before anything large is allocated.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from engine.curvature.activations import checkpointed, traced
from engine.curvature.batches import Batch, mapped, tensors
from engine.curvature.broadcast import proven
from engine.curvature.calls import Call, called, followers, shared_tables, unattributed, watched
from engine.curvature.collected import Collected, LayerFacts, NestedSize, read_collected
from engine.curvature.coverage_law import require_coverage, surveyed, trainable_numbers
from engine.curvature.discovery import Uses, calls_of, candidates, discovered
from engine.curvature.ekfac import corrected
from engine.curvature.elsewhere import used_elsewhere
from engine.curvature.factors import Corrected
from engine.curvature.finishing import flaw, foreseen_flaw
from engine.curvature.finiteness import witnessed
from engine.curvature.forecast import DryRun, forecast
from engine.curvature.gathered import Gathered
from engine.curvature.hooks import places_of
from engine.curvature.interception import Interception
from engine.curvature.layers.coverage import DeclaredLayer, Survey, declare
from engine.curvature.layers.layer import BlockLayer
from engine.curvature.mixed_precision import usable
from engine.curvature.nested import sizes_of
from engine.curvature.numerics import Numerics, pinned
from engine.curvature.padding import padding_decides_nothing
from engine.curvature.passes import PassJob, gather
from engine.curvature.prediction import predict
from engine.curvature.statistics import LayerStatistics
from engine.curvature.untouched import untouched
from engine.errors import (
    ModelRefused,
    NonFiniteModel,
    NothingToAnalyse,
)
from engine.memory.budget import give_back_host_memory
from engine.memory.plan import Plan
from engine.workspace import Workspace

_DRY_EXAMPLES = (2, 3)
"""One example, repeated. Not once alone: a model may squeeze a batch of one away."""


def collected(workspace: Workspace) -> Collected:
    """The job's factors: collected at the first call, read where they are stored, kept for the next analysis.

    Raises:
        EngineError: As ``engine.errors`` lists; the model is restored whatever happens.
    """
    known = workspace.shared.get("collected")
    if isinstance(known, Collected):
        return known
    fresh = read_collected(workspace.stored) if workspace.stored is not None else _collect(workspace)
    workspace.shared["collected"] = fresh
    return fresh


def _collect(workspace: Workspace) -> Collected:
    if workspace.model is None or workspace.task is None or workspace.batches is None:
        raise ValueError("a workspace without stored factors needs a model, batches and a task")
    dtype = torch.float64 if workspace.collection.dtype == "float64" else torch.float32
    numerics = Numerics.here(workspace.device, workspace.numerics)
    not_replayed = numerics.not_replayed(workspace.numerics)
    if not_replayed:
        workspace.log(
            "warning",
            f"computed with other numerics than the first attempt, so bits may differ: {'; '.join(not_replayed)}",
        )
    job = PassJob(
        workspace=workspace,
        model=workspace.model,
        task=workspace.task,
        collection=workspace.collection,
        dtype=dtype,
        numerics=numerics,
        heard=set(),
        precision=usable(workspace.collection.amp, workspace.device),
    )
    if job.precision.fallback is not None:
        workspace.log("warning", f"`collection.amp: {job.collection.amp}` is not used: {job.precision.fallback}")
    _require_finite(job.model)
    found = surveyed(job.model, job.collection)
    trainable = trainable_numbers(job.model)
    with untouched(job.model, dtype), pinned(numerics, job.heard):
        # the survey saw the caller's flags; what follows sees every parameter frozen
        with workspace.operation("dry run"):
            job, seen, mixed = _dry_run(job, found)
            found, seen = _without_other_uses(job, found, seen)
            found, seen, mixed = _looked_into(job, found, seen, mixed)
        job = dataclasses.replace(job, places=places_of(found))
        _require_coverage_so_far(job, found, trainable, mixed)
        shared = followers(seen.calls, found.treated)
        seen = _with_activations(job, found, seen)
        plan = forecast(workspace, dtype, found.treated, seen, shared)
        del seen
        # what the dry runs held would stay with the process, beside what the passes hold
        give_back_host_memory()
        workspace.curve.planned_device_bytes = plan.peak_bytes("device")
        workspace.curve.planned_host_bytes = plan.peak_bytes("host")
        workspace.planned(plan.as_json() | {"numerics": dataclasses.asdict(numerics)})
        workspace.plan = plan
        plan.require(workspace.memory)
        workspace.guard.hold(plan)
        sizes = sizes_of(workspace, job.collection)
        job = dataclasses.replace(job, micro_batch=plan.chosen.micro_batch, offload=plan.chosen.offload, sizes=sizes)
        with checkpointed(job.model, wanted=plan.chosen.activation_checkpointing):
            gathered = gather(job, found, shared, mixed, plan)
            corrections = corrected(job, gathered, plan.chosen.corrections) if job.collection.ekfac else {}
        if gathered.nondeterministic:
            workspace.log(
                "warning",
                "another run may round otherwise: there is no deterministic form of "
                + ", ".join(sorted(gathered.nondeterministic)),
            )
        return _finished(job, found, trainable, gathered, plan, corrections)


def _with_activations(job: PassJob, survey: Survey, seen: DryRun) -> DryRun:
    """The dry run, with what autograd saves of a pass where anything is pulled back."""
    if job.collection.fisher == "forward_only":
        return seen
    batch = next(job.batches())
    watched = {
        role.module: job.collection.exact_trace or isinstance(role, BlockLayer)
        for layer in survey.treated
        for role in layer.roles
    }

    def run(examples: int) -> Tensor:
        with job.precision.autocast(job.workspace.device):
            return predict(job.model, _repeated(batch, examples), job.task).outputs

    sizes = (1,) if job.collection.batch_size == 1 else _DRY_EXAMPLES
    saved, recomputed = traced(run, sizes, job.model, watched)
    if saved.of(1) == 0:
        # no graph at all: what the collection follows are loose parameters, which no module's call shows
        return seen
    return dataclasses.replace(seen, saved=saved, recomputed=recomputed)


def _require_finite(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ModelRefused(
                f"the model's tensor `{name}` has no shape yet; call the model once on a batch before it is measured",
                layer=name.rpartition(".")[0],
                pointer="/model",
            )
        # torch cannot ask a sparse tensor; what it brings into the outputs is seen there
        if tensor.layout == torch.strided and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise NonFiniteModel(
                f"the model's tensor `{name}` holds {bad} NaN or infinite number{'s' if bad > 1 else ''} of "
                f"{tensor.numel()}; mend the checkpoint",
                layer=name.rpartition(".")[0],
                pointer="/model",
            )


def _dry_run(job: PassJob, survey: Survey) -> tuple[PassJob, DryRun, frozenset[str]]:
    """What one example, repeated, shows of the model: the job with its tables, a run, the layers that mix examples."""
    batch = next(job.batches())
    with witnessed(job.model, job.task) as witness:
        witness.look_at(batch, 0)
        if job.collection.batch_size == 1:
            # every position is the only example's
            return job, _seen(job, survey, _repeated(batch, 1)), frozenset()
        fewer, more = (_repeated(batch, times) for times in _DRY_EXAMPLES)
        few, many = _seen(job, survey, fewer), _seen(job, survey, more)
        tables = shared_tables(few.calls, many.calls)
        if tables:
            job = dataclasses.replace(job, tables=proven(tables, partial(_disturbed, job, survey, fewer)))
            few, many = _seen(job, survey, fewer), _seen(job, survey, more)
        run = partial(predict, job.model, task=job.task)
        with torch.no_grad():
            cut = padding_decides_nothing(batch, job.task, few.calls, few.examples, run)
        job = dataclasses.replace(job, cut_padding=cut)
    return job, few, unattributed(few.calls, many.calls, _DRY_EXAMPLES)


def _without_other_uses(job: PassJob, survey: Survey, seen: DryRun) -> tuple[Survey, DryRun]:
    """Declare layers whose parameters the model also reads where no hook sees it."""
    called = {call.layer.name for call in seen.calls}
    batch = _repeated(next(job.batches()), seen.examples)

    def run() -> None:
        torch.manual_seed(job.collection.seed)
        with torch.no_grad():
            predict(job.model, batch, job.task)

    elsewhere = used_elsewhere([layer for layer in survey.treated if layer.name in called], survey.aliases, run)
    if not elsewhere:
        return survey, seen
    refused = tuple(declare(layer, "used_elsewhere") for layer in survey.treated if layer.name in elsewhere)
    kept = tuple(layer for layer in survey.treated if layer.name not in elsewhere)
    calls = [call for call in seen.calls if call.layer.name not in elsewhere]
    return (
        dataclasses.replace(survey, treated=kept, declared=(*survey.declared, *refused)),
        dataclasses.replace(seen, calls=calls),
    )


def _looked_into(
    job: PassJob, survey: Survey, seen: DryRun, mixed: frozenset[str]
) -> tuple[Survey, DryRun, frozenset[str]]:
    """Look again, into the operations, where modules alone do not show what the parameters do."""
    parameters = candidates(job.model, survey, {call.layer for call in seen.calls}, mixed)
    if not parameters:
        return survey, seen, mixed
    batch = next(job.batches())
    several = (1,) if job.collection.batch_size == 1 else _DRY_EXAMPLES
    runs = [_operations(job, survey, _repeated(batch, times), parameters) for times in several]
    survey = discovered(job.model, survey, parameters, tuple(uses for uses, _ in runs), mixed)
    treated = {role for layer in survey.treated for role in (layer, *layer.roles)}
    calls = [[call for call in found if call.layer in treated] + calls_of(uses, survey) for uses, found in runs]
    seen = DryRun(calls=calls[0], examples=several[0], outputs=seen.outputs)
    return survey, seen, frozenset() if len(calls) == 1 else unattributed(calls[0], calls[1], _DRY_EXAMPLES)


def _operations(job: PassJob, survey: Survey, batch: Batch, parameters: dict[str, Tensor]) -> tuple[Uses, list[Call]]:
    """What ``parameters`` do with ``batch``, and the calls of the modules."""
    uses = Uses()
    interception = Interception(parameters, uses)
    interception.begin(tensors(batch.inputs), batch.size)
    spread = [module for role, module in called(survey.treated) if role.name in job.tables]
    with torch.enable_grad(), watched(survey.treated, batch.size, job.tables) as calls, interception:
        # what a table is spread to has an example's copy for each
        handles = [module.register_forward_hook(lambda _, __, output: interception.enters(output)) for module in spread]
        try:
            predict(job.model, batch, job.task)
        finally:
            for handle in handles:
                handle.remove()
    return uses, calls


def _disturbed(job: PassJob, survey: Survey, batch: Batch, tables: frozenset[str], disturb: str | None) -> Tensor:
    """Outputs of ``batch`` with ``tables`` spread over it, the last copy of one of them disturbed."""
    torch.manual_seed(job.collection.seed)
    # without its labels: the outputs of one example must be told from another's
    unlabelled = dataclasses.replace(job.task, loss=None)
    with torch.no_grad(), watched(survey.treated, batch.size, tables, disturb):
        return predict(job.model, batch, unlabelled).outputs


def _repeated(batch: Batch, times: int) -> Batch:
    def repeated(tensor: Tensor) -> Tensor:
        return tensor[:1].repeat_interleave(times, 0)

    return Batch(
        inputs=mapped(batch.inputs, repeated), targets=mapped(batch.targets, repeated), index=repeated(batch.index)
    )


def _seen(job: PassJob, survey: Survey, batch: Batch) -> DryRun:
    with torch.no_grad(), watched(survey.treated, batch.size, job.tables) as calls:
        prediction = predict(job.model, batch, job.task)
    return DryRun(calls=calls, examples=batch.size, outputs=prediction.outputs.numel())


def _require_coverage_so_far(job: PassJob, survey: Survey, trainable: int, mixed: frozenset[str]) -> None:
    """Fail before anything large is allocated, where too little will be covered whatever the data still call."""
    declared = list(survey.declared)
    covered = []
    for layer in survey.treated:
        reason = foreseen_flaw(layer, job.collection, mixed)
        if reason is None:
            covered.append(layer)
        else:
            declared.append(declare(layer, reason))
    require_coverage(trainable, covered, declared, job.collection)


def _finished(
    job: PassJob,
    survey: Survey,
    trainable: int,
    gathered: Gathered,
    plan: Plan,
    corrections: Mapping[str, Callable[[], Corrected]],
) -> Collected:
    declared: list[DeclaredLayer] = list(survey.declared)
    covered: list[LayerStatistics] = []
    for layer in survey.treated:
        found = gathered.statistics[layer.name]
        reason = flaw(found, job.collection)
        if reason is None:
            covered.append(found)
        else:
            declared.append(declare(layer, reason))
    if not covered:
        reasons = ", ".join(sorted({layer.reason for layer in declared}))
        raise NothingToAnalyse(
            f"no layer of the model ({type(job.model).__name__}) could be measured: {reasons}", pointer="/model"
        )
    require_coverage(trainable, [found.layer for found in covered], declared, job.collection)
    parts = [(found, group) for found in covered for group in range(found.layer.groups)]
    names = [found.layer.parts[group] for found, group in parts]
    ordinals = {name: ordinal for ordinal, name in enumerate(names)}
    facts = []
    for ordinal, (found, group) in enumerate(parts):
        leader = found.leader if found.leader is not None and found.leader.layer.name in ordinals else None
        shared_with = None if leader is None else ordinals[leader.layer.name]
        # examples of a moving average do not weigh alike, and the formula takes them to
        facts.append(_facts(ordinal, found, group, leader, shared_with, ema=job.collection.ema_decay is not None))
    factors = [gathered.factors[name] for name in names]
    order = {name: place for place, (name, _) in enumerate(job.model.named_modules())}
    return Collected(
        layers=tuple(facts),
        declared=tuple(
            sorted(
                declared, key=lambda layer: order.get(layer.name, order.get(layer.name.rpartition(".")[0], len(order)))
            )
        ),
        trainable_parameters=trainable,
        examples=gathered.examples,
        updates=gathered.updates,
        passes=gathered.passes,
        collection=dataclasses.replace(job.collection),
        device="cpu",
        storage_policy="resident" if len(plan.chosen.parts) == 1 else "laid aside",
        micro_batch=plan.chosen.micro_batch,
        amp=job.precision.amp,
        amp_fallback=job.precision.fallback,
        loss_scale=gathered.loss_scale if job.precision.amp == "fp16" else None,
        planned_peak_bytes=plan.largest_peak_bytes,
        nondeterministic=tuple(sorted(gathered.nondeterministic)),
        not_replayed=job.numerics.not_replayed(job.workspace.numerics),
        load=lambda ordinal: factors[ordinal](),
        load_corrected=(lambda ordinal: corrections[names[ordinal]]()) if corrections else None,
        nested=_nested(job, gathered, tuple(facts)),
    )


def _nested(job: PassJob, gathered: Gathered, layers: tuple[LayerFacts, ...]) -> tuple[NestedSize, ...]:
    """The smaller sample sizes, by the ordinals of the whole."""
    if job.sizes is None:
        return ()
    shelf = job.sizes.shelf
    found = []
    for _, snapshot in sorted(gathered.nested.items()):
        bounds = [(facts, snapshot.rows[facts.name]) for facts in layers]
        waiting = [snapshot.waiting[facts.name] for facts in layers]
        found.append(
            NestedSize(
                eighths=snapshot.eighths,
                examples=snapshot.examples,
                rank_bounds=tuple(
                    ((rows_a or None) if facts.form == "kronecker" else None, rows_g or None)
                    for facts, (rows_a, rows_g) in bounds
                ),
                load=lambda ordinal, waiting=waiting: waiting[ordinal].load(shelf),  # type: ignore[misc]
            )
        )
    return tuple(found)


def _facts(
    ordinal: int,
    found: LayerStatistics,
    group: int,
    leader: LayerStatistics | None,
    shared_with: int | None,
    *,
    ema: bool,
) -> LayerFacts:
    layer = found.layer
    source = leader or found
    return LayerFacts(
        ordinal=ordinal,
        name=layer.parts[group],
        module=type(layer.module).__name__,
        form=layer.form,
        why=found.explanation,
        parameters=layer.part_parameters[group],
        parameter_count=layer.parameter_count // layer.groups,
        in_dim=layer.in_dim,
        out_dim=layer.out_dim,
        bias=layer.bias,
        positions=source.positions,
        terms=found.terms,
        calls=found.calls,
        sharing=found.sharing,
        rank_bound_A=(source.rank_bounds[0] or None) if layer.form == "kronecker" else None,
        rank_bound_G=found.rank_bounds[1] or None,
        shared_A_with=shared_with,
        exact_trace=found.exact_traces[group] if found.exact_traces else None,
        trace_standard_error=None if ema or not found.standard_errors else found.standard_errors[group],
    )
