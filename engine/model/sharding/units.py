"""Units: the modules that ``fully_shard`` was applied to, each with the parameters that are brought together at once.

A parameter belongs to the innermost unit that contains every module that holds it, as FSDP has it where units are made
from the inside outwards.
"""

import sys
from dataclasses import dataclass, field

from torch import Tensor, nn

from catalog.responses.layer_record import WHOLE_MODEL
from engine.distributed.sharded_tensors import is_sharded
from engine.errors import ModelRefused

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
    """Describe how a model is sharded.

    Args:
        model: The model, as the caller has it.

    Returns:
        Each unit's name with names and shapes of its parameters; nothing where the model is not sharded.

    Raises:
        ModelRefused: If a sharded parameter stands in no unit.
    """
    return [
        (unit.name, [(name, tuple(each.shape)) for name, each in zip(unit.names, unit.tensors, strict=True)])
        for unit in find_units(model)
    ]


def gathered_bytes(model: nn.Module, item: int | None = None) -> int:
    """Compute the most bytes that are gathered of a sharded model at once.

    Args:
        model: The model, as the caller has it.
        item: Bytes of a number that is measured with; None for those of the parameter.

    Returns:
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
