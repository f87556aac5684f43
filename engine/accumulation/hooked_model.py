"""Hooked model: the hooks on modules and the watch over parameters, attached together and removed together.

Parameters may be read outside the calls of the modules that hold them. A head may multiply by its table's weight
without being a module, a module may keep another's parameter under a name of its own (BERT's prediction head, its
decoder's bias), to use it or not, and a model may call a module with other weights in the place of its own
(``functional_call``). A hook on the module sees none of that. Autograd does: outside its own module's call every
parameter is a *stand-in*, a leaf of the graph over the same numbers. A gradient that arrives there is one that the
module's rows leave out, whatever the way there (``where``, ``nan_to_num``, a rounding with a gradient of its own).
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from engine.accumulation.layer_statistics import LayerStatistics
from engine.layers.coverage import Alias
from engine.layers.layer import TreatedLayer
from engine.row_layout.attention_masks import RECOMPUTED, Key
from engine.row_layout.layer_calls import called
from engine.tracing.function_mode import ParameterUseMode


class StandIn:
    """A leaf over the numbers of a parameter, which holds the parameter's place outside its module's calls."""

    def __init__(self, layer: str, module: nn.Module, key: str) -> None:
        self.layer = layer
        self.replaced = False
        """The module was called with something else in the parameter's place."""
        self._own, self._key = module._parameters, key  # noqa: SLF001 - own parameters, whatever holds them too
        kept = self._own[key]
        if kept is None:
            raise ValueError(f"there is no `{key}` to stand in for")
        self._kept = kept
        self.leaf = nn.Parameter(kept.detach())

    def when_reached(self, call: Callable[[Tensor], None]) -> RemovableHandle:
        """Call a function of the leaf when a gradient has reached it: of the parameter's shape, its ``grad`` set.

        The handle removes the hook.
        """
        handle: RemovableHandle = self.leaf.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
        return handle

    def lay(self, *_: object) -> None:
        """Put the stand-in in the parameter's place, unless something else is there."""
        if self._own[self._key] is self._kept:
            self._own[self._key] = self.leaf

    def lift(self, *_: object) -> None:
        """Put the parameter back, and note where something else has been put in its place."""
        if self._own[self._key] is self.leaf:
            self._own[self._key] = self._kept
        elif self._own[self._key] is not self._kept:
            self.replaced = True


@contextlib.contextmanager
def install_stand_ins(layers: Sequence[TreatedLayer], aliases: Sequence[Alias] = ()) -> Iterator[list[StandIn]]:
    """Put stand-ins in the place of the layers' parameters, except while a module that holds them is called.

    ``aliases`` are second names of the parameters, on modules that are taken not to use them.
    """
    stand_ins: list[StandIn] = []
    with contextlib.ExitStack() as stack:
        for layer, module, key in _places(layers):
            stand_in = StandIn(layer, module, key)
            stand_ins.append(stand_in)
            stack.callback(stand_in.lift)
            # what hooks of the caller's do is not part of what the module computes
            for handle in (
                module.register_forward_pre_hook(stand_in.lift),
                module.register_forward_hook(stand_in.lay, prepend=True, always_call=True),
            ):
                stack.callback(handle.remove)
            stand_in.lay()
        for alias in aliases:
            stand_in = StandIn(alias.layer, alias.module, alias.key)
            stand_ins.append(stand_in)
            stack.callback(stand_in.lift)
            stand_in.lay()
        yield stand_ins


