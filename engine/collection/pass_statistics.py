"""Pass statistics: the sums of one pass's layers, zeroed, or as a checkpoint holds them.

Facts of a covered layer after its passes, and what a merge takes, are read off its statistics.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from catalog.requests.collection import Collection
from engine.accumulation.batch_variance import BatchVariance, activation_refusal, gradient_refusal
from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.tied_statistics import TiedHeadStatistics
from engine.collection.checkpoints import CheckpointForeign, Checkpoints, Resumed
from engine.collection.collection_state import CollectionState
from engine.collection.normalise import foreseen_flaw, layer_sums
from engine.collection.pass_job import PassJob
from engine.collection.probe import ProbedModel
from engine.collection.ranks.agreement import agree_on_sums
from engine.factors.factor_set import LayerFacts
from engine.factors.representation import DENSE
from engine.gradient_identity.self_check import SelfCheck
from engine.layers.layer import TreatedLayer, factor_sides
from engine.layers.tied import TiedHeadLayer
from engine.memory.host_accumulation import ROW_STAGING_NUMBERS, Staging, staging_numbers
from engine.memory.out_of_memory import first_line, ran_out_of_memory
from engine.model.batches import Batch


def begin_statistics(
    probed: ProbedModel,
    layers: Sequence[TreatedLayer],
    state: CollectionState,
    stream: Iterator[Batch],
    checkpoints: Checkpoints,
    found: Resumed | None,
) -> tuple[LayerStatistics, ...]:
    """Return the sums of the layers of a pass: zeroed, or those of a checkpoint that has proved right on every rank."""
    if found is None:
        state.begin_pass()
        return tuple(_allocated(probed, layers, state.shared).values())
    ranks, by_name = probed.job.workspace.machine.ranks, dict[str, LayerStatistics]()
    foreign = full = ""
    try:
        by_name = _allocated(probed, layers, state.shared)
        checkpoints.restore(found, by_name, stream)
    except CheckpointForeign as error:
        foreign = str(error)
    except Exception as error:
        if ranks.size == 1 or not ran_out_of_memory(error):
            raise
        full = first_line(error)
    foreign, full = agree_on_sums(ranks, foreign, full)
    if foreign:
        raise CheckpointForeign(foreign)
    if full:
        raise MemoryError(full)
    checkpoints.take_over(found)
    state.take_over(found.stored)
    if not found.running:
        state.begin_pass()
    return tuple(by_name.values())


def _allocated(
    probed: ProbedModel, treated: Sequence[TreatedLayer], shared: dict[str, str]
) -> dict[str, LayerStatistics]:
    """Zeroed sums of every layer of a pass."""
    job, ranks = probed.job, probed.job.workspace.machine.ranks
    by_name: dict[str, LayerStatistics] = {}
    traced = job.collection.exact_trace and job.collection.fisher != "forward_only"
    staging = row_staging = None
    if job.offload:
        sides = [side for layer in treated for side in factor_sides(layer, follows=layer.name in shared)]
        staging = Staging(staging_numbers(sides), job.dtype, job.workspace.machine.device)
    elif job.workspace.machine.device.type == "cuda" and any(each.on_host for each in job.representations.values()):
        row_staging = Staging(ROW_STAGING_NUMBERS, job.dtype, job.workspace.machine.device)
    unordered = job.layout.orders.unordered_among(treated)
    for layer in treated:
        sharing = job.collection.sharing if layer.form == "kronecker" else "expand"
        # a leader stands before its followers
        leader = by_name[shared[layer.name]] if layer.name in shared else None
        representation = job.representations.get(layer.name, DENSE)
        statistics = statistics_kind(layer)(
            layer=layer,
            sharing=sharing,
            leader=leader,
            traced=traced and layer.name not in unordered,
            ordered=layer.name not in unordered,
            staging=staging,
            row_staging=row_staging if representation.on_host else None,
            representation=representation,
            precision=job.precision,
        )
        needs_order = statistics.needs_order or job.collection.ekfac
        statistics.flaw = foreseen_flaw(layer, job.collection, probed.probe.mixed)
        if layer.name in unordered and needs_order and statistics.flaw is None:
            statistics.flaw = "rows_unordered"
        statistics.partial = job.workspace.inputs.part is not None
        # room for this rank's rows; more is made where its part is larger
        statistics.representation = replace(representation, rows=-(-representation.rows // ranks.size))
        statistics.allocate(job.dtype, job.workspace.machine.device)
        statistics.representation = representation
        if job.collection.batch_variance:
            _begin_variance_(statistics, job.collection.fisher)
        by_name[layer.name] = statistics
    return by_name


def _begin_variance_(statistics: LayerStatistics, fisher: str) -> None:
    """Begin the variance over batches of the sums that a layer holds itself, which takes a second set of them."""
    layer, kept = statistics.layer, statistics.representation.kind
    if statistics.A is not None and activation_refusal(layer) is None:
        statistics.variance_A = BatchVariance.of(statistics.A)
    if statistics.G is not None and gradient_refusal(layer, kept, fisher) is None:
        statistics.variance_G = BatchVariance.of(statistics.G)


def statistics_kind(layer: TreatedLayer) -> type[LayerStatistics]:
    """Choose the class that holds a layer's sums."""
    return TiedHeadStatistics if isinstance(layer, TiedHeadLayer) else LayerStatistics


