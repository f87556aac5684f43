"""Layer sums: what a merge with factors of other examples takes, read off a layer's statistics."""

import math

from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.tied_statistics import TiedHeadStatistics
from engine.factors.factor_set import LayerSums


def layer_sums(
    found: LayerStatistics, group: int, *, weight_A: float | None = None, weight_G: float | None = None
) -> LayerSums | None:
    """Return the counts and sums of one group of a layer, once its pass is done.

    Args:
        found: Statistics of the layer.
        group: The group, from 0.
        weight_A: The count that A was divided by; None takes that of the whole pass.
        weight_G: The same of G; with it, the traces and variances of the whole pass are left out.

    Returns:
        The sums; None where a checkpoint of an earlier version did not hold them.
    """
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
