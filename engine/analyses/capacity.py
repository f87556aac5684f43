"""`capacity`: how many directions of each layer, and of the model, the loss really curves in.

Token importance: the exact diagonal of a head's G, kept as an artifact, with how few tokens carry most of it.

``G_vv = E[g_v²]`` over loss terms: of a softmax under `mc` and `type2`, where its probabilities are kept, the mean of
``p_v (1 − p_v)``, which no sampling enters; elsewhere the sum of the collected gradients' squares. Where a table holds
the head's weight, G is that of the nearest product of both uses; the diagonal of the head's own is kept beside it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from catalog.analyses.capacity import CapacityParams, CapacitySummary
from catalog.analyses.capacity_metrics import CapacityMetrics, TokenImportance
from engine.analyses.costs.capacity import capacity_cost
from engine.analyses.layer_analysis import LayerAnalysis, is_decomposed
from engine.analyses.metrics.exact_ggn_check import CrossChecked, cross_check
from engine.analyses.metrics.kronecker_metrics import DAMPED, settled
from engine.analyses.metrics.layer_metrics import layer_metrics, sides_of
from engine.analyses.metrics.model_metrics import ModelLayer, model_metrics
from engine.analyses.metrics.sample_convergence import Followed, follow_layer, model_convergence, sum_layers
from engine.errors import NoSuchLayer
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.factors.kronecker_factors import Factors
from engine.layers.tied import NEAREST
from engine.measurement.layer_measurement import Measured
from engine.workspace import Workspace

POINTER = "/capacity/token_importance"
_SHARE = 0.99
_MOST = 10


def require_head(name: str | None, workspace: Workspace) -> None:
    """Refuse a head that the model does not have, or a Fisher without gradients, before anything is collected."""
    if name is None or workspace.inputs.model is None:
        return
    if workspace.options.collection.fisher == "forward_only":
        raise NoSuchLayer("needs gradients, and `forward_only` takes none; take another `collection.fisher`",
                          pointer=POINTER)  # fmt: skip
    modules = [module for module, _ in workspace.inputs.model.named_modules() if module]
    if name not in modules:
        shown = ", ".join(modules[-5:])
        raise NoSuchLayer(f"is `{name}`, which the model does not have; its last modules are {shown}", pointer=POINTER)


def token_importance(name: str | None, workspace: Workspace, whole: FactorSet) -> TokenImportance | None:
    """Write the importance of each row of a head's G as an artifact, and summarise it.

    Memory:
        The layer's factors as they are kept, and 16 V bytes.
    """
    if name is None:
        return None
    facts = next((facts for facts in whole.layers if facts.name == name), None) or _tied(name, whole)
    why = _why_not(name, facts, whole)
    factors = None if why is not None or facts is None else whole.load(facts.ordinal)
    if factors is not None and facts is not None and NEAREST in facts.why and factors.head_diagonal is None:
        why = "these factors are from before the diagonal of a tied head's own G was kept"
    if why is not None or facts is None or factors is None:
        blank = dict.fromkeys(TokenImportance.__dataclass_fields__)
        return TokenImportance(**{**blank, "layer": name, "why": why})  # type: ignore[arg-type]
    diagonal = gradient_diagonal(factors)
    artifact = f"token_importance/{facts.ordinal}.safetensors"
    workspace.ports.artifacts.save_tensors(artifact, {"importance": diagonal}, {"layer": facts.name})
    ordered = torch.sort(diagonal, descending=True, stable=True)
    carried = ordered.values.cumsum(0)
    trace = float(carried[-1])
    return TokenImportance(
        layer=name,
        why=None,
        tokens=diagonal.numel(),
        artifact=artifact,
        trace=trace,
        tokens_for_99_percent=int((carried < _SHARE * trace).sum()) + 1 if trace > 0 else 0,
        most=tuple(int(place) for place in ordered.indices[:_MOST]),
    )


def gradient_diagonal(factors: Factors) -> Tensor:
    """Return the diagonal (V,) of a head's G, in float64 on the host and with the scale, without making G dense.

    A tied head carries the diagonal of its own G beside its factors.
    """
    if factors.head_diagonal is not None:
        return factors.head_diagonal.to("cpu", torch.float64)
    # what is stored is not handed out
    return factors.side_G.diagonal().clone()


def _tied(name: str, whole: FactorSet) -> LayerFacts | None:
    """The layer of a table that holds the weight of the head ``name``, by whichever of their names it goes."""
    return next((each for each in whole.layers if NEAREST in each.why and f"`{name}`" in each.why), None)


def _why_not(name: str, facts: LayerFacts | None, whole: FactorSet) -> str | None:
    """Why the layer has no diagonal of a head's G; None where it has."""
    if facts is None:
        declared = next((layer for layer in whole.declared if layer.name == name), None)
        if declared is not None:
            return f"the layer is not covered: {declared.reason}"
        return "no covered layer has that name"
    if whole.collection.fisher == "forward_only":
        return "G is the identity under `forward_only`"
    return None


