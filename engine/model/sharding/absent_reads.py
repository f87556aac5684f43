"""Absent reads: a sharded model that reads a parameter while its unit does not run is refused.

The storage of such a parameter is empty, and torch reads an empty storage at address 0. FSDP itself fails there, since
the operation meets a part of the parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.errors import ModelRefused
from engine.model.batches import tensors

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


class AbsentReads(TorchFunctionMode):
    """Refuses operations on a tensor whose storage is empty."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as torch returns
        del types
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
