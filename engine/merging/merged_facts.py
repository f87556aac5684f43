"""Merged facts: what is known of one layer over the examples of several sets, from what each set knows of it.

Requirements of a merge: one collection's options, one model, and every example counted once.

Sets carry the indices of the examples that they read, as runs, which must be disjoint. A part says besides where in the
data it begins, and of how many examples: all parts together must be the whole, each beginning where the one before it
ends. So nothing is counted twice and nothing is left out, however the data were cut.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from catalog.record import plain
from engine.errors import NotMergeable
from engine.factors.factor_set import CountedExamples, FactorSet, LayerFacts, LayerSums, Run, VarianceSums
from engine.linalg.linear_operator import Structured
from engine.merging.estimates import exact_trace, joined_variance, missing_variance, relative_variance
from engine.merging.example_runs import joined, overlap
from engine.merging.weighted_sides import Addend, MergedLayer, added
from engine.model.determinism import DRAWN

_ALIKE = ("module", "form", "parameters", "parameter_count", "in_dim", "out_dim", "bias", "sharing", "windows")
_RESIDUAL = re.compile(r"relative residual [^)]*")
_REASONS = re.compile(r"(?:A: (?P<A>.*?))?(?:; )?(?:G: (?P<G>.*))?")


def require_alike(addends: Sequence[Addend]) -> None:
    """Require that all sets mean the same layer."""
    first = addends[0].facts
    for each in addends[1:]:
        differing = [name for name in _ALIKE if getattr(each.facts, name) != getattr(first, name)]
        if differing:
            name = differing[0]
            raise NotMergeable(
                f"layer `{first.name}`: `{name}` must be the same in all sets (got {getattr(first, name)!r} and "
                f"{getattr(each.facts, name)!r}); collect all of them from one model",
                layer=first.name,
            )


def merged_sums(addends: Sequence[Addend], idle: float) -> LayerSums:
    """Add the counts and sums of one layer."""
    every = [each.sums for each in addends]
    first, gradients = every[0], sum(sums.gradients for sums in every)
    if gradients and any(sums.unproven for sums in every):
        name = addends[0].facts.name
        raise NotMergeable(
            f"layer `{name}`: it has a gradient in some sets, and in others only inputs, which one collection over all "
            "examples would leave out; collect them undivided",
            layer=name,
        )
    traces = [sums.traces for sums in every if sums.gradients or sums.weight_G]
    whole = tuple(sum(column) for column in zip(*(each for each in traces if each is not None), strict=True))
    return replace(
        first,
        weight_A=sum(sums.weight_A for sums in every),
        weight_G=sum(sums.weight_G for sums in every) + idle,
        rows_A=sum(sums.rows_A for sums in every),
        rows_G=sum(sums.rows_G for sums in every),
        gradients=gradients,
        unproven=any(sums.unproven for sums in every),
        examples=sum(sums.examples for sums in every),
        traces=None if any(each is None for each in traces) or not whole else whole,
        variance_A=None,
        variance_G=None,
    )


def merged_facts(addends: Sequence[Addend], idle: float, made: MergedLayer | None, *, varied: bool) -> LayerFacts:
    """Return what is known of one layer over all examples; ordinal and sharing are the first set's."""
    require_alike(addends)
    facts, sums = [each.facts for each in addends], merged_sums(addends, idle)
    first = facts[0]
    trace = error = None
    if sums.traces is not None and sums.weight_G:
        trace, error = exact_trace(sums.traces, sums.weight_G, sums.examples)
    bounded = sums.tied is None
    worst = max(facts, key=lambda each: -1.0 if each.gradient_identity is None else each.gradient_identity)
    loosest = max(facts, key=lambda each: each.identity_tolerance or 0.0)
    checked = [each.examples_checked for each in facts if each.examples_checked is not None]
    kinds = {each.representation_G for each in facts}
    found = replace(
        first,
        positions=sum(each.positions for each in facts),
        terms=sum(each.terms for each in facts),
        calls=max(each.calls for each in facts),
        rank_bound_A=(sums.rows_A or None) if bounded and first.form == "kronecker" else None,
        rank_bound_G=(sums.rows_G or None) if bounded else None,
        exact_trace=trace,
        trace_standard_error=error,
        representation_G=first.representation_G if len(kinds) == 1 else "dense",
        rows_place="host" if len(kinds) == 1 and first.rows_place is not None else None,
        gradient_identity=worst.gradient_identity,
        checked_against=worst.checked_against,
        identity_tolerance=loosest.identity_tolerance,
        identity_tolerance_reason=loosest.identity_tolerance_reason,
        examples_checked=sum(checked) if checked else None,
        pieces=sum(each.pieces for each in facts),
        reached=any(each.reached for each in facts),
        sums=sums,
    )
    if made is not None and made.tied is not None:
        found = replace(
            found,
            why=_RESIDUAL.sub(f"relative residual {made.residual:.2g}", found.why),
            sums=replace(sums, tied=made.tied),
        )
    return _with_variance(found, addends, idle) if varied else found


