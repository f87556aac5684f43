"""Layer facts: what is known of a covered layer after its passes, and what a merge takes, read off its statistics."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from catalog.requests.collection import Collection
from engine.accumulation.batch_variance import activation_refusal, gradient_refusal
from engine.accumulation.layer_statistics import LayerStatistics
from engine.collection.normalise import layer_sums
from engine.collection.pass_job import PassJob
from engine.factors.factor_set import LayerFacts
from engine.gradient_identity.self_check import SelfCheck
from engine.layers.layer import TreatedLayer

WITHOUT_CUDNN = "it runs without cuDNN, which has no backward pass of recurrent layers in evaluation mode"
"""How the record of a recurrent layer on a GPU says that its numbers are not those of cuDNN's kernel."""


def layer_facts(
    found: LayerStatistics, group: int, job: PassJob, self_check: SelfCheck | None, ordinals: Mapping[str, int]
) -> LayerFacts:
    """Return what is known of one group of a covered layer, but for its places in the parameters.

    Args:
        found: Statistics of the layer, its passes done.
        group: The group, from 0.
        self_check: Findings of each layer's check; None where nothing was checked.
        ordinals: The places of all groups of all covered layers, by name.
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
