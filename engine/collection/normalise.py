"""Normalised sums: one pass's sums become factors on the host, in memory or spilled.

A layer that no gradient reached, or that turned out to mix examples, is not covered; its
sums are freed with the others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from catalog import ANALYSES
from catalog.requests.collection import Collection
from engine.accumulation.gradient_rows import ProbabilityRows
from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.sketched_rows import SketchRows
from engine.accumulation.tied_statistics import TiedHeadStatistics
from engine.collection.collection_state import CollectionState
from engine.collection.ranks.reduce_statistics import is_elsewhere, refuse_elsewhere
from engine.errors import NonFiniteFactor
from engine.factors.dense import diagonals
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.factor_set import LayerSums
from engine.factors.kronecker_factors import HOST, Factors, mirrored_, to_storage
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.factors.spilled_factors import spill
from engine.layers.convolution import ConvolutionLayer
from engine.layers.layer import TreatedLayer
from engine.linalg.linear_operator import Structured
from engine.memory.budget import give_back_host_memory
from engine.workspace import Workspace

T = TypeVar("T")
Stored = tuple[Tensor, float]
"""A factor as it is kept, and its scale."""
StoredSide = tuple[Tensor | Structured, float]
"""The same of a G, or what stands for it."""


def keep_factors(
    workspace: Workspace,
    dtype: torch.dtype,
    state: CollectionState,
    statistics: tuple[LayerStatistics, ...],
    *,
    aside: bool,
) -> None:
    """Turn one pass's sums into factors, in memory or spilled: one layer at a time, its sums freed.

    They stand on the host, or stay where their sums stood until they are written (``leaves_once``).

    Memory:
        One factor beyond what is kept, where it is kept in another precision than its sums where they stand.

    Of several ranks, one that does not own a layer has no factors of it, where sums went to owners.
    """
    leaders = {found.leader.layer.name for found in statistics if found.leader is not None}
    shared: dict[str, list[Stored]] = {}
    parts = (part for known in state.statistics.values() for part in known.layer.parts)
    places = {part: place for place, part in enumerate(parts)}
    stays = leaves_once(workspace) and not aside
    for found in statistics:
        if flaw(found, workspace.options.collection) is not None:
            continue
        leader = found.leader.layer.name if found.leader is not None else ""
        if is_elsewhere(workspace, found.layer.name):
            state.factors |= {part: partial(refuse_elsewhere, part) for part in found.layer.parts}
            continue
        for factors in finish_layer(found, workspace.options.collection, dtype, shared, stays=stays):
            part = factors.layer
            if aside and workspace.ports.scratch is not None:
                spilled = spill(workspace.ports.scratch, factors, str(places[part]), state.spilled.get(leader))
                state.spilled[part], state.factors[part] = spilled, partial(spilled.load, workspace.ports.scratch)
            else:
                state.factors[part] = constant(factors)
        if found.layer.name not in leaders:
            shared.pop(found.layer.name, None)
    for found in statistics:
        # of those that are declared after all
        found.A = found.G = found.gradient_rows = None
    if aside:
        give_back_host_memory()


def leaves_once(workspace: Workspace) -> bool:
    """Return whether factors stay on the device until they are written, since nothing but that is done with them.

    Of other analyses even those without a decomposition read a layer's factors again.
    """
    options, inputs = workspace.options, workspace.inputs
    return (
        workspace.machine.device.type != "cpu"
        and options.decomposition == "none"
        and all(ANALYSES[kind].keeps_factors for kind in options.kinds)
        and not options.collection.ekfac
        and inputs.part is None
        and workspace.machine.ranks.size == 1
    )


def finish_layer(
    found: LayerStatistics,
    collection: Collection,
    dtype: torch.dtype,
    shared: dict[str, list[Stored]],
    *,
    stays: bool = False,
) -> Iterator[Factors]:
    """Yield the factors of one layer, or of each of its groups; its sums are normalised in place and freed.

    What others share of its A is added to ``shared``. Factors that ``stays`` holds stay where their sums stand; a tied
    head's are always made on the host.
    """
    wanted = collection.storage_dtype
    # a part is rounded once, after the merge
    storage = dtype if wanted is None or found.partial else getattr(torch, wanted)
    holder = found.leader or found
    gradient: Sequence[StoredSide]
    if isinstance(found, TiedHeadStatistics):
        nearest_A, nearest_G = found.nearest_product_(
            _activation(found), _head_gradient(found, collection), identity=collection.fisher == "forward_only"
        )
        shared[holder.layer.name] = _stored(found, "A", nearest_A, storage)
        if isinstance(nearest_G, Tensor):
            gradient = _stored(found, "G", nearest_G, storage)
        else:
            gradient = [(nearest_G.to(torch.device("cpu")), 1.0)]
        del nearest_A, nearest_G
        found.A = None
    else:
        if holder.layer.name not in shared:
            shared[holder.layer.name] = _stored(found, "A", _activation(found), storage, stays=stays)
            holder.A = None
        gradient = _gradient_side(found, collection, storage, stays=stays)
    found.G = found.gradient_rows = None
    for part, (A, scale_A), (G, scale_G) in zip(found.layer.parts, shared[holder.layer.name], gradient, strict=True):
        yield Factors(
            layer=part,
            form=found.layer.form,
            bias=found.layer.bias,
            A=A,
            G=G,
            scale_A=scale_A,
            scale_G=scale_G,
            head_diagonal=found.head_diagonal if isinstance(found, TiedHeadStatistics) else None,
            tied=found.made_of if isinstance(found, TiedHeadStatistics) else None,
        )
    if isinstance(found, TiedHeadStatistics):
        found.made_of = None


def constant(value: T) -> Callable[[], T]:
    """Return a function that returns ``value``."""
    return lambda: value


def foreseen_flaw(layer: TreatedLayer, collection: Collection, mixed: frozenset[str]) -> str | None:
    """Return why a layer cannot be covered, as far as is known before the first pass; None where it can.

    ``mixed`` names layers whose positions belong to no one example.
    """
    if layer.name in mixed:
        return "batch_not_first"
    exact = layer.form in ("block", "diagonal_block")
    return "needs_gradients" if collection.fisher == "forward_only" and exact else None


def flaw(found: LayerStatistics, collection: Collection) -> str | None:
    """Return why a layer cannot be covered after the passes; None where it is covered."""
    if found.flaw is not None:
        return found.flaw
    if found.partial:
        return None
    reached = found.gradients > 0 or collection.fisher == "forward_only"
    if found.calls == 0:
        return found.layer.reason_uncalled
    return None if reached else "no_gradient"


def layer_sums(
    found: LayerStatistics, group: int, *, weight_A: float | None = None, weight_G: float | None = None
) -> LayerSums | None:
    """Return the counts and sums of one group of a layer, once its pass is done."""
    layer, holder = found.layer, found.leader or found
    counted_A, counted_G = weight_A, weight_G
    if weight_A is None or weight_G is None:
        counted_A, counted_G = holder.total_A, found.total_G
    if counted_A is None or counted_G is None:
        return None
    # of a part of the pass there are none
    whole = weight_G is None
    return LayerSums(
        whole=layer.name,
        reason_uncalled=layer.reason_uncalled,
        weight_A=counted_A,
        weight_G=counted_G,
        rows_A=holder.rows_A,
        rows_G=found.rows_G,
        gradients=found.gradients,
        unproven=found.unproven,
        row_dtype=None
        if found.representation.kind == "dense"
        else str(found.representation.dtype).removeprefix("torch."),
        examples=found.examples,
        traces=_traces(found, group) if whole else None,
        variance_A=holder.variance_A.sums(group) if whole else None,
        variance_G=found.variance_G.sums(group) if whole else None,
        tied=found.tied_sums if isinstance(found, TiedHeadStatistics) else None,
    )


def _traces(found: LayerStatistics, group: int) -> tuple[float, ...] | None:
    own = found.trace_sums[3 * group : 3 * group + 3]
    numbers = tuple(each for each in (*own, found.weights_squared) if each is not None and math.isfinite(each))
    return numbers if len(numbers) == 4 else None


def _activation(found: LayerStatistics) -> Tensor:
    """A, normalised and symmetric; the 1×1 matrix 1 for an exact block; the leader's where that was declared."""
    holder = found.leader if found.leader is not None else found
    if holder.A is None:
        return torch.ones(1, 1, dtype=found.sums_dtype)
    # a decayed count may lie below one; without any position the sum is zero
    symmetric, layer = mirrored_(holder.A.div_(holder.weight_A or 1.0)), holder.layer
    holder.weight_A = 1.0
    return layer.in_parameter_order_(symmetric) if isinstance(layer, ConvolutionLayer) else symmetric


