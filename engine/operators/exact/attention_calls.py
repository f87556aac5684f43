"""Calls of ``scaled_dot_product_attention``, answered by one that has forward and second derivatives.

Torch's fused kernels have neither, and its other kernel holds the scores of all heads. A mode that is shown every
torch function puts ``engine.operators.exact.attention`` in their place, whatever kernels the caller allows; no switch
of torch is touched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from engine.errors import ModelRefused
from engine.model.torch_functions import operation_name, reveal_operations
from engine.operators.exact.attention import Attention, Operands
from engine.operators.exact.tangents import Tangents

_NAME = "scaled_dot_product_attention"
_ASKS = nn.functional.multi_head_attention_forward
"""Torch's own function that hides such a call from a mode."""


class AttentionCalls(TorchFunctionMode):
    """A mode that answers calls of attention.

    Args:
        carrier: Follows tangents; None where there are none to follow.
        at_once: Scores of one block; None is a size that a cache holds.
    """

    def __init__(self, carrier: Tangents | None = None, at_once: int | None = None) -> None:
        super().__init__()
        self._carrier = carrier
        self._at_once = at_once
        self.narrowest: torch.dtype | None = None
        """The floating-point dtype of fewest bits that a function has returned so far."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as torch returns
        del types
        named = dict(kwargs or {})
        if func is _ASKS:
            with self:
                return reveal_operations(func)(*args, **named)
        if getattr(func, "__name__", "") == _NAME or operation_name(func) == _NAME:
            call = _Call.of(*args, **named)
            if call is not None:
                return call.answered(self._carrier, self._at_once)
        result = func(*args, **named)
        if isinstance(result, Tensor) and result.is_floating_point():
            narrowest = self.narrowest or result.dtype
            self.narrowest = result.dtype if result.dtype.itemsize < narrowest.itemsize else narrowest
        return result


@dataclass(frozen=True, kw_only=True)
class _Call:
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    causal: bool
    scale: float
    grouped: bool

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> "_Call | None":
        """Return the call; None where it is torch's to answer, or to refuse."""
        if dropout_p > 0:
            raise ModelRefused(
                f"attention drops out in evaluation (`dropout_p` {dropout_p}), so the model has no exact curvature; "
                "call `scaled_dot_product_attention` with `dropout_p=0` outside of training",
                pointer="/model",
            )
        parts = (query, key, value)
        plain = all(part.ndim >= 3 and part.layout == torch.strided and not part.is_nested for part in parts)
        alike = query.ndim == key.ndim == value.ndim and query.dtype == key.dtype == value.dtype
        if (
            (is_causal and attn_mask is not None)
            or not plain
            or not alike
            or not query.is_floating_point()
            or 0 in (query.numel(), key.numel(), value.numel())
        ):
            return None
        return cls(
            query=query, key=key, value=value, attn_mask=attn_mask, causal=is_causal,
            scale=query.shape[-1] ** -0.5 if scale is None else scale, grouped=enable_gqa,
        )  # fmt: skip

    def answered(self, carrier: Tangents | None, at_once: int | None) -> Tensor:
        """Compute the call's result."""
        lead: torch.Size = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
            *(part.shape[:-3] for part in (self.query, self.key, self.value))
        )
        query, key, value = (
            part.expand(*lead, *part.shape[-3:]).reshape(-1, *part.shape[-3:])
            for part in (self.query, self.key, self.value)
        )
        heads, own = key.shape[1], query.shape[1]
        if heads != own and not (self.grouped and own % heads == 0):
            heads = own
            key, value = (part.expand(-1, own, -1, -1) for part in (key, value))
        group = own // heads
        value = value.expand(-1, heads, -1, -1)
        bias = mask = None
        if self.attn_mask is not None:
            pairs = self._pairs(self.attn_mask, lead, group)
            bias, mask = (None, pairs) if pairs.dtype == torch.bool else (pairs, None)
        answer: Tensor = _Forward.apply(  # type: ignore[no-untyped-call]
            query.reshape(-1, heads, group, *query.shape[2:]), key.unsqueeze(2), value.unsqueeze(2), bias,
            _How(mask=mask, causal=self.causal, scale=self.scale, at_once=at_once), carrier,
        )  # fmt: skip
        return answer.reshape(*lead, own, *answer.shape[-2:])

    def _pairs(self, mask: Tensor, lead: Sequence[int], group: int) -> Tensor:
        """The mask as (B or 1, K or 1, g or 1, L or 1, S or 1)."""
        if mask.dtype != torch.bool:
            mask = mask.to(self.query.dtype)
        mask = mask.reshape((1,) * (3 + len(lead) - mask.ndim) + tuple(mask.shape))
        if any(size != 1 for size in mask.shape[:-3]):
            mask = mask.expand(*lead, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
        else:
            mask = mask.reshape(1, *mask.shape[-3:])
        group = 1 if mask.shape[1] == 1 else group
        return mask.reshape(mask.shape[0], -1, group, *mask.shape[2:])


@dataclass(frozen=True, kw_only=True)
class _How:
    mask: Tensor | None
    causal: bool
    scale: float
    at_once: int | None

    def attention(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Attention:
        sized = {} if self.at_once is None else {"at_once": self.at_once}
        return Attention(
            query=query, key=key, value=value, bias=bias, mask=self.mask, causal=self.causal, scale=self.scale, **sized
        )


class _Forward(Function):
    """O of one call; its pullback is a function of its own, so that it has a pullback too."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, how: _How,
        carrier: Tangents | None,
    ) -> Tensor:  # fmt: skip
        attention = how.attention(query, key, value, bias)
        if carrier is None:
            output, rows = attention.forward()
        else:
            output, rows = _carried(attention, carrier)
        ctx.save_for_backward(query, key, value, bias, rows)  # type: ignore[arg-type]
        ctx.how = how  # type: ignore[attr-defined]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's context
        found = _Pullback.apply(gradient, *ctx.saved_tensors, ctx.how)  # type: ignore[no-untyped-call]
        return (*found, None, None)


class _Pullback(Function):
    """The gradients of ``⟨gO, O⟩``, whose own pullback is ``Attention``'s second derivative."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None,
        rows: Tensor, how: _How,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        found = how.attention(query, key, value, bias).pullback(rows, gradient)
        ctx.save_for_backward(gradient, query, key, value, bias, rows)  # type: ignore[arg-type]
        ctx.how = how  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return found.query, found.key, found.value, found.bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's context
        gradient, query, key, value, bias, rows = ctx.saved_tensors
        along = Operands(query=cotangents[0], key=cotangents[1], value=cotangents[2], bias=cotangents[3])
        attention = ctx.how.attention(query, key, value, bias)
        # the pullback is the gradient of ⟨gO, O⟩: its derivative is symmetric, and linear in gO
        found = attention.pullback_tangent(rows, gradient, along)
        return attention.tangent(rows, along), found.query, found.key, found.value, found.bias, None, None


def _carried(attention: Attention, carrier: Tangents) -> tuple[Tensor, Tensor]:
    """Compute the outputs, and the tangents of each column in which an operand has one."""
    nothing = [None] * carrier.columns
    operands = [attention.query, attention.key, attention.value, attention.bias]
    columns = list(zip(*((carrier.of(own) if own is not None else None) or nothing for own in operands), strict=True))
    moving = [place for place, own in enumerate(columns) if any(part is not None for part in own)]
    with carrier.resting():
        tangents = [Operands(query=q, key=k, value=v, bias=b) for q, k, v, b in (columns[place] for place in moving)]
        output, rows, pushed = attention.forward_with_tangents(tangents)
    found: list[Tensor | None] = list(nothing)
    for place, own in zip(moving, pushed, strict=True):
        found[place] = own
    if moving:
        carrier.put(output, found)
    return output, rows
