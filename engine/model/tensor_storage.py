"""Storages: which tensors look at the same numbers, told on the meta device too, where nothing has an address."""

import torch
from torch import Tensor


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Tells one living storage from another."""
    return int(storage._cdata)  # noqa: SLF001 - torch's own identity of it, with no other name


def storage_of(tensor: Tensor) -> int:
    """The identity of a strided tensor's storage."""
    return storage_identity(tensor.untyped_storage())


def detach_view(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as a view of nothing, over the same numbers.

    A hook on a view is passed by where a model writes to another view of the same tensor: autograd then
    takes up the history at what both are views of.
    """
    if tensor._base is None:  # noqa: SLF001 - what a view is of, with no other name
        return tensor
    alone: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)  # noqa: SLF001 - likewise
    return alone
