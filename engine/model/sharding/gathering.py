"""Gathering: a model that ``fully_shard`` has cut is measured with whole parameters, one unit of it at a time.

    unit      a module that ``fully_shard`` was applied to, with the parameters below it that are no inner unit's
    forward   a unit has its numbers while its ``forward`` runs, and until the next unit needs room
    backward  what autograd saves of a parameter is a note of it; where the backward pass asks for the numbers, its
              unit is brought together again, and the one before it is let go of

Inside, every parameter is a plain one of its whole shape, and FSDP's own hooks are off: nothing is cast, prefetched,
averaged over ranks or scattered, and each rank's gradients are those of its own examples, as where each holds the
whole model. Between uses a parameter has an empty storage, so at most the units that contain each other and one more
are there at once. Numbers are moved and never computed with: each has the bits that it has in the unsharded model.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from engine.distributed.group import Ranks
from engine.distributed.parameter_rounds import ParameterRounds
from engine.distributed.sharded_tensors import ShardedParameter, read_shard
from engine.errors import ModelRefused
from engine.model.batches import tensors
from engine.model.sharding.gathered_parameters import (
    OF_FSDP,
    GatheredParameter,
    Unit,
    class_before_sharding,
    empty_storage,
    fill_storage,
    find_units,
    make_gathered,
    mark_forward,
)

_SHAPES_ALONE = frozenset(
    {
        "__get__",
        "__set__",
        "__len__",
        "__hash__",
        "__repr__",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
    }
    | {"storage_offset", "element_size", "untyped_storage", "data_ptr", "get_device", "is_floating_point", "is_complex"}
    | {"is_contiguous", "is_signed", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"}
    | {"detach", "view", "view_as", "as_strided", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand"}
    | {"expand_as", "narrow", "select", "unbind", "chunk", "split", "unflatten", "movedim", "diagonal"}
    | {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "zeros_like", "ones_like", "empty_like"}
    | {"full_like", "rand_like", "randn_like", "_unsafe_view"}
)
"""Functions that read no number of a tensor."""


class _Units:
    """The units of one model while it is measured: which of them have their numbers."""

    def __init__(self, units: tuple[Unit, ...], ranks: Ranks, device: torch.device) -> None:
        shards: list[list[ShardedParameter]] = [
            [read_shard(name, tensor, ranks.rank) for name, tensor in zip(unit.names, unit.tensors, strict=True)]
            for unit in units
        ]
        self._rounds = ParameterRounds(ranks, shards, [unit.name for unit in units])
        self.parameters = [
            [
                make_gathered(each.shape, each.local.dtype, device, trainable=tensor.requires_grad)
                for each, tensor in zip(own, unit.tensors, strict=True)
            ]
            for own, unit in zip(shards, units, strict=True)
        ]
        for place, own in enumerate(self.parameters):
            for parameter in own:
                parameter.unit = place
                parameter.bring = functools.partial(self.bring, place)
                parameter.release = self.release
        self._running: list[int] = []
        """Units whose ``forward`` runs, the innermost last."""
        self._filled: set[int] = set()

    def bring(self, unit: int) -> None:
        """Have a unit's numbers; what is there and no running unit needs makes room first."""
        if unit in self._filled:
            return
        # ranks must send each other what they expect, whatever casts one of them is under
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - its only name
            self.release()
            self._rounds.bring(unit, [fill_storage(parameter) for parameter in self.parameters[unit]])
        self._filled.add(unit)

    def release(self) -> None:
        """Let go of every unit that does not run."""
        for unit in self._filled - set(self._running):
            for parameter in self.parameters[unit]:
                empty_storage(parameter)
        self._filled &= set(self._running)

    def serve(self) -> None:
        """Serve other ranks while this one waits for them."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - its only name
            self.release()
            self._rounds.serve()

    def running(self, unit: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a unit's ``forward`` with its numbers brought together around it."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
            self._running.append(unit)
            try:
                self.bring(unit)
                with uncached_casts(), saved_tensors_hooks(*self._hooks()):
                    return forward(*args, **kwargs)
            finally:
                # its numbers stay until another unit needs room: hooks on the module may look at them
                self._running.remove(unit)

        return run

    @contextlib.contextmanager
    def holding(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Have the units of some tensors together."""
        storages = {storage for storage in map(_storage, tensors) if storage is not None}
        units = [
            place
            for place, own in enumerate(self.parameters)
            if any(_storage(parameter) in storages for parameter in own)
        ]
        self._running += units
        try:
            for unit in units:
                self.bring(unit)
            yield
        finally:
            for unit in units:
                self._running.remove(unit)

    def _hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Hooks that save a note in place of a gathered parameter, and leave all else to the hooks that were there."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001 - torch has no other way to nest them

        def pack(tensor: Tensor) -> tuple[int | None, Any, int]:
            unit = self._unit_of(tensor)
            if unit is None and outer is not None:
                return unit, outer[0](tensor), 0
            # the tensor itself would hold the graph that holds it, where an operation saves its own output
            return unit, tensor.detach(), tensor._version  # noqa: SLF001 - what autograd itself compares

        def unpack(saved: tuple[int | None, Any, int]) -> Tensor:
            unit, content, version = saved
            if unit is None and outer is not None:
                own: Tensor = outer[1](content)
                return own
            if content._version != version:  # noqa: SLF001 - likewise
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation"
                )
            if unit is not None:
                self.bring(unit)
            kept: Tensor = content
            return kept

        return pack, unpack

    def _unit_of(self, tensor: Tensor) -> int | None:
        """The running unit whose parameter a tensor is, or a view of."""
        storage = _storage(tensor)
        for unit in self._running if storage is not None else ():
            if any(_storage(each) == storage for each in self.parameters[unit]):
                return unit
        return None


