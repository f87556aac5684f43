"""Coverage: the share of a model that a job measured, and the options that would cover the rest.

A figure of the whole model (an effective dimension, a trace) counts covered layers only. Where the loss depends on
parameters that no layer covers, the figure is one of a part, and must be shown as such.

Parameters that the loss does not depend on are not covered either, and nothing is missing for that: their curvature
is zero on these data (`no_gradient`, `never_routed`), or they hold no number (`no_numbers`).
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from catalog.record import plain, record

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
    "batch_not_first": "put the examples in the first dimension; or take `collection.sharing: expand` without `ekfac`",
    "transformed": "call the layer outside of `torch.func.vmap`, `grad`, `jvp` and their like, on a whole batch",
    "nested_tensor": "pad the examples to one length and mask what is padding, in place of a nested tensor",
    "complex_numbers": "hold real and imaginary parts in real parameters of their own, and compute with these",
    "needs_gradients": "take a `collection.fisher` with gradients: `mc`, `type2` or `empirical`",
    "unknown_operation": "replace the operation that the layer's record names",
    "unforeseen_use": "put an example with that use first in the data",
    "gradient_identity": "compare the number in the layer's record with rounding: `collection.dtype: float64`",
    "examples_mix": "compute the outputs of each example from that example alone",
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
class CoverageView:
    """The share of a model that a job measured, and what would cover the rest."""

    status: Literal["complete", "accepted", "partial"]
    """`complete`: everything that the loss depends on is covered; `accepted`: not everything, and no less than
    `collection.min_coverage` asks; `partial`: not everything, and the document names no share that would do."""
    measured_share: float
    """Covered share of the trainable parameters: all figures of the model are of these."""
    trainable_parameters: int
    """All trainable parameters of the model."""
    not_measured: tuple[NotMeasured, ...]
    """Largest first; without parameters that have no curvature on these data."""
    message: str | None
    """A sentence on what is missing; null where nothing is."""


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
    return CoverageView(
        status=status,
        measured_share=share,
        trainable_parameters=trainable,
        not_measured=tuple(missing),
        message=_sentence(share, trainable, missing) if missing else None,
    )


def remedy_of(reason: str) -> str | None:
    """Return what would cover parameters that are not.

    Args:
        reason: The reason for which they are not.

    Returns:
        A clause in the imperative; None where this version does not know the reason.
    """
    return _REMEDIES.get(reason)


def percentage(share: float) -> str:
    """Return a share as a percentage with one decimal.

    Args:
        share: From 0 to 1.

    Returns:
        The text, such as `37.2%`; cut and not rounded, so that what is not whole never reads `100.0%`.
    """
    return f"{math.floor(share * 1000 + 1e-9) / 10}%"


def _sentence(share: float, trainable: int, missing: list[NotMeasured]) -> str:
    reasons = ", ".join(f"{each.parameters:,} {each.reason}" for each in missing)
    return f"{percentage(share)} of the {trainable:,} trainable parameters were measured; not measured: {reasons}"


def _coverage(summary: Any) -> Mapping[str, Any] | None:  # noqa: ANN401 - a record, or JSON of any analysis
    coverage = plain(summary).get("coverage") if summary is not None else None
    return coverage if isinstance(coverage, Mapping) else None
