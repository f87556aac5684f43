"""Gathered parameters: whole parameters that have numbers only while a part of the model that uses them runs.

A gathered parameter has the name, shape and place of the one it stands for. Its storage is empty between uses, so it
costs nothing then; ``AbsentReads`` refuses a model that reads it all the same.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


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
    """Tell whether an instance computes otherwise than its class.

    Args:
        module: Any module.

    Returns:
        True where it has a ``forward`` of its own, but for one that gathers parameters around that of its class.
    """
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
