"""Layers whose class says other than what they compute are measured by their operations, or declared."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.curvature.collected import Collected
from tests.oracles import collect, curvature_traces, ggn_block, relative_error, stacked

EXACT = 1e-10


def images(examples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(examples, 2, 5, 5, dtype=torch.float64, generator=generator),
        torch.randint(0, 3, (examples,), generator=generator),
    )


def require_truth(model: nn.Module, x: Tensor, y: Tensor, whole: Collected) -> None:
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


def measured(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Collected:
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
    whole = collect(model, [images()], "classification")
    assert [(layer.name, layer.reason) for layer in whole.declared] == [("1", "batch_statistics")]


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
