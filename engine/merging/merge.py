"""The merge of sets of factors: the set that one collection over all of their examples would have left.

Layers are merged when they are asked for, one at a time: ``load(ordinal)`` reads that layer of each set in turn and
adds its sums. What needs all tensors beforehand (the variance over batches, the product of a head and its table) reads
them once more when the sets are merged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from catalog.analyses.analysis import LookedAt
from engine.errors import NothingToAnalyse, NotMergeable
from engine.factors.factor_set import FactorSet, LayerFacts, LayerSums, NestedSize
from engine.factors.kronecker_factors import Factors
from engine.layers.coverage import DeclaredLayer, require_coverage
from engine.merging.merged_facts import merged_facts, merged_sums, require_mergeable
from engine.merging.weighted_sides import Addend, Precision, merge_layer
from engine.model.example_digests import EnteredExamples


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One layer in the sets that have it."""

    addends: tuple[Addend, ...]
    places: tuple[int, ...]
    """The sets, from 0."""
    idle: float
    """Loss terms, weighted, of the sets that never called it."""


def merge_factor_sets(sets: Sequence[FactorSet]) -> FactorSet:
    """Merge sets of factors, one at least, that were collected over disjoint examples.

    They are in the order of their sums: another order rounds otherwise. Counts, traces and variances of the result are
    theirs together, and its ``load`` reads each set's layer and adds it up: A and G in float64, and one set's factors
    are held. The result can be stored, and merged again.

    Raises:
        NotMergeable: If they are not sums of one collection over disjoint examples, or not all of the data that they
            say they are parts of.
        NothingToAnalyse: If no layer is covered.
        CoverageTooLow: If less is covered than the collection asks for.
    """
    if not sets:
        raise NotMergeable("there is no set of factors to merge; give one at least")
    counted = require_mergeable(sets)
    full = [each for each in sets if each.examples or each.layers]
    if not full:
        raise NothingToAnalyse("no example entered any set of factors; give data", pointer="/data")
    declared = _declared(full)
    layers = _gathered(full, declared)
    named = _precision(full[0])
    facts: list[LayerFacts] = []
    kept: list[_Layer] = []
    for name, layer in layers.items():
        made = merge_layer(layer.addends, layer.idle, named) if layer.addends[0].sums.tied is not None else None
        own = merged_facts(layer.addends, layer.idle, made, varied=full[0].collection.batch_variance)
        reason = _flaw(own, full[0])
        if reason is None:
            facts.append(replace(own, ordinal=len(kept)))
            kept.append(layer)
        else:
            _declare(declared, own, reason)
        del made, name
    facts = _with_leaders(facts, kept, full)
    if not facts:
        raise NothingToAnalyse(
            f"no layer could be measured: {', '.join(sorted({row.reason for row in declared}))}", pointer="/model"
        )
    require_coverage(full[0].trainable_parameters, facts, declared, full[0].collection)  # type: ignore[arg-type] # counts
    first = full[0]
    held: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
    return replace(
        first,
        layers=tuple(facts),
        declared=tuple(declared),
        examples=sum(each.examples for each in full),
        updates=sum(each.updates for each in full),
        passes=max(each.passes for each in full),
        storage_policy="stored",
        micro_batch=first.micro_batch if len({each.micro_batch for each in full}) == 1 else None,
        loss_scale=min((each.loss_scale for each in full if each.loss_scale is not None), default=None),
        planned_peak_bytes=None,
        looked_at=_looked_at(full),
        nondeterministic=_united(full),
        not_replayed=tuple(dict.fromkeys(each for own in full for each in own.not_replayed)),
        load=partial(_load, tuple(kept), tuple(facts), named, held),
        nested=_merged_sizes(full, kept, facts, named),
        reused_from=None,
        load_corrected=None,
        counted=counted,
        entered=_entered(full),
    )


def _entered(sets: Sequence[FactorSet]) -> EnteredExamples | None:
    """The examples of all sets; None where one does not say, and where their digests count the batches of each."""
    own = [each.entered for each in sets if each.entered is not None and not each.collection.nested]
    return reduce(EnteredExamples.joined, own) if len(own) == len(sets) else None


def _precision(first: FactorSet) -> Precision:
    sums = torch.float64 if first.collection.dtype == "float64" else torch.float32
    wanted = first.collection.storage_dtype
    return Precision(
        sums=sums,
        storage=sums if wanted is None else getattr(torch, wanted),
        identity=first.collection.fisher == "forward_only",
    )


