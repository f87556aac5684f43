"""Low-rank adapters: their two small matrices are covered and exact, the frozen layer below has no row."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracles import collect, ggn_block, kronecker, relative_error, row_vector

EXACT = 1e-12


class Adapted(nn.Module):
    """A frozen layer beside ``B A dropout(x)``, its parts in dictionaries by adapter, as the peft library builds it."""

    def __init__(self, base: nn.Linear, rank: int, names: tuple[str, ...] = ("default",)) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({name: nn.Dropout(0.5) for name in names})
        self.lora_A = nn.ModuleDict({name: nn.Linear(base.in_features, rank, bias=False) for name in names})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, base.out_features, bias=False) for name in names})
        self.scaling, self.active = 1.5, "default"

    def forward(self, x: Tensor) -> Tensor:
        lowered = self.lora_A[self.active](self.lora_dropout[self.active](x))
        return self.base_layer(x) + self.lora_B[self.active](lowered) * self.scaling


class OwnMatrices(nn.Module):
    """The same by hand: two tensors and matrix products."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.lora_A.T) @ self.lora_B.T


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(6, 5, 4, dtype=torch.float64, generator=generator),
        torch.randn(6, 5, 3, dtype=torch.float64, generator=generator),
    )


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
def test_both_matrices_are_exact_where_the_net_is_linear(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, y = examples()
    model = nn.Sequential(Adapted(nn.Linear(4, 6), 2), Adapted(nn.Linear(6, 3), 2)).double()
    model.train()
    whole = collect(model, [(x, y)], "regression", min_coverage=1.0, **options)
    names = [f"{place}.lora_{side}.default" for place in (0, 1) for side in "AB"]
    assert [layer.name for layer in whole.layers] == names
    assert whole.declared == ()
    assert whole.trainable_parameters == 2 * (4 + 6) + 2 * (6 + 3)
    # dropout is off while measuring, and on again afterwards
    assert model.training
    model.eval()
    for name in names:
        weight = f"{name}.weight"
        truth = ggn_block(model, x, y, "mse", (weight,), row_vector(weight, None))
        assert relative_error(kronecker(whole, name), truth) < EXACT


def test_an_adapter_that_is_not_active_is_declared() -> None:
    torch.manual_seed(0)
    x, y = examples()
    model = Adapted(nn.Linear(4, 3), 2, ("default", "other")).double()
    whole = collect(model, [(x, y)], "regression")
    assert [layer.name for layer in whole.layers] == ["lora_A.default", "lora_B.default"]
    assert {layer.name: layer.reason for layer in whole.declared} == {
        "lora_A.other": "no_gradient",
        "lora_B.other": "no_gradient",
    }


def test_a_fresh_adapter_whose_second_matrix_is_zero_has_no_curvature_in_the_first() -> None:
    torch.manual_seed(0)
    x, y = examples()
    model = Adapted(nn.Linear(4, 3), 2).double()
    nn.init.zeros_(model.lora_B["default"].weight)  # type: ignore[arg-type]
    whole = collect(model, [(x, y)], "regression", min_coverage=1.0)
    assert float(whole.load(0).G.abs().max()) == 0
    assert float(whole.load(1).G.trace()) > 0


def test_one_layer_shared_by_two_adapters_has_no_row_of_its_own() -> None:
    torch.manual_seed(0)
    x, y = examples()
    base = nn.Linear(4, 4)
    model = nn.Sequential(Adapted(base, 2), nn.Tanh(), Adapted(base, 2), nn.Linear(4, 3)).double()
    whole = collect(model, [(x, y)], "regression", min_coverage=1.0)
    assert not any("base_layer" in layer.name for layer in whole.layers)
    assert len(whole.layers) == 5


def test_adapters_by_hand_are_covered_or_declared() -> None:
    torch.manual_seed(0)
    x, y = examples()
    model = nn.Sequential(OwnMatrices(nn.Linear(4, 6), 2), nn.Tanh(), nn.Linear(6, 3)).double()
    whole = collect(model, [(x, y)], "regression")
    assert whole.trainable_parameters == 2 * (4 + 6) + 21
    named = {name for layer in (*whole.layers, *whole.declared) for name in layer.parameters}
    assert named == {"0.lora_A", "0.lora_B", "2.weight", "2.bias"}