_MEASURED: list[_Units] = []
"""The units of the sharded models that are being measured."""


def _storage(tensor: Tensor) -> int | None:
    """The identity of a strided tensor's storage."""
    if tensor.layout != torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch's own identity of it


@contextlib.contextmanager
def holding(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Have the numbers of gathered parameters outside of the modules that use them.

    Args:
        tensors: Any tensors; views of gathered parameters among them have their numbers inside.

    Memory:
        The units of all of them.
    """
    with contextlib.ExitStack() as stack:
        for units in _MEASURED:
            stack.enter_context(units.holding(tensors))
        yield


def refusing_absent_reads() -> contextlib.AbstractContextManager[object]:
    """Refuse operations of a model on gathered parameters that have no numbers."""
    return AbsentReads() if _MEASURED else contextlib.nullcontext()


@contextlib.contextmanager
def uncached_casts() -> Iterator[None]:
    """Let autocast keep no copy of parameters, which would outlive their unit.

    A copy made without a graph would, by an older torch, be taken for the pass with one too, and its gradient lost.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def gather_on_request(model: nn.Module, ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Have the parameters of a sharded model whole, unit by unit; all of it is as before afterwards.

    Every rank enters it at the same place, and leaves it after the same meeting.

    Args:
        model: The model; one that is not sharded is left alone.
        device: Where passes run.

    Raises:
        ModelRefused: If it is sharded otherwise than by ``fully_shard``.
    """
    units = find_units(model)
    if not units:
        yield
        return
    for module in model.modules():
        if class_before_sharding(module) is not None:
            # what a forward pass of the caller's has left whole
            module.reshard()  # type: ignore[operator]
    # parts are those of now
    units = find_units(model)
    held = _Units(units, ranks, device)
    with contextlib.ExitStack() as stack:
        _lay(
            stack,
            model,
            {
                id(tensor): own
                for unit, whole in zip(units, held.parameters, strict=True)
                for tensor, own in zip(unit.tensors, whole, strict=True)
            },
        )
        for module in model.modules():
            _unmark(stack, module)
        for place, unit in enumerate(units):
            _replace(stack, unit.module, held.running(place, unit.module.forward))
        _MEASURED.append(held)
        stack.callback(_MEASURED.remove, held)
        ranks.serving = held.serve
        stack.callback(setattr, ranks, "serving", None)
        try:
            yield
        finally:
            held.release()


def _lay(stack: contextlib.ExitStack, model: nn.Module, wholes: dict[int, GatheredParameter]) -> None:
    """Put whole parameters in the place of sharded ones."""
    for module in model.modules():
        own = module._parameters  # noqa: SLF001 - the place of parameters, whatever their kind
        for key, parameter in own.items():
            if parameter is not None and id(parameter) in wholes:
                stack.callback(own.__setitem__, key, parameter)
                own[key] = wholes[id(parameter)]


def _unmark(stack: contextlib.ExitStack, module: nn.Module) -> None:
    """Give a module the class that it had, and take FSDP's hooks away."""
    own = class_before_sharding(module)
    if own is not None:
        stack.callback(setattr, module, "__class__", type(module))
        module.__class__ = own
    for hooks in (module._forward_pre_hooks, module._forward_hooks):  # noqa: SLF001 - FSDP keeps its handles for itself
        for key, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", "")).startswith(OF_FSDP):
                before = dict(hooks)
                stack.callback(_refill, hooks, before)
                del hooks[key]


def _refill(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    """Put hooks back in their order; those that came since stay behind them."""
    since = {key: hook for key, hook in hooks.items() if key not in before}
    hooks.clear()
    hooks.update(before)
    hooks.update(since)


def _replace(stack: contextlib.ExitStack, module: nn.Module, forward: Callable[..., Any]) -> None:
    mark_forward(module, forward)
    before = vars(module).get("forward")
    if before is None:
        stack.callback(vars(module).pop, "forward", None)
    else:
        stack.callback(setattr, module, "forward", before)
    module.forward = forward


class AbsentReads(TorchFunctionMode):
    """Refuses operations on a parameter whose unit does not run: its storage is empty, and torch would read address 0.

    FSDP itself fails there, since the operation meets a part of the parameter.
    """

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _SHAPES_ALONE:
            with torch._C.DisableTorchFunction():  # noqa: SLF001 - its own operations are not the model's
                for tensor in tensors((tuple(args), dict(kwargs or {}))):
                    _require_present(tensor, name)
        return func(*args, **(kwargs or {}))


def _require_present(tensor: Tensor, operation: str) -> None:
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return
    try:
        absent = not tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        # within a transform of torch.func
        return
    if absent:
        raise ModelRefused(
            f"the model reads a parameter of shape {tuple(tensor.shape)} in `{operation}` while the unit that it is "
            "sharded in does not run, where `fully_shard` does not gather it; apply `fully_shard` to a module that "
            "contains every module that reads it",
            pointer="/model",
        )
