"""A pass on the meta device, where tensors have shapes and no numbers.

Seven billion weights take no memory there, and a pass takes milliseconds. What a model or we ask of
a number has no answer then, so one is assumed: a flag is true and a number is one, which is that no
text is padded and nothing is NaN. Attention saves what the kernel of the machine's own device would.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.experimental._config as tracer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from engine.model.activation_memory import Saved
from engine.model.determinism import Numerics, attention_nodes
from engine.model.pass_peak import PlainDispatchMode
from engine.model.torch_functions import reveal_operations


class _Assumed(PlainDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what is asked of numbers that are not there."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
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


_FLASH_HEAD = 256
"""Numbers of a head that flash attention takes on a GPU."""
_HEAD_ALIGNED = 8
"""Flash attention pads heads to a multiple of as many numbers; so is a mask's row for the memory-efficient kernel."""
_ALIGNED_BYTES = 16
"""Bytes of which a head's are a multiple where the memory-efficient kernel is taken."""
_FLASH_ROWS = 128
"""Flash attention's backward pass rounds the length of the queries up to a multiple of as many."""
_FLASH_COLUMNS = 32
"""The same of the numbers of a head."""
_MULTIPROCESSORS = 132
"""Those of a device that cannot be asked: an H100's."""
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_OLDEST_FLASH = 8
"""Compute capability from which a GPU has flash attention, and bfloat16 in the memory-efficient kernel."""


class _Attention(TorchFunctionMode):
    """Takes the kernel that ``device`` takes with ``numerics``; on the meta device torch writes all scores out."""

    def __init__(self, device: torch.device, numerics: Numerics, *, narrow: bool) -> None:
        super().__init__()
        self._narrow = narrow
        self._device = device
        self._allowed = numerics.attention
        found = re.match(r"sm_(\d+)\d$", numerics.instructions)
        # a device that is not here is taken for one of today's
        self._is_old = found is not None and int(found[1]) < _OLDEST_FLASH

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.nn.functional.multi_head_attention_forward:
            # a mode is off while torch runs what it was asked about
            with self:
                return reveal_operations(func)(*args, **named)
        if func is torch.nn.functional.scaled_dot_product_attention:
            call = _AttentionCall(*args, **named)
            if call.query.is_meta:
                return self._attend(call)
        return func(*args, **named)

    def _attend(self, call: _AttentionCall) -> Tensor:
        """Run the first kernel that takes the call, in torch's order: flash, memory-efficient, math.

        cuDNN's is taken for none, as no job allows it.
        """
        fused = self._fused(call) if _is_fusible(call) else None
        if fused is not None:
            return fused(call)
        # grouped heads are written out there, as torch does on any device
        return torch.nn.functional.scaled_dot_product_attention(
            call.query,
            call.key,
            call.value,
            call.attn_mask,
            call.dropout_p,
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
        )

    def _fused(self, call: _AttentionCall) -> Callable[[_AttentionCall], Tensor] | None:
        if self._device.type != "cuda":
            return _flash_on_cpu if _flash_takes_on_cpu(call) else None
        if not _fits_on_a_device(call):
            return None
        if "flash" in self._allowed and self._flash_takes(call):
            return _flash
        return _memory_efficient if "memory-efficient" in self._allowed and self._memory_efficient_takes(call) else None

    def _flash_takes(self, call: _AttentionCall) -> bool:
        """Tell whether flash attention takes a call: in 16 bits alone, without a mask; grouped heads as they are."""
        query, key, value = call.query, call.key, call.value
        sizes = {each.shape[-1] for each in (query, key, value)}
        return (
            not self._is_old
            and (query.dtype in _SIXTEEN_BITS or (self._narrow and query.dtype == torch.float32))
            and call.attn_mask is None
            and len(sizes) == 1
            and max(sizes) <= _FLASH_HEAD
            and not (call.is_causal and query.shape[-2] != key.shape[-2])
            and (call.enable_gqa or query.shape[-3] == key.shape[-3])
        )

    def _memory_efficient_takes(self, call: _AttentionCall) -> bool:
        """Tell whether the memory-efficient kernel takes a call: in up to 32 bits, without grouped heads."""
        query, key, value = call.query, call.key, call.value
        aligned = _ALIGNED_BYTES // (2 if self._narrow else query.dtype.itemsize)
        return (
            query.dtype in (torch.float32, torch.float16, *(() if self._is_old else (torch.bfloat16,)))
            and query.shape[-3] == key.shape[-3] == value.shape[-3]
            and query.shape[-1] == key.shape[-1]
            and query.shape[-1] % aligned == value.shape[-1] % aligned == 0
        )


def _is_fusible(call: _AttentionCall) -> bool:
    """Tell whether any kernel but math takes a call's shapes."""
    every = call.query, call.key, call.value
    return all(each.ndim == 4 and each.numel() and each.stride(-1) == 1 for each in every)


def _fits_on_a_device(call: _AttentionCall) -> bool:
    """Tell whether a device's fused kernels take a call: its mask is contiguous along keys, and nothing is spread."""
    mask = call.attn_mask
    return (mask is None or mask.stride(-1) == 1) and len(
        {len(each) for each in (call.query, call.key, call.value)}
    ) == 1


def _flash_takes_on_cpu(call: _AttentionCall) -> bool:
    """Tell whether a CPU's flash kernel takes a call: where the caller allows it and nothing is dropped."""
    backends: Any = torch.backends.cuda
    query, key, value = call.query, call.key, call.value
    return (
        backends.flash_sdp_enabled()
        and not call.dropout_p
        and not (call.attn_mask is not None and call.attn_mask.requires_grad)
        and (call.enable_gqa or query.shape[-3] == key.shape[-3])
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
    )