@dataclass(frozen=True)
class _LayerOutcome:
    of_model: ModelLayer
    """Values of the layer that the model's metrics need."""
    metrics: CapacityMetrics
    over_sizes: Followed | None
    """Its metrics over growing numbers of examples, where these were asked for."""


class Capacity(LayerAnalysis[CapacityParams]):
    """The metrics of each layer's spectra, and of the model as one block-diagonal matrix."""

    kind = "capacity"
    cost = staticmethod(capacity_cost)
    divided = True
    _exact: CrossChecked | None

    @override
    def require(self) -> None:
        require_head(self.params.token_importance, self.workspace)

    @override
    def prepare(self) -> None:
        self._exact = cross_check(self.params, self.workspace, self.whole)
        # values that the summary needs, by ordinal
        self._of_model: dict[int, ModelLayer] = {}
        self._over_sizes: dict[int, Followed] = {}
        self._identity: dict[int, str] = {}
        """Names of layers whose damping exceeds every eigenvalue."""
        self._decompositions = 0

    @override
    def layer(self, layer: Measured) -> _LayerOutcome:
        params, device = self.params, self.workspace.machine.device
        sides = sides_of(layer, self.whole, params, device)
        metrics = layer_metrics(layer, sides, params)
        over = follow_layer(layer, self.whole, sides, metrics, params, device)
        return _LayerOutcome(ModelLayer.of(layer.facts.name, sides, metrics, params.selected), metrics, over)

    @override
    def take(self, layer: Measured, outcome: _LayerOutcome) -> CapacityMetrics:
        ordinal, norm = layer.facts.ordinal, outcome.of_model.spectral_norm
        metrics = outcome.metrics
        if outcome.over_sizes is not None:
            self._over_sizes[ordinal] = outcome.over_sizes
            metrics = replace(metrics, convergence=outcome.over_sizes.convergence)
        self._decompositions += is_decomposed(layer)
        if metrics.damping is not None and norm is not None and metrics.damping > norm:
            self._identity[ordinal] = layer.facts.name
        if self._exact is not None:
            beside = self._exact.of_layer(ordinal, layer.A.trace * layer.G.trace, norm)
            metrics = replace(metrics, cross_check=beside)
        self._of_model[ordinal] = outcome.of_model
        return metrics

    @override
    def summary(self) -> CapacitySummary:
        params, whole = self.params, self.whole
        rule = self.workspace.options.stabilisation
        # in the model's order, whatever the order of measuring: sums round the same
        ordinals = [facts.ordinal for facts in whole.layers]
        rows = [self.measured[ordinal] for ordinal in ordinals]
        of_model = [self._of_model[ordinal] for ordinal in ordinals]
        curved = [each.sides.trace > 0 for each in of_model]

        def total(metric: str) -> float | None:
            if metric not in params.selected:
                return None
            found = [getattr(row, metric) for row in rows]
            if metric not in DAMPED or None not in found:
                return sum_layers(found, curved)
            # rounding may decide the number of a layer, and hardly touch that of all
            ends = [
                [value] * 3 if value is not None else [DAMPED[metric](own) for own in each.sides.variants]
                for value, each in zip(found, of_model, strict=True)
            ]
            sums = [sum_layers(values, curved) for values in zip(*ends, strict=True)]
            return settled(sums, dimension if metric == "logdet_damped" else 0.0)

        dimension = sum(row.dimension for row in rows)
        effective = total("effective_dimension")
        model = model_metrics(of_model, params)
        over_all = [self._over_sizes[ordinal] for ordinal in ordinals if ordinal in self._over_sizes]
        return CapacitySummary(
            coverage=self.coverage,
            layers=len(rows),
            branches=self.branches,
            eigendecompositions=self._decompositions,
            dimension=dimension,
            trace=total("trace"),
            effective_dimension=effective,
            effective_dimension_share=effective / dimension if dimension and effective is not None else None,
            effective_rank=total("effective_rank"),
            logdet_damped=total("logdet_damped"),
            damping=rule.damping,
            damping_mode=rule.damping_mode,
            damping_split=rule.damping_split,
            kappa_max=rule.kappa_max,
            fisher=whole.collection.fisher,
            sharing=whole.collection.sharing,
            update_freq=whole.collection.update_freq,
            identity_layers=tuple(name for _, name in sorted(self._identity.items())),
            not_converged=_not_converged(rows),
            model=replace(model, convergence=model_convergence(over_all, model, params)),
            token_importance=token_importance(params.token_importance, self.workspace, whole),
            cross_check=None if self._exact is None else self._exact.of_model(row.cross_check for row in rows),
        )


def _not_converged(rows: Sequence[CapacityMetrics]) -> dict[str, int] | None:
    """Layers by metric; every metric that was followed is named."""
    followed = [row.convergence for row in rows if row.convergence is not None]
    if not followed:
        return None
    counts = Counter({each.metric: 0 for each in followed[0]})
    counts.update(each.metric for one in followed for each in one if each.not_converged)
    return dict(counts)
