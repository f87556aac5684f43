"""Coverage: the share of a model that a job measured, and the options that would cover the rest.

A figure of the whole model (an effective dimension, a trace) counts covered layers only. Where the loss depends on
parameters that no layer covers, the figure is one of a part, and must be shown as such.

Parameters that the loss does not depend on are not covered either, and nothing is missing for that: their curvature
is zero on these data (`no_gradient`, `never_routed`), or they hold no number (`no_numbers`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from catalog.analyses.analysis import CoverageKind, CoveragePart, ExpertTokens, NamedParameters
from catalog.record import FieldError, plain, record
from catalog.record_reader import read

FLAT_REASONS = frozenset({"no_gradient", "never_routed", "no_numbers"})
"""Reasons of parameters without curvature on the job's data."""

_REMEDIES: Mapping[str, str] = {
    "unsupported_layer": "build the layer from torch's own layers, or use its parameters in torch operations",
    "bare_parameter": "use the parameter in torch operations, or make it the weight of a layer",
    "tied": "give each use a parameter of its own",
    "used_elsewhere": "read the parameter through the layer that holds it",
    "parametrised": "remove the parametrisation (`torch.nn.utils.parametrize.remove_parametrizations`)",
    "overridden_forward": "take the layer's class without a `forward` of its own",
    "embedding_renormalised": "renormalise the table once, and build the embedding without `max_norm`",
    "batch_statistics": "normalise by running statistics (`track_running_stats=True`)",
    "several_inputs": "call the layer with one input",
    "batch_not_first": "put the examples in the first dimension, and give every call the rows of each of them",
    "rows_unordered": "put the rows of each example together; a layer with A and G needs no order under "
    "`collection.sharing: expand` without `ekfac`",
    "transformed": "call the layer outside of `torch.func.vmap`, `grad`, `jvp` and their like, on a whole batch",
    "nested_tensor": "pad the examples to one length and mask what is padding, in place of a nested tensor",
    "complex_numbers": "hold real and imaginary parts in real parameters of their own, and compute with these",
    "needs_gradients": "take a `collection.fisher` with gradients: `mc`, `type2` or `empirical`",
    "unknown_operation": "replace the operation that the layer's record names",
    "unforeseen_use": "put an example with that use first in the data",
    "correction_differs": "take `collection.dtype: float64` where it is float32, `collection.ekfac: false`, or a model "
    "that computes the same at every pass",
    "gradient_identity": "compare the number in the layer's record with rounding: `collection.dtype: float64`",
    "examples_mix": "compute the outputs of each example from that example alone",
    "not_repeatable": "draw from the default generators of torch, numpy or Python, or draw nothing in evaluation mode",
    "no_gradient": "look for a `forward` that detaches its outputs, or runs under `torch.no_grad` or `inference_mode`",
    "gradient_not_followed": "replace the operation between the parameter and the loss by torch operations",
}


@record
class NotMeasured:
    """Parameters that the loss depends on and no layer covers, for one reason."""

    reason: str
    """Stable name of the reason."""
    parameters: int
    """Parameters that are not measured for it."""
    share: float
    """Of the trainable parameters."""
    remedy: str | None
    """What would cover them; null where this version does not know the reason."""


@record
class CoverageShare:
    """Trainable parameters that are covered in one form, or not covered for one reason, as a part of all."""

    kind: CoverageKind
    """`block`: all of their layer's block of the curvature is kept, as two Kronecker factors or as it is; `diagonal`:
    of the block, or of its factor G, the diagonal alone; `sketched`: G as a diagonal and a sketch; `covered`: one of
    these, of a job that does not say which; `not_covered`: nothing."""
    reason: str | None
    """Stable name of the reason why they are not covered; null for those that are."""
    parameters: int
    """The count of their numbers."""
    share: float
    """Of the trainable parameters."""
    percent: float
    """The same in per cent with one decimal, rounded by largest remainders, so that those of all parts add up to 100;
    0.1 at least."""
    layers: int
    """Layers, or rows of what is not covered, that they are in."""
    named: tuple[NamedParameters, ...]
    """Those of the first eight layers or rows by name, with what keeps them from more; empty for `block`."""


