"""A preconditioned gradient is what the dense matrices give, however a side is kept; by its rows it keeps digits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.requests.collection import Collection
from catalog.requests.woodbury import Woodbury
from engine.errors import BiasColumnMismatch, WrongShape
from kronoscope.local import LayerFactors, measure


def layers(policy: str) -> dict[str, LayerFactors]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 7), nn.Flatten(), nn.Linear(21, 12), nn.Tanh(), nn.LayerNorm(12)).double()
    model.append(nn.Linear(12, 3).double())
    batches = [(torch.arange(24).view(8, 3) % 9, torch.arange(8) % 3)]
    collection = Collection(dtype="float64", fisher="empirical")
    woodbury = Woodbury(policy=policy)  # type: ignore[arg-type]
    return dict(measure(model, batches, task="classification", kinds=["factors"], collection=collection,
                        woodbury=woodbury).factors)  # fmt: skip


def dense_solution(layer: LayerFactors, gradient: Tensor, damping_a: float, damping_g: float) -> Tensor:
    damped = [side.double() + damping * torch.eye(len(side), dtype=torch.float64)
              for side, damping in ((layer.A, damping_a), (layer.G, damping_g))]  # fmt: skip
    return torch.linalg.solve(damped[1], gradient) @ torch.linalg.inv(damped[0])


@pytest.mark.parametrize("policy", ["dense", "all"])
def test_every_form_is_inverted_as_its_dense_matrices_are(policy: str) -> None:
    kinds = set()
    for name, layer in layers(policy).items():
        gradient = torch.randn(
            len(layer.G), len(layer.A), dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        kinds.add((layer.form, layer.structured_G is not None))
        found = layer.precondition(gradient, damping_A=1e-3, damping_G=1e-4)
        expected = dense_solution(layer, gradient, 1e-3, 1e-4)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()), msg=name)
        with pytest.raises(BiasColumnMismatch, match=f"`{name}`"):
            layer.precondition(gradient[:, :-1] if gradient.shape[1] > 1 else gradient[:-1], damping_A=1, damping_G=1)
    assert {form for form, _ in kinds} == {"diagonal", "kronecker", "block"}
    assert {rows for _, rows in kinds} == {policy == "all"}


def test_a_gradient_of_the_rows_themselves_keeps_its_digits() -> None:
    layer = layers("all")["2"]
    rows = layer.gradient_rows
    assert rows is not None
    inner = torch.randn(len(rows), 22, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = layer.precondition(inner, damping_A=1.0, damping_G=1e-9, of_rows=True)
    left, roots, right = torch.linalg.svd(rows.double(), full_matrices=False)
    pushed = right.T @ ((roots / (1e-9 + roots**2))[:, None] * (left.T @ inner))
    expected = pushed @ torch.linalg.inv(layer.A + torch.eye(22, dtype=torch.float64))
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_what_cannot_be_inverted_is_refused() -> None:
    layer = layers("dense")["2"]
    gradient = torch.ones(12, 22, dtype=torch.float64)
    with pytest.raises(ValueError, match="damping_G must be positive"):
        layer.precondition(gradient, damping_A=1e-3, damping_G=0.0)
    with pytest.raises(ValueError, match="keeps no gradient rows"):
        layer.precondition(gradient, damping_A=1e-3, damping_G=1e-3, of_rows=True)


@pytest.mark.parametrize(
    ("gradient", "got"), [("v", "str"), ([[1.0]], "list"), (torch.ones(12, 22) * 1j, r"a tensor of torch\.complex64")]
)
def test_a_gradient_is_a_tensor_of_real_numbers(gradient: Any, got: str) -> None:
    with pytest.raises(TypeError, match=rf"`gradient` must be a torch\.Tensor of real numbers, .*\(got {got}\)"):
        layers("dense")["2"].precondition(gradient, damping_A=1.0, damping_G=1.0)


@pytest.mark.parametrize("shape", [(50, 22), (22,), (12, 22)])
def test_a_gradient_of_other_rows_than_are_kept_is_refused(shape: tuple[int, ...]) -> None:
    layer = layers("all")["2"]
    with pytest.raises(WrongShape, match=r"layer `2`: with `of_rows`, `gradient` must have shape \(8, in_dim\), one"):
        layer.precondition(torch.ones(shape), damping_A=1.0, damping_G=1.0, of_rows=True)
