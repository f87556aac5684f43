"""`factors`: collect A and G of every treated layer and keep them, one row per layer."""

from collections.abc import Generator

from catalog.analyses.analysis import LayerResult
from catalog.analyses.factors import FactorsMetrics, FactorsSummary
from engine.analyses.coverage_summary import coverage
from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.measurement.finite_numbers import finite_summary
from engine.measurement.layer_measurement import Measured, measure_layers
from engine.measurement.layer_results import covered_result, uncovered_results
from engine.measurement.representation_record import branch_counts
from engine.measurement.subsample_spectra import nested_traces
from engine.workspace import Workspace


def collect_factors(params: None, workspace: Workspace) -> Generator[LayerResult, None, FactorsSummary]:
    """Yield each layer as its factors are written; the layers that are not covered follow."""
    del params  # the collection's own block says it all
    whole = collect_or_read(workspace)
    total = len(whole.layers)
    layers = []
    for done, layer in enumerate(measure_layers(workspace), start=1):
        layers.append(layer)
        if ("factors", layer.facts.ordinal) not in workspace.resume.completed:
            yield covered_result("factors", layer, _metrics(layer, whole))
        workspace.ports.report("factors", done, total, "layers")
    yield from uncovered_results("factors", workspace)
    summary = FactorsSummary(
        coverage=coverage(whole),
        layers=total,
        branches=branch_counts(whole.layers),
        eigendecompositions=sum(
            layer.spectrum_A is not None and layer.facts.form not in ("diagonal", "diagonal_block") for layer in layers
        ),
        woodbury_layers=sum(layer.facts.representation_G == "woodbury" for layer in layers),
        examples=whole.examples,
        updates=whole.updates,
        passes=whole.passes,
        fisher=whole.collection.fisher,
        sharing=whole.collection.sharing,
        update_freq=whole.collection.update_freq,
        factor_bytes=sum(layer.record.factor_bytes or 0 for layer in layers),
        dense_factor_bytes=sum(_dense_bytes(layer) for layer in layers),
    )
    return finite_summary(summary, workspace.ports.log)


def _metrics(layer: Measured, whole: FactorSet) -> FactorsMetrics:
    leader = layer.facts.shared_A_with
    return FactorsMetrics(
        form=layer.facts.form,
        trace_A=layer.trace_A,
        trace_G=layer.trace_G,
        exact_trace=layer.record.exact_trace,
        trace_ratio=layer.record.trace_ratio,
        shared_A_with=None if leader is None else whole.layers[leader].name,
        calls=layer.facts.calls,
        nested=nested_traces(layer.nested),
    )


def _dense_bytes(layer: Measured) -> int:
    item = {"float64": 8, "float32": 4}.get(str(layer.record.dtype), 2)
    return item * (layer.facts.in_dim**2 + layer.facts.out_dim**2)
