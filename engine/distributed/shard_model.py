"""A sharded model made of a whole one: which of its modules are units, decided by its structure.

    blocks    the entries of each outermost ``ModuleList``, the repeated layers of a model
    tables    every plain linear layer and embedding outside of blocks whose parameters no other module holds
    the rest  one unit with the model

Units are cut one after another, so that of the whole model one unit at a time stands on the device.
"""

import pkgutil
from collections.abc import Callable

import torch
from torch import nn

from engine.errors import ModelRefused


def shard_model(model: nn.Module, device: torch.device, ranks: int) -> list[str]:
    """Cut a model over the ranks of the initialised process group.

    Args:
        model: The whole model, on the host; changed in place. Every rank has the same one.
        device: Where this rank's part is to stand.
        ranks: All ranks.

    Returns:
        Names of the units, the model's own, which is empty, last.

    Raises:
        ModelRefused: If torch cannot cut a parameter.

    Memory:
        This rank's parts, and one whole unit.
    """
    # their import takes long, and few jobs need them
    fully_shard: Callable[..., nn.Module] = pkgutil.resolve_name("torch.distributed.fsdp:fully_shard")
    mesh = pkgutil.resolve_name("torch.distributed.device_mesh:init_device_mesh")(device.type, (ranks,))
    modules = dict(model.named_modules())
    names = [*find_blocks(model), ""]
    for name in names:
        try:
            fully_shard(modules[name], mesh=mesh)
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
            raise ModelRefused(
                f"`memory.model_sharding` is on, and torch cannot shard `{name or type(model).__name__}`: "
                f"{str(error)[:300]}; leave it out, and each rank holds the whole model",
                layer=name or None,
                pointer="/memory/model_sharding",
            ) from error
    return names


def find_blocks(model: nn.Module) -> list[str]:
    """Find the modules that are sharded one by one."""
    users: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(name)
    chosen: list[str] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in (*chosen, *lists)) and name not in chosen:
            continue
        entries = [name] if type(module) in (nn.Linear, nn.Embedding) else []
        if isinstance(module, nn.ModuleList):
            lists.append(name)
            # a list within a list has no forward pass of its own to be a unit
            entries = [f"{name}.{key}" if name else key for key, each in module.named_children() if _is_block(each)]
        chosen += [entry for entry in entries if entry and _is_apart(model.get_submodule(entry), entry, users)]
    return chosen


def _is_block(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _is_apart(module: nn.Module, name: str, users: dict[int, set[str]]) -> bool:
    """Whether a module has parameters, and no module outside of it holds one of them."""
    own = list(module.parameters())
    return bool(own) and all(
        user == name or user.startswith(f"{name}.") for parameter in own for user in users[id(parameter)]
    )
