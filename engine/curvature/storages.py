"""Storages: which tensors look at the same numbers, told on the meta device too, where nothing has an address."""

import torch
from torch import Tensor


def identity(storage: torch.UntypedStorage) -> int:
    """Tells one living storage from another."""
    return int(storage._cdata)  # noqa: SLF001 - torch's own identity of it, with no other name


def storage_of(tensor: Tensor) -> int:
    """The identity of a strided tensor's storage."""
    return identity(tensor.untyped_storage())
