"""The truth of a model at a batch size: plain autograd in float64, each example alone, with hooks of its own.

Of every linear layer A and G by their definition, of every parameter the second moment of its gradient. Beside them
the same of whole batches: where both are equal the batch size changes nothing, and where they are not examples depend
on each other. A model that draws random numbers gets, for an example alone, the numbers that it drew in the batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

SEED = 0
"""Of the collection, whose pass begins with it."""
_DRAWS = frozenset(
    [
        "rand",
        "randn",
        "rand_like",
        "randn_like",
        "bernoulli",
        "multinomial",
        "randperm",
        "normal",
        "randint",
        "dropout",
        "bernoulli_",
        "normal_",
        "uniform_",
        "exponential_",
    ]
)


@dataclass(kw_only=True)
class Sums:
    """What some examples add up to."""

    A: dict[str, Tensor] = field(default_factory=dict)
    """Σ a aᵀ of each linear layer that a gradient reaches."""
    G: dict[str, Tensor] = field(default_factory=dict)
    """Σ g gᵀ."""
    rows: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Σ ∇ℓ of each parameter."""
    outer: dict[str, Tensor] = field(default_factory=dict)
    """Σ ∇ℓ ∇ℓᵀ of each parameter, flattened."""

    def add(self, other: "Sums") -> None:
        for own, more in ((self.A, other.A), (self.G, other.G), (self.gradients, other.gradients)):
            for name, tensor in more.items():
                own[name] = own[name] + tensor if name in own else tensor
        for name, count in other.rows.items():
            self.rows[name] = self.rows.get(name, 0) + count
        for name, gradient in other.gradients.items():
            flat = gradient.flatten()
            self.outer[name] = self.outer.get(name, 0) + torch.outer(flat, flat)


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What must be measured of a model at one batch size."""

    alone: Sums
    """Over all examples, each alone in a model that is made anew."""
    examples: int
    off: Mapping[str, float]
    """How far the sums of whole batches are from those of single examples, of each parameter's layer."""
    outputs_off: float
    """The same of the model's outputs."""

    def has_gradient(self, parameter: str) -> bool:
        return bool(self.alone.outer[parameter].any())

    def second_moment(self, parameter: str) -> Tensor:
        """Σ ∇ℓ ∇ℓᵀ over single examples of a parameter, or of one of its slices, as ``name[0]`` stands for."""
        name, _, place = parameter.partition("[")
        outer = self.alone.outer[name]
        if not place:
            return outer
        size = self.alone.gradients[name][0].numel()
        own = slice(size * int(place[:-1]), size * (int(place[:-1]) + 1))
        return outer[own, own]


class Draws(TorchFunctionMode):
    """Keeps what a model draws in a batch, and gives an example alone its part of it."""

    def __init__(self, drawn: Sequence[Tensor] | None = None, place: int = 0) -> None:
        super().__init__()
        self.drawn: list[Tensor] = [] if drawn is None else list(drawn)
        self.replays = drawn is not None
        self.place, self.number = place, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name not in _DRAWS or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if name == "dropout":
            return args[0] * self._one(func(torch.ones_like(args[0]), *args[1:], **kwargs))
        if name.endswith("_"):
            return args[0].copy_(self._one(func(*args, **kwargs).clone()))
        fresh = self._one(func(*args, **kwargs))
        if name in {"randperm", "multinomial"}:
            # a place that an example alone does not have is not drawn for it
            places = args[0] if isinstance(args[0], int) else args[0].shape[-1]
            return fresh.clamp(max=places - 1)
        return fresh

    def _one(self, fresh: Tensor) -> Tensor:
        if not self.replays:
            self.drawn.append(fresh)
            return fresh
        kept = self.drawn[self.number]
        self.number += 1
        return kept if kept.shape == fresh.shape else kept[self.place : self.place + 1]


