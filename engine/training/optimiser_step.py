"""The step of an optimiser at the end of an episode: gradients are unscaled, clipped and applied once.

With float16 and scale S the gradients arrive as S · ∂L/∂θ. They are divided by S before their norm is taken; where one
has overflowed the step is skipped, counted, and S is halved. Gradients are cleared afterwards, skipped or not.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from catalog.field_errors import suggestion
from engine.errors import NonFiniteLoss, TrainingRefused
from engine.training.mixed_precision import TrainingPrecision

OptimiserName = Literal["AdamW", "Adam", "SGD"]
_OPTIMISERS = ("AdamW", "Adam", "SGD")
_SMALLEST_SCALE = 2.0**-24
"""Smallest number of float16: no gradient is large enough to overflow once it is multiplied by it."""


def make_optimiser(
    name: OptimiserName,
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    weight_decay: float = 0.0,
    momentum: float = 0.9,
) -> torch.optim.Optimizer:
    """Make an optimiser that holds no more than its moments, of the parameters that need a gradient.

    Torch's optimiser goes through them one by one: all at once (``foreach``) would hold intermediates of all of them.
    The learning rate is above 0; the decay of the weights is decoupled in AdamW; SGD alone has ``momentum``, the share
    of the last direction. ``TrainingRefused`` if the name is unknown, a number cannot be, or there is no parameter to
    train.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if name not in _OPTIMISERS:
        near = suggestion(name, _OPTIMISERS)
        raise TrainingRefused(f"the optimiser must be one of {', '.join(_OPTIMISERS)} (got {name!r}){near}")
    if not (learning_rate > 0 and math.isfinite(learning_rate)):
        raise TrainingRefused(f"the learning rate must be above 0 and finite (got {learning_rate})")
    if not trained:
        raise TrainingRefused("an optimiser needs a parameter to train (got none that needs a gradient)")
    if name == "SGD":
        return torch.optim.SGD(trained, lr=learning_rate, momentum=momentum, weight_decay=weight_decay, foreach=False)
    kind = torch.optim.AdamW if name == "AdamW" else torch.optim.Adam
    return kind(trained, lr=learning_rate, weight_decay=weight_decay, foreach=False)


class OptimiserStep:
    """Steps of an optimiser, one for the gradients of an episode, with the number of those skipped.

    Args:
        optimiser: The optimiser of all parameters that have gradients.
        precision: The precision that the gradients were computed in; with a scaler they arrive scaled.
        max_norm: Norm of all gradients together beyond which they are scaled down to it; None for any norm.
    """

    def __init__(
        self,
        optimiser: torch.optim.Optimizer,
        precision: TrainingPrecision | None = None,
        max_norm: float | None = None,
    ) -> None:
        self.optimiser = optimiser
        self.scaler = None if precision is None else precision.scaler
        self.max_norm = max_norm
        self.skipped = 0
        """Steps that were left out since a gradient had overflowed float16."""

    def take(self, loss: Tensor | float, name: str = "this step") -> bool:
        """Apply the gradients that are in ``.grad``, and clear them; return False where the step was skipped.

        ``loss`` is theirs, not scaled; ``name`` is that of the episode, for errors. ``NonFiniteLoss`` if the loss or,
        without a scaler, a gradient is NaN or Inf, or no scale is small enough; the weights are as before.
        """
        if not math.isfinite(float(loss)):
            raise NonFiniteLoss(
                f"the loss of {name} must be finite (got {float(loss)}); take a smaller learning rate, or full width "
                "(use_amp: false) if 16 bits overflow"
            )
        parameters = [
            each for group in self.optimiser.param_groups for each in group["params"] if each.grad is not None
        ]
        if self.scaler is not None:
            self.scaler.unscale_(self.optimiser)
        norm = nn.utils.get_total_norm([each.grad for each in parameters], foreach=False)
        if self.scaler is None and not math.isfinite(float(norm)):
            raise NonFiniteLoss(
                f"the gradients of {name} must be finite (their norm is {float(norm)}, the loss {float(loss):.4g}); "
                "take a smaller learning rate, or look for a root or a quotient at zero in the loss"
            )
        if self.max_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm, foreach=False)
        moved = self._apply(name)
        self.optimiser.zero_grad(set_to_none=True)
        return moved

    def _apply(self, name: str) -> bool:
        if self.scaler is None:
            self.optimiser.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            return True
        self.skipped += 1
        if self.scaler.get_scale() < _SMALLEST_SCALE:
            raise NonFiniteLoss(
                f"the gradients of {name} overflow float16 even when they are multiplied by {before:.1g}, or are not "
                "finite at all; take bf16 or full width (use_amp: false)"
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on as if it had not ended: moments, scale and the number of skipped steps."""
        scale = None if self.scaler is None else self.scaler.state_dict()
        return {"optimiser": self.optimiser.state_dict(), "scaler": scale, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state of another run, as ``state_dict`` has returned it.

        ``TrainingRefused`` if one of the two has a scale of the loss and the other has none.
        """
        if (self.scaler is None) != (state["scaler"] is None):
            has, lacks = ("this run", "the stored one") if self.scaler is not None else ("the stored run", "this one")
            raise TrainingRefused(f"both runs must train in one precision: {has} scales the loss, and {lacks} does not")
        self.optimiser.load_state_dict(dict(state["optimiser"]))
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.skipped = int(state["skipped"])
