"""Complex numbers: a layer that holds, takes or gives them is declared by name; real ones beside it are right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.linalg.gram import add_gram_, add_grams_
from tests.oracles import workspace

C = torch.cfloat
Run = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A head, a part `a`, and whatever is done with both."""

    def __init__(self, make: Callable[[], Any], use: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h, self.a, self.use = nn.Linear(8, 5), make(), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


DECLARED: dict[str, tuple[Callable[[], Any], Run, str]] = {
    "linear": (lambda: nn.Linear(6, 8, dtype=C), lambda s, x: s.h(s.a(x.to(C)).abs()), "complex_numbers"),
    "parameter": (
        lambda: nn.Parameter(torch.randn(6, 8, dtype=C)),
        lambda s, x: s.h((x.to(C) @ s.a).abs()),
        "complex_numbers",
    ),
    "convolution": (
        lambda: nn.Conv1d(1, 2, 3, dtype=C),
        lambda s, x: s.h(s.a(x.to(C)[:, None]).abs().flatten(1)),
        "complex_numbers",
    ),
    "norm fed with complex numbers": (
        lambda: nn.RMSNorm(8),
        lambda s, x: s.h(s.a(functional.pad(x, (0, 2)).to(C) * (1 + 2j)).abs()),
        "complex_numbers",
    ),
    "real weight made complex": (
        lambda: nn.Linear(6, 8, bias=False),
        lambda s, x: s.h(functional.linear(x.to(C) * (1 + 1j), s.a.weight.to(C)).abs()),
        "unknown_operation",
    ),
    "two real parts": (
        lambda: nn.Parameter(torch.randn(6, 8, 2)),
        lambda s, x: s.h((x.to(C) @ torch.view_as_complex(s.a)).abs()),
        "unknown_operation",
    ),
}
COVERED: dict[str, tuple[Callable[[], Any], Run]] = {
    "transform of a layer's output": (lambda: nn.Linear(6, 8), lambda s, x: s.h(torch.fft.fft(s.a(x)).abs())),
    "buffer": (lambda: nn.Buffer(torch.randn(6, 8, dtype=C)), lambda s, x: s.h((x.to(C) @ s.a).abs())),
}


def measured(net: Net, data: tuple[Tensor, Tensor], **options: Any) -> FactorSet:
    return collect_or_read(workspace(net, [data], "classification", fisher="empirical", **options))


def require_right(net: Net, found: FactorSet, data: tuple[Tensor, Tensor]) -> None:
    """Hold each layer's exact trace against the gradients of each example by plain autograd."""
    parameters, squares = dict(net.named_parameters()), dict.fromkeys(dict(net.named_parameters()), 0.0)
    for x, y in zip(*data, strict=True):
        net.zero_grad()
        functional.cross_entropy(net(x[None]), y[None]).backward()
        for name, each in parameters.items():
            squares[name] += float(each.grad.abs().double().square().sum()) / len(data[0])
    for layer in found.layers:
        truth = sum(squares[name] for name in layer.parameters)
        assert layer.exact_trace == pytest.approx(truth, rel=1e-5)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.randint(5, (8,), generator=generator)


@pytest.mark.part(of=24, by=("batch_size",))
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("name", DECLARED)
def test_complex_numbers_are_declared_and_real_layers_beside_them_are_covered(name: str, batch_size: int) -> None:
    make, use, reason = DECLARED[name]
    net = Net(make, use)
    found = measured(net, data(), batch_size=batch_size, dtype="float32")
    assert [layer.name for layer in found.layers] == ["h"]
    assert [row.reason for row in found.declared] == [reason]
    own = [each for key, each in net.named_parameters() if key.startswith("a")]
    assert sum(row.parameter_count for row in found.declared) == sum(each.numel() for each in own)
    require_right(net, found, data())


@pytest.mark.part(of=24, by=("dtype",))
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", COVERED)
def test_what_is_complex_between_real_layers_costs_no_coverage(name: str, dtype: str, batch_size: int) -> None:
    net = Net(*COVERED[name])
    found = measured(net, data(), batch_size=batch_size, dtype=dtype)
    assert not found.declared
    require_right(net, found, data())


def test_narrow_complex_numbers_in_a_float64_job_are_no_mixing() -> None:
    found = measured(Net(*DECLARED["linear"][:2]), data(), batch_size=8, dtype="float64")
    assert [row.reason for row in found.declared] == ["complex_numbers"]


@pytest.mark.parametrize("dtype", [torch.cfloat, torch.cdouble])
def test_sums_refuse_to_cut_complex_rows(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 4, dtype=dtype)
    with pytest.raises(TypeError, match="must be real"):
        add_gram_(torch.zeros(4, 4, dtype=torch.float64), rows)
    with pytest.raises(TypeError, match="must be real"):
        add_grams_(torch.zeros(2, 2, 2, dtype=torch.float64), rows)
