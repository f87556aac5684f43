"""The coverage law: covered + declared = trainable, each number once; and the share that a caller asks for.

The share is known three times, each time better: from the modules alone, before anything is
computed; after the dry run, which shows what is called, and how; and after the last pass, which
shows what the loss depends on.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from catalog.requests.collection import Collection
from catalog.responses.coverage import remedy_of
from engine.errors import CoverageBroken, CoverageTooLow, NothingToAnalyse
from engine.layers.coverage import DeclaredLayer, Survey, survey
from engine.layers.layer import TreatedLayer
from engine.model.state.preserve_state import in_evaluation


def survey_layers(model: nn.Module, collection: Collection) -> Survey:
    """Survey a model as it will be measured, in evaluation, and leave its modes as they were.

    Args:
        model: The model, in any mode.
        collection: Its ``min_coverage`` is held against what can be covered at best.

    Returns:
        The survey.

    Raises:
        NothingToAnalyse: If no layer can be treated.
        CoverageTooLow: If less can be covered than ``collection`` asks.
        CoverageBroken: If the survey does not add up.
    """
    # batch norm is treated by its running statistics, which only evaluation mode uses
    with in_evaluation(model):
        result = survey(model)
    possible = [row for row in result.declared if row.open]
    if not result.treated and not possible:
        reasons = sorted(count_by_reason(result.declared)) or ["no trainable parameter"]
        raise NothingToAnalyse(
            f"the model ({type(model).__name__}) has no layer that can be treated: {', '.join(reasons)}; "
            "give one with weights that are trained (`requires_grad`)",
            pointer="/model",
        )
    closed = [row for row in result.declared if not row.open]
    require_coverage(count_trainable_numbers(model), (*result.treated, *possible), closed, collection)
    return result


def nothing_covered(model: nn.Module, declared: Sequence[DeclaredLayer]) -> NothingToAnalyse:
    """Return the error that no layer of a model is covered, with each reason and what would cover its parameters.

    Args:
        declared: Its parameters that are not covered, which are all of them.
    """
    first = {row.reason: row for row in sorted(declared, key=lambda row: (row.reason, not row.why))[::-1]}
    reasons = [f"{reason} ({row.why})" if row.why else reason for reason, row in sorted(first.items())]
    remedies = [remedy for reason in sorted(first) if (remedy := remedy_of(reason)) is not None]
    said = "; ".join([", ".join(reasons), *remedies])
    return NothingToAnalyse(
        f"no layer of the model ({type(model).__name__}) could be measured: {said}", pointer="/model"
    )


def count_trainable_numbers(model: nn.Module) -> int:
    """Count the trainable numbers of a model."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_by_reason(declared: Iterable[DeclaredLayer]) -> dict[str, int]:
    """Count the numbers that each reason declares.

    Args:
        declared: Rows of layers that are not covered.

    Returns:
        Numbers by reason, in the order in which the reasons first come.
    """
    counts: Counter[str] = Counter()
    for layer in declared:
        counts[layer.reason] += layer.parameter_count
    return dict(counts)


def require_coverage(
    trainable: int,
    covered: Iterable[TreatedLayer | DeclaredLayer],
    declared: Iterable[DeclaredLayer],
    collection: Collection,
) -> None:
    """Require that covered and declared numbers are all trainable ones, and that enough are covered.

    Args:
        trainable: Trainable numbers of the model.
        covered: Layers that are covered, or may still be.
        declared: Rows of those that are not.
        collection: Its ``min_coverage`` is the share asked for, between 0 and 1; None asks for none.

    Raises:
        CoverageTooLow: If the covered share is below ``collection.min_coverage``; the message names the share, the
            reasons with their counts, and the remedy.
        CoverageBroken: If the parts do not add up to ``trainable``.
    """
    numbers = sum(layer.parameter_count for layer in covered)
    reasons = count_by_reason(declared)
    if numbers + sum(reasons.values()) != trainable:
        raise CoverageBroken(
            f"{numbers} covered and {sum(reasons.values())} declared numbers are not the {trainable} trainable ones: "
            "a fault of Kronoscope's; please report the model"
        )
    wanted, share = collection.min_coverage, numbers / max(trainable, 1)
    if wanted is None or share >= wanted:
        return
    missing = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
    # cut, not rounded: what is not whole must not read 100.00%
    percent = math.floor(share * 10_000) / 100
    raise CoverageTooLow(
        f"{percent:.2f}% of the {trainable:,} trainable numbers can be covered, but `min_coverage` asks for "
        f"{wanted:.2%}; not covered: {missing}; lower `min_coverage`, or freeze what "
        "need not be measured (`requires_grad_(False)`)",
        pointer="/collection/min_coverage",
    )