def _added(call: _AttentionCall) -> Tensor | None:
    """Return a call's mask as it is added to the scores."""
    mask = call.attn_mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=call.query.dtype, device="meta")


def _flash_on_cpu(call: _AttentionCall) -> Tensor:
    aten: Any = torch.ops.aten
    outputs = aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - its only name
        call.query, call.key, call.value, call.dropout_p, call.is_causal, attn_mask=_added(call), scale=call.scale
    )
    attended: Tensor = outputs[0]
    return attended


def _flash(call: _AttentionCall) -> Tensor:
    """Attend as flash attention does on a GPU: heads are padded, and the padded ones saved."""
    aten: Any = torch.ops.aten
    size = call.query.shape[-1]
    scale = size**-0.5 if call.scale is None else call.scale
    query, key, value = (
        torch.nn.functional.pad(each, (0, -size % _HEAD_ALIGNED)) if size % _HEAD_ALIGNED else each
        for each in (call.query, call.key, call.value)
    )
    outputs = aten._scaled_dot_product_flash_attention(  # noqa: SLF001 - its only name
        query, key, value, call.dropout_p, call.is_causal, False, scale=scale
    )
    attended: Tensor = outputs[0]
    return attended[..., :size]


def _memory_efficient(call: _AttentionCall) -> Tensor:
    """Attend as the memory-efficient kernel does: a mask's rows are padded, and it is spread over heads unwritten."""
    aten: Any = torch.ops.aten
    mask, query, columns = _added(call), call.query, call.key.shape[-2]
    if mask is not None:
        if columns % _HEAD_ALIGNED:
            mask = torch.nn.functional.pad(mask, (0, -columns % _HEAD_ALIGNED))[..., :columns]
        mask = mask.expand(*query.shape[:3], columns)
    every = query, call.key, call.value
    outputs = aten._scaled_dot_product_efficient_attention(  # noqa: SLF001 - its only name
        *every,
        mask,
        torch.is_grad_enabled() and any(each.requires_grad for each in every),
        call.dropout_p,
        call.is_causal,
        scale=call.scale,
    )
    attended: Tensor = outputs[0]
    return attended


def attention_workspace(outputs: Tensor, examples: int, multiprocessors: int | str | None) -> Saved | None:
    """Return the bytes that fused attention takes of a GPU for itself, on the way back through a graph.

    In its deterministic form flash attention adds the queries' gradients up in float32 once for each share of the
    blocks of keys, so that sequences and shares together occupy the multiprocessors: ⌈SM / (N·h)⌉ · N · h · T · d
    numbers, at most (SM − 1 + N·h) · T · d. It holds one number for each row besides, and grouped keys and values
    written out. The memory-efficient kernel adds up in float32 where its results are narrower.

    Source:
        Dao, FlashAttention-2 (2023), and the allocations of torch 2.11's own kernels; no device has measured it.

    Args:
        outputs: What a model returned for ``examples`` examples, with their graph, on any device.
        examples: At least 1.
        multiprocessors: Those of the device, as ``Numerics`` have them.

    Returns:
        The highest of one line for each call of attention; None where there is no such call.
    """
    shares = (multiprocessors if isinstance(multiprocessors, int) else _MULTIPROCESSORS) - 1
    lines = set()
    for node in attention_nodes(outputs):
        saved: Any = node
        query, key, value = saved._saved_query, saved._saved_key, saved._saved_value  # noqa: SLF001 - torch's names
        heads, rows, size = query.shape[-3:]
        if "Flash" not in node.name():
            summed = 0 if query.dtype == torch.float32 else query.numel() + key.numel() + value.numel()
            lines.add((0, 4 * (summed + query[..., 0].numel()) // examples))
            continue
        rows, size = (-(-each // step) * step for each, step in ((rows, _FLASH_ROWS), (size, _FLASH_COLUMNS)))
        calls = -(-len(query) // examples)
        written = 2 * heads * key.shape[-2] * key.shape[-1] * 2 if key.shape[-3] < heads else 0
        lines.add((4 * shares * rows * size, calls * (4 * heads * rows * (size + 1) + written)))
    if not lines:
        return None
    fixed, each = max(lines)
    return Saved(fixed_bytes=fixed, example_bytes=each, others=tuple(lines))


@contextlib.contextmanager
def simulate_device(device: torch.device, numerics: Numerics, *, narrow: bool = False) -> Iterator[None]:
    """Run models on the meta device as they would run on another one.

    Entering loads torch's tracer, some 100 MB.

    Args:
        device: The device that is simulated; it need not exist on this machine.
        numerics: The job's on that device: the attention kernels that it allows. Of a CPU, torch's switches decide.
        narrow: The job computes under autocast, which hands attention 16 bits in place of 32. On the meta device
            nothing is cast, so the kernel is that of 16 bits, and what it saves is counted in 32.

    Returns:
        A context manager, in which a flag on the meta device is true and a number one.
    """
    before = tracer.meta_nonzero_assume_all_nonzero
    tracer.meta_nonzero_assume_all_nonzero = True
    try:
        with _Assumed(), _Attention(device, numerics, narrow=narrow):  # type: ignore[no-untyped-call]
            yield
    finally:
        tracer.meta_nonzero_assume_all_nonzero = before