@contextmanager
def _hooked(net: nn.Module) -> Iterator[dict[str, list[tuple[Tensor, list[Tensor]]]]]:
    """Inputs and output gradients of every call of a linear layer."""
    calls: dict[str, list[tuple[Tensor, list[Tensor]]]] = {}
    handles = []
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):

            def after(module: nn.Linear, args: tuple[Tensor], output: Tensor, name: str = name) -> None:
                if output.requires_grad:
                    arrived: list[Tensor] = []
                    output.register_hook(lambda gradient: arrived.append(gradient.detach()))
                    calls.setdefault(name, []).append((args[0].detach().clone(), arrived))

            handles.append(module.register_forward_hook(after))
    yield calls
    for handle in handles:
        handle.remove()


def observe(net: nn.Module, x: Tensor, y: Tensor, draws: Draws) -> tuple[Sums, Tensor]:
    """Run some examples together there and back; returns their sums and outputs."""
    parameters = dict(net.named_parameters())
    with _hooked(net) as calls, draws:
        outputs = net(x)
        loss = functional.cross_entropy(outputs, y, reduction="sum")
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    sums = Sums()
    for name, gradient in zip(parameters, gradients, strict=True):
        sums.gradients[name] = torch.zeros_like(parameters[name]) if gradient is None else gradient
    for name, own in calls.items():
        for entered, arrived in own:
            if arrived and len(entered):
                a, g = (rows.reshape(-1, rows.shape[-1]) for rows in (entered, arrived[0]))
                a = torch.cat([a, a.new_ones(len(a), 1)], 1)
                sums.A[name] = sums.A.get(name, 0) + a.T @ a
                sums.G[name] = sums.G.get(name, 0) + g.T @ g
                sums.rows[name] = sums.rows.get(name, 0) + len(a)
    return sums, outputs.detach()


def find_truth(build: Callable[[], nn.Module], x: Tensor, y: Tensor, size: int) -> Truth:
    """Run every batch, and every example of it alone, each in a model that is made anew."""
    x, state = x.double() if x.is_floating_point() else x, torch.get_rng_state()
    alone, off, outputs_off = Sums(), {}, 0.0
    generator = torch.manual_seed(SEED).get_state()
    for start in range(0, len(x), size):
        parts, draws, whole = Sums(), Draws(), build().double().eval()
        # only forward passes over batches draw, one after the other
        torch.set_rng_state(generator)
        together, outputs = observe(whole, x[start : start + size], y[start : start + size], draws)
        generator = torch.get_rng_state()
        for place in range(len(outputs)):
            one = slice(start + place, start + place + 1)
            net = build().double().eval()
            own, output = observe(net, x[one], y[one], Draws(draws.drawn, place))
            parts.add(own)
            alone.add(own)
            outputs_off = max(outputs_off, distance(outputs[place], output[0]))
        for name in together.gradients:
            layer = name.rpartition(".")[0]
            sides = [
                (together.gradients, parts.gradients, name),
                (together.A, parts.A, layer),
                (together.G, parts.G, layer),
            ]
            pairs = [(a[key], b[key], _floor(b)) for a, b, key in sides if key in a and key in b]
            if together.rows.get(layer) != parts.rows.get(layer):
                off[name] = 1.0
            off[name] = max([off.get(name, 0.0), *(distance(*pair) for pair in pairs)])
    torch.set_rng_state(state)
    return Truth(alone=alone, examples=len(x), off=off, outputs_off=outputs_off)


def _floor(tensors: Mapping[str, Tensor]) -> float:
    """A thousandth of the largest of some tensors: what is far below it is rounding, a gradient that cancels."""
    return 1e-3 * max(float(each.norm()) for each in tensors.values())


def distance(found: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """‖found − truth‖ / (‖truth‖ + floor)."""
    difference = float((found.double() - truth.double()).norm())
    return difference / max(float(truth.double().norm()) + floor, 1e-30) if difference else 0.0
