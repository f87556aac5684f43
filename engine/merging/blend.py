"""A blend of two sets of factors, as a moving average of preconditioned training takes it.

With the weight β of what was known before,

    A ← β A + (1 − β) A′,   G ← β G + (1 − β) G′

for each factor by itself, in float64 and rounded once. Gradient rows stand behind each other and are made one by QR
where there are more of them than G has itself, so that a long average is bounded; probabilities become a dense G then.
The blend is held in memory: it does not read what it was made of again.

References:
    Martens & Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature, section 5
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.errors import UsageError
from engine.factors.factor_set import FactorSet, LayerFacts, LayerSums
from engine.factors.kronecker_factors import Factors
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.merging.weighted_sides import Addend, Precision, merge_layer

_ALIKE = ("form", "parameters", "in_dim", "out_dim", "bias")


def blend_factor_sets(before: FactorSet, now: FactorSet, decay: float, layers: Sequence[str]) -> FactorSet:
    """Return the moving average of two sets of factors of the same layers, in memory.

    ``decay`` is β, from 0 to 1, the weight of ``before``. Both sets have the named ``layers``. The result has the
    precision that ``before`` is kept in; it is not a sum over examples any more, and has no exact traces, variances or
    corrections. All factors of the layers are held; one layer's in float64 meanwhile.

    Raises:
        UsageError: If a layer is another one in the two sets.
        NotMergeable: If a sketch stands for a G.
    """
    own = {facts.name: facts for facts in now.layers}
    facts: list[LayerFacts] = []
    held: list[Factors] = []
    shared: dict[str, Tensor] = {}
    for each in before.layers:
        if each.name not in layers:
            continue
        other = own[each.name]
        _require_alike(each, other)
        dense = each.representation_G != other.representation_G
        addends = (_addend(before, each, decay, dense=dense), _addend(now, other, 1.0 - decay, dense=dense))
        dtype = before.load(each.ordinal).A.dtype
        merged = merge_layer(addends, 0.0, Precision(sums=dtype, storage=dtype))
        made = _bounded(merged.factors, dtype)
        leader = _leader(before, each)
        together = leader is not None and leader == _leader(now, other) and leader in shared
        if together and leader is not None:
            made = replace(made, A=shared[leader])
        shared[each.name] = made.A
        # a product of head and table is blended again by its own coefficients
        sums = None if merged.tied is None else replace(addends[0].sums, tied=merged.tied)
        facts.append(replace(_blended_facts(each, other, made), ordinal=len(facts), sums=sums))
        held.append(made)
    places = {each.name: each.ordinal for each in facts}
    facts = [
        replace(each, shared_A_with=None if each.shared_A_with is None else places.get(_leader(before, old) or ""))
        for each, old in zip(facts, [old for old in before.layers if old.name in layers], strict=True)
    ]
    return replace(
        before,
        layers=tuple(facts),
        examples=before.examples + now.examples,
        updates=before.updates + now.updates,
        storage_policy="resident",
        load=held.__getitem__,
        load_corrected=None,
        nested=(),
        counted=None,
        entered=None,
        reused_from=None,
    )


def _addend(found: FactorSet, facts: LayerFacts, weight: float, *, dense: bool) -> Addend:
    """One set's layer with its weight; as a matrix, where the two sets keep G differently."""

    def load() -> Factors:
        factors = found.load(facts.ordinal)
        return replace(factors, G=factors.widened_G, scale_G=1.0) if dense else factors

    known = facts.sums
    tied = None if known is None or known.tied is None else replace(known.tied, lookups=weight)
    sums = LayerSums(
        whole=facts.name,
        reason_uncalled="",
        weight_A=weight,
        weight_G=weight,
        rows_A=0,
        rows_G=0,
        gradients=1,
        unproven=False,
        tied=tied,
    )
    return Addend(facts=replace(facts, representation_G="dense") if dense else facts, sums=sums, load=load)


def _require_alike(first: LayerFacts, second: LayerFacts) -> None:
    differing = [name for name in _ALIKE if getattr(first, name) != getattr(second, name)]
    if differing:
        name = differing[0]
        raise UsageError(
            f"layer `{first.name}`: `{name}` must be the same in both sets of factors (got {getattr(first, name)!r} "
            f"and {getattr(second, name)!r}); collect both from one model",
            layer=first.name,
        )


def _bounded(made: Factors, dtype: torch.dtype) -> Factors:
    """The factors with a dense G where its probabilities are more than G has rows."""
    if isinstance(made.G, SoftmaxFisher) and made.G.count > made.G.size:
        return replace(made, G=made.G.to_dense(torch.promote_types(dtype, torch.float32)))
    return made


def _leader(found: FactorSet, facts: LayerFacts) -> str | None:
    return None if facts.shared_A_with is None else found.layers[facts.shared_A_with].name


def _blended_facts(first: LayerFacts, second: LayerFacts, made: Factors) -> LayerFacts:
    def bound(one: int | None, other: int | None) -> int | None:
        return None if one is None or other is None else one + other

    return replace(
        first,
        positions=first.positions + second.positions,
        terms=first.terms + second.terms,
        rank_bound_A=bound(first.rank_bound_A, second.rank_bound_A),
        rank_bound_G=bound(first.rank_bound_G, second.rank_bound_G),
        shared_A_with=first.shared_A_with if first.shared_A_with == second.shared_A_with else None,
        exact_trace=None,
        reached=first.reached or second.reached,
        trace_standard_error=None,
        relative_variance_A=None,
        relative_variance_G=None,
        relative_standard_error_A=None,
        relative_standard_error_G=None,
        representation_G=made.side_G.kind,
    )
