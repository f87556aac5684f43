"""Collection: from a model and data to A and G of every treated layer.

A dry run of a few examples comes first: it shows which layers are called, which are fed by the
same tensor (they share one A), and how large everything will be, so that the plan is made and
checked before anything large is allocated.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from catalog.record import plain
from engine.accumulation.layer_statistics import LayerStatistics
from engine.collection.checkpoints import fingerprint
from engine.collection.collection_state import CollectionState
from engine.collection.ekfac_passes import correct_block, correct_eigenvalues
from engine.collection.first_check import Verification, explain
from engine.collection.nan_check import require_finite_model, require_known_labels
from engine.collection.normalise import flaw, foreseen_flaw, leaves_once
from engine.collection.parameter_windows import find_windows, list_parameters, list_unregistered
from engine.collection.pass_job import PassJob
from engine.collection.pass_statistics import layer_facts
from engine.collection.probe import ProbedModel
from engine.collection.ranks.joined_job import follow_planner, gather_model, join_ranks, require_same_checks
from engine.collection.ranks.reduce_statistics import owners_by_ordinal
from engine.collection.run_passes import announce, run_passes
from engine.collection.subsamples import by_ordinal, sizes_of
from engine.errors import ModelRefused
from engine.factors.factor_files import read_factors, reused
from engine.factors.factor_set import CalledOnce, Corrected, CountedExamples, FactorSet, ParameterShape, Run
from engine.gradient_identity.findings import FAILED_CHECK, refusal
from engine.layers.coverage import DeclaredLayer, Survey, declare, nothing_covered, require_coverage, survey_layers
from engine.layers.layer import TreatedLayer
from engine.memory.budget import give_back_host_memory
from engine.memory.plan import Plan
from engine.merging.corrections import merge_corrections
from engine.merging.merge import merge_factor_sets
from engine.merging.part_files import read_part
from engine.model.activation_memory import set_activation_checkpointing
from engine.model.determinism import DRAWN, Numerics, set_numerics
from engine.model.state.own_gradients import with_own_gradients
from engine.model.state.preserve_state import preserve_state, require_usable
from engine.planning.choose_plan import PlannedJob, choose_plan
from engine.planning.dry_pass import explain_refusal
from engine.planning.job_plan import smallest_budgets
from engine.planning.joined_plan import with_join
from engine.planning.model_memory import weigh_model
from engine.planning.probe_model import exclude_other_uses, probe_functional_layers, probe_model, probe_sizes
from engine.workspace import JobOptions, Workspace


class JobFactors:
    """The factors of one job, once they are collected or read."""

    def __init__(self) -> None:
        self.factors: FactorSet | None = None
        self.failed = False
        """Whether they could not be had; no analysis of the job can do without."""


def collect_or_read(workspace: Workspace) -> FactorSet:
    """Return the job's factors: collected at the first call, read where they are stored, kept for the next analysis.

    Args:
        workspace: The job: its model or stored factors, options, machine and ports.

    Returns:
        The factor set, the same object at every call within one job.

    Raises:
        EngineError: As ``engine.errors`` lists; the model is restored whatever happens.
    """
    results = workspace.results.of(JobFactors)
    if results.factors is None:
        results.failed = True
        results.factors = _factors(workspace)
        results.failed = False
    return results.factors


def _factors(workspace: Workspace) -> FactorSet:
    if workspace.inputs.stored_pieces:
        return _merged(workspace)
    if workspace.inputs.stored is not None:
        return read_factors(workspace.inputs.stored)
    # before its tensors are converted
    weigh_model(workspace)
    # the other ranks leave with an error of this one, instead of waiting for it
    with workspace.machine.ranks.guarding():
        return _cached(workspace) or _collect(workspace)


def _merged(workspace: Workspace) -> FactorSet:
    """The factors of all pieces, with EK-FAC's corrections where those of all pieces are there."""
    inputs = workspace.inputs
    merged = merge_factor_sets([read_part(piece) for piece in inputs.stored_pieces])
    workspace.machine.guard.hold()
    if not inputs.stored_corrections:
        return merged
    if inputs.bases is None:
        raise ValueError("stored corrections need the bases that they were made in")
    dtype = torch.float64 if merged.collection.dtype == "float64" else torch.float32
    return merge_corrections(
        merged, inputs.bases, inputs.stored_corrections, lambda block: correct_block(workspace, block, dtype)
    )


