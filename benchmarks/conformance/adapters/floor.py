"""The floor: what no collection of A and G can do without.

One forward pass, one backward pass without weight gradients, and one triangle of each distinct
AᵀA and GᵀG, in the strips that torch multiplies fastest here (tried out beforehand, for each
shape). Whatever else a collection needs is free: patches of convolutions stand ready, the
direction that is pulled back is given, positions that are padding are left out (the copy that
leaves them out is counted), nothing is checked, no label is drawn, no bias column kept.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.conformance.problem import Factors, Problem, Stream

PACKAGE = "torch"
_STRIPS = (1, 2, 4, 6, 8, 12, 16)


@dataclass
class _Triangle:
    """One sum, and the strips in which it is fastest."""

    total: Tensor
    strips: int

    def add(self, rows: Tensor) -> None:
        """Add the upper triangle of ``rowsᵀ rows``."""
        _add(self.total, rows, self.strips)


@dataclass
class _Watch:
    """What the hooks share during one pass."""

    positions: Tensor | None
    patches: dict[str, Tensor] = field(default_factory=dict)
    triangles: dict[tuple[str, str], _Triangle] = field(default_factory=dict)
    entered: dict[int, Tensor] = field(default_factory=dict)
    """What the layers were fed in this pass, by identity; held, so that no other tensor gets its identity."""
    fastest: dict[tuple[int, int], int] = field(default_factory=dict)

    def rows(self, tensor: Tensor) -> Tensor:
        """Positions that count, as rows."""
        rows = tensor.flatten(2).transpose(1, 2) if tensor.ndim == 4 else tensor
        rows = rows.reshape(-1, rows.shape[-1])
        if self.positions is not None and self.positions.numel() == rows.shape[0]:
            return rows[self.positions]
        return rows

    def add(self, name: str, side: str, rows: Tensor) -> None:
        """Add to the sum of that side; at its first time, find out how."""
        key = name, side
        if key not in self.triangles:
            shape = tuple(rows.shape)
            if shape not in self.fastest:
                self.fastest[shape] = _fastest(rows)
            self.triangles[key] = _Triangle(rows.new_zeros(rows.shape[1], rows.shape[1]), self.fastest[shape])
        self.triangles[key].add(rows)


def collect(problem: Problem, stream: Stream) -> Factors:
    """One triangle of each sum, not normalised, by layer; a shared A stands at its first layer alone."""
    model = problem.model.requires_grad_(requires_grad=False)
    inputs, _ = next(iter(stream))
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    watch = _Watch(positions=None if mask is None or bool(mask.all()) else mask.bool().reshape(-1))
    with torch.no_grad():
        _prepare(problem, watch, inputs)
        direction = torch.randn_like(problem.outputs(model, inputs))
    handles = [_hook(watch, name, model.get_submodule(name)) for name in problem.layers]
    for batch, _ in stream:
        watch.entered.clear()
        torch.autograd.backward(problem.outputs(model, batch), direction)
    for handle in handles:
        handle.remove()
    empty = torch.empty(0)
    return {
        name: tuple(watch.triangles[name, side].total if (name, side) in watch.triangles else empty for side in "AG")
        for name in problem.layers
    }  # type: ignore[return-value]


def _prepare(problem: Problem, watch: _Watch, inputs: object) -> None:
    """Copy out every convolution's patches."""

    def copy(name: str) -> object:
        def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if isinstance(module, nn.Conv2d):
                unfolded = functional.unfold(
                    args[0], module.kernel_size, module.dilation, module.padding, module.stride
                )
                watch.patches[name] = unfolded.transpose(1, 2).reshape(-1, unfolded.shape[1])

        return before

    handles = [
        problem.model.get_submodule(name).register_forward_pre_hook(copy(name))  # type: ignore[arg-type]
        for name in problem.layers
    ]
    problem.outputs(problem.model, inputs)
    for handle in handles:
        handle.remove()


def _hook(watch: _Watch, name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
    def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if id(args[0]) not in watch.entered:
            watch.entered[id(args[0])] = args[0]
            patches = watch.patches.get(name)
            watch.add(name, "A", watch.rows(args[0].detach()) if patches is None else patches)

        def arrived(gradient: Tensor) -> None:
            watch.add(name, "G", watch.rows(gradient))

        hooked = output if output.requires_grad else output.detach().requires_grad_()
        hooked.register_hook(arrived)
        return None if hooked is output else hooked

    return module.register_forward_hook(after)


def _fastest(rows: Tensor) -> int:
    """The number of strips that takes the least time for rows of this shape."""
    total = rows.new_zeros(rows.shape[1], rows.shape[1])
    seconds = {}
    for strips in _STRIPS:
        begun = time.process_time()
        _add(total, rows, strips)
        seconds[strips] = time.process_time() - begun
    return min(seconds, key=seconds.__getitem__)


def _add(total: Tensor, rows: Tensor, strips: int) -> None:
    size = total.shape[0]
    height = -(-size // strips)
    for start in range(0, size, height):
        stop = min(start + height, size)
        total[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])
