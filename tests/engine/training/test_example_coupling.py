"""Coupling of examples: what is measured on models that couple them, by layers or by code of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.training.batch_statistics import couples_examples, require_uncoupled
from tests.engine.training.nets import conv_net, images, instance_net


class Centred(nn.Module):
    """Features less the batch's mean, times a strength; the mean without a graph where it is detached."""

    def __init__(self, strength: float = 1.0, *, detached: bool = False) -> None:
        super().__init__()
        self.linear, self.strength, self.detached = nn.Linear(128, 8, dtype=torch.float64), strength, detached

    def forward(self, x: Tensor) -> Tensor:
        features = self.linear(x.flatten(1))
        mean = features.mean(0)
        return features - self.strength * (mean.detach() if self.detached else mean)


class Divided(nn.Module):
    """Features divided by the number of examples, which other neighbours do not show."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) / len(x)


def dropping(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), module)


@pytest.mark.part(of=6, by=("model",))
@pytest.mark.parametrize("count", [2, 3, 15])
@pytest.mark.parametrize(
    "model",
    [Centred(), Centred(1e-6), Centred(detached=True), Divided(), dropping(Centred()), dropping(Divided()),
     conv_net().double(), nn.BatchNorm2d(2, track_running_stats=False).double()],
)  # fmt: skip
def test_models_that_couple_their_examples_are_seen(model: nn.Module, count: int) -> None:
    assert couples_examples(model.train(), images(count)) is not None


@pytest.mark.part(of=6, by=("model",))
@pytest.mark.parametrize("count", [1, 2, 3, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("model", "batch_norm"),
    [(conv_net(), "frozen"), (instance_net(), "whole"), (dropping(nn.Conv2d(2, 3, 3)), "whole"),
     (nn.Sequential(nn.GroupNorm(2, 2), nn.Flatten(), nn.LayerNorm(128)), "whole"),
     (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), "whole")],
)  # fmt: skip
def test_models_that_do_not_are_not(model: nn.Module, batch_norm: Any, dtype: torch.dtype, count: int) -> None:
    model.to(dtype).train()
    buffers, state = [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()
    assert couples_examples(model, images(count).to(dtype), batch_norm=batch_norm) is None
    assert all(map(torch.equal, model.buffers(), buffers))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())


def test_the_difference_is_that_of_the_features() -> None:
    """With two examples a mean over the batch moves by half of their difference, or by the first less itself alone."""
    model, x = Centred(), images(2)
    plain = model.linear(x.flatten(1)).detach()
    together = (plain[0] - plain[1]) / 2
    same = torch.zeros_like(together)  # with itself as a neighbour, and alone
    expected = float((together - same).abs().max() / together.abs().max())
    assert couples_examples(model, x) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match=f"those of Centred change by {expected:.2g} of the largest"):
        require_uncoupled(model, x)