@dataclass
class _Spread:
    """The variance of one side over the batches of all sets so far."""

    missing: str | None
    """The reason why a set that counts has no sums, so that all sets have none; None where each of them has."""
    sums: VarianceSums | None = None
    total: Tensor | None = None
    """``Σ w A`` in float64."""
    weight: float = 0.0

    def add_(self, own: VarianceSums | None, factor: Tensor | Structured, weight: float) -> None:
        """Let one set's batches enter."""
        if self.missing is not None or own is None or isinstance(factor, Structured):
            return
        if self.sums is None or self.total is None:
            self.sums = own
        else:
            gap = 0.0
            if self.weight and weight:
                apart = factor.to(self.total.dtype, copy=True).sub_(self.total, alpha=1 / self.weight)
                gap = float(apart.square_().sum())
            self.sums = joined_variance(self.sums, own, (self.weight, weight), gap)
        self.total = added(self.total, factor, weight)
        self.weight += weight

    def relative(self) -> tuple[float | None, float | None]:
        """Variance and standard error, relative to the norm of the factor."""
        if self.sums is None or self.total is None or not self.weight:
            return None, None
        norm = float(self.total.square().sum()) / self.weight**2
        return relative_variance(self.sums, float(self.sums.batches), self.weight, norm)

    def kept(self) -> VarianceSums | None:
        """The sums for another merge; None where they overflow, as those of a collection."""
        return self.sums if self.sums is not None and math.isfinite(self.sums.squares) else None


def _unsummed(addends: Sequence[Addend], side: Literal["A", "G"]) -> str | None:
    """The reason why one side has no variance over the batches of all sets: that of a set with no sums of them."""
    sums = [
        (each.sums.variance_A, each.sums.weight_A) if side == "A" else (each.sums.variance_G, each.sums.weight_G)
        for each in addends
    ]
    summed = any(known is not None for known, _ in sums)
    for each, (known, weight) in zip(addends, sums, strict=True):
        if known is None and (weight > 0 or not summed):
            matched = _REASONS.fullmatch(each.facts.no_batch_variance or "")
            return (None if matched is None else matched[side]) or "it was never summed"
    return None


def _with_variance(facts: LayerFacts, addends: Sequence[Addend], idle: float) -> LayerFacts:
    """The facts with the variance of A and G over all batches.

    Batches that never called the layer have a G of zero; a set that has only such ones does not say how many.
    """
    uncalled = "a set never called the layer, and how many batches it had is not known" if idle else None
    sides = {
        "A": _Spread(missing=_unsummed(addends, "A")),
        "G": _Spread(missing=_unsummed(addends, "G") or uncalled),
    }
    if any(spread.missing is None for spread in sides.values()):
        for each in addends:
            factors = each.load()
            sides["A"].add_(each.sums.variance_A, factors.A, each.sums.weight_A)
            sides["G"].add_(each.sums.variance_G, factors.G, each.sums.weight_G)
    reasons = []
    for side, spread in sides.items():
        if spread.relative()[0] is None:
            batches = 0 if spread.sums is None else spread.sums.batches
            reasons.append(f"{side}: {spread.missing or missing_variance(batches)}")
    sums = facts.sums
    return replace(
        facts,
        relative_variance_A=sides["A"].relative()[0],
        relative_standard_error_A=sides["A"].relative()[1],
        relative_variance_G=sides["G"].relative()[0],
        relative_standard_error_G=sides["G"].relative()[1],
        no_batch_variance="; ".join(reasons) or None,
        sums=None if sums is None else replace(sums, variance_A=sides["A"].kept(), variance_G=sides["G"].kept()),
    )


_WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def require_mergeable(sets: Sequence[FactorSet]) -> CountedExamples:
    """Require that sets are sums of one collection over disjoint examples."""
    first = sets[0]
    if first.collection.ema_decay is not None:
        raise NotMergeable(
            f"`collection.ema_decay` is {first.collection.ema_decay}: a moving average weighs examples by their order, "
            "and is not a sum that could be merged; collect without it",
            pointer="/collection/ema_decay",
        )
    if len(sets) > 1 and any(DRAWN in (each.nondeterministic or ()) for each in sets):
        raise NotMergeable(
            "the model draws random numbers in evaluation mode, others in each set than in one collection over all "
            "examples; collect them undivided, or make the model draw none",
            pointer="/model",
        )
    counted = [_counted(each, place) for place, each in enumerate(sets, start=1)]
    for place, each in enumerate(sets[1:], start=2):
        _require_same_options(first, each, place)
        _require_same_model((first, counted[0]), (each, counted[place - 1]), place)
    for place, (each, own) in enumerate(zip(sets, counted, strict=True), start=1):
        _require_exact_storage(each, own, place)
    return _together(counted)


def _counted(found: FactorSet, place: int) -> CountedExamples:
    if found.counted is None or any(layer.sums is None for layer in found.layers):
        raise NotMergeable(
            f"set {place} does not say which examples it is over, or how often its sums were counted: a version that "
            "did not keep it collected it, or its examples come in an order too scattered to keep; collect it again",
            pointer="/factors",
        )
    return found.counted