def plan_collection(workspace: Workspace, pieces: int, whole: JobOptions) -> Plan:
    """Probe the model, and plan the collection of one of at most ``pieces`` and the merge of all; collect nothing.

    The plan fits, and is announced; ``whole`` are the options of the job that joins the pieces. The model is restored
    whatever happens.
    """
    weigh_model(workspace)
    with prepare_collection(workspace) as (planned, _):
        plan = with_join(planned.plan, workspace, planned.probed.probe, pieces, whole)
        plan.require(workspace.machine.budget, {})
        _announce_anew(workspace, planned.probed.job.numerics, plan)
        return plan


@contextlib.contextmanager
def prepare_collection(workspace: Workspace) -> Iterator[tuple[PlannedJob, tuple[ParameterShape, ...]]]:
    """Survey, probe and plan a collection; inside, the model is as its passes need it, and the plan is held.

    Args:
        workspace: The job: its model, data, options, machine and ports; the plan is announced.

    Yields:
        The plan, which fits, and the trainable parameters.

    Raises:
        EngineError: As ``engine.errors`` lists; the model is restored whatever happens.
    """
    job = PassJob.of(workspace, workspace.machine.device)
    _warn_of_other_numerics(job)
    require_usable(job.model)
    with gather_model(job):
        require_finite_model(job.model)
        if workspace.machine.ranks.size > 1:
            job = join_ranks(workspace.machine.ranks, job)
        survey = survey_layers(job.model, job.collection)
        trainable = list_parameters(job.model)
        _tell_unregistered(job)
        with preserve_state(job.model, job.dtype), set_numerics(job.numerics, job.heard):
            try:
                # the survey saw the caller's flags; what follows sees every parameter frozen
                numbers = sum(math.prod(each.shape) for each in trainable)
                planned = with_own_gradients(job.model, partial(_settle, job, survey, numbers))
                # what the probe held would stay with the process, beside what the passes hold
                give_back_host_memory()
                workspace.machine.guard.hold(planned.plan)
                yield planned, tuple(trainable)
            except ModelRefused as refused:
                # what the model raised stays the cause: a refusal that is its own cause loses it
                raise explain_refusal(job, refused) from (refused.__cause__ or refused)


def _cached(workspace: Workspace) -> FactorSet | None:
    """Return the same collection, if it was made before; of a part, which no other job asks for, none is kept."""
    unshared = workspace.ports.cache is None or workspace.inputs.part is not None
    found = None if unshared or workspace.ports.cache is None else workspace.ports.cache.find()
    if found is None:
        return None
    whole = reused(*found)
    workspace.machine.guard.hold()
    return whole


def _collect(workspace: Workspace) -> FactorSet:
    """Survey, probe, plan, run the passes, and finish: the five stages of a collection."""
    with prepare_collection(workspace) as (planned, trainable):
        job = planned.probed.job
        probed = planned.probed.for_passes(planned.plan.chosen, sizes_of(workspace, job.collection))
        model = fingerprint(job.model)
        with set_activation_checkpointing(job.model, wanted=planned.plan.chosen.activation_checkpointing):
            sums = run_passes(probed, planned.plan)
            plan = dataclasses.replace(planned.plan, chosen=sums.chosen)
            probed = probed.for_passes(plan.chosen, probed.job.sizes)
            corrections = _corrections(probed.job, sums, plan)
        rounding = sorted(sums.nondeterministic - {DRAWN})
        if rounding:
            workspace.ports.log(
                "warning",
                f"another run may round otherwise: there is no deterministic form of {', '.join(rounding)}",
            )
        collected = _finished(probed.job, probed.survey, trainable, sums, plan, corrections)
        return dataclasses.replace(collected, counted=_counted(probed.job, sums, model))


def _tell_unregistered(job: PassJob) -> None:
    """Tell of trainable tensors that the model holds, and that are none of its parameters."""
    names = list_unregistered(job.model)
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        job.workspace.ports.notice(
            f"{', '.join(f'`{name}`' for name in names[:3])}{more} of the model require gradients and are not among "
            "its `parameters()`, so they are not measured; keep modules in an `nn.ModuleList` or `nn.ModuleDict`, "
            "tensors in an `nn.Parameter` or `nn.ParameterList`"
        )


