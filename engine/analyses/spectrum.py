"""`spectrum`: eigenvalues at both ends, trace and density of K-FAC's curvature, EK-FAC's and the exact one's."""

from typing import Literal

from typing_extensions import override

from catalog.analyses.spectrum import SpectrumParams, SpectrumSummary
from catalog.analyses.spectrum_metrics import CurvatureSpectrum, LayerSpectrum, SpectrumMetrics
from engine.analyses.costs.spectrum import spectrum_cost
from engine.analyses.layer_analysis import LayerAnalysis
from engine.analyses.metrics.layer_metrics import no_spectrum
from engine.analyses.spectra.exact_spectra import exact_spectra
from engine.analyses.spectra.kronecker_spectra import BlockSpectra, ekfac_block, kfac_block
from engine.errors import UsageError
from engine.measurement.layer_measurement import Measured

_BLOCKS: tuple[Literal["kfac", "ekfac"], ...] = ("kfac", "ekfac")


class Spectrum(LayerAnalysis[SpectrumParams]):
    """The spectrum of each layer as its factors are decomposed; then that of the exact curvatures, by their products.

    Memory:
        One layer's factors at a time; of exact curvatures the search's basis, the quadrature's vectors and the graph of
        a slice, as ``engine.analyses.costs.spectrum`` counts them.
    """

    kind = "spectrum"
    cost = staticmethod(spectrum_cost)

    @override
    def require(self) -> None:
        model = self.workspace.inputs.model
        if model is not None:
            # what is covered is known after the collection, and is no more than this
            trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
            _require_dimension(self.params, trainable, "trainable")

    @override
    def prepare(self) -> None:
        if "ekfac" in self.params.curvatures and self.whole.load_corrected is None:
            raise UsageError(
                "the factors hold no eigenvalues of EK-FAC, and `spectrum.of: ekfac` needs them; collect with "
                "`collection.ekfac: true`, or leave it out",
                pointer="/spectrum/of",
            )
        _require_dimension(self.params, self.whole.covered_parameters, "covered")
        self._blocks = {of: BlockSpectra(of=of, params=self.params) for of in _BLOCKS if of in self.params.curvatures}
        self._digests: list[tuple[int, str | None, str | None]] = []

    @override
    def layer(self, layer: Measured) -> SpectrumMetrics:
        facts, blocks = layer.facts, self._blocks
        found: dict[str, LayerSpectrum] = {}
        lacking: dict[str, str] = {}
        if "kfac" in blocks:
            why = no_spectrum(layer)
            if why is None:
                found["kfac"] = blocks["kfac"].take(facts.ordinal, kfac_block(layer, self.params))
            else:
                lacking["kfac"] = why
                blocks["kfac"].lack(facts.ordinal, facts.name, layer.A.trace * layer.G.trace, why)
        if "ekfac" in blocks and self.whole.load_corrected is not None:
            corrected = self.whole.load_corrected(facts.ordinal)
            found["ekfac"] = blocks["ekfac"].take(facts.ordinal, ekfac_block(layer, corrected, self.params))
        self._digests.append((facts.ordinal, layer.record.digest_A, layer.record.digest_G))
        return SpectrumMetrics(
            form=facts.form,
            dimension=facts.in_dim * facts.out_dim,
            kfac=found.get("kfac"),
            ekfac=found.get("ekfac"),
            no_spectrum=lacking,
            estimated=_estimated(layer) if "kfac" in found else None,
        )

    @override
    def summary(self) -> SpectrumSummary:
        params, whole = self.params, self.whole
        found: dict[str, CurvatureSpectrum] = {
            of: each.of_model(whole.covered_parameters) for of, each in self._blocks.items()
        }
        if params.exact:
            found |= exact_spectra(params, self.workspace, whole, sorted(self._digests))
        return SpectrumSummary(
            coverage=self.coverage,
            layers=len(whole.layers),
            curvatures=tuple(found[of] for of in params.curvatures),
        )


def _require_dimension(params: SpectrumParams, dimension: int, which: str) -> None:
    if params.k is not None and params.k > dimension:
        raise UsageError(
            f"`spectrum.k` must be at most the dimension {dimension}, the number of {which} parameters "
            f"(got {params.k}); take fewer",
            pointer="/spectrum/k",
        )


def _estimated(layer: Measured) -> str | None:
    """How the eigenvalues are known where G's are not computed."""
    counted = layer.G.counted
    if counted is None or layer.G.spectrum is not None:
        return None
    return (
        f"G ({layer.facts.out_dim} rows) is held as `{layer.facts.representation_G}`: its eigenvalues are estimated "
        f"between bounds that {counted.counts} inertia counts prove"
    )
