"""Collection: pass the data through the model once and gather A and G of every treated layer.

A dry run of a few examples comes first: it shows which layers are called, which are fed by the
same tensor (they share one A), and how large everything will be, so that the plan is made and
checked before anything large is allocated.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from catalog.collection import Collection
from catalog.inputs import Task
from engine.curvature.batches import Batch, batched, mapped
from engine.curvature.collected import Collected, LayerFacts, read_collected
from engine.curvature.factors import Factors, mirrored_
from engine.curvature.forecast import DryRun, forecast
from engine.curvature.hooks import Collector, SharingBroken, followers, unattributed, untouched, watched
from engine.curvature.layers.coverage import DeclaredLayer, Survey, declare, survey
from engine.curvature.layers.layer import BlockLayer, TreatedLayer
from engine.curvature.loss import directions
from engine.curvature.prediction import positions, predict
from engine.curvature.statistics import LayerStatistics
from engine.errors import (
    EmptyData,
    EngineError,
    ModelRefused,
    NonFiniteFactor,
    NonFiniteModel,
    NothingToAnalyse,
    Unwinding,
)
from engine.memory.plan import Plan
from engine.workspace import Workspace

_DRY_EXAMPLES = (2, 3)
"""One example, repeated. Not once alone: a model may squeeze a batch of one away."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The parts of a workspace that a collection needs, all present."""

    workspace: Workspace
    model: nn.Module
    task: Task
    collection: Collection
    dtype: torch.dtype

    def batches(self) -> Iterator[Batch]:
        """The data, anew, in batches on the device."""
        stream = self.workspace.batches() if self.workspace.batches is not None else iter(())
        for batch in batched(stream, self.collection.batch_size):
            yield batch.to(self.workspace.device, self.dtype)


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
    job = _Job(
        workspace=workspace, model=workspace.model, task=workspace.task, collection=workspace.collection, dtype=dtype
    )
    _require_finite(job.model)
    surveyed = _surveyed(job.model)
    with untouched(job.model, dtype):
        # the survey saw the caller's flags; what follows sees every parameter frozen
        seen, mixed = _dry_run(job, surveyed)
        shared = followers(seen.calls, surveyed.treated)
        plan = forecast(workspace, dtype, surveyed.treated, seen, shared)
        del seen
        workspace.planned(plan.as_json())
        plan.require(workspace.memory)
        passes = 1
        while True:
            try:
                statistics, examples, updates = _run(job, surveyed.treated, shared, mixed)
                break
            except SharingBroken as broken:
                # rare: a model that feeds its layers differently from batch to batch
                shared = {name: leader for name, leader in shared.items() if name not in broken.followers}
                passes += 1
        return _finished(job, surveyed, statistics, plan, (examples, updates, passes))


def _surveyed(model: nn.Module) -> Survey:
    modes = [(module, module.training) for module in model.modules()]
    try:
        # batch norm is treated by its running statistics, which only evaluation mode uses
        model.eval()
        found = survey(model)
    finally:
        for module, training in modes:
            module.training = training
    if not found.treated:
        reasons = sorted({layer.reason for layer in found.declared}) or ["no trainable parameter"]
        raise NothingToAnalyse(
            f"the model ({type(model).__name__}) has no layer that can be treated: {', '.join(reasons)}",
            pointer="/model",
        )
    return found


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


def _dry_run(job: _Job, surveyed: Survey) -> tuple[DryRun, frozenset[str]]:
    """What one example, repeated, shows of the model; and the layers that mix examples."""
    batch = next(job.batches())
    if job.collection.batch_size == 1:
        # every position is the only example's
        return _seen(job, surveyed, batch, 1), frozenset()
    few, more = (_seen(job, surveyed, batch, times) for times in _DRY_EXAMPLES)
    return few, unattributed(few.calls, more.calls, _DRY_EXAMPLES)


