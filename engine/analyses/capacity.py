"""`capacity`: how many directions of each layer the loss really curves in."""

import math
from collections.abc import Generator

import torch

from catalog.analysis import LayerResult
from catalog.capacity import CapacityMetrics, CapacityParams, CapacitySummary
from engine.analyses.measured import Measured, coverage, covered_result, declared_results, measured_layers
from engine.analyses.sample_sizes import nested_capacity
from engine.curvature import kronecker_spectrum as spectrum
from engine.curvature.collection import collected
from engine.errors import NonFiniteFactor
from engine.workspace import Workspace


def measure_capacity(params: CapacityParams, workspace: Workspace) -> Generator[LayerResult, None, CapacitySummary]:
    """Yield each layer's metrics as its spectra are known; declared layers follow.

    Raises:
        EngineError: As ``engine.errors`` lists.
    """
    whole = collected(workspace)
    total = len(whole.layers)
    found: dict[int, CapacityMetrics] = {}
    identity: dict[int, str] = {}
    decompositions = 0
    for done, layer in enumerate(measured_layers(workspace), start=1):
        metrics = layer_metrics(layer, params)
        found[layer.facts.ordinal] = metrics
        decompositions += layer.facts.form not in ("diagonal", "diagonal_block")
        if metrics.damping is not None and metrics.damping > metrics.spectral_norm:
            identity[layer.facts.ordinal] = layer.facts.name
        if ("capacity", layer.facts.ordinal) not in workspace.completed:
            yield covered_result("capacity", layer, metrics)
        workspace.report("capacity", done, total, "layers")
    yield from declared_results("capacity", workspace)
    # in the model's order, whatever the order of measuring: sums round the same
    rows = [found[facts.ordinal] for facts in whole.layers]
    dimension = sum(row.dimension for row in rows)
    effective = sum(row.effective_dimension or 0 for row in rows)
    return CapacitySummary(
        coverage=coverage(whole),
        layers=total,
        eigendecompositions=decompositions,
        dimension=dimension,
        trace=sum(row.trace for row in rows),
        effective_dimension=effective,
        effective_dimension_share=effective / dimension if dimension else None,
        effective_rank=sum(row.effective_rank or 0 for row in rows),
        logdet_damped=sum(row.logdet_damped or 0 for row in rows),
        damping=workspace.stabilisation.damping,
        damping_mode=workspace.stabilisation.damping_mode,
        kappa_max=workspace.stabilisation.kappa_max,
        fisher=whole.collection.fisher,
        sharing=whole.collection.sharing,
        update_freq=whole.collection.update_freq,
        identity_layers=tuple(name for _, name in sorted(identity.items())),
    )


def layer_metrics(layer: Measured, params: CapacityParams) -> CapacityMetrics:
    """Every metric of one layer's F = G ⊗ A."""
    a, g, damped = layer.spectrum_A, layer.spectrum_G, layer.damping
    if a is None or g is None:
        raise ValueError(f"layer `{layer.facts.name}`: no eigenvalues were asked for")
    dimension = a.numel() * g.numel()
    if not math.isfinite(float(a.sum()) * float(g.sum())):
        raise NonFiniteFactor(
            f"layer `{layer.facts.name}`: the eigenvalues of G ⊗ A exceed float64; scale the model's inputs or loss",
            layer=layer.facts.name,
        )
    tolerance = params.rank_tolerance
    if tolerance is None:
        precision = torch.float64 if layer.record.dtype == "float64" else torch.float32
        tolerance = max(a.numel(), g.numel()) * torch.finfo(precision).eps
    rank_a, rank_g = spectrum.entropy_effective_rank(a), spectrum.entropy_effective_rank(g)
    found = spectrum.rank(a, g, tolerance)
    singular = layer.clipping_A.kappa is None or layer.clipping_G.kappa is None
    joint = damped.joint
    effective = None if joint is None else spectrum.effective_dimension(a, g, joint)
    factored = None
    if damped.A is not None and damped.G is not None:
        factored = spectrum.effective_dimension_factored(a, g, damped.A, damped.G)
    return CapacityMetrics(
        form=layer.facts.form,
        dimension=dimension,
        trace=float(a.sum()) * float(g.sum()),
        frobenius_norm=float(a.norm()) * float(g.norm()),
        spectral_norm=float(a[-1]) * float(g[-1]),
        stable_rank=spectrum.stable_rank(a, g),
        participation_ratio=spectrum.participation_ratio(a, g),
        effective_rank=None if rank_a is None or rank_g is None else rank_a * rank_g,
        rank=found,
        logdet=spectrum.logdet(a, g) if found == dimension else None,
        damping=joint,
        logdet_damped=None if joint is None else spectrum.logdet_damped(a, g, joint),
        effective_dimension=effective,
        effective_dimension_factored=factored,
        effective_dimension_share=None if effective is None else effective / dimension,
        kappa=None if singular else _product(layer.clipping_A.kappa, layer.clipping_G.kappa),
        kappa_clipped=_product(layer.clipping_A.kappa_clipped, layer.clipping_G.kappa_clipped),
        trace_A=layer.trace_A,
        trace_G=layer.trace_G,
        effective_rank_A=rank_a,
        effective_rank_G=rank_g,
        nested=nested_capacity(layer.nested),
    )


def _product(left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return None
    product = left * right
    return product if product < float("inf") else None
