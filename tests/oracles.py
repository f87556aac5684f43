"""Dense float64 oracles: the generalised Gauss-Newton of the mean loss by autodiff, block by block."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.workspace import JobOptions, ModelInputs, Ports, Workspace


class MemoryArtifacts:
    """Artifacts kept in dictionaries."""

    def __init__(self) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self.tables: dict[str, Any] = {}

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self.tensors[name] = {key: tensor.clone() for key, tensor in tensors.items()}

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        if name not in self.tensors:
            raise FileNotFoundError(name)
        return self.tensors[name]

    def save_json(self, name: str, value: object) -> None:
        self.tables[name] = copy.deepcopy(value)

    def load_json(self, name: str) -> Any:
        if name not in self.tables:
            raise FileNotFoundError(name)
        return self.tables[name]

    def remove(self, name: str) -> None:
        self.tensors.pop(name, None)
        self.tables.pop(name, None)


COLLECTION: dict[str, Any] = {"fisher": "type2", "dtype": "float64", "batch_size": 4}
"""Options that a test does not name."""


def workspace(
    model: nn.Module, chunks: list[tuple[Any, ...]], task: str, loss: str | None = None, **options: Any
) -> Workspace:
    """A workspace over in-memory chunks; options are the collection's."""

    def batches() -> Iterator[tuple[Any, ...]]:
        return iter(chunks)

    return Workspace(
        inputs=ModelInputs(model=model, batches=batches, task=Task(type=task, loss=loss)),
        options=JobOptions(collection=Collection(**COLLECTION | options)),
        ports=Ports(artifacts=MemoryArtifacts()),
    )


def collect(
    model: nn.Module, chunks: list[tuple[Any, ...]], task: str, loss: str | None = None, **options: Any
) -> FactorSet:
    return collect_or_read(workspace(model, chunks, task, loss, **options))


def same_facts(left: FactorSet, right: FactorSet, tolerance: float = 1e-9) -> bool:
    """Whether two collections say the same of their layers; the sums behind a trace may differ by rounding."""
    plain = [
        [
            replace(
                layer,
                exact_trace=None,
                trace_standard_error=None,
                gradient_identity=None,
                examples_checked=None,
                checked_against=None,
                identity_tolerance=None,
                identity_tolerance_reason=None,
                sums=None,
            )
            for layer in each.layers
        ]
        for each in (left, right)
    ]
    traces = [
        torch.tensor([layer.exact_trace or 0.0 for layer in each.layers], dtype=torch.float64) for each in (left, right)
    ]
    return plain[0] == plain[1] and torch.allclose(*traces, rtol=tolerance, atol=0)


def kronecker(whole: FactorSet, name: str) -> Tensor:
    """G ⊗ A of a layer by name, dense."""
    (facts,) = [layer for layer in whole.layers if layer.name == name]
    factors = whole.load(facts.ordinal)
    a = torch.diag(factors.A) if factors.A.ndim == 1 else factors.A
    return torch.kron(factors.G, a)


def summed_loss(outputs: Tensor, targets: Tensor, loss: str) -> Tensor:
    """Sum over terms of one example's loss; mse and bce average over a term's outputs."""
    if loss == "cross_entropy":
        return nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1), reduction="sum")
    width = outputs.shape[-1]
    if loss == "mse":
        return (outputs - targets).square().sum() / width
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / width


def ggn_block(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: str,
    names: tuple[str, ...],
    arrange: Callable[[dict[str, Tensor]], Tensor],
) -> Tensor:
    """Σ_n J_nᵀ H_n J_n / (number of loss terms) for the parameters ``names``.

    ``arrange`` orders each output's Jacobian {name: (outputs, *shape)} into (outputs, P), the
    parameter order of the factors under test.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    total: Tensor | None = None
    terms = 0
    for example, target in zip(inputs, targets, strict=True):

        def output(own: dict[str, Tensor], example: Tensor = example) -> Tensor:
            return functional_call(model, {**parameters, **own}, (example[None],))[0]

        own = {name: parameters[name] for name in names}
        jacobian = jacrev(output)(own)
        at = output(own)
        curvature = hessian(lambda f, target=target: summed_loss(f, target, loss))(at)
        size = at.numel()
        flat = arrange({name: part.reshape(size, *parameters[name].shape) for name, part in jacobian.items()})
        block = flat.T @ curvature.reshape(size, size) @ flat
        total = block if total is None else total + block
        terms += at.numel() // at.shape[-1]
    assert total is not None
    return total / terms


def curvature_traces(model: nn.Module, inputs: Tensor, targets: Tensor, loss: str) -> dict[str, Tensor]:
    """tr(J_nᵀ H_n J_n) of every parameter by name, one number an example: not yet divided by the loss terms."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for example, target in zip(inputs, targets, strict=True):

        def output(own: dict[str, Tensor], example: Tensor = example) -> Tensor:
            return functional_call(model, own, (example[None],))[0]

        jacobian, at = jacrev(output)(parameters), output(parameters)
        size = at.numel()
        curvature = hessian(lambda f, target=target: summed_loss(f, target, loss))(at).reshape(size, size)
        for name, part in jacobian.items():
            flat = part.reshape(size, -1)
            found[name].append((curvature * (flat @ flat.T)).sum())
    return {name: torch.stack(each) for name, each in found.items()}


def gradient_squares(model: nn.Module, inputs: Tensor, targets: Tensor, loss: str) -> dict[str, Tensor]:
    """‖∇ℓ_n‖² of every parameter by name, one number an example."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def example_loss(own: dict[str, Tensor], example: Tensor, target: Tensor) -> Tensor:
        return summed_loss(functional_call(model, own, (example[None],))[0], target, loss)

    gradients = vmap(grad(example_loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
    return {name: gradient.flatten(1).square().sum(1) for name, gradient in gradients.items()}


def require_traces(model: nn.Module, whole: FactorSet, losses: Iterator[Tensor], terms: int) -> None:
    """Each layer's exact trace of the empirical Fisher is that of plain autograd, each example alone.

    ``losses`` makes the loss of one example after the other, summed over its terms.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    totals = dict.fromkeys(named, 0.0)
    for loss in losses:
        for name, part in zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True):
            totals[name] += 0.0 if part is None else float(part.square().sum())
    for layer in whole.layers:
        truth = sum(totals[name] for name in layer.parameters) / terms
        assert layer.exact_trace is not None, layer.name
        assert abs(layer.exact_trace - truth) <= 1e-10 * truth, (layer.name, layer.exact_trace, truth)


def row_vector(weight: str, bias: str | None) -> Callable[[dict[str, Tensor]], Tensor]:
    """Order (d_out, d_in + 1) with the bias as the last column."""

    def arrange(jacobian: dict[str, Tensor]) -> Tensor:
        matrix = jacobian[weight].flatten(2)
        if bias is not None:
            matrix = torch.cat([matrix, jacobian[bias].unsqueeze(-1)], -1)
        return matrix.flatten(1)

    return arrange


def stacked(*names: str) -> Callable[[dict[str, Tensor]], Tensor]:
    """Order the parameters one after the other."""
    return lambda jacobian: torch.cat([jacobian[name].flatten(1) for name in names], 1)


def relative_error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())
