"""The identity of storages, by which views of one tensor are recognised, on the meta device too."""

import torch
from torch import Tensor


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