def _warn_of_other_numerics(job: PassJob) -> None:
    """Log what is computed otherwise than in the first attempt, or than the document asks."""
    log = job.workspace.ports.log
    not_replayed = job.numerics.not_replayed(job.workspace.resume.numerics)
    if not_replayed:
        log(
            "warning",
            f"computed with other numerics than the first attempt, so bits may differ: {'; '.join(not_replayed)}",
        )
    for option, why in (("amp", job.precision.fallback), ("precision", job.precision.sums_fallback)):
        if why is not None:
            log("warning", f"`collection.{option}: {getattr(job.collection, option)}` is not used: {why}")


def _corrections(job: PassJob, sums: CollectionState, plan: Plan) -> Mapping[str, Callable[[], Corrected]]:
    """Run the passes that re-estimate eigenvalues, where EK-FAC is asked for."""
    # of a part the bases are not known yet: they are those of the merged factors
    if not job.collection.ekfac or job.workspace.inputs.part is not None:
        return {}
    with job.workspace.machine.operation("correction", "correction"):
        return correct_eigenvalues(job, sums, plan.chosen.corrections)


def _settle(job: PassJob, survey: Survey, trainable: int) -> PlannedJob:
    """Probe and plan until every layer passes its first check, and return the plan without the probe's tensors."""
    workspace, verification = job.workspace, Verification.of(job)
    with workspace.machine.operation("dry run"):
        dry = probe_model(job, survey)
        require_known_labels(workspace.inputs.labels, dry.probe.classes, job.task)
        modules = exclude_other_uses(dry)
    while True:
        with workspace.machine.operation("dry run"):
            functional = probe_functional_layers(modules, verification.forced, verification.unplaced)
            probed = verification.without_refused(functional)
        _require_coverage_so_far(probed, trainable)
        planned = choose_plan(workspace, probe_sizes(probed))
        if workspace.machine.ranks.size > 1:
            probed, plan = follow_planner(workspace.machine.ranks, workspace, planned.probed, planned.plan)
            planned = dataclasses.replace(planned, probed=probed, plan=plan)
        plan = planned.plan
        _announce_anew(workspace, job.numerics, plan)
        if not plan.fits(workspace.machine.budget):
            plan.require(workspace.machine.budget, smallest_budgets(workspace, planned.probed.probe, planned.less))
        with set_activation_checkpointing(job.model, wanted=plan.chosen.activation_checkpointing):
            changed = verification.changes(planned.probed, plan.chosen)
        if workspace.machine.ranks.size > 1:
            require_same_checks(workspace.machine.ranks, verification.failed)
        if not changed:
            cut = verification.cuts_padding(planned.probed)
            checked = dataclasses.replace(planned.probed.job, first_check=verification.self_check, cut_padding=cut)
            probed = dataclasses.replace(planned.probed.without_tensors(), job=checked)
            return dataclasses.replace(planned, probed=probed, less=None)


def _announce_anew(workspace: Workspace, numerics: Numerics, plan: Plan) -> None:
    """Let everyone who looks at the plan look at ``plan``."""
    workspace.machine.curve.stages.plan = plan
    workspace.machine.guard.announce = partial(announce, workspace, numerics)
    announce(workspace, numerics, plan, ())
    workspace.results.plan = plan


