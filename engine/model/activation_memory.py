"""Activation memory: the bytes that autograd saves between the two passes, and a way to save fewer.

What is saved is traced, not guessed: two forward passes of very few examples say how many bytes do
not depend on their number, and how many each adds. Checkpointing keeps only what enters each of a
model's repeated layers, and computes the inside of one again when the gradients arrive there.

Hugging Face's checkpointing layers are recomputed by torch directly. Their own switch works in
training mode alone, which would turn on whatever else a layer does in training, dropout for one.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.model.batches import tensors


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Return a number that tells one living storage from another."""
    return int(storage._cdata)  # noqa: SLF001 - torch's own identity of it, with no other name


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage.

    Args:
        tensor: A strided tensor of any shape.

    Returns:
        The same number for all views of one tensor.
    """
    return storage_identity(tensor.untyped_storage())


def detach_view(tensor: Tensor) -> Tensor:
    """Return a tensor as a view of nothing, over the same numbers.

    A hook on a view is passed by where a model writes to another view of the same tensor: autograd then takes up the
    history at what both are views of.

    Args:
        tensor: A tensor of any shape, attached to a graph or not.

    Returns:
        The tensor itself where it is not a view; else one of the same shape and storage, attached to the graph.
    """
    if tensor._base is None:  # noqa: SLF001 - what a view is of, with no other name
        return tensor
    alone: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)  # noqa: SLF001 - likewise
    return alone


def hook_gradient(tensor: Tensor, arrived: Callable[[Tensor], Tensor | None]) -> None:
    """Call ``arrived`` with the gradient of a tensor, unless a backward function of the model's own returns None."""

    def defined(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else arrived(gradient)

    tensor.register_hook(defined)  # type: ignore[no-untyped-call]


def watch_gradient(output: Tensor, arrived: Callable[[Tensor], None]) -> Tensor:
    """Call ``arrived`` with the gradient of an output; one that needs no gradient is replaced by a leaf that does.

    Returns:
        The tensor that the model goes on with, with the numbers of ``output``.
    """
    if output.requires_grad:
        hook_gradient(output, arrived)
        return detach_view(output)
    leaf = output.detach().requires_grad_()
    hook_gradient(leaf, arrived)
    # a copy, since the next operation may work in place and a leaf forbids that
    return leaf.clone()


_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Arguments by which a layer hands keys and values on; running it twice would hand them on twice."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes that autograd holds between the two passes: some at any size, and some for each example."""

    fixed_bytes: int
    example_bytes: int
    inputs: Mapping[nn.Module, "Saved"] = field(default_factory=dict, compare=False)
    """The part of it that is not autograd's: what enters a treated layer, held for that layer alone."""
    others: tuple[tuple[int, int], ...] = ()
    """The bytes that are held at other moments: some at any size, and some for each example."""

    def of(self, examples: int) -> int:
        """Return the bytes held for a number of examples, at the moment when they are most.

        Args:
            examples: Examples of one pass.

        Returns:
            The largest of ``fixed + examples · each`` over the moments that were traced, in bytes.
        """
        lines = ((self.fixed_bytes, self.example_bytes), *self.others)
        return max(fixed + examples * each for fixed, each in lines)

    def within(self, modules: Iterable[nn.Module]) -> "Saved":
        """Return the bytes that are held where only some modules are treated.

        Args:
            modules: The treated modules; those among ``inputs`` that are not treated hold no input.

        Returns:
            The same lines without the inputs of all other modules.
        """
        mine = set(modules)
        absent = [own for module, own in self.inputs.items() if module not in mine]
        fixed, each = sum(own.fixed_bytes for own in absent), sum(own.example_bytes for own in absent)
        return Saved(
            fixed_bytes=self.fixed_bytes - fixed,
            example_bytes=self.example_bytes - each,
            others=tuple((bytes_ - fixed, more - each) for bytes_, more in self.others),
        )


@dataclass(frozen=True, kw_only=True)
class GradientCopies:
    """Bytes that a treated layer's statistics take where the gradients of its input and output arrive."""

    outputs: Mapping[nn.Module, int] = field(default_factory=dict)
    """By module, how many times the bytes of its output are taken; of any other, its input and output once."""
    padded: bool = False
    """Positions that count are copied from the padded ones, which takes the output's bytes once more."""

    def bytes_of(self, module: nn.Module, entered: int, left: int) -> int:
        """Return what one call's gradients take.

        Args:
            module: The called module.
            entered: Bytes of its input.
            left: Bytes of its output.

        Returns:
            Bytes that are held at once when the gradients arrive.
        """
        times = self.outputs.get(module)
        return entered + (2 if self.padded else 1) * left if times is None else times * left


@dataclass
class _Trace:
    """Storages held by one forward pass, by the checkpointing layer they are saved in (None outside)."""

    within: str | None = None
    held: dict[str | None, dict[int, int]] = field(default_factory=dict)
    order: dict[int, int] = field(default_factory=dict)
    """Bytes of every storage, in the order in which they came."""
    entered: dict[int, int] = field(default_factory=dict)
    """Storages that enter checkpointing layers."""
    wanted: dict[int, int] = field(default_factory=dict)
    """Inputs of treated layers, which the graph's hooks hold until the backward pass has ended."""
    wanted_by: dict[nn.Module, set[int]] = field(default_factory=dict)
    """The storages among them that no other module had wanted before, by module."""
    arrivals: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {False: [], True: []})
    """For each call of a treated layer, the storages that autograd held by then, and the bytes that its gradients
    will take; True for those of ``GradientCopies.outputs``."""
    kept: list[Any] = field(default_factory=list)
    """The storages themselves: another one must not come to stand at the place of one let go."""

    def hold(self, tensor: Tensor, known: frozenset[int]) -> None:
        """Count a tensor's storage once."""
        storage = tensor.untyped_storage()
        self.kept.append(storage)
        if storage_identity(storage) not in known:
            self.held.setdefault(self.within, {})[storage_identity(storage)] = storage.nbytes()
            self.order.setdefault(storage_identity(storage), storage.nbytes())

    def storages(self, tree: Any) -> dict[int, int]:  # noqa: ANN401 - what a module was given
        """Identity and bytes of each storage of ``tree``."""
        storages = [tensor.untyped_storage() for tensor in tensors(tree) if tensor.layout == torch.strided]
        self.kept += storages
        return {storage_identity(storage): storage.nbytes() for storage in storages}

    @property
    def plain(self) -> int:
        """The bytes held without checkpointing."""
        together = dict(self.wanted)
        for group in self.held.values():
            together |= group
        return sum(together.values())

    def inputs(self, *, without: Mapping[int, int]) -> dict[nn.Module, int]:
        """Return the bytes that each module's inputs add to what is held ``without`` them."""
        return {
            module: sum(self.wanted[each] for each in own if each not in without)
            for module, own in self.wanted_by.items()
        }

    @property
    def autograd(self) -> dict[int, int]:
        """Storages that autograd itself holds."""
        return {each: size for group in self.held.values() for each, size in group.items()}

    def met(self, *, copied: bool, retained: bool) -> int:
        """Most bytes at once where the gradients of a treated layer arrive, of those whose copies are known or others.

        What autograd saved after its call has been let go of by then, unless the graph is ``retained``, and no treated
        layer's input has.
        """
        held = [0]
        for each in self.order:
            held.append(held[-1] + (0 if each in self.wanted else self.order[each]))
        inputs = sum(self.wanted.values())
        arrivals = self.arrivals[copied]
        return max((inputs + held[-1 if retained else count] + arriving for count, arriving in arrivals), default=0)

    @property
    def checkpointed(self) -> int:
        """The bytes held with checkpointing: outside, at the entry of each layer, and inside the largest of them."""
        inside = max((sum(group.values()) for within, group in self.held.items() if within is not None), default=0)
        return sum((self.held.get(None, {}) | self.entered | self.wanted).values()) + inside


