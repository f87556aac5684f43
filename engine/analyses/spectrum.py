"""`spectrum`: eigenvalues at both ends, trace and density of K-FAC's curvature, EK-FAC's and the exact one's."""

from collections.abc import Generator
from typing import Literal

from catalog.analyses.analysis import LayerResult
from catalog.analyses.spectrum import SpectrumParams, SpectrumSummary
from catalog.analyses.spectrum_metrics import CurvatureSpectrum, LayerSpectrum, SpectrumMetrics
from engine.analyses.coverage_summary import coverage
from engine.analyses.metrics.layer_metrics import no_spectrum
from engine.analyses.spectra.exact_spectra import exact_spectra
from engine.analyses.spectra.kronecker_spectra import BlockSpectra, ekfac_block, kfac_block
from engine.collect import collect_or_read
from engine.errors import UsageError
from engine.factors.factor_set import FactorSet
from engine.measurement.finite_numbers import finite_summary
from engine.measurement.layer_measurement import Measured, measure_layers
from engine.measurement.layer_results import covered_result, uncovered_results
from engine.workspace import Workspace

_BLOCKS: tuple[Literal["kfac", "ekfac"], ...] = ("kfac", "ekfac")


def measure_spectrum(params: SpectrumParams, workspace: Workspace) -> Generator[LayerResult, None, SpectrumSummary]:
    """Yield each layer's spectrum as its factors are decomposed; then multiply with the exact curvatures.

    Memory:
        One layer's factors at a time; of exact curvatures the search's basis, the quadrature's vectors and the graph of
        a slice, as ``engine.planning.later.spectrum`` counts them.
    """
    model = workspace.inputs.model
    if model is not None:
        # what is covered is known after the collection, and is no more than this
        trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
        _require_dimension(params, trainable, "trainable")
    whole = collect_or_read(workspace)
    _require_known(params, whole)
    blocks = {of: BlockSpectra(of=of, params=params) for of in _BLOCKS if of in params.curvatures}
    digests: list[tuple[int, str | None, str | None]] = []
    for done, layer in enumerate(measure_layers(workspace), start=1):
        workspace.ports.raise_if_cancelled()
        with workspace.machine.operation(f"spectrum of layer {layer.facts.ordinal}", "spectrum"):
            metrics = _metrics(layer, whole, blocks, params)
        digests.append((layer.facts.ordinal, layer.record.digest_A, layer.record.digest_G))
        if ("spectrum", layer.facts.ordinal) not in workspace.resume.completed:
            yield covered_result("spectrum", layer, metrics)
        workspace.ports.report("spectrum", done, len(whole.layers), "layers")
    yield from uncovered_results("spectrum", workspace)
    found: dict[str, CurvatureSpectrum] = {of: each.of_model(whole.covered_parameters) for of, each in blocks.items()}
    if params.exact:
        found |= exact_spectra(params, workspace, whole, sorted(digests))
    summary = SpectrumSummary(
        coverage=coverage(whole),
        layers=len(whole.layers),
        curvatures=tuple(found[of] for of in params.curvatures),
    )
    return finite_summary(summary, workspace.ports.log)


def _require_known(params: SpectrumParams, whole: FactorSet) -> None:
    """Refuse what the factors cannot answer, before anything is decomposed."""
    if "ekfac" in params.curvatures and whole.load_corrected is None:
        raise UsageError(
            "the factors hold no eigenvalues of EK-FAC, and `spectrum.of: ekfac` needs them; collect with "
            "`collection.ekfac: true`, or leave it out",
            pointer="/spectrum/of",
        )
    _require_dimension(params, whole.covered_parameters, "covered")


def _require_dimension(params: SpectrumParams, dimension: int, which: str) -> None:
    if params.k is not None and params.k > dimension:
        raise UsageError(
            f"`spectrum.k` must be at most the dimension {dimension}, the number of {which} parameters "
            f"(got {params.k}); take fewer",
            pointer="/spectrum/k",
        )


def _metrics(
    layer: Measured, whole: FactorSet, blocks: dict[Literal["kfac", "ekfac"], BlockSpectra], params: SpectrumParams
) -> SpectrumMetrics:
    facts = layer.facts
    found: dict[str, LayerSpectrum] = {}
    lacking: dict[str, str] = {}
    if "kfac" in blocks:
        why = no_spectrum(layer)
        if why is None:
            found["kfac"] = blocks["kfac"].take(facts.ordinal, kfac_block(layer, params))
        else:
            lacking["kfac"] = why
            blocks["kfac"].lack(facts.ordinal, facts.name, layer.trace_A * layer.trace_G, why)
    if "ekfac" in blocks and whole.load_corrected is not None:
        corrected = whole.load_corrected(facts.ordinal)
        found["ekfac"] = blocks["ekfac"].take(facts.ordinal, ekfac_block(layer, corrected, params))
    return SpectrumMetrics(
        form=facts.form,
        dimension=facts.in_dim * facts.out_dim,
        kfac=found.get("kfac"),
        ekfac=found.get("ekfac"),
        no_spectrum=lacking,
        estimated=_estimated(layer) if "kfac" in found else None,
    )


def _estimated(layer: Measured) -> str | None:
    """How the eigenvalues are known where G's are not computed."""
    counted = layer.counted_G
    if counted is None or layer.spectrum_G is not None:
        return None
    return (
        f"G ({layer.facts.out_dim} rows) is held as `{layer.facts.representation_G}`: its eigenvalues are estimated "
        f"between bounds that {counted.counts} inertia counts prove"
    )