def _gradient_side(
    found: LayerStatistics, collection: Collection, storage: torch.dtype, *, stays: bool
) -> Sequence[StoredSide]:
    """G of each group as it is kept."""
    if found.gradient_rows is None:
        return _stored(found, "G", _gradient(found, collection), storage, stays=stays)
    rows, name = found.gradient_rows, found.layer.name
    if not bool(torch.isfinite(rows.largest).all()):
        raise _overflown(name, "G", found.sums_dtype)
    kept = rows.rows.dtype
    # float16 has a scale of each row's own
    if kept != torch.float16 and float(rows.largest.max()) > torch.finfo(kept).max:
        raise NonFiniteFactor(
            f"layer `{name}`: gradients reach {float(rows.largest.max()):.2g}, beyond the range of "
            f"{str(kept).removeprefix('torch.')}; take `woodbury.dtype: fp16`, whose rows have scales",
            layer=name,
        )
    wide = found.sums_dtype if found.partial else None
    place = rows.rows.device if stays else HOST
    return [(side, 1.0) for side in rows.finished(found.weight_G or 1.0, wide, place)]


def _head_gradient(found: LayerStatistics, collection: Collection) -> Tensor | SoftmaxFisher | DiagonalSketch:
    """G of a head alone, before its table's part comes in."""
    rows = found.gradient_rows
    if not isinstance(rows, (ProbabilityRows, SketchRows)):
        return _gradient(found, collection)
    (side,) = rows.finished(found.weight_G or 1.0)
    return side.to(rows.scales.device)