def _load(
    layers: tuple[_Layer, ...],
    facts: tuple[LayerFacts, ...],
    precision: Precision,
    held: "WeakValueDictionary[int, Tensor]",
    ordinal: int,
) -> Factors:
    """One layer over all examples; layers with one A share the tensor while it is in use."""
    made = merge_layer(layers[ordinal].addends, layers[ordinal].idle, precision).factors
    leader = facts[ordinal].shared_A_with
    holder = ordinal if leader is None else leader
    shared = held.get(holder)
    if shared is not None:
        return replace(made, A=shared)
    held[holder] = made.A
    return made


def _gathered(sets: Sequence[FactorSet], declared: list[DeclaredLayer]) -> dict[str, _Layer]:
    """Every layer that no set found flawed, in the order of the set that has most; the others stay ``declared``."""
    widest = max(sets, key=lambda each: len(each.layers))
    names = list(dict.fromkeys(layer.name for each in (widest, *sets) for layer in each.layers))
    by_name = [{layer.name: layer for layer in each.layers} for each in sets]
    found: dict[str, _Layer] = {}
    for name in names:
        addends, places, idle, flawed = [], [], 0.0, None
        for place, (each, own) in enumerate(zip(sets, by_name, strict=True)):
            facts = own.get(name)
            if facts is not None and facts.sums is not None:
                addends.append(Addend(facts=facts, sums=facts.sums, load=partial(each.load, facts.ordinal)))
                places.append(place)
                continue
            row = _row_of(each, name, by_name)
            flawed = flawed or (row if row.reason not in _UNCALLED else None)
            if row.reason in _UNCALLED:
                idle += 0.0 if each.counted is None else each.counted.terms_weight
        if flawed is None:
            found[name] = _Layer(addends=tuple(addends), places=tuple(places), idle=idle)
            for row in [row for row in declared if _is_of(row, addends[0].facts)]:
                declared.remove(row)
    return found


_UNCALLED = frozenset({"never_routed"})
"""Reasons that say that no data called a layer: it adds nothing."""


def _row_of(found: FactorSet, name: str, by_name: Sequence[dict[str, LayerFacts]]) -> DeclaredLayer:
    """The row by which a set declares a layer that others cover."""
    facts = next(own[name] for own in by_name if name in own)
    row = next((row for row in found.declared if _is_of(row, facts)), None)
    if row is None:
        raise NotMergeable(
            f"layer `{name}` is in one set of factors and not known in another; collect all of them from one model",
            layer=name,
        )
    if row.reason == "no_gradient":
        raise NotMergeable(
            f"layer `{name}` has a gradient in one set of factors and none in another, whose inputs are not known any "
            "more; collect them undivided",
            layer=name,
        )
    return row


def _is_of(row: DeclaredLayer, facts: LayerFacts) -> bool:
    """Whether a row declares the parameters of a layer."""
    whole = facts.name if facts.sums is None else facts.sums.whole
    return row.name == whole or not set(_parameters(facts)).isdisjoint(row.parameters)


def _parameters(facts: LayerFacts) -> tuple[str, ...]:
    """Names of the parameters, without the number of a group."""
    if facts.sums is None or facts.sums.whole == facts.name:
        return facts.parameters
    return tuple(name.rpartition("[")[0] for name in facts.parameters)


def _declared(sets: Sequence[FactorSet]) -> list[DeclaredLayer]:
    """Rows of all sets, each once."""
    rows = {(row.name, row.parameters): row for each in reversed(sets) for row in each.declared}
    order = dict.fromkeys((row.name, row.parameters) for each in sets for row in each.declared)
    return [rows[key] for key in order]


def _declare(declared: list[DeclaredLayer], facts: LayerFacts, reason: str) -> None:
    """Declare a layer that no example reached; the groups of one layer have one row."""
    whole = facts.name if facts.sums is None else facts.sums.whole
    for place, row in enumerate(declared):
        if row.name == whole and row.reason == reason:
            declared[place] = replace(row, parameter_count=row.parameter_count + facts.parameter_count)
            return
    declared.append(
        DeclaredLayer(
            name=whole,
            module=facts.module,
            reason=reason,
            parameters=_parameters(facts),
            parameter_count=facts.parameter_count,
        )
    )


def _flaw(facts: LayerFacts, first: FactorSet) -> str | None:
    """Why a layer is not covered over all examples, as one collection would tell."""
    if facts.sums is None:
        return None
    if facts.calls == 0:
        return facts.sums.reason_uncalled
    reached = facts.sums.gradients > 0 or first.collection.fisher == "forward_only"
    return None if reached else "no_gradient"


