"""Nets of one to a hundred parameters, and curvatures of small rank, have the spectra of their dense matrices."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from catalog.analyses.spectrum import SpectrumParams
from engine.analyses.spectrum import Spectrum
from tests.oracles import workspace


def classify(features: int, classes: int, count: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, features, generator=drawn, dtype=torch.float64)
    return inputs, torch.randint(0, classes, (count,), generator=drawn)


def regress(features: int, outputs: int, count: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(6)
    return tuple(torch.randn(count, size, generator=drawn, dtype=torch.float64) for size in (features, outputs))  # type: ignore[return-value] # two of them


def dead() -> nn.Module:
    """No example reaches its first layer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    return model


def perceptron(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(widths[0], widths[1])]
    for before, after in itertools.pairwise(widths[1:]):
        layers += [nn.Tanh(), nn.Linear(before, after)]
    return nn.Sequential(*layers)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor], str]] = {
    "1 parameter": (lambda: nn.Linear(1, 1, bias=False), regress(1, 1, 12), "regression"),
    "2 parameters": (lambda: nn.Linear(1, 1), regress(1, 1, 12), "regression"),
    "4 parameters of rank 2": (lambda: nn.Linear(1, 2), classify(1, 2, 12), "classification"),
    "16 parameters of rank 6": (lambda: nn.Linear(3, 4), classify(3, 4, 2), "classification"),
    "39 parameters": (lambda: perceptron(5, 4, 3), classify(5, 3, 12), "classification"),
    "39 parameters of one example": (lambda: perceptron(5, 4, 3), classify(5, 3, 1), "classification"),
    "a dead layer": (dead, classify(4, 2, 20), "classification"),
    "100 parameters": (lambda: perceptron(3, 8, 6, 2), regress(3, 2, 5), "regression"),
}


def dense(model: nn.Module, batch: tuple[Tensor, Tensor], task: str, of: str) -> Tensor:
    names = [name for name, _ in model.named_parameters()]
    shapes = [parameter.shape for parameter in model.parameters()]
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    measure = nn.functional.cross_entropy if task == "classification" else nn.functional.mse_loss

    def outputs(vector: Tensor, inputs: Tensor) -> Tensor:
        parts = vector.split([shape.numel() for shape in shapes])
        named = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return functional_call(model, named, (inputs,))  # type: ignore[no-any-return]

    def loss(vector: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return measure(outputs(vector, inputs), targets)

    if of == "hessian":
        return torch.autograd.functional.hessian(lambda vector: loss(vector, *batch), flat)
    if of == "empirical":
        each = [(batch[0][place : place + 1], batch[1][place : place + 1]) for place in range(len(batch[0]))]
        jacobian = torch.autograd.functional.jacobian
        rows = torch.stack([jacobian(lambda vector, own=own: loss(vector, *own), flat) for own in each])
        return rows.T @ rows / len(each)
    jacobian_of = torch.autograd.functional.jacobian(lambda vector: outputs(vector, batch[0]), flat)
    return torch.einsum("nap,nab,nbq->pq", jacobian_of, _of_loss(outputs(flat, batch[0]), task), jacobian_of)


def _of_loss(predicted: Tensor, task: str) -> Tensor:
    """The loss's Hessian of each example's outputs, over the examples."""
    count, size = predicted.shape
    if task == "regression":
        return (2 / size / count) * torch.eye(size, dtype=torch.float64).expand(count, -1, -1)
    chances = predicted.softmax(-1)
    return (torch.diag_embed(chances) - chances[:, :, None] * chances[:, None, :]) / count


@pytest.mark.part(of=32, by=("of",))
@pytest.mark.parametrize("of", ["hessian", "ggn", "fisher", "empirical"])
@pytest.mark.parametrize("case", CASES)
def test_small_nets_have_the_spectrum_of_the_dense_matrix(case: str, of: Any) -> None:
    make, batch, task = CASES[case]
    torch.manual_seed(0)
    model = make().double()
    params = SpectrumParams(of=of, tolerance=1e-9, density=False, trace="none")
    space = workspace(model, [batch], task)  # type: ignore[arg-type] # either of the two
    space.options.kinds, space.options.params = ("spectrum",), {"spectrum": params}
    space.options.decomposition = params.decomposition
    analysis = Spectrum(params, space).rows()
    while True:
        try:
            next(analysis)
        except StopIteration as end:
            (found,) = end.value.curvatures
            break
    size = sum(parameter.numel() for parameter in model.parameters())
    assert found.dimension == size
    assert len(found.largest) == len(found.smallest) == min(10, size)
    # products with labels that are drawn have no dense matrix but the one they make
    if of == "fisher":
        assert all(each.converged and each.value >= -each.bound for each in (*found.largest, *found.smallest))
        return
    true = torch.linalg.eigvalsh(dense(model, batch, task, of))
    for ends, values in ((found.largest, true.flip(0)), (found.smallest, true)):
        for each, value in zip(ends, values.tolist(), strict=False):
            assert each.converged
            assert abs(each.value - value) <= each.bound + 1e-12 * float(true.abs().max())
            assert each.bound <= 1e-6 * float(true.abs().max())