def _gradient(found: LayerStatistics, collection: Collection) -> Tensor:
    if found.G is None:
        raise ValueError(f"layer `{found.layer.name}` was never allocated")
    if collection.fisher == "forward_only":
        return torch.eye(found.layer.out_dim, dtype=found.G.dtype, device=found.G.device).expand(found.G.shape)
    return mirrored_(found.G.div_(found.weight_G or 1.0))


def _stored(
    found: LayerStatistics, side: str, factor: Tensor, dtype: torch.dtype, *, stays: bool = False
) -> list[Stored]:
    """``factor`` as it is kept, with its scale; each group's by itself.

    ``NonFiniteFactor`` if it holds NaN or Inf, or does so at ``dtype``.
    """
    name = found.layer.name
    if not _is_finite(factor):
        raise _overflown(name, side, factor.dtype)
    groups = [factor] if found.layer.groups == 1 else list(factor)
    kept = [to_storage(group, dtype, group.device if stays else HOST) for group in groups]
    if dtype != factor.dtype and not all(_is_finite(stored) for stored, _ in kept):
        kind = str(dtype).removeprefix("torch.")
        raise NonFiniteFactor(
            f"layer `{name}`: {side} has entries beyond the range of {kind}; take another `collection.storage_dtype`",
            layer=name,
        )
    return kept


def _overflown(name: str, side: str, dtype: torch.dtype | None) -> NonFiniteFactor:
    return NonFiniteFactor(
        f"layer `{name}`: {side} holds NaN or Inf after the last batch; activations or gradients "
        f"overflow at {str(dtype).removeprefix('torch.')}: take `collection.dtype: float64`",
        layer=name,
    )


def _is_finite(factor: Tensor) -> bool:
    """Judge by the diagonal, as no entry of a positive semidefinite matrix is larger than the largest there.

    The whole would take another factor's worth of memory to look at.
    """
    return bool(torch.isfinite(diagonals(factor)).all())
