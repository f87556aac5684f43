"""`factors`: collect A and G of every treated layer and keep them, one row per layer."""

from typing_extensions import override

from catalog.analyses.factors import FactorsMetrics, FactorsSummary
from engine.analyses.layer_analysis import LayerAnalysis, is_decomposed
from engine.measurement.layer_measurement import Measured
from engine.measurement.subsample_spectra import nested_traces


class KeptFactors(LayerAnalysis[None]):
    """The factors, as they are written; the collection's own block of options says it all."""

    kind = "factors"

    @override
    def prepare(self) -> None:
        self._layers: list[Measured] = []

    @override
    def layer(self, layer: Measured) -> FactorsMetrics:
        self._layers.append(layer)
        leader = layer.facts.shared_A_with
        return FactorsMetrics(
            form=layer.facts.form,
            trace_A=layer.A.trace,
            trace_G=layer.G.trace,
            exact_trace=layer.record.exact_trace,
            trace_ratio=layer.record.trace_ratio,
            shared_A_with=None if leader is None else self.whole.layers[leader].name,
            calls=layer.facts.calls,
            nested=nested_traces(layer.nested) if layer.nested else None,
        )

    @override
    def summary(self) -> FactorsSummary:
        whole, layers = self.whole, self._layers
        return FactorsSummary(
            coverage=self.coverage,
            layers=len(whole.layers),
            branches=self.branches,
            eigendecompositions=sum(is_decomposed(layer) for layer in layers),
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


def _dense_bytes(layer: Measured) -> int:
    item = {"float64": 8, "float32": 4}.get(str(layer.record.dtype), 2)
    return item * (layer.facts.in_dim**2 + layer.facts.out_dim**2)
