"""The refusal: the entry of a layer that failed its check among those that are not covered."""

from dataclasses import replace

from engine.gradient_identity.comparison import LayerCheck
from engine.layers.coverage import DeclaredLayer, declare
from engine.layers.layer import TreatedLayer

FAILED_CHECK = "gradient_identity"
"""Reason of a layer whose rows are not the gradient of each example alone."""
MIXED_EXAMPLES = "examples_mix"
"""The same where the model's outputs for one example depend on the others."""


def refusal(layer: TreatedLayer, check: LayerCheck) -> DeclaredLayer:
    """Turn a layer that failed its check into one that is not covered.

    Args:
        check: Its failed check.

    Returns:
        The layer with the reason that its examples mix, or that the gradient identity failed, and the numbers of the
        check.
    """
    return replace(declare(layer, MIXED_EXAMPLES if check.mixes else FAILED_CHECK), why=check.why)
