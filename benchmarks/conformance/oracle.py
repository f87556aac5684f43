"""The oracle: A and G by definition, in float64, of a model in which every layer is a plain linear map.

A case states what its layer is by a second model that computes the same with ``nn.Linear`` over
explicitly gathered positions (patches of a convolution, slices of a group, one-hot tokens). There
nothing is left to interpret: A is the mean of ``[a 1]ᵀ[a 1]`` over the positions that count, and G
the sum of ``gᵀg`` over them, divided by the loss terms.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.conformance.problem import Problem


@dataclass
class _Uses:
    """What entered and left one layer, call by call."""

    inputs: list[Tensor]
    outputs: list[Tensor]


def blocks(
    problem: Problem,
    plain: nn.Module,
    names: tuple[str, ...],
    batch: tuple[Any, Tensor],
    positions: Tensor | None = None,  # (N, T) booleans of those that count
) -> list[tuple[Tensor, Tensor]]:
    """A and G of the linear layers ``names`` of ``plain``; calls of one layer are summed."""
    uses = {name: _Uses([], []) for name in names}

    def watch(name: str) -> Any:  # noqa: ANN401 - torch's hook signature
        def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            output.retain_grad()
            uses[name].inputs.append(args[0].detach())
            uses[name].outputs.append(output)

        return after

    handles = [plain.get_submodule(name).register_forward_hook(watch(name)) for name in names]
    inputs, targets = batch
    outputs = problem.outputs(plain, inputs)
    problem.summed_loss(outputs, targets).backward()
    for handle in handles:
        handle.remove()
    terms = int((problem.labels(targets) != problem.ignore_index).sum())
    found = []
    for name in names:
        bias = plain.get_submodule(name).bias is not None
        a = torch.cat([_rows(entered, positions) for entered in uses[name].inputs])
        g = torch.cat([_rows(left.grad, positions) for left in uses[name].outputs if left.grad is not None])
        if bias:
            a = torch.cat([a, a.new_ones(a.shape[0], 1)], 1)
        found.append((a.T @ a / a.shape[0], g.T @ g / terms))
    return found


def _rows(tensor: Tensor, positions: Tensor | None) -> Tensor:
    rows = tensor.reshape(-1, tensor.shape[-1])
    counted = positions is not None and positions.numel() == rows.shape[0]
    return rows[positions.reshape(-1)] if positions is not None and counted else rows


def example_block(problem: Problem, model: nn.Module, names: tuple[str, ...], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Σ ∇ₙ∇ₙᵀ / N over whole parameters: what an exact block must be."""
    inputs, targets = batch
    total = None
    for row in range(len(inputs)):
        model.zero_grad()
        # twice, and halved: torch 2.13 misreads a batch norm's gradient on a batch of one, whose
        # memory order it cannot tell
        pair = inputs[[row, row]], targets[[row, row]]
        (problem.summed_loss(problem.outputs(model, pair[0]), pair[1]) / 2).backward()
        gradient = torch.cat([model.get_parameter(name).grad.flatten() for name in names])  # type: ignore[union-attr]
        outer = torch.outer(gradient, gradient)
        total = outer if total is None else total + outer
    if total is None:
        raise ValueError("a block needs an example")
    return total / len(inputs)


def patches(padded: Tensor, kernel: tuple[int, ...], stride: int, dilation: int) -> Tensor:
    """Patches (N, positions, C·k) of an already padded input (N, C, …), gathered one by one."""
    extents = [
        (size - dilation * (width - 1) - 1) // stride + 1 for size, width in zip(padded.shape[2:], kernel, strict=True)
    ]
    rows = []
    for place in torch.cartesian_prod(*[torch.arange(extent) for extent in extents]).reshape(-1, len(extents)).tolist():
        window = padded
        for axis, (start, width) in enumerate(zip(place, kernel, strict=True)):
            picked = torch.arange(width) * dilation + start * stride
            window = window.index_select(2 + axis, picked)
        rows.append(window.flatten(1))
    return torch.stack(rows, 1)
