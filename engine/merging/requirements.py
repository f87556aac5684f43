"""Requirements of a merge: one collection's options, one model, and every example counted once.

Sets carry the indices of the examples that they read, as runs, which must be disjoint. A part says besides where in the
data it begins, and of how many examples: all parts together must be the whole, each beginning where the one before it
ends. So nothing is counted twice and nothing is left out, however the data were cut.
"""

from collections.abc import Sequence
from dataclasses import asdict

from engine.errors import NotMergeable
from engine.factors.factor_set import CountedExamples, FactorSet, Run
from engine.merging.example_runs import joined, overlap
from engine.model.determinism import DRAWN

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
    for block in ("collection", "woodbury"):
        here, there = asdict(getattr(first, block)), asdict(getattr(other, block))
        for name in here:
            if here[name] != there[name]:
                raise NotMergeable(
                    f"`{block}.{name}` must be the same in all sets (got {here[name]!r} in set 1 and {there[name]!r} "
                    f"in set {place}); collect set {place} again with the options of set 1",
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
