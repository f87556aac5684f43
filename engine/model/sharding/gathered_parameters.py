"""Gathered parameters: whole parameters that have numbers only while a part of the model that uses them runs.

A gathered parameter has the name, shape and place of the one it stands for. Its storage is empty between uses, so it
costs nothing then; ``AbsentReads`` refuses a model that reads it all the same.

Units are the modules that ``fully_shard`` was applied to, each with the parameters that are brought together at once. A
parameter belongs to the innermost unit that contains every module that holds it, as FSDP has it where
units are made from the inside outwards.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from catalog.responses.layer_record import WHOLE_MODEL
from engine.distributed.sharded_tensors import is_sharded
from engine.errors import ModelRefused


class GatheredParameter(nn.Parameter):
    """A whole parameter whose storage is filled on request."""

    bring: Callable[[], None]
    """Fills the storage, unless it is filled."""
    release: Callable[[], None]
    """Empties it, and those of all other gathered parameters of the model that no running module needs."""
    unit: int
    """The unit of the model that it is filled with."""

    def __deepcopy__(self, memo: Any) -> "GatheredParameter":  # noqa: ANN401 - as copy gives it
        raise TypeError("a parameter that is gathered on request cannot be copied")


_OVER_OWN = "gathers_over_own"
"""Attribute of a ``forward`` that gathers parameters around another: whether that one was the instance's own."""


