"""A trainable structured layer: it is the matrix that it holds, and training moves its generators."""

import pytest
import torch
from torch import nn

from engine.semiseparable.layer import StructuredLinear
from engine.semiseparable.semiseparable_matrix import MatrixRefused

KINDS = ["tridiagonal_lowrank", "block_sss"]


@pytest.mark.parametrize("features", [1, 30, 64])
@pytest.mark.parametrize("structure", KINDS)
def test_a_layer_is_its_matrix(structure: str, features: int) -> None:
    torch.manual_seed(0)
    layer = StructuredLinear(features, structure=structure, rank=min(3, features), block=8)  # type: ignore[arg-type]
    assert layer.bias is not None
    nn.init.normal_(layer.bias)
    x = torch.randn(4, 5, features)
    wanted = x @ layer.matrix().to_dense().T + layer.bias
    assert torch.allclose(layer(x), wanted, atol=1e-5)
    assert sum(parameter.numel() for parameter in layer.parameters()) <= max(features, 4) * (features + 30)


@pytest.mark.parametrize("structure", KINDS)
def test_training_reaches_a_matrix_of_the_structure(structure: str) -> None:
    torch.manual_seed(0)
    wanted, layer = (StructuredLinear(24, structure=structure, rank=2, block=8) for _ in range(2))  # type: ignore[arg-type]
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.03)
    x = torch.randn(256, 24)
    target = wanted(x).detach()
    losses = []
    for _ in range(150):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(layer(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 20
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in layer.parameters())


def test_a_layer_is_saved_with_its_model() -> None:
    torch.manual_seed(0)
    one, other = (StructuredLinear(20, structure="block_sss", rank=2, block=8) for _ in range(2))
    other.load_state_dict(one.state_dict())
    x = torch.randn(3, 20)
    assert torch.equal(one(x), other(x))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(MatrixRefused, match=r"`features` must be at least 1 \(got 0\)"):
        StructuredLinear(0)
    for numbers in ({"features": 2.0}, {"features": 8, "block": 2.0}, {"features": 8, "rank": 2.0}):
        with pytest.raises(MatrixRefused, match=r"must be a whole number \(got 2\.0\)"):
            StructuredLinear(**numbers)  # type: ignore[arg-type]
    with pytest.raises(MatrixRefused, match="`rank` must be from 1 to 8"):
        StructuredLinear(8, rank=9)
    with pytest.raises(MatrixRefused, match="must be tridiagonal_lowrank or block_sss"):
        StructuredLinear(8, structure="dense")  # type: ignore[arg-type]
