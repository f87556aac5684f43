"""Activations: what autograd saves of a forward pass until the backward pass, and how to save less.

What is saved is traced, not guessed: two forward passes of very few examples say how many bytes do
not depend on their number, and how many each adds. Checkpointing keeps only what enters each of a
model's repeated layers, and computes the inside of one again when the gradients arrive there.

Hugging Face's checkpointing layers are recomputed by torch directly. Their own switch works in
training mode alone, which would turn on whatever else a layer does in training, dropout for one.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.curvature.batches import tensors
from engine.curvature.storages import identity, storage_of

_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Arguments by which a layer hands keys and values on; running it twice would hand them on twice."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes that autograd holds between the two passes: some at any size, and some for each example."""

    fixed_bytes: int
    example_bytes: int

    def of(self, examples: int) -> int:
        """Bytes for so many examples."""
        return self.fixed_bytes + examples * self.example_bytes


@dataclass
class _Trace:
    """Storages held by one forward pass, by the checkpointing layer they are saved in (None outside)."""

    within: str | None = None
    held: dict[str | None, dict[int, int]] = field(default_factory=dict)
    entered: dict[int, int] = field(default_factory=dict)
    """Storages that enter checkpointing layers."""
    wanted: dict[int, int] = field(default_factory=dict)
    """Inputs of treated layers that are held until their gradients arrive."""
    met: int = 0
    """Most bytes at once where the gradients of a treated layer arrive: what was saved up to its call, its
    gradients, and a copy of each."""
    kept: list[Any] = field(default_factory=list)
    """The storages themselves: another one must not come to stand at the place of one let go."""

    def hold(self, tensor: Tensor, known: frozenset[int]) -> None:
        """Count a tensor's storage once."""
        storage = tensor.untyped_storage()
        self.kept.append(storage)
        if identity(storage) not in known:
            self.held.setdefault(self.within, {})[identity(storage)] = storage.nbytes()

    def storages(self, tree: Any) -> dict[int, int]:  # noqa: ANN401 - what a module was given
        """Identity and bytes of each storage of ``tree``."""
        found = [tensor.untyped_storage() for tensor in tensors(tree) if tensor.layout == torch.strided]
        self.kept += found
        return {identity(storage): storage.nbytes() for storage in found}

    @property
    def plain(self) -> int:
        """Bytes held without checkpointing."""
        together = dict(self.wanted)
        for group in self.held.values():
            together |= group
        return sum(together.values())

    @property
    def checkpointed(self) -> int:
        """Bytes held with it: what is outside, what enters each layer, and the inside of the largest."""
        inside = max((sum(group.values()) for within, group in self.held.items() if within is not None), default=0)
        return sum((self.held.get(None, {}) | self.entered | self.wanted).values()) + inside


def checkpointing_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The model's repeated layers that offer to be computed again, by name; told by name, as torch suffices here."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(
            cls.__name__ == "GradientCheckpointingLayer" and cls.__module__.startswith("transformers.")
            for cls in type(module).__mro__
        )
    }


@contextlib.contextmanager
def checkpointed(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Compute the inside of every checkpointing layer again in the backward pass, where that is ``wanted``."""
    layers = list(checkpointing_layers(model).values()) if wanted else []
    before = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = _recomputed(layer.forward)
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                vars(layer).pop("forward", None)
            else:
                layer.forward = own


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the layer takes and gives
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        for given in (bound.arguments, *(value for value in bound.arguments.values() if isinstance(value, dict))):
            given.update({name: None for name in _CACHES if name in given})
            if "use_cache" in given:
                given["use_cache"] = False
        return checkpoint(forward, *bound.args, use_reentrant=False, **bound.kwargs)

    return run


def traced(
    run: Callable[[int], object],
    sizes: tuple[int, ...],
    model: nn.Module,
    watched: Mapping[nn.Module, bool],
) -> tuple[Saved, Saved | None, Saved]:
    """What ``run`` of so many examples saves; with checkpointing, where offered; and what is held on the way back.

    ``watched`` are the modules of treated layers, and whether their inputs are held, too.

    Memory:
        What is saved of the largest of ``sizes``.
    """
    traces = [_trace(run, size, model, watched) for size in sizes]
    offered = bool(checkpointing_layers(model))
    plain = _fit(sizes, [trace.plain for trace in traces])
    met = _fit(sizes, [trace.met for trace in traces])
    return plain, _fit(sizes, [trace.checkpointed for trace in traces]) if offered else None, met


def _fit(sizes: tuple[int, ...], held: list[int]) -> Saved:
    """The line through the first and the last; through the origin where there is one size alone."""
    if len(sizes) == 1:
        return Saved(fixed_bytes=0, example_bytes=-(-held[0] // sizes[0]))
    each = max(0, -((held[0] - held[-1]) // (sizes[-1] - sizes[0])))
    return Saved(fixed_bytes=max(0, held[0] - sizes[0] * each), example_bytes=each)


def _trace(run: Callable[[int], object], size: int, model: nn.Module, watched: Mapping[nn.Module, bool]) -> _Trace:
    trace = _Trace()
    # weights are there anyway, and counted as such
    known = frozenset(
        storage_of(tensor) for tensor in (*model.parameters(), *model.buffers()) if tensor.layout == torch.strided
    )

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            trace.hold(tensor, known)
        # the tensor itself would hold the graph that holds it, for ever, where an operation saves its own output
        return tensor.detach()

    def follow(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401 - torch's hook signature
        if watched[module]:
            trace.wanted |= trace.storages(args[:1])
        # what is saved later has been let go of by then
        gradients = sum(
            tensor.nbytes for tensor in (*tensors(args[:1]), *tensors(output)) if tensor.is_floating_point()
        )
        trace.met = max(trace.met, trace.plain + 2 * gradients)
        if isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
            # what the collection does: gradients of outputs alone
            return output.detach().requires_grad_().clone()
        return None

    handles = [module.register_forward_hook(follow) for module in watched]
    for name, layer in checkpointing_layers(model).items():
        handles += [
            layer.register_forward_pre_hook(functools.partial(_enter, trace, name)),
            layer.register_forward_hook(functools.partial(_leave, trace)),
        ]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            held = run(size)
        del held
    finally:
        for handle in handles:
            handle.remove()
    return trace


def _enter(trace: _Trace, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
    trace.within = name
    trace.entered |= trace.storages(args[:1])


def _leave(trace: _Trace, *_: object) -> None:
    trace.within = None
