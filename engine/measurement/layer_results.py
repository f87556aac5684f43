"""Layer results: the rows of an analysis, one for each layer, covered or not."""

import time
from collections.abc import Iterator
from dataclasses import replace

from catalog.analyses.analysis import LayerResult
from catalog.responses.layer_record import LayerRecord
from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.layers.coverage import DeclaredLayer
from engine.measurement.finite_numbers import nullify, reason
from engine.measurement.layer_measurement import Measured
from engine.measurement.observed import held_bytes, observe
from engine.workspace import Workspace


def covered_result(kind: str, layer: Measured, metrics: object) -> LayerResult:
    """Make the row of a covered layer.

    Args:
        kind: Name of the analysis.
        metrics: What the analysis computed of it.

    Returns:
        The row; what is not finite is null, and the record's ``why`` names those numbers.
    """
    facts = layer.facts
    metrics, of_metrics = nullify(metrics)
    record, of_record = nullify(layer.record)
    if of_metrics or of_record:
        record = replace(record, why="; ".join(filter(None, (record.why, reason((*of_metrics, *of_record))))))
    return LayerResult(
        kind=kind,
        ordinal=facts.ordinal,
        layer=facts.name,
        module=facts.module,
        status=layer.status,
        reason=None,
        parameters=facts.parameters,
        parameter_count=facts.parameter_count,
        metrics=metrics,
        record=record,
        observed=layer.observed,
    )


def uncovered_results(kind: str, workspace: Workspace) -> Iterator[LayerResult]:
    """Make the rows of the layers that are not covered, after those of the covered ones.

    Args:
        kind: Name of the analysis.
        workspace: The job; rows that an earlier attempt has delivered are left out.

    Returns:
        One row per layer that is not covered, with its reason and without metrics.
    """
    whole = collect_or_read(workspace)
    for place, layer in enumerate(whole.declared):
        ordinal = len(whole.layers) + place
        if (kind, ordinal) not in workspace.resume.completed:
            yield _declared_result(kind, ordinal, layer, whole, workspace)


def _declared_result(
    kind: str, ordinal: int, layer: DeclaredLayer, whole: FactorSet, workspace: Workspace
) -> LayerResult:
    blank = dict.fromkeys(LayerRecord.__dataclass_fields__)
    known = {
        "branch": "declared",
        "why": layer.why or layer.reason,
        "fisher": whole.collection.fisher,
        "world_size": 1,
        "planned_peak_bytes": whole.planned_peak_bytes,
    }
    now = held_bytes(workspace.machine.device)
    return LayerResult(
        kind=kind,
        ordinal=ordinal,
        layer=layer.name,
        module=layer.module,
        status="declared",
        reason=layer.reason,
        parameters=layer.parameters,
        parameter_count=layer.parameter_count,
        metrics=None,
        record=LayerRecord(**{**blank, **known}),  # type: ignore[arg-type]
        observed=observe(time.perf_counter(), now, now, workspace, whole),
    )