def mark_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Mark a function as the ``forward`` of a module with parameters gathered around it."""
    setattr(forward, _OVER_OWN, has_own_forward(module))


def has_own_forward(module: nn.Module) -> bool:
    """Tell whether an instance computes otherwise than its class: by a ``forward`` of its own that not only gathers."""
    own = vars(module).get("forward")
    return own is not None and bool(getattr(own, _OVER_OWN, True))


def make_gathered(shape: torch.Size, dtype: torch.dtype, device: torch.device, *, trainable: bool) -> GatheredParameter:
    """Make a gathered parameter without numbers."""
    return GatheredParameter(_empty(shape, dtype, device), requires_grad=trainable)


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor with an empty storage."""
    made = torch.empty(shape, dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    return made


def fill_storage(parameter: Tensor) -> Tensor:
    """Give a gathered parameter's storage its room.

    Args:
        parameter: The parameter, its storage empty.

    Returns:
        The same numbers as a tensor whose writes autograd does not take for changes of the parameter.
    """
    parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
    return parameter.data


def empty_storage(parameter: Tensor) -> None:
    """Let go of a gathered parameter's numbers."""
    parameter.untyped_storage().resize_(0)


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what ``tensor.data`` is to be in another precision.

    Args:
        tensor: A parameter or buffer, gathered or not.
        dtype: A float dtype.

    Returns:
        Converted numbers; of a gathered parameter an empty storage, which is filled in that precision.
    """
    if not isinstance(tensor, GatheredParameter):
        return tensor.data.to(dtype)
    tensor.release()
    return _empty(tensor.shape, dtype, tensor.device)


def put_back(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor the numbers back that it had before ``converted``.

    Args:
        tensor: The parameter or buffer.
        data: What ``tensor.data`` was.
    """
    if isinstance(tensor, GatheredParameter):
        tensor.release()
    tensor.data = data


def present(tensor: Tensor) -> Tensor:
    """Have a tensor's numbers, to be looked at before any other's.

    Args:
        tensor: A parameter or buffer, gathered or not.

    Returns:
        The same tensor. Of several in a row that belong to one unit, the first brings it together for all.
    """
    if isinstance(tensor, GatheredParameter):
        tensor.bring()
    return tensor


def numbers_at_once(tensors: Iterable[Tensor]) -> int:
    """Count the floating-point numbers of tensors that stand on this rank at the same time.

    Args:
        tensors: Parameters and buffers.

    Returns:
        Numbers of all that are always there, and of the two largest units of the others: one within the other.
    """
    plain, units = 0, dict[int, int]()
    for tensor in tensors:
        if not tensor.is_floating_point():
            continue
        if isinstance(tensor, GatheredParameter):
            units[tensor.unit] = units.get(tensor.unit, 0) + tensor.numel()
        else:
            plain += tensor.numel()
    return plain + sum(sorted(units.values())[-2:])


OF_FSDP = "torch.distributed.fsdp"
"""The module whose hooks are FSDP's."""


@dataclass(eq=False)
class Unit:
    """Parameters that are brought together at once."""

    name: str
    module: nn.Module
    names: list[str] = field(default_factory=list)
    """First name of each parameter in the model."""
    tensors: list[Tensor] = field(default_factory=list)
    """The parameters as the caller has them."""


def class_before_sharding(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that a module had before ``fully_shard`` was applied to it."""
    fsdp = sys.modules.get(OF_FSDP)
    marked = None if fsdp is None else getattr(fsdp, "FSDPModule", None)
    if marked is None or not isinstance(module, marked):
        return None
    classes = type(module).__mro__
    own: type[nn.Module] = classes[classes.index(marked) + 1]
    return own


def find_units(model: nn.Module) -> tuple[Unit, ...]:
    """Find the units of a sharded model."""
    modules = dict(model.named_modules())
    is_unit = {name: class_before_sharding(module) is not None for name, module in modules.items()}
    users: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_sharded(parameter):
            users.setdefault(id(parameter), (parameter, []))[1].append(name)
    for name, buffer in model.named_buffers():
        if is_sharded(buffer):
            raise _refused(name, "is a sharded buffer, which nothing brings together")
    units = {name: Unit(name=name, module=modules[name]) for name, marked in is_unit.items() if marked}
    for own, names in users.values():
        # of a parameter with several users, the innermost unit that holds them all
        shared = set.intersection(*(_ancestors(name.rpartition(".")[0]) for name in names))
        holders = [name for name in shared if is_unit[name]]
        if not holders:
            raise _refused(
                names[0], "is sharded over ranks (DTensor) by something else than `fully_shard` on a module around it"
            )
        unit = units[max(holders, key=lambda name: (bool(name), name.count("."), name))]
        unit.names.append(names[0])
        unit.tensors.append(own)
    return tuple(unit for unit in units.values() if unit.names)


def describe_units(model: nn.Module) -> list[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    """Return each unit's name with names and shapes of its parameters; nothing where the model is not sharded.

    ``ModelRefused`` if a sharded parameter stands in no unit.
    """
    return [
        (unit.name, [(name, tuple(each.shape)) for name, each in zip(unit.names, unit.tensors, strict=True)])
        for unit in find_units(model)
    ]


def gathered_bytes(model: nn.Module, item: int | None = None) -> int:
    """Compute the most bytes that are gathered of a sharded model at once, with ``item`` a number, else as they are.

    Bytes of the two largest units, one of which may contain the other, and twice those of the largest parameter,
    which is on its way; 0 where the model is not sharded.
    """
    units = find_units(model)
    sizes = sorted(sum(tensor.numel() * (item or tensor.element_size()) for tensor in unit.tensors) for unit in units)
    largest = max((tensor.numel() * tensor.element_size() for unit in units for tensor in unit.tensors), default=0)
    return sum(sizes[-2:]) + 2 * largest


def _ancestors(name: str) -> set[str]:
    """Names of a module and of those around it."""
    parts = name.split(".") if name else []
    return {".".join(parts[:count]) for count in range(len(parts) + 1)}


def _refused(name: str, why: str) -> ModelRefused:
    return ModelRefused(
        f"the model's tensor `{name}` {why}; apply `torch.distributed.fsdp.fully_shard` to the modules that hold it, "
        "or measure the model before it is sharded, each rank with a whole copy",
        layer=name.rpartition(".")[0] or WHOLE_MODEL,
        pointer="/model",
    )