@record
class CoverageView:
    """The share of a model that a job measured, and what would cover the rest."""

    status: Literal["complete", "accepted", "partial"]
    """`complete`: everything that the loss depends on is covered; `accepted`: not everything, and no less than
    `collection.min_coverage` asks; `partial`: not everything, and the document names no share that would do."""
    measured_share: float
    """Covered share of the trainable parameters: all figures of the model are of these."""
    measured_percent: float
    """The same in per cent with one decimal: the sum of the covered parts', and below 100 where anything is missing."""
    trainable_parameters: int
    """All trainable parameters of the model."""
    not_measured: tuple[NotMeasured, ...]
    """Largest first; without parameters that have no curvature on these data."""
    message: str | None
    """A sentence on what is missing, by reason and name; null where nothing is."""
    parts: tuple[CoverageShare, ...] = ()
    """All trainable parameters by the form in which their curvature is kept: `block`, `diagonal`, `sketched`, and what
    is not covered by reason, the largest first."""
    experts: ExpertTokens | None = None
    """The tokens that experts were sent, and which got too few; null of a model without experts."""

    def percent(self, *kinds: CoverageKind) -> float:
        """Return the percentage of the parameters that are kept in one of these forms."""
        return _sum_percent(part for part in self.parts if part.kind in kinds)


def assess_coverage(summary: Mapping[str, Any] | None, min_coverage: float | None) -> CoverageView | None:
    """Return how much of the model the summaries of a job speak for.

    Args:
        summary: The summary of each analysis by its kind, as records or as JSON; all share one collection.
        min_coverage: `collection.min_coverage` of the document.

    Returns:
        The share and what is missing; None where no summary counts parameters, as of a matrix without a model.
    """
    counts = next(filter(None, (_coverage(each) for each in (summary or {}).values())), None)
    trainable = 0 if counts is None else int(counts.get("trainable_parameters") or 0)
    if counts is None or not trainable:
        return None
    missing = sorted(
        (
            NotMeasured(reason=reason, parameters=count, share=count / trainable, remedy=remedy_of(reason))
            for reason, count in (counts.get("reasons") or {}).items()
            if count and reason not in FLAT_REASONS
        ),
        key=lambda each: (-each.parameters, each.reason),
    )
    share = float(counts["covered_share"])
    status: Literal["complete", "accepted", "partial"] = "complete"
    if missing:
        status = "partial" if min_coverage is None else "accepted"
    parts = _shares(_parts(counts, share, trainable), trainable)
    percent = _sum_percent(part for part in parts if part.kind != "not_covered")
    return CoverageView(
        status=status,
        measured_share=share,
        measured_percent=percent,
        trainable_parameters=trainable,
        not_measured=tuple(missing),
        message=_sentence(percent, trainable, missing, parts) if missing else None,
        parts=parts,
        experts=_stored(ExpertTokens | None, counts.get("experts"), "experts", None),
    )


def remedy_of(reason: str) -> str | None:
    """Return the remedy, in the imperative, for parameters not covered for a reason; None of an unknown reason."""
    return _REMEDIES.get(reason)


def percentage(share: float) -> str:
    """Return a share from 0 to 1 as a percentage with one decimal, such as `37.2%`.

    It is cut and not rounded, so that what is not whole never reads `100.0%`.
    """
    return f"{math.floor(share * 1000 + 1e-9) / 10}%"


_KINDS: Mapping[CoverageKind, str] = {
    "block": "full block",
    "diagonal": "diagonal",
    "sketched": "sketched",
    "covered": "covered",
    "not_covered": "not covered",
}


def kinds_of(measured: CoverageView) -> dict[str, float]:
    """Return the percentage of the parameters that are kept in each form, by its name; they add up to 100."""
    shares = {said: measured.percent(kind) for kind, said in _KINDS.items()}
    return {said: share for said, share in shares.items() if share}


def describe_kinds(measured: CoverageView) -> str:
    """Return the percentages of the forms in one line, such as `8.3% full block, 91.7% diagonal`."""
    return ", ".join(f"{share:.1f}% {said}" for said, share in kinds_of(measured).items())


def coverage_warning(measured: CoverageView | None) -> str | None:
    """Return a sentence on what was not measured, or on a model that has diagonals more than blocks; None of others."""
    if measured is None:
        return None
    lesser = measured.percent("diagonal", "sketched")
    if measured.status != "partial" and lesser <= measured.percent("block"):
        return None
    named = [
        f"{part.kind}: {name_parameters(part.named, part.layers)}"
        for part in measured.parts
        if part.kind in ("diagonal", "sketched") and lesser > measured.percent("block")
    ]
    said = [describe_kinds(measured), *filter(None, [measured.message]), *named]
    return f"of the model's trainable parameters {'; '.join(said)}"