def _seen(job: _Job, surveyed: Survey, batch: Batch, times: int) -> DryRun:
    def repeated(tensor: Tensor) -> Tensor:
        return tensor[:1].repeat_interleave(times, 0)

    same = Batch(
        inputs=mapped(batch.inputs, repeated), targets=mapped(batch.targets, repeated), index=repeated(batch.index)
    )
    with torch.no_grad(), watched(surveyed.treated) as calls:
        prediction = predict(job.model, same, job.task)
    return DryRun(calls=calls, examples=times, outputs=prediction.outputs.numel())


def _run(
    job: _Job, treated: tuple[TreatedLayer, ...], shared: dict[str, str], mixed: frozenset[str]
) -> tuple[tuple[LayerStatistics, ...], int, int]:
    """One pass over the data: statistics, examples that entered them, updates."""
    workspace, collection = job.workspace, job.collection
    by_name: dict[str, LayerStatistics] = {}
    for layer in treated:
        sharing = collection.sharing if layer.form == "kronecker" else "expand"
        # a leader stands before its followers
        leader = by_name[shared[layer.name]] if layer.name in shared else None
        statistics = LayerStatistics(layer=layer, sharing=sharing, leader=leader)
        if layer.name in mixed:
            statistics.flaw = "batch_not_first"
        elif collection.fisher == "forward_only" and isinstance(layer, BlockLayer):
            statistics.flaw = "needs_gradients"
        statistics.allocate(job.dtype, workspace.device)
        by_name[layer.name] = statistics
    all_statistics = tuple(by_name.values())
    collector = Collector(statistics=all_statistics, gradients=collection.fisher != "forward_only")
    batch_count = None if workspace.examples is None else -(-workspace.examples // collection.batch_size)
    examples = updates = terms = 0
    # a model that draws numbers in evaluation mode draws the same ones in every run
    torch.manual_seed(collection.seed)
    with collector.attached(), torch.enable_grad():
        for number, batch in enumerate(job.batches()):
            workspace.checkpoint()
            if number % collection.update_freq == 0:
                if collection.ema_decay is not None and updates:
                    for statistics in all_statistics:
                        statistics.decay_(collection.ema_decay)
                terms += _update(job, batch, collector)
                examples += batch.size
                updates += 1
            workspace.report("collection", number + 1, batch_count, "batches")
    if terms == 0:
        raise EmptyData(
            f"all targets of the {examples} examples are ignored, so there is no loss term; correct the targets",
            pointer="/data",
        )
    return all_statistics, examples, updates


def _update(job: _Job, batch: Batch, collector: Collector) -> int:
    """Let one batch enter the statistics; returns its loss terms."""
    collector.begin(batch.size, positions(batch, job.task))
    with torch.set_grad_enabled(collector.gradients):
        prediction = predict(job.model, batch, job.task)
    collector.returning = True
    terms = prediction.terms
    for statistics in collector.statistics:
        statistics.weight_G += terms
        statistics.terms += terms
    if prediction.outputs.requires_grad and terms:
        waiting: Tensor | None = None
        for direction in directions(prediction, batch.index, job.task.likelihood, job.collection):
            if waiting is not None:
                _pull_back(prediction.outputs, waiting, retain_graph=True)
            waiting = direction
        if waiting is not None:
            # the last one frees the graph as it goes
            _pull_back(prediction.outputs, waiting, retain_graph=False)
    collector.end()
    return terms


def _pull_back(outputs: Tensor, direction: Tensor, *, retain_graph: bool) -> None:
    try:
        torch.autograd.backward(outputs, direction, retain_graph=retain_graph)
    except (EngineError, Unwinding, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise ModelRefused(
            f"the model raised in its backward pass: {type(error).__name__}: {str(error)[:500]}; "
            "a model that can be trained can be measured: mend it, or take `fisher: forward_only`",
            pointer="/model",
        ) from error


def _finished(
    job: _Job, surveyed: Survey, statistics: tuple[LayerStatistics, ...], plan: Plan, counts: tuple[int, int, int]
) -> Collected:
    declared: list[DeclaredLayer] = list(surveyed.declared)
    covered: list[LayerStatistics] = []
    for found in statistics:
        reason = _flaw(found, job.collection)
        if reason is None:
            covered.append(found)
        else:
            declared.append(declare(found.layer, reason))
    if not covered:
        reasons = ", ".join(sorted({layer.reason for layer in declared}))
        raise NothingToAnalyse(
            f"no layer of the model ({type(job.model).__name__}) could be measured: {reasons}", pointer="/model"
        )
    factors: dict[int, Factors] = {}
    facts: list[LayerFacts] = []
    for ordinal, found in enumerate(covered):
        leader = found.leader if found.leader in covered else None
        shared_with = covered.index(leader) if leader is not None else None
        activation = factors[shared_with].A if shared_with is not None else _activation(found)
        factors[ordinal] = Factors(
            layer=found.layer.name,
            form=found.layer.form,
            bias=found.layer.bias,
            A=activation,
            G=_gradient(found, job.collection),
        )
        facts.append(_facts(ordinal, found, leader, shared_with))
        _require_finite_factors(factors[ordinal])
    order = {name: place for place, (name, _) in enumerate(job.model.named_modules())}
    examples, updates, passes = counts
    return Collected(
        layers=tuple(facts),
        declared=tuple(sorted(declared, key=lambda layer: order[layer.name])),
        trainable_parameters=sum(found.layer.parameter_count for found in covered)
        + sum(layer.parameter_count for layer in declared),
        examples=examples,
        updates=updates,
        passes=passes,
        collection=dataclasses.replace(job.collection),
        device=str(job.workspace.device),
        planned_peak_bytes=plan.largest_peak_bytes,
        load=factors.__getitem__,
    )


def _flaw(found: LayerStatistics, collection: Collection) -> str | None:
    if found.flaw is not None:
        return found.flaw
    reached = found.gradients > 0 or collection.fisher == "forward_only"
    return None if found.calls > 0 and reached else "no_gradient"


def _activation(found: LayerStatistics) -> Tensor:
    """A, normalised and symmetric; the 1×1 matrix 1 for an exact block; the leader's where that was declared."""
    holder = found.leader if found.leader is not None else found
    if holder.A is None:
        return torch.ones(1, 1, dtype=found.G.dtype, device=found.G.device) if found.G is not None else torch.ones(1, 1)
    # a decayed count may lie below one; without any position the sum is zero
    normalised = holder.A.div_(holder.weight_A or 1.0)
    holder.weight_A = 1.0
    return normalised if normalised.ndim == 1 else mirrored_(normalised)


def _gradient(found: LayerStatistics, collection: Collection) -> Tensor:
    if found.G is None:
        raise ValueError(f"layer `{found.layer.name}` was never allocated")
    if collection.fisher == "forward_only":
        return torch.eye(found.layer.out_dim, dtype=found.G.dtype, device=found.G.device)
    return mirrored_(found.G.div_(found.weight_G or 1.0))


def _facts(ordinal: int, found: LayerStatistics, leader: LayerStatistics | None, shared_with: int | None) -> LayerFacts:
    layer = found.layer
    source = leader or found
    return LayerFacts(
        ordinal=ordinal,
        name=layer.name,
        module=type(layer.module).__name__,
        form=layer.form,
        why=layer.why,
        parameters=layer.parameters,
        parameter_count=layer.parameter_count,
        in_dim=layer.in_dim,
        out_dim=layer.out_dim,
        bias=layer.bias,
        positions=source.positions,
        terms=found.terms,
        calls=found.calls,
        sharing=found.sharing,
        rank_bound_A=source.rows_A if layer.form == "kronecker" else None,
        rank_bound_G=found.rows_G or None,
        shared_A_with=shared_with,
    )


def _require_finite_factors(factors: Factors) -> None:
    for name, tensor in (("A", factors.A), ("G", factors.G)):
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteFactor(
                f"layer `{factors.layer}`: {name} holds NaN or Inf after the last batch; activations or gradients "
                f"overflow at {str(tensor.dtype).removeprefix('torch.')}: take `collection.dtype: float64`",
                layer=factors.layer,
            )