def checkpointing_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the model's repeated layers that offer to be computed again."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(
            cls.__name__ == "GradientCheckpointingLayer" and cls.__module__.startswith("transformers.")
            for cls in type(module).__mro__
        )
    }


@contextlib.contextmanager
def set_activation_checkpointing(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Compute the inside of every checkpointing layer again in the backward pass.

    Args:
        model: The model; its layers' ``forward`` is replaced inside, and restored afterwards.
        wanted: False leaves the model as it is.

    Returns:
        A context manager; passes inside it save what enters each checkpointing layer, and nothing of its inside.
    """
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
        for entries in (bound.arguments, *(value for value in bound.arguments.values() if isinstance(value, dict))):
            entries.update({name: None for name in _CACHES if name in entries})
            if "use_cache" in entries:
                entries["use_cache"] = False
        return checkpoint(forward, *bound.args, use_reentrant=False, **bound.kwargs)

    return run


def trace_saved_bytes(
    run: Callable[[int], object],
    sizes: tuple[int, ...],
    model: nn.Module,
    watched: Mapping[nn.Module, bool],
    copies: GradientCopies | None = None,
    *,
    retained: bool = False,
) -> tuple[Saved, Saved | None, Saved, Saved]:
    """Trace what a forward pass saves for its backward pass, as lines in the number of examples.

    Args:
        run: Runs a forward pass of so many examples and returns what holds its graph.
        sizes: One number of examples or two, ascending; a single one gives lines through the origin.
        model: The model that ``run`` runs; its parameters and buffers are not counted.
        watched: Modules of treated layers; True where their inputs are held until the backward pass has ended.
        copies: Bytes taken where gradients arrive; None for each layer's input and output once.
        retained: The graph serves several backward passes, so that nothing of it is released on the way.

    Returns:
        What is saved; the same with checkpointing, None where no layer offers it; the most at the arrival of the
        gradients of a layer that is not among ``copies.outputs``, and of one that is.

    Memory:
        What is saved of the largest of ``sizes``.
    """
    traces = [_trace(run, size, model, watched, copies or GradientCopies()) for size in sizes]
    own = [trace.inputs(without=trace.autograd) for trace in traces]
    plain = _fit(sizes, [trace.plain for trace in traces], own)
    met, met_copied = (
        _fit(sizes, [each.met(copied=kind, retained=retained) for each in traces], own) for kind in (False, True)
    )
    if not checkpointing_layers(model):
        return plain, None, met, met_copied
    own = [trace.inputs(without=trace.held.get(None, {}) | trace.entered) for trace in traces]
    return plain, _fit(sizes, [trace.checkpointed for trace in traces], own), met, met_copied


def _fit(sizes: tuple[int, ...], held: list[int], inputs: list[dict[nn.Module, int]]) -> Saved:
    """Return the line through the first and the last; through the origin where there is one size alone."""
    parts = {module: _fit(sizes, [each.get(module, 0) for each in inputs], []) for module in (inputs or [{}])[0]}
    if len(sizes) == 1:
        return Saved(fixed_bytes=0, example_bytes=-(-held[0] // sizes[0]), inputs=parts)
    each = max(0, -((held[0] - held[-1]) // (sizes[-1] - sizes[0])))
    return Saved(fixed_bytes=max(0, held[0] - sizes[0] * each), example_bytes=each, inputs=parts)


def _trace(
    run: Callable[[int], object],
    size: int,
    model: nn.Module,
    watched: Mapping[nn.Module, bool],
    copies: GradientCopies,
) -> _Trace:
    trace = _Trace()
    # weights are there anyway, and counted as such
    weights = frozenset(
        storage_of(tensor) for tensor in (*model.parameters(), *model.buffers()) if tensor.layout == torch.strided
    )

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            trace.hold(tensor, weights)
        # the tensor itself would hold the graph that holds it, for ever, where an operation saves its own output
        return tensor.detach()

    def follow(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401 - torch's hook signature
        if watched[module]:
            storages = trace.storages(args[:1])
            trace.wanted_by.setdefault(module, set()).update(storages.keys() - trace.wanted.keys())
            trace.wanted |= storages
        entered, left = (
            sum(tensor.nbytes for tensor in tensors(tree) if tensor.is_floating_point()) for tree in (args[:1], output)
        )
        instead = None
        if isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
            # what the collection does: gradients of outputs alone; the graph begins at a leaf, which it holds
            trace.hold(output, weights)
            instead = output.detach().requires_grad_().clone()
        arriving = copies.bytes_of(module, entered, left)
        trace.arrivals[module in copies.outputs].append((len(trace.order), arriving))
        return instead

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
