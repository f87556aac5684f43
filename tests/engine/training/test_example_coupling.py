"""Coupling of examples: what is measured on models that couple them, by layers or by code of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import TrainingRefused
from engine.training.batch_statistics import couples_examples, require_uncoupled
from tests.engine.training.nets import Written, conv_net, images, instance_net


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


@pytest.mark.part(of=24, by=("model",))
@pytest.mark.parametrize("count", [2, 3, 15])
@pytest.mark.parametrize(
    "model",
    [Centred(), Centred(1e-6), Centred(detached=True), Divided(), dropping(Centred()), dropping(Divided()),
     conv_net().double(), nn.BatchNorm2d(2, track_running_stats=False).double()],
)  # fmt: skip
def test_models_that_couple_their_examples_are_seen(model: nn.Module, count: int) -> None:
    assert couples_examples(model.train(), images(count)) is not None


@pytest.mark.part(of=24, by=("model",))
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
    with pytest.raises(TrainingRefused, match=f"those of Centred change by {expected:.2g} of the largest"):
        require_uncoupled(model, x)


def centred_in_chunks_of_two(net: Any, x: Tensor) -> Tensor:
    return net.a(x) - net.a(x).mean(0) * (len(x) == 2)


@pytest.mark.parametrize(
    ("model", "count", "chunk"),
    [
        (Written(centred_in_chunks_of_two), 22, 5),
        (Written(lambda net, x: net.a(x) - net.a(x).mean(0) * (len(x) > 8)), 16, 8),
        (Written(lambda net, x: net.a(x) / (net.a(x).std(0) if len(x) > 1 else 1)), 9, 1),
        (Written(lambda net, x: (net.a(x) - net.a(x).mean(0)) / net.a(x).std(0, correction=0)), 9, 1),
    ],
    ids=["a smaller last chunk", "more than a chunk, of two", "a deviation unless alone", "no number alone"],
)
def test_sizes_of_the_pass_are_compared(model: nn.Module, count: int, chunk: int) -> None:
    torch.manual_seed(0)
    with pytest.raises(TrainingRefused, match="change by"):
        require_uncoupled(model, torch.randn(count, 6), chunk=chunk)


class Attentive(nn.Module):
    """Attention over the positions of each example, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unflatten(1, (1, -1)).expand(-1, 3, -1) * torch.arange(1.0, 4.0)[:, None]).flatten(1)


class Noisy(nn.Module):
    """Noise in evaluation mode too, as functional dropout has it."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x + torch.randn(len(x), 6), 0.3)


@pytest.mark.part(of=16, by=("net", "chunk"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 9, 16, 32])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("net", ["plain", "dropout", "batch norm", "attention", "group norm", "noise"])
def test_examples_on_their_own_are_not_refused(net: str, chunk: int, count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    nets: dict[str, nn.Module] = {
        "plain": nn.Linear(6, 4),
        "dropout": nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU()),
        "batch norm": nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).eval(),
        "attention": Attentive(),
        "group norm": nn.Sequential(nn.GroupNorm(2, 6), nn.Linear(6, 4)),
        "noise": Noisy(),
    }
    model, x, before = nets[net].double().to(dtype), torch.randn(count, 6), torch.get_rng_state()
    if net == "attention" and dtype != torch.float32:
        model.float()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            require_uncoupled(model, x, chunk=chunk)
    else:
        require_uncoupled(model, x.to(dtype), chunk=chunk)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("count", "chunk", "drop", "sizes"),
    [
        (32, 8, 0.0, [8, 4, 4, 8]),
        (30, 8, 0.0, [8, 4, 4, 8, 6]),
        (16, 8, 0.0, [16, 8, 8]),
        (9, 1, 0.0, [4, 1, 1, 1, 1, 4]),
        (32, 8, 0.5, [8, 8, 8, 8, 4, 4, 8]),
    ],
)
def test_a_check_runs_few_batches_of_at_most_a_chunk(count: int, chunk: int, drop: float, sizes: list[int]) -> None:
    model, seen = Written(lambda net, x: net.a(x), drop), list[int]()
    model.register_forward_hook(lambda module, args, left: seen.append(len(args[0])))
    require_uncoupled(model, torch.randn(count, 6), chunk=chunk)
    assert seen == sizes


def test_inputs_that_a_model_writes_to_are_as_before() -> None:
    x = torch.randn(32, 6)
    before = x.clone()
    assert couples_examples(Written(lambda net, x: net.a(x.mul_(2))), x, chunk=8) is None
    assert torch.equal(x, before)
