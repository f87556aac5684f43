"""Coverage: which trainable parameters the rows of a job speak for, and what the layers proved of themselves."""

from catalog.analyses.analysis import Coverage
from engine.factors.factor_set import FactorSet
from engine.layers.coverage_check import count_by_reason


def coverage(whole: FactorSet) -> Coverage:
    """Count by parameter what the rows cover, after the law covered + declared = trainable."""
    reasons = count_by_reason(whole.declared)
    return Coverage(
        trainable_parameters=whole.trainable_parameters,
        covered_parameters=whole.covered_parameters,
        declared_parameters=sum(reasons.values()),
        covered_share=whole.covered_parameters / max(whole.trainable_parameters, 1),
        layers_covered=len(whole.layers),
        layers_declared=len(whole.declared),
        reasons=reasons,
        gradient_identity=max((each for each in _identities(whole) if each is not None), default=None),
        examples_checked=min((each.examples_checked or 0 for each in whole.layers), default=None)
        if any(each is not None for each in _identities(whole))
        else None,
        looked_at=whole.looked_at,
    )


def _identities(whole: FactorSet) -> list[float | None]:
    return [layer.gradient_identity for layer in whole.layers]
