"""A pass on the meta device, where tensors have shapes and no numbers.

Seven billion weights take no memory there, and a pass takes milliseconds. What a model or we ask of
a number has no answer then, so one is assumed: a flag is true and a number is one, which is that no
text is padded and nothing is NaN. Attention saves what the kernel of the machine's own device would.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.experimental._config as tracer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class _Assumed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what is asked of numbers that are not there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would load its compiler
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an overload of torch's
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as torch returns
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - its only name
                return True if args[0].dtype == torch.bool else 1
            if func in (torch.ops.aten.equal.default, torch.ops.aten.allclose.default):
                return True
        # shapes are worked out in Python, by operations that are none of the model's
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - its only name
            return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _AttentionCall:
    """Arguments of ``scaled_dot_product_attention``, by torch's names and in torch's order."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


_WIDEST_HEAD = 256
"""Numbers of a head that flash attention takes on a GPU."""


class _Attention(TorchFunctionMode):
    """Takes the fused kernel that ``device`` would take; on the meta device torch writes all scores out."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - as torch returns
        named = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention and args and args[0].is_meta:
            return self._fused(_AttentionCall(*args, **named))
        return func(*args, **named)

    def _takes_flash(self, query: Tensor, mask: Tensor | None) -> bool:
        """Tell whether the kernel without scores is taken: on a GPU in 16 bits alone, where no mask is given."""
        if self._device.type != "cuda":
            return True
        return query.dtype in (torch.float16, torch.bfloat16) and mask is None and query.shape[-1] <= _WIDEST_HEAD

    def _fused(self, call: _AttentionCall) -> Tensor:
        query, key, value, mask = call.query, call.key, call.value, call.attn_mask
        if call.enable_gqa and self._device.type == "cuda":
            key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device="meta")
        if query.ndim != 4 or (mask is not None and mask.requires_grad) or not self._takes_flash(query, mask):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, mask, call.dropout_p, is_causal=call.is_causal, scale=call.scale
            )
        aten: Any = torch.ops.aten
        if self._device.type == "cuda":
            outputs = aten._scaled_dot_product_flash_attention(  # noqa: SLF001
                query, key, value, call.dropout_p, call.is_causal, False, scale=call.scale
            )
        else:
            outputs = aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
                query, key, value, call.dropout_p, call.is_causal, attn_mask=mask, scale=call.scale
            )
        attended: Tensor = outputs[0]
        return attended


@contextlib.contextmanager
def simulate_device(device: torch.device) -> Iterator[None]:
    """Run models on the meta device as they would run on another one.

    Entering loads torch's tracer, some 100 MB.

    Args:
        device: The device whose fused attention kernel is taken; it need not exist on this machine.

    Returns:
        A context manager, in which a flag on the meta device is true and a number one.
    """
    before = tracer.meta_nonzero_assume_all_nonzero
    tracer.meta_nonzero_assume_all_nonzero = True
    try:
        with _Assumed(), _Attention(device):  # type: ignore[no-untyped-call]
            yield
    finally:
        tracer.meta_nonzero_assume_all_nonzero = before