def _require_coverage_so_far(probed: ProbedModel, trainable: int) -> None:
    """Fail before anything large is allocated, where too little will be covered whatever the data still call."""
    job, survey, mixed = probed.job, probed.survey, probed.probe.mixed
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
    trainable: Sequence[ParameterShape],
    state: CollectionState,
    plan: Plan,
    corrections: Mapping[str, Callable[[], Corrected]],
) -> FactorSet:
    """Return the covered layers with their facts; a layer that turned out not to be coverable is declared."""
    declared: list[DeclaredLayer] = list(survey.declared)
    covered: list[LayerStatistics] = []
    for layer in survey.treated:
        found = state.statistics[layer.name]
        reason = flaw(found, job.collection)
        if reason is None:
            covered.append(found)
        else:
            declared.append(_not_covered(state, layer, reason))
    declared = [explain(row, state.self_check) for row in declared]
    if not covered:
        raise nothing_covered(job.model, declared)
    numbers = sum(math.prod(each.shape) for each in trainable)
    require_coverage(numbers, [found.layer for found in covered], declared, job.collection)
    parts = [(found, group) for found in covered for group in range(found.layer.groups)]
    names = [found.layer.parts[group] for found, group in parts]
    ordinals = {name: ordinal for ordinal, name in enumerate(names)}
    tensors = {id(parameter): name for name, parameter in job.model.named_parameters()}
    facts = []
    for found, group in parts:
        own = layer_facts(found, group, job, state.self_check, ordinals)
        windows = find_windows(found.layer, group, tensors)
        facts.append(dataclasses.replace(own, windows=windows, **_reduced(job, found)))
    factors = {ordinal: state.factors[name] for name, ordinal in ordinals.items()}
    once = leaves_once(job.workspace)
    if once:
        # the only references to what stands on the device
        state.factors.clear()
    order = {name: place for place, (name, _) in enumerate(job.model.named_modules())}
    return FactorSet(
        layers=tuple(facts),
        declared=tuple(
            sorted(
                declared, key=lambda layer: order.get(layer.name, order.get(layer.name.rpartition(".")[0], len(order)))
            )
        ),
        trainable_parameters=numbers,
        parameters=tuple(trainable),
        loss=job.task.likelihood,
        task=plain(dataclasses.replace(job.task, loss=job.task.likelihood)),
        examples=state.examples,
        entered=state.entered,
        updates=state.updates,
        passes=state.passes,
        collection=dataclasses.replace(job.collection),
        woodbury=job.workspace.options.woodbury,
        device="cpu",
        storage_policy="resident" if len(plan.chosen.parts) == 1 else "laid aside",
        micro_batch=plan.chosen.micro_batch,
        amp=job.precision.amp,
        amp_fallback=job.precision.fallback,
        accumulation_precision=job.precision.sums,
        accumulation_fallback=job.precision.sums_fallback,
        loss_scale=state.loss_scale if job.precision.amp == "fp16" else None,
        planned_peak_bytes=plan.largest_peak_bytes,
        looked_at=None if state.self_check is None or not state.self_check.layers else state.self_check.looked_at,
        nondeterministic=tuple(sorted(state.nondeterministic)),
        not_replayed=job.numerics.not_replayed(job.workspace.resume.numerics),
        load=lambda ordinal: factors[ordinal](),
        let_go=factors.pop if once else None,
        load_corrected=(lambda ordinal: corrections[names[ordinal]]()) if corrections else None,
        nested=by_ordinal(job.sizes, state, tuple(facts)),
        owners=owners_by_ordinal(job.workspace, [found.layer.name for found, _ in parts]),
    )


def _counted(job: PassJob, state: CollectionState, model: str) -> CountedExamples | None:
    """Say which examples the sums are over; None where they are too scattered, or a checkpoint did not say."""
    part, first = job.workspace.inputs.part, next(iter(state.statistics.values()))
    if not state.runs or first.total_G is None:
        return None
    return CountedExamples(
        runs=tuple(Run(begin=begin, end=end) for begin, end in state.runs),
        terms_weight=first.total_G,
        begin=0 if part is None else part.begin,
        whole=None if part is None else part.examples,
        model=model,
        unmasked=tuple(CalledOnce(part=name, number=number) for name, number in sorted(state.unmasked)),
        overwritten=tuple(sorted(state.overwritten)),
    )


def _reduced(job: PassJob, found: LayerStatistics) -> dict[str, Any]:
    """How ranks have added up a covered layer, by the names of its facts."""
    ranks, name = job.workspace.machine.ranks, found.layer.name
    if ranks.size == 1:
        return {}
    leader = found if found.leader is None else found.leader
    return {
        "world_size": ranks.size,
        "reduction": ranks.traffic.reductions.get(name, "none"),
        "positions_local": ranks.traffic.positions.get(leader.layer.name),
        "sent_bytes": ranks.traffic.sent_of(name),
    }


def _not_covered(state: CollectionState, layer: TreatedLayer, reason: str) -> DeclaredLayer:
    """A layer that turned out not to be coverable; what its own check has found says why."""
    check = None if state.self_check is None else state.self_check.layers.get(layer.name)
    return refusal(layer, check) if reason == FAILED_CHECK and check is not None else declare(layer, reason)
