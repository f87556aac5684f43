"""Sharded tensors: parameters of which this rank holds a part (``DTensor``), and the ranks that hold the others.

FSDP2 (``fully_shard``) cuts a parameter along one dimension into one part for each rank of a shard group, of
``⌈n / S⌉`` rows but for the last ones, which may be smaller or empty. On a mesh of two dimensions every shard group
holds one copy of the whole parameter (HSDP).

A sharded model made of a whole one: which of its modules are units, decided by its structure.

    blocks    the entries of each outermost ``ModuleList``, the repeated layers of a model
    tables    every plain linear layer and embedding outside of blocks whose parameters no other module holds
    the rest  one unit with the model

Units are cut one after another, so that of the whole model one unit at a time stands on the device.
"""

import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from catalog.responses.layer_record import WHOLE_MODEL
from engine.errors import ModelRefused


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """This rank's part of one parameter."""

    name: str
    local: Tensor
    """The part, of the parameter's shape but for ``dim``."""
    shape: torch.Size
    """Shape of the whole parameter."""
    dim: int
    """The dimension along which it is cut."""
    copies: tuple[tuple[int, ...], ...]
    """The ranks that hold the parts of one copy, in the order of the parts; one entry for each copy."""

    def holders(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose parts are those of one rank's copy.

        Returns:
            Ranks in the order of the parts; the rank is one of them.
        """
        return next(each for each in self.copies if rank in each)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the part of a rank.

        Returns:
            Begin and end along ``dim``; equal where it holds nothing.
        """
        holders = self.holders(rank)
        size, place = self.shape[self.dim], holders.index(rank)
        each = -(-size // len(holders))
        return min(size, place * each), min(size, (place + 1) * each)

    def part_shape(self, rank: int) -> torch.Size:
        """Return the shape of a rank's part: that of the whole but for ``dim``."""
        first, last = self.bounds(rank)
        return torch.Size((*self.shape[: self.dim], last - first, *self.shape[self.dim + 1 :]))


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a tensor is a ``DTensor``.

    Args:
        tensor: Any tensor. Where ``torch.distributed.tensor``, which takes long, is not imported, none is.

    Returns:
        True for a ``DTensor``.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor that stand on this rank.

    Args:
        tensor: Any strided tensor, sharded or not.

    Returns:
        Bytes of the part, or of the whole.
    """
    own: Any = tensor
    if is_sharded(tensor):
        own = own.to_local()
    return int(own.numel() * own.element_size())


def read_shard(name: str, tensor: Any, rank: int) -> ShardedParameter:  # noqa: ANN401 - a DTensor, imported nowhere
    """Describe a parameter that ``fully_shard`` has cut.

    Args:
        name: Its name in the model.
        tensor: The parameter, a ``DTensor``.
        rank: This rank, by its number among all.

    Returns:
        Its part on this rank.

    Raises:
        ModelRefused: If it is cut otherwise, as by tensor parallelism, or this rank is none of its mesh.
    """
    placement = sys.modules["torch.distributed.tensor"]
    cuts = [place for place, each in enumerate(tensor.placements) if type(each) is placement.Shard]
    whole = [place for place, each in enumerate(tensor.placements) if isinstance(each, placement.Replicate)]
    ranks = tensor.device_mesh.mesh
    if len(cuts) > 1 or len(cuts) + len(whole) != ranks.ndim or not bool((ranks == rank).any()):
        raise ModelRefused(
            f"the model's parameter `{name}` is placed as {tuple(tensor.placements)} on a mesh of {ranks.numel()} "
            "ranks; what can be measured are parameters cut along one dimension over ranks that all measure together "
            "(`fully_shard`, on a mesh of one or two dimensions): measure it without tensor parallelism",
            layer=name.rpartition(".")[0] or WHOLE_MODEL,
            pointer="/model",
        )
    groups = ranks.reshape(-1, 1) if not cuts else ranks.movedim(cuts[0], -1).reshape(-1, ranks.shape[cuts[0]])
    dim = tensor.placements[cuts[0]].dim % tensor.ndim if cuts and tensor.ndim else 0
    found = ShardedParameter(
        name=name,
        local=tensor.to_local().detach(),
        shape=tensor.shape,
        dim=dim,
        copies=tuple(tuple(int(each) for each in group) for group in groups),
    )
    if found.local.shape != found.part_shape(rank):
        raise ModelRefused(
            f"the model's parameter `{name}` of shape {tuple(found.shape)} has a part of shape "
            f"{tuple(found.local.shape)} on rank {rank}, where an even cut gives {tuple(found.part_shape(rank))}; "
            "shard the model with `fully_shard`",
            layer=name.rpartition(".")[0] or WHOLE_MODEL,
            pointer="/model",
        )
    return found


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
            blocks = (
                key for key, each in module.named_children() if not isinstance(each, (nn.ModuleList, nn.ModuleDict))
            )
            entries = [f"{name}.{key}" if name else key for key in blocks]
        chosen += [entry for entry in entries if entry and _is_apart(model.get_submodule(entry), entry, users)]
    return chosen


def _is_apart(module: nn.Module, name: str, users: dict[int, set[str]]) -> bool:
    """Whether a module has parameters, and no module outside of it holds one of them."""
    own = list(module.parameters())
    return bool(own) and all(
        user == name or user.startswith(f"{name}.") for parameter in own for user in users[id(parameter)]
    )