def name_parameters(named: Sequence[NamedParameters], rows: int, most: int = 3) -> str:
    """Return parameters by name, each with the operation that keeps them from more, or the class of their module.

    Args:
        named: Those of the first rows.
        rows: Of how many rows.
        most: Rows that are named; the others are counted.

    Returns:
        The text, such as `words.weight (Embedding) and 2 more`; empty where none is named.
    """
    listed = [f"{', '.join(each.names)} ({each.why or each.module})" for each in named[:most]]
    return "; ".join(listed) + (f"; and {rows - len(listed)} more" if 0 < len(listed) < rows else "")


def _sentence(percent: float, trainable: int, missing: list[NotMeasured], parts: Sequence[CoverageShare]) -> str:
    named = {part.reason: name_parameters(part.named, part.layers) for part in parts if part.named}
    reasons = ", ".join(
        f"{each.parameters:,} {each.reason}" + (f": {named[each.reason]}" if each.reason in named else "")
        for each in missing
    )
    return f"{percent:.1f}% of the {trainable:,} trainable parameters were measured; not measured: {reasons}"


def _sum_percent(parts: Iterable[CoverageShare]) -> float:
    return sum(round(10 * part.percent) for part in parts) / 10


def _shares(parts: Sequence[CoveragePart], trainable: int) -> tuple[CoverageShare, ...]:
    """Return parts with percentages that add up to 100: covered ones, then the others, the largest first."""
    order = sorted(parts, key=lambda part: (0, 0) if part.kind != "not_covered" else (1, -part.parameters))
    listed = [part for part in order if part.parameters]
    return tuple(
        CoverageShare(
            kind=part.kind,
            reason=part.reason,
            parameters=part.parameters,
            share=part.parameters / trainable,
            percent=tenth / 10,
            layers=part.layers,
            named=part.named,
        )
        for part, tenth in zip(listed, apportion([part.parameters for part in listed], 1000), strict=True)
    )


def apportion(counts: Sequence[int], units: int) -> list[int]:
    """Divide units in proportion to counts, by largest remainders; then each has one at least, taken from the largest.

    Args:
        counts: Positive counts.
        units: Units to divide, 0 or more.

    Returns:
        Units of each, which add up to ``units``; 0 of each where nothing is counted.
    """
    total = sum(counts)
    if not total:
        return [0 for _ in counts]
    given = [count * units // total for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda place: (-(counts[place] * units % total), place))
    for place in by_remainder[: units - sum(given)]:
        given[place] += 1
    for place in [place for place, count in enumerate(counts) if count and not given[place]]:
        largest = max(range(len(given)), key=given.__getitem__)
        if given[largest] > 1:
            given[largest] -= 1
            given[place] = 1
    return given


def _parts(counts: Mapping[str, Any], share: float, trainable: int) -> tuple[CoveragePart, ...]:
    """Return the parts that a summary counts; of one without, what is covered as one part."""
    stored = _stored(tuple[CoveragePart, ...], counts.get("parts") or (), "parts", ())
    if stored:
        return tuple(stored)
    blank: dict[str, Any] = {"layers": 0, "named": ()}
    reasons = {reason: int(count) for reason, count in (counts.get("reasons") or {}).items()}
    covered = int(counts.get("covered_parameters") or round(share * trainable))
    return (
        CoveragePart(kind="covered", reason=None, parameters=covered, **blank),
        *(CoveragePart(kind="not_covered", reason=each, parameters=count, **blank) for each, count in reasons.items()),
    )


def _stored(annotation: Any, value: Any, name: str, otherwise: Any) -> Any:  # noqa: ANN401 - as `read`
    try:
        return read(annotation, value, name)
    except FieldError:
        return otherwise  # of another version, or of a job that wrote its summary itself


def _coverage(summary: Any) -> Mapping[str, Any] | None:  # noqa: ANN401 - a record, or JSON of any analysis
    coverage = plain(summary.get("coverage") if isinstance(summary, Mapping) else getattr(summary, "coverage", None))
    return coverage if isinstance(coverage, Mapping) else None