WITHOUT_CUDNN = "it runs without cuDNN, which has no backward pass of recurrent layers in evaluation mode"
"""How the record of a recurrent layer on a GPU says that its numbers are not those of cuDNN's kernel."""


def layer_facts(
    found: LayerStatistics, group: int, job: PassJob, self_check: SelfCheck | None, ordinals: Mapping[str, int]
) -> LayerFacts:
    """Return what is known of one group of a covered layer, its passes done, but for its places in the parameters.

    ``group`` counts from 0; ``self_check`` is None where nothing was checked; ``ordinals`` are the places of all groups
    of all covered layers, by name.
    """
    layer, device = found.layer, job.workspace.machine.device
    leader = found.leader if found.leader is not None and found.leader.layer.name in ordinals else None
    source = leader or found
    # examples of a moving average do not weigh alike, and the formula takes them to
    weighted = job.collection.ema_decay is not None
    own = LayerFacts(
        ordinal=ordinals[layer.parts[group]],
        name=layer.parts[group],
        module=type(layer.module).__name__,
        form=layer.form,
        why="; ".join([found.explanation, *instead_of_cudnn(layer, device)]),
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
        shared_A_with=None if leader is None else ordinals[leader.layer.name],
        exact_trace=found.exact_traces[group] if found.exact_traces else None,
        representation_G=found.representation.kind,
        rows_place=found.representation.place(torch.device("cpu") if job.offload else device),
        trace_standard_error=None if weighted or not found.standard_errors else found.standard_errors[group],
        sums=None if weighted else layer_sums(found, group),
        holders=layer.holders,
        reached=float(found.largest) > 0,
        frozen_bias=not layer.bias and getattr(layer.module, "bias", None) is not None,
    )
    return dataclasses.replace(own, **_proved(self_check, found.layer), **_varied(job.collection, found, group))


def instead_of_cudnn(layer: TreatedLayer, device: torch.device) -> tuple[str, ...]:
    """Say that a recurrent layer runs without cuDNN, where it would have run with it."""
    return (WITHOUT_CUDNN,) if device.type == "cuda" and isinstance(layer.module, nn.RNNBase) else ()


def _proved(self_check: SelfCheck | None, layer: TreatedLayer) -> dict[str, Any]:
    """Numbers of a covered layer's self-check, by the names of its facts."""
    check = None if self_check is None else self_check.layers.get(layer.name)
    if check is None:
        return {}
    return {
        "gradient_identity": check.error,
        "examples_checked": check.examples,
        "checked_against": check.proof,
        "identity_tolerance": check.tolerance,
        "identity_tolerance_reason": check.tolerance_reason,
    }


def _varied(collection: Collection, found: LayerStatistics, group: int) -> dict[str, Any]:
    """The variance of a covered layer's factors over batches, by the names of its facts."""
    if not collection.batch_variance:
        return {}
    layer, source = found.layer, found.leader or found
    A = source.variance_A.relative(group, activation_refusal(layer))
    G = found.variance_G.relative(group, gradient_refusal(layer, found.representation.kind, collection.fisher))
    return {
        "relative_variance_A": A.variance,
        "relative_variance_G": G.variance,
        "relative_standard_error_A": A.standard_error,
        "relative_standard_error_G": G.standard_error,
        "no_batch_variance": "; ".join(f"{side}: {each.why}" for side, each in (("A", A), ("G", G)) if each.why)
        or None,
    }