def find_shared_parameters(
    layers: Sequence[TreatedLayer],
    aliases: Sequence[Alias],
    run: Callable[[], Tensor],
    within: contextlib.AbstractContextManager[object] | None = None,
) -> frozenset[str]:
    """Find the layers whose parameters a model also reads outside their modules' calls.

    Args:
        layers: Layers that modules' calls show.
        aliases: Second names of their parameters.
        run: Runs the model and returns its outputs, shape (N, …), with a graph.
        within: What ``run`` runs the model in, for what activation checkpointing runs again; None for nothing.

    Memory:
        What autograd saves of a run, from such uses on; and their gradients.
    """
    names = {layer.name for layer in layers}
    with (
        install_stand_ins(layers, [alias for alias in aliases if alias.layer in names]) as stand_ins,
        torch.enable_grad(),
    ):
        outputs = run()
        replaced = frozenset(each.layer for each in stand_ins if each.replaced)
        if not outputs.requires_grad:
            return replaced
        with within or contextlib.nullcontext():
            # shown tensors, torch would take this for an operation, inside which no mode is active
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                [get_gradient_edge(outputs)],
                [get_gradient_edge(each.leaf) for each in stand_ins],
                [torch.ones_like(outputs)],
                allow_unused=True,
            )
    reached = (each.layer for each, gradient in zip(stand_ins, gradients, strict=True) if gradient is not None)
    return replaced | frozenset(reached)


def _places(layers: Sequence[TreatedLayer]) -> Iterator[tuple[str, nn.Module, str]]:
    for layer in layers:
        for role in layer.roles:
            for module in (role.module, *role.also.values()):
                for key, covered in (("weight", role.weight), ("bias", role.bias)):
                    if covered and isinstance(module._parameters.get(key), nn.Parameter):  # noqa: SLF001 - its own
                        yield layer.name, module, key


@dataclass
class CallCounts:
    """The calls of one forward pass, and of what runs again while the gradients return.

    A call counts once, though activation checkpointing runs a layer again during the backward
    pass. A call without a graph does not count, unless that is how the checkpoint runs it first:
    then the second run counts.
    """

    gradients: bool
    """Gradients are wanted: a call without a graph does not contribute to the loss."""
    returning: bool = False
    """The backward pass has begun."""
    _calls: Counter[str] = field(default_factory=Counter)
    """Calls of each layer in the forward pass."""
    _ungraphed: Counter[str] = field(default_factory=Counter)
    """Those of them that left no graph."""
    _numbers: Counter[str] = field(default_factory=Counter)
    """Calls of each part of a layer in the forward pass."""

    def begin(self) -> None:
        """Prepare for one forward pass."""
        self.returning = False
        for record in (self._calls, self._ungraphed, self._numbers):
            record.clear()

    def of(self, name: str) -> int:
        """Return how often a layer was called in the forward pass so far."""
        return self._calls[name]

    def count(self, name: str) -> bool:
        """Note one call of a layer."""
        graphed = torch.is_grad_enabled() or not self.gradients
        if self.returning:
            again = graphed and self._ungraphed[name] > 0
            self._ungraphed[name] -= again
            return again
        self._calls[name] += 1
        self._ungraphed[name] += not graphed
        return graphed

    def key(self, part: str) -> Key:
        """Number the call under way."""
        if self.returning:
            return part, RECOMPUTED
        self._numbers[part] += 1
        return part, self._numbers[part] - 1


@contextlib.contextmanager
def hooked(
    statistics: Sequence[LayerStatistics],
    after: Callable[[LayerStatistics, TreatedLayer], Any],
    use_mode: ParameterUseMode | None,
) -> Iterator[None]:
    """Watch layers while inside."""
    # before the caller's own hooks, which may put something else in the output's place
    handles = [
        module.register_forward_hook(after(each, role), with_kwargs=True, prepend=True)
        for each in statistics
        for role, module in called((each.layer,))
    ]
    by_name = {each.layer.name: each for each in statistics}

    def arrived(stand_in: StandIn, leaf: Tensor) -> None:
        leaf.grad = None
        by_name[stand_in.layer].flaw = by_name[stand_in.layer].flaw or "unforeseen_use"

    try:
        with install_stand_ins([each.layer for each in statistics]) as stand_ins:
            # removed again: a leaf and its hook hold each other, and with them the statistics
            handles += [each.when_reached(partial(arrived, each)) for each in stand_ins]
            with use_mode.watching() if use_mode else contextlib.nullcontext():
                yield
            for stand_in in stand_ins:
                if stand_in.replaced:
                    arrived(stand_in, stand_in.leaf)
    finally:
        for handle in handles:
            handle.remove()
