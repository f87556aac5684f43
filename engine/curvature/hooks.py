"""Hooks: watch a model's treated layers, and leave the model exactly as it was found.

No weight gradient is ever computed: every parameter is set to need none, and an output that then
needs none either is made a leaf that does, so that gradients with respect to *outputs* flow and
nothing else. They are bitwise the same and cost about half the backward pass.
"""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.curvature.layers.convolution import ConvolutionLayer
from engine.curvature.layers.embedding import EmbeddingLayer
from engine.curvature.layers.layer import BlockLayer, TreatedLayer
from engine.curvature.layers.linear import LinearLayer
from engine.curvature.statistics import LayerStatistics
from engine.errors import Unwinding


class SharingBroken(Unwinding):
    """A layer that shared its input with another in the first batch no longer does."""

    def __init__(self, follower: LayerStatistics) -> None:
        super().__init__(follower.layer.name)
        self.follower = follower


@contextlib.contextmanager
def untouched(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Run ``model`` in ``eval()`` at ``dtype`` without parameter gradients; restore everything.

    Flags, modes, weights, buffers, `.grad`s, hooks and the generators' state are as before
    afterwards, whatever happens inside.
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    contents = [
        (tensor, tensor.data)
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.is_floating_point() and tensor.dtype != dtype
    ]
    precision = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            model.eval()
            for parameter, _ in flags:
                parameter.requires_grad_(False)
            for tensor, data in contents:
                tensor.data = data.to(dtype)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = precision
            for tensor, data in contents:
                tensor.data = data
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
            for module, training in modes:
                module.training = training


@dataclass
class Call:
    """One call of a treated layer, seen in the dry run."""

    layer: TreatedLayer
    entered: Tensor
    output: Tensor


@contextlib.contextmanager
def watched(layers: tuple[TreatedLayer, ...]) -> Iterator[list[Call]]:
    """List every call of ``layers``, in order; holds the tensors until the list is dropped."""
    calls: list[Call] = []

    def watch(layer: TreatedLayer) -> Any:  # noqa: ANN401 - torch's hook signature
        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ANN401
            calls.append(Call(layer, _entered(args, kwargs), output))

        return after

    handles = [layer.module.register_forward_hook(watch(layer), with_kwargs=True) for layer in layers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    entered = args[0] if args else next(iter(kwargs.values()))
    if not isinstance(entered, Tensor):
        raise TypeError(f"a treated layer was called with {type(entered).__name__} instead of a tensor")
    return entered


@dataclass
class Collector:
    """Attached hooks: each call of a treated layer adds to its statistics."""

    statistics: tuple[LayerStatistics, ...]
    examples: int = 0
    """Examples of the current batch."""
    positions: Tensor | None = None
    """(N, T) booleans of the current batch; None where all positions count."""
    _inputs: dict[int, "weakref.ref[Tensor]"] = field(default_factory=dict)
    _calls: dict[int, int] = field(default_factory=dict)

    def begin(self, examples: int, positions: Tensor | None) -> None:
        """Prepare for one batch."""
        self.examples = examples
        self.positions = None if positions is None or bool(positions.all()) else positions
        self._inputs.clear()
        self._calls.clear()

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the layers while inside."""
        handles = [
            statistics.layer.module.register_forward_hook(self._after(statistics), with_kwargs=True)
            for statistics in self.statistics
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after(self, statistics: LayerStatistics) -> Any:  # noqa: ANN401 - torch's hook signature
        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            entered = _entered(args, kwargs)
            calls = self._calls[id(statistics)] = self._calls.get(id(statistics), 0) + 1
            statistics.calls = max(statistics.calls, calls)
            self._check_sharing(statistics, entered, calls)
            if statistics.flaw is None and not statistics.layer.batch_first(entered, self.examples):
                statistics.flaw = "batch_not_first"
            if statistics.flaw is not None:
                return None
            kept = self._kept(statistics.layer, entered.detach())
            statistics.add_input_(entered.detach(), self.examples, kept)
            return self._follow(statistics, entered, output, kept)

        return after

    def _check_sharing(self, statistics: LayerStatistics, entered: Tensor, calls: int) -> None:
        self._inputs[id(statistics)] = weakref.ref(entered)
        if statistics.leader is None:
            return
        known = self._inputs.get(id(statistics.leader))
        if calls > 1 or known is None or known() is not entered:
            raise SharingBroken(statistics)

    def _kept(self, layer: TreatedLayer, entered: Tensor) -> Tensor | None:
        """(P,) booleans of the positions that count for this call."""
        kept = None
        count = entered.numel() if isinstance(layer, EmbeddingLayer) else entered.numel() // layer.fan_in
        # a layer after pooling has other positions than the tokens, and all of them count
        if self.positions is not None and count == self.positions.numel() and not isinstance(layer, ConvolutionLayer):
            kept = self.positions.reshape(-1)
        if isinstance(layer, EmbeddingLayer) and layer.module.padding_idx is not None:
            # the padding row gets no gradient, whatever arrives at it
            real = entered.reshape(-1) != layer.module.padding_idx
            kept = real if kept is None else kept & real
        return kept

    def _follow(
        self, statistics: LayerStatistics, entered: Tensor, output: Tensor, kept: Tensor | None
    ) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        examples = self.examples
        # only a block layer's gradient needs its input again
        held = entered.detach() if isinstance(statistics.layer, BlockLayer) else None

        def arrived(gradient: Tensor) -> None:
            statistics.add_gradient_(gradient, held, examples, kept)

        if output.requires_grad:
            output.register_hook(arrived)  # type: ignore[no-untyped-call]
            return None
        leaf = output.detach().requires_grad_()
        leaf.register_hook(arrived)  # type: ignore[no-untyped-call]
        # a copy, since the next operation may work in place and a leaf forbids that
        return leaf.clone()


def followers(calls: list[Call]) -> dict[str, str]:
    """Layers that are fed by the very tensor another layer got first: follower → leader.

    Only linear layers with the same column of ones share; identity of the tensor decides, never
    equality of its values.
    """
    count: dict[str, int] = {}
    for call in calls:
        count[call.layer.name] = count.get(call.layer.name, 0) + 1
    leaders: dict[tuple[int, bool, bool], str] = {}
    shared: dict[str, str] = {}
    for call in calls:
        layer = call.layer
        if not isinstance(layer, LinearLayer) or count[layer.name] > 1:
            continue
        key = (id(call.entered), layer.weight, layer.bias)
        if key in leaders:
            shared[layer.name] = leaders[key]
        else:
            leaders[key] = layer.name
    return shared
