"""Rules: the tangents of operations that would else be computed twice, or with more memory than they need.

An operation that is linear in its first operand has the operation itself for its derivative. A product of two has two
summands, of which the second is added to the first in place. An elementwise function has a diagonal Jacobian, and a
softmax a symmetric one: torch's backward formula is then the tangent too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ATEN: Any = torch.ops.aten


def _private(name: str) -> Any:  # noqa: ANN401 - torch's overloads have no public type
    """Return an operation that torch's own functions are made of."""
    return getattr(_ATEN, name).default


_BAGS, _SOFTMAX, _SOFTMAX_BACKWARD = (
    _private("_embedding_bag"),
    _private("_softmax"),
    _private("_softmax_backward_data"),
)

LINEAR: frozenset[Any] = frozenset(
    {
        _ATEN.clone.default, _private("_to_copy"), _private("_unsafe_view"), _ATEN.neg.default,
        _ATEN.sum.default, _ATEN.sum.dim_IntList, _ATEN.mean.default, _ATEN.mean.dim, _ATEN.cumsum.default,
        _ATEN.index_select.default, _ATEN.gather.default, _ATEN.index.Tensor,
        _ATEN.constant_pad_nd.default, _ATEN.repeat.default, _ATEN.flip.default, _ATEN.roll.default,
        _ATEN.tril.default, _ATEN.triu.default, _ATEN.mul.Scalar, _ATEN.div.Scalar,
        _ATEN.avg_pool2d.default, _private("_adaptive_avg_pool2d"),
    }
)  # fmt: skip
"""Operations that are linear in their first operand, the only one that can move."""

Rule = Callable[[Any, Mapping[int, Tensor], Sequence[Any], Mapping[str, Any]], Any]
"""(result, tangents by operand, operands, options) -> the result's tangent, or ``NotImplemented``."""


