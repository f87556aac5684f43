"""Joint statistics: those that need what entered a layer and the gradient of its output together.

The gradient of one example's loss with respect to a weight sums over its positions *and* over all
calls of the module, before anything is squared: ``∇W ℓ_n = Σ_calls Σ_t g_t a_tᵀ``. A ``Meeting``
therefore waits, in each backward pass, until every call of the forward pass has its gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine.curvature.layers.layer import BlockLayer, Use

Met = Sequence[tuple[Use, Tensor]]
"""Calls of one layer in one forward pass, each with the gradient of its output in one direction."""


@dataclass
class Meeting:
    """Where the calls of one layer wait for their gradients."""

    receive: Callable[[Met], None]
    """Gets all calls of one direction together."""
    _met: list[tuple[Use, Tensor]] = field(default_factory=list)

    def arrive(self, use: Use, gradient: Tensor, calls: int) -> None:
        """One gradient has arrived, of a module that was called ``calls`` times."""
        self._met.append((use, gradient))
        # the last to arrive closes the meeting, so that a layer called once holds nothing longer
        if len(self._met) >= calls:
            self.close()

    def close(self) -> None:
        """Hand on what has arrived; calls that the direction does not reach have no gradient."""
        met, self._met = self._met, []
        if met:
            self.receive(met)


def block_gradients(layer: BlockLayer, met: Met) -> Tensor:
    """Gradient of each example's loss with respect to (weight, bias), all calls summed, as (N, out_dim)."""
    total, *others = (layer.example_gradients(use, gradient) for use, gradient in met)
    for other in others:
        total = total + other
    return total
