"""`capacity`: how many directions of each layer, and of the model, the loss really curves in."""

import dataclasses
from collections import Counter
from collections.abc import Generator, Iterator, Sequence

from catalog.analyses.analysis import LayerResult
from catalog.analyses.capacity import CapacityParams, CapacitySummary
from catalog.analyses.capacity_metrics import CapacityMetrics
from engine.analyses.coverage_summary import coverage
from engine.analyses.metrics.exact_ggn_check import cross_check
from engine.analyses.metrics.layer_metrics import layer_metrics, sides_of
from engine.analyses.metrics.model_metrics import ModelLayer, model_metrics
from engine.analyses.metrics.sample_convergence import Followed, follow_layer, model_convergence, sum_layers
from engine.analyses.metrics.token_importance import require_head, token_importance
from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.measurement.divided_layers import DividedLayers
from engine.measurement.finite_numbers import finite_summary
from engine.measurement.layer_measurement import Measured, measure_layers
from engine.measurement.layer_results import covered_result, uncovered_results
from engine.measurement.representation_record import branch_counts
from engine.workspace import Workspace


def measure_capacity(params: CapacityParams, workspace: Workspace) -> Generator[LayerResult, None, CapacitySummary]:
    """Yield each layer's metrics as its spectra are known; the layers that are not covered follow."""
    require_head(params.token_importance, workspace)
    whole = collect_or_read(workspace)
    exact = cross_check(params, workspace, whole)
    total = len(whole.layers)
    found: dict[int, tuple[ModelLayer, CapacityMetrics]] = {}
    over_sizes: dict[int, Followed] = {}
    identity: dict[int, str] = {}
    decompositions = 0
    for done, (layer, (kept, of_layer, over)) in enumerate(_metrics(params, workspace, whole), start=1):
        metrics = of_layer
        if over is not None:
            over_sizes[layer.facts.ordinal] = over
            metrics = dataclasses.replace(metrics, convergence=over.convergence)
        decompositions += layer.spectrum_A is not None and layer.facts.form not in ("diagonal", "diagonal_block")
        if metrics.damping is not None and kept.spectral_norm is not None and metrics.damping > kept.spectral_norm:
            identity[layer.facts.ordinal] = layer.facts.name
        if exact is not None:
            beside = exact.of_layer(layer.facts.ordinal, layer.trace_A * layer.trace_G, kept.spectral_norm)
            metrics = dataclasses.replace(metrics, cross_check=beside)
        found[layer.facts.ordinal] = kept, metrics
        if ("capacity", layer.facts.ordinal) not in workspace.resume.completed:
            yield covered_result("capacity", layer, metrics)
        workspace.ports.report("capacity", done, total, "layers")
    yield from uncovered_results("capacity", workspace)
    workspace.ports.raise_if_cancelled()
    # in the model's order, whatever the order of measuring: sums round the same
    rows = [found[facts.ordinal][1] for facts in whole.layers]
    dimension = sum(row.dimension for row in rows)
    wanted = params.selected
    curved = [found[facts.ordinal][0].sides.trace > 0 for facts in whole.layers]
    model = model_metrics([found[facts.ordinal][0] for facts in whole.layers], params)
    over_all = [over_sizes[facts.ordinal] for facts in whole.layers if facts.ordinal in over_sizes]
    effective = _sum("effective_dimension", rows, curved) if "effective_dimension" in wanted else None
    summary = CapacitySummary(
        coverage=coverage(whole),
        layers=total,
        branches=branch_counts(whole.layers),
        eigendecompositions=decompositions,
        dimension=dimension,
        trace=_sum("trace", rows, curved) if "trace" in wanted else None,
        effective_dimension=effective,
        effective_dimension_share=effective / dimension if dimension and effective is not None else None,
        effective_rank=_sum("effective_rank", rows, curved) if "effective_rank" in wanted else None,
        logdet_damped=_sum("logdet_damped", rows, curved) if "logdet_damped" in wanted else None,
        damping=workspace.options.stabilisation.damping,
        damping_mode=workspace.options.stabilisation.damping_mode,
        damping_split=workspace.options.stabilisation.damping_split,
        kappa_max=workspace.options.stabilisation.kappa_max,
        fisher=whole.collection.fisher,
        sharing=whole.collection.sharing,
        update_freq=whole.collection.update_freq,
        identity_layers=tuple(name for _, name in sorted(identity.items())),
        not_converged=_not_converged(rows),
        model=dataclasses.replace(model, convergence=model_convergence(over_all, model, params)),
        token_importance=token_importance(params.token_importance, workspace, whole),
        cross_check=None if exact is None else exact.of_model(row.cross_check for row in rows),
    )
    return finite_summary(summary, workspace.ports.log)


def _metrics(
    params: CapacityParams, workspace: Workspace, whole: FactorSet
) -> Iterator[tuple[Measured, tuple[ModelLayer, CapacityMetrics, Followed | None]]]:
    """Every layer with its metrics; of several ranks, each computes those of its own layers."""
    device = workspace.machine.device

    def compute(layer: Measured) -> tuple[ModelLayer, CapacityMetrics, Followed | None]:
        with workspace.machine.operation(f"capacity of layer {layer.facts.ordinal}", "capacity"):
            sides = sides_of(layer, whole, params, device)
            metrics = layer_metrics(layer, sides, params)
            over = follow_layer(layer, whole, sides, metrics, params, device)
            return ModelLayer.of(layer.facts.name, sides, metrics, params.selected), metrics, over

    division = DividedLayers.of(workspace, whole)
    if division is None:
        return ((layer, compute(layer)) for layer in measure_layers(workspace))
    return division.compute(list(measure_layers(workspace)), compute, "capacity")


def _sum(metric: str, rows: Sequence[CapacityMetrics], curved: Sequence[bool]) -> float | None:
    return sum_layers([getattr(row, metric) for row in rows], curved)


def _not_converged(rows: Sequence[CapacityMetrics]) -> dict[str, int] | None:
    """Layers by metric; every metric that was followed is named."""
    followed = [row.convergence for row in rows if row.convergence is not None]
    if not followed:
        return None
    counts = Counter({each.metric: 0 for each in followed[0]})
    counts.update(each.metric for one in followed for each in one if each.not_converged)
    return dict(counts)