def _product(result: Tensor, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
    del named
    left, right = args
    moved, other = tangents.get(id(left)), tangents.get(id(right))
    add = Tensor.addmm_ if result.ndim == 2 else Tensor.baddbmm_
    if moved is None:
        return left @ other
    found = moved @ right
    return found if other is None else add(found, left, other)


def _affine(result: Tensor, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
    if named or len(args) != 3:
        return NotImplemented
    shift, left, right = args
    found = _product(result, tangents, (left, right), {}) if {id(left), id(right)} & tangents.keys() else None
    own = tangents.get(id(shift))
    if own is None:
        return found
    return own.expand(result.shape).clone() if found is None else found.add_(own)


def _times(result: Tensor, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
    left, right = args
    moved, other = tangents.get(id(left)), tangents.get(id(right))
    if named or result.dtype != (left if moved is not None else right).dtype:
        return NotImplemented
    if moved is None:
        return left * other
    found = moved * right
    return found if other is None else found.addcmul_(left.to(found.dtype), other)


def _sum(result: Tensor, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
    left, right = args
    moved, other = (tangents.get(id(each)) if isinstance(each, Tensor) else None for each in (left, right))
    if named or any(own is not None and own.dtype != result.dtype for own in (moved, other)):
        return NotImplemented
    if moved is not None and other is not None:
        return moved + other
    own = moved if moved is not None else other
    # a tensor of its own, which may be written to
    return torch.empty_like(result).copy_(own)  # type: ignore[arg-type]


def _difference(result: Tensor, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
    left, right = args
    moved, other = (tangents.get(id(each)) if isinstance(each, Tensor) else None for each in (left, right))
    if named or other is not None or moved is None or moved.dtype != result.dtype:
        return NotImplemented
    return torch.empty_like(result).copy_(moved)


def _convolution(result: Tensor, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
    del result, named
    image, weight, bias = args[:3]
    found = None
    own = None if bias is None else tangents.get(id(bias))
    for place, operand in enumerate((image, weight)):
        moved = tangents.get(id(operand))
        if moved is not None:
            operands = (moved, weight) if place == 0 else (image, moved)
            part = _ATEN.convolution.default(*operands, None, *args[3:])
            found = part if found is None else found.add_(part)
    if own is None:
        return found
    return NotImplemented if found is None else found.add_(own.view(-1, *(1,) * (found.ndim - 2)))


def _quotient(result: Tensor, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
    left, right = args
    if named or id(right) in tangents:
        return NotImplemented
    found = tangents[id(left)] / right
    return found if found.dtype == result.dtype else NotImplemented


def _join(function: Callable[..., Tensor]) -> Rule:
    def rule(result: Any, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
        if named or any(part.dtype != result.dtype for part in args[0]):
            return NotImplemented
        parts = [tangents.get(id(part)) for part in args[0]]
        parts = [torch.zeros_like(own) if part is None else part for own, part in zip(args[0], parts, strict=True)]
        return function(parts, *args[1:])

    return rule


def _looked_up(result: Tensor, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
    del result
    found = _ATEN.embedding.default(tangents[id(args[0])], *args[1:], **named)
    padding = named.get("padding_idx", args[2] if len(args) > 2 else -1)
    # the row of padding receives no gradient, and so moves nothing either
    return found if padding < 0 else found.masked_fill_((args[1] == padding).unsqueeze(-1), 0.0)


def _bagged(result: Any, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
    moved, mode = tangents.get(id(args[0])), named.get("mode", args[4] if len(args) > 4 else 0)
    weights = named.get("per_sample_weights", args[6] if len(args) > 6 else None)
    padding = named.get("padding_idx", args[8] if len(args) > 8 else -1)
    if moved is None or mode not in _SUMMED or id(weights) in tangents or padding >= 0:
        return NotImplemented
    bags = _BAGS(moved, *args[1:], **named)
    return (bags[0], *[None] * (len(result) - 1))


_SUMMED = (0, 1)
"""Numbers of the modes ``sum`` and ``mean``, which are linear in the table."""


def _power(result: Tensor, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
    base, exponent = args
    if named or exponent == 0 or base.dtype != result.dtype:
        return NotImplemented
    return base.pow(exponent - 1).mul_(exponent).mul_(tangents[id(base)])


def _normalised(result: Any, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """LayerNorm: ``z = (x − mean) r`` moves by ``q − mean q − z mean(z ∘ q)`` for ``q = r dx``, the rest is linear."""
    image, shape, weight, bias = args[:4]
    output, mean, scale = result
    if named or image.dtype != output.dtype or mean.dtype != output.dtype:
        return NotImplemented
    moved, of_weight, of_bias = (None if own is None else tangents.get(id(own)) for own in (image, weight, bias))
    dims = tuple(range(-len(shape), 0))
    straight = torch.sub(image, mean).mul_(scale)
    found = None
    if moved is not None:
        found = torch.mul(moved, scale)
        found.sub_(found.mean(dims, keepdim=True))
        found.addcmul_(straight, (straight * found).mean(dims, keepdim=True), value=-1)
        if weight is not None:
            found.mul_(weight)
    if of_weight is not None:
        straight.mul_(of_weight)
        found = straight if found is None else found.add_(straight)
    if of_bias is not None:
        found = of_bias.expand(image.shape).clone() if found is None else found.add_(of_bias)
    return found, None, None


def _pointwise(backward: Callable[..., Tensor], *, of_result: bool = False) -> Rule:
    def rule(result: Any, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
        moved = tangents[id(args[0])]
        return backward(moved, result) if of_result else backward(moved, *args, **named)

    return rule


def _softmax(result: Tensor, tangents: Mapping[int, Tensor], args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401
    moved = tangents[id(args[0])]
    if named or moved.dtype != result.dtype:
        return NotImplemented
    return _SOFTMAX_BACKWARD(moved, result, args[1], moved.dtype)


RULES: Mapping[Any, Rule] = {
    _ATEN.mm.default: _product,
    _ATEN.bmm.default: _product,
    _ATEN.addmm.default: _affine,
    _ATEN.baddbmm.default: _affine,
    _ATEN.mul.Tensor: _times,
    _ATEN.add.Tensor: _sum,
    _ATEN.sub.Tensor: _difference,
    _ATEN.convolution.default: _convolution,
    _ATEN.div.Tensor: _quotient,
    _ATEN.cat.default: _join(_ATEN.cat.default),
    _ATEN.stack.default: _join(_ATEN.stack.default),
    _ATEN.embedding.default: _looked_up,
    _BAGS: _bagged,
    _ATEN.pow.Tensor_Scalar: _power,
    _ATEN.native_layer_norm.default: _normalised,
    _ATEN.gelu.default: _pointwise(_ATEN.gelu_backward.default),
    _ATEN.silu.default: _pointwise(_ATEN.silu_backward.default),
    _ATEN.tanh.default: _pointwise(_ATEN.tanh_backward.default, of_result=True),
    _ATEN.sigmoid.default: _pointwise(_ATEN.sigmoid_backward.default, of_result=True),
    _ATEN.relu.default: _pointwise(
        lambda moved, result: _ATEN.threshold_backward.default(moved, result, 0), of_result=True
    ),
    _SOFTMAX: _softmax,
}
"""By operation, for those of which torch's own formula would compute more."""
