"""Layers whose class says other than what they compute are measured by their operations, or declared."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import NothingToAnalyse
from engine.factors.factor_set import FactorSet
from tests.oracles import collect, curvature_traces, ggn_block, relative_error, require_traces, stacked

EXACT = 1e-10


def images(examples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(examples, 2, 5, 5, dtype=torch.float64, generator=generator),
        torch.randint(0, 3, (examples,), generator=generator),
    )


def require_truth(model: nn.Module, x: Tensor, y: Tensor, whole: FactorSet) -> None:
    """Every layer has the exact trace of its parameters, and the block or diagonal of its own dense block."""
    traces = curvature_traces(model, x, y, "cross_entropy")
    for layer in whole.layers:
        truth = sum(traces[name].sum() for name in layer.parameters) / len(x)
        assert layer.exact_trace is not None
        assert abs(layer.exact_trace - float(truth)) <= EXACT * float(truth), layer.name
        if layer.form in ("block", "diagonal_block"):
            block = ggn_block(model, x, y, "cross_entropy", layer.parameters, stacked(*layer.parameters))
            expected = block.diagonal() if layer.form == "diagonal_block" else block
            assert relative_error(whole.load(layer.ordinal).G, expected) < EXACT, layer.name


def measured(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> FactorSet:
    whole = collect(model, [(x, y)], "classification", **{"exact_trace": True, "min_coverage": 1.0} | options)
    require_truth(model, x, y, whole)
    return whole


class Activated(nn.BatchNorm2d):
    """A batch norm with its activation behind it."""

    def forward(self, x: Tensor) -> Tensor:
        plain = functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, 1e-3)
        return functional.silu(plain)


class Grouped(nn.GroupNorm):
    """A group norm with its activation behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


class Synchronised(nn.SyncBatchNorm):
    """A batch norm of another base."""


def replaced() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    norm.forward = lambda x: nn.BatchNorm2d.forward(norm, x) * 3 - x  # type: ignore[method-assign]
    return norm


NORMS: list[Callable[[], nn.Module]] = [
    lambda: Activated(4),
    lambda: Grouped(2, 4),
    lambda: Synchronised(4),
    replaced,
]


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_normalisation_with_a_forward_of_its_own_is_measured_by_its_operations(
    norm: Callable[[], nn.Module], batch_size: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm(), nn.Flatten(), nn.Linear(36, 3)).double().eval()
    for name, tensor in (*model[1].named_parameters(), *model[1].named_buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 2) if name != "running_mean" else tensor.data.uniform_(-1, 1)
    whole = measured(model, *images(), batch_size=batch_size)
    assert [layer.form for layer in whole.layers] == ["kronecker", "diagonal_block", "diagonal_block", "kronecker"]


def test_a_batch_norm_without_running_statistics_is_declared_whatever_its_class() -> None:
    torch.manual_seed(0)
    norm = Activated(4, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Flatten(), nn.Linear(36, 3)).double().eval()
    norm.forward = lambda x: nn.BatchNorm2d.forward(norm, x)  # type: ignore[method-assign]
    with pytest.raises(NothingToAnalyse, match="batch_statistics, examples_mix"):
        collect(model, [images()], "classification", self_check="growing")


class RootMeanSquare(nn.Module):
    """An RMS normalisation as libraries write it, its epsilon under a name of its own."""

    def __init__(self, name: str, form: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 4))
        self.name, self.form = name, form
        setattr(self, name, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        square = x.pow(2).mean(-1, keepdim=True)
        epsilon = getattr(self, self.name)
        if self.form == "clamped":
            return self.weight * x / square.sqrt().clamp(min=epsilon)
        return self.weight * x * torch.rsqrt(square + epsilon)


class SomeRMSNorm(RootMeanSquare):
    """Known by its name."""


@pytest.mark.part(of=16, by=("form",))
@pytest.mark.parametrize(
    ("name", "form", "kept"),
    [
        ("eps", "plain", "block"),
        ("epsilon", "plain", "block"),
        ("norm_eps", "plain", "block"),
        ("tiny", "plain", "diagonal_block"),
        ("eps", "clamped", "diagonal_block"),
    ],
)
def test_an_rms_norm_is_taken_by_what_it_computes(name: str, form: str, kept: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), SomeRMSNorm(name, form), nn.Flatten(), nn.Linear(40, 3)).double().eval()
    x, y = images()
    whole = measured(model, x / 4, y)
    assert [layer.form for layer in whole.layers] == ["kronecker", kept, "kronecker"]


class Doubled(torch.autograd.Function):
    """A product whose gradient is the model's own: twice what it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, 2 * gradient.T @ x


class Clipped(torch.autograd.Function):
    """A weight from a weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Own(nn.Linear):
    """A linear layer through a function of one's own."""

    def __init__(self, *, of_weights: bool) -> None:
        super().__init__(5, 4, bias=False)
        self.of_weights = of_weights

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, Clipped.apply(self.weight)) if self.of_weights else Doubled.apply(x, self.weight)


@pytest.mark.part(of=32, by=("of_weights",))
@pytest.mark.parametrize("of_weights", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_custom_function_has_the_gradient_that_the_model_gives_it(*, of_weights: bool, batch_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Own(of_weights=of_weights), nn.Linear(4, 3)).double()
    x, y = images()
    x = x.flatten(1)[:, :5]
    whole = collect(model, [(x, y)], "classification", fisher="empirical", min_coverage=1.0, batch_size=batch_size)
    losses = (functional.cross_entropy(model(one[None])[0], target) for one, target in zip(x, y, strict=True))
    require_traces(model, whole, losses, 6)