def _with_leaders(facts: list[LayerFacts], kept: list[_Layer], sets: Sequence[FactorSet]) -> list[LayerFacts]:
    """The facts with the layer that each shares its A with, where all sets agree on that."""
    ordinals = {own.name: own.ordinal for own in facts}
    found = []
    for own, layer in zip(facts, kept, strict=True):
        leaders = {
            None if each.facts.shared_A_with is None else sets[place].layers[each.facts.shared_A_with].name
            for place, each in zip(layer.places, layer.addends, strict=True)
        }
        leader = leaders.pop() if len(leaders) == 1 else None
        found.append(replace(own, shared_A_with=None if leader is None else ordinals.get(leader)))
    return found


def _looked_at(sets: Sequence[FactorSet]) -> LookedAt | None:
    """Batches of all sets that a self-check looked at; None where a set does not say."""
    known = [each.looked_at for each in sets if each.looked_at is not None]
    if len(known) < len(sets):
        return None
    return joined_looks(LookedAt(), known)


def joined_looks(known: LookedAt, parts: Sequence[LookedAt]) -> LookedAt:
    """Return the batches looked at before, and those that each rank or set has looked at since."""
    return LookedAt(
        signatures=known.signatures + sum(each.signatures - known.signatures for each in parts),
        glances=known.glances + sum(each.glances - known.glances for each in parts),
        full=known.full + sum(each.full - known.full for each in parts),
        no_glance=next((each.no_glance for each in parts if each.no_glance is not None), None),
    )


def _united(sets: Sequence[FactorSet]) -> tuple[str, ...] | None:
    heard = [each.nondeterministic for each in sets]
    if any(each is None for each in heard):
        return None
    return tuple(sorted({name for each in heard for name in each or ()}))


def _merged_sizes(
    sets: Sequence[FactorSet], layers: Sequence[_Layer], facts: Sequence[LayerFacts], precision: Precision
) -> tuple[NestedSize, ...]:
    """The smaller sample sizes: all sets before the one in which a size is reached, and that one's first examples."""
    if not sets[0].collection.nested:
        return ()
    begins = [each.counted.begin for each in sets if each.counted is not None]
    if begins != sorted(begins) or any(each.counted is None or each.counted.whole is None for each in sets):
        raise NotMergeable(
            "`collection.nested` keeps the first examples of the data: sets must be the parts of one division, in the "
            "order of their examples",
            pointer="/collection/nested",
        )
    reached = {size.eighths: (place, size) for place, each in enumerate(sets) for size in each.nested}
    found = []
    for eighths, (last, size) in sorted(reached.items()):
        own = [_first_examples(layer, last, size, sets) for layer in layers]
        sums = [merged_sums(each.addends, each.idle) for each in own]
        found.append(
            NestedSize(
                eighths=eighths,
                examples=sum(each.examples for each in sets[:last]) + size.examples,
                rank_bounds=tuple(_bounds(layer, each) for layer, each in zip(facts, sums, strict=True)),
                load=partial(_load_size, tuple(own), precision),
                sums=tuple(sums),
            )
        )
    return tuple(found)


def _first_examples(layer: _Layer, last: int, size: NestedSize, sets: Sequence[FactorSet]) -> _Layer:
    """A layer in the sets before ``last``, and after the first examples of that one."""
    addends, idle = [], 0.0
    for place, each in zip(layer.places, layer.addends, strict=True):
        if place < last:
            addends.append(each)
        elif place == last:
            sums = size.sums[each.facts.ordinal]
            if sums is None:
                raise NotMergeable("a smaller sample size of a part does not say what it sums; collect the part again")
            addends.append(replace(each, sums=sums, load=partial(size.load, each.facts.ordinal)))
    absent = [each for place, each in enumerate(sets[:last]) if place not in layer.places]
    idle += sum(each.counted.terms_weight for each in absent if each.counted is not None)
    return _Layer(addends=tuple(addends), places=layer.places[: len(addends)], idle=idle)


def _bounds(facts: LayerFacts, sums: LayerSums) -> tuple[int | None, int | None]:
    if sums.tied is not None:
        return None, None
    return (sums.rows_A or None) if facts.form == "kronecker" else None, sums.rows_G or None


def _load_size(layers: tuple[_Layer, ...], precision: Precision, ordinal: int) -> Factors:
    return merge_layer(layers[ordinal].addends, layers[ordinal].idle, precision).factors