def _require_same_options(first: FactorSet, other: FactorSet, place: int) -> None:
    for block in ("collection", "woodbury", "task"):
        # an earlier version kept no task
        here, there = (plain(getattr(each, block) or {}) for each in (first, other))
        for name in here:
            if here[name] != there.get(name, here[name]):
                raise NotMergeable(
                    f"`{block}.{name}` must be the same in all sets (got {repr(here[name])[:60]} in set 1 and "
                    f"{repr(there[name])[:60]} in set {place}); collect set {place} again with the options of set 1",
                    pointer=f"/{block}/{name}",
                )
    if first.amp != other.amp:
        raise NotMergeable(
            f"the model must compute in one precision (got `{first.amp}` in set 1 and `{other.amp}` in set {place}, "
            f"where {other.amp_fallback or 'nothing was refused'}); collect with `amp: off`, or on devices of one kind",
            pointer="/collection/amp",
        )
    if first.accumulation_precision != other.accumulation_precision:
        raise NotMergeable(
            f"the products of the sums must have one precision (got `{first.accumulation_precision}` in set 1 and "
            f"`{other.accumulation_precision}` in set {place}, where "
            f"{other.accumulation_fallback or 'nothing was refused'}); collect with `precision: ieee`, or on "
            "devices of one kind",
            pointer="/collection/precision",
        )


def _require_same_model(
    first: tuple[FactorSet, CountedExamples], other: tuple[FactorSet, CountedExamples], place: int
) -> None:
    (here, own), (there, counted) = first, other
    if here.parameters != there.parameters or here.trainable_parameters != there.trainable_parameters:
        raise NotMergeable(
            f"set {place} is of a model with other trainable parameters than set 1: "
            f"{there.trainable_parameters:,} numbers, and {here.trainable_parameters:,} in set 1; "
            "collect both from one model",
            pointer="/model",
        )
    if own.model != counted.model:
        raise NotMergeable(
            f"set {place} is of another model than set 1: its numbers have the digest {counted.model[:16]}…, and "
            f"{own.model[:16]}… in set 1; a factory must make the same model each time (set its seed)",
            pointer="/model",
        )
    if own.unmasked != counted.unmasked:
        calls = sorted(f"{call.part}[{call.number}]" for call in set(own.unmasked) ^ set(counted.unmasked))
        raise NotMergeable(
            f"padding takes part in {', '.join(calls)} in one of set 1 and set {place}, and not in the other, where "
            "one collection over all examples would let it take part everywhere; collect them undivided"
        )


def _require_exact_storage(found: FactorSet, counted: CountedExamples, place: int) -> None:
    """A part keeps its sums as wide as they were made; a finished set was rounded to its ``storage_dtype``."""
    kept, sums = found.collection.storage_dtype, found.collection.dtype
    if counted.whole is None and kept is not None and _WIDTHS[kept] < _WIDTHS[sums]:
        raise NotMergeable(
            f"set {place} was rounded to `collection.storage_dtype: {kept}`, so its sums are not known to {sums} any "
            f"more; collect it again with `storage_dtype: {sums}`",
            pointer="/collection/storage_dtype",
        )


def _together(counted: Sequence[CountedExamples]) -> CountedExamples:
    """The examples of all sets, each counted once."""
    runs = [[run.begin, run.end] for each in counted for run in each.runs]
    twice = overlap(runs)
    if twice is not None:
        places = [
            str(place)
            for place, each in enumerate(counted, start=1)
            for run in each.runs
            if run.begin <= twice < run.end
        ]
        raise NotMergeable(
            f"example {twice} is in set {' and in set '.join(places)}: every example counts once; give sets of "
            "examples that have none in common",
            pointer="/data",
        )
    _require_whole(counted)
    return CountedExamples(
        runs=tuple(Run(begin=begin, end=end) for begin, end in joined(runs)),
        terms_weight=sum(each.terms_weight for each in counted),
        begin=0,
        whole=None,
        model=counted[0].model,
        unmasked=counted[0].unmasked,
        overwritten=tuple(sorted({layer for each in counted for layer in each.overwritten})),
    )


def _require_whole(counted: Sequence[CountedExamples]) -> None:
    """Parts must be all parts of their data: one begins where the one before it ends."""
    wholes = sorted({each.whole for each in counted if each.whole is not None})
    if len(wholes) > 1:
        raise NotMergeable(
            f"the sets are parts of data of {' and of '.join(str(each) for each in wholes)} examples; give the parts "
            "of one division",
            pointer="/data",
        )
    for whole in wholes:
        reached = 0
        for each in sorted((each for each in counted if each.count), key=lambda each: each.begin):
            if each.begin != reached:
                raise NotMergeable(
                    f"of {whole} examples those from {min(reached, each.begin)} to {max(reached, each.begin) - 1} are "
                    f"{'in no set' if each.begin > reached else 'in two sets'}: every example counts once; give all "
                    "parts of one division",
                    pointer="/data",
                )
            reached += each.count
        if reached != whole:
            raise NotMergeable(
                f"the sets are over {reached} examples, and are parts of {whole}: every example counts once; give all "
                "parts of one division",
                pointer="/data",
            )
