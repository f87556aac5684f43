"""Rewrites: operations on a watched parameter, put into products and broadcasts that are separable by example.

A product of several matrices becomes products of one each, a normalisation becomes a plain one with
a scale and a shift after it. Each rewrite computes what the operation computes, up to rounding, or
returns ``NotImplemented``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.tracing.matrix_products import Multiplying

_WIDEST = 2**13
"""Columns of the outer product of a bilinear layer's inputs: the A of more takes over half a gigabyte."""


def _linear(mode: Multiplying, entered: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # noqa: ANN401
    if bias is not None and mode.is_data(bias) and not mode.is_data(weight):
        with mode:
            return functional.linear(entered, weight) + bias
    plain = None if bias is None else bias.detach()
    return mode.product(entered, weight, bias, lambda: functional.linear(entered, weight.detach(), plain))


def _matmul(mode: Multiplying, left: Tensor, right: Tensor) -> Any:  # noqa: ANN401
    if mode.is_derived(left):
        if mode.is_derived(right) or left.ndim != 2 or right.ndim < 2:
            return _batched(mode, left, right)
        with mode:
            # (W x) = (xᵀ Wᵀ)ᵀ
            return torch.matmul(right.transpose(-1, -2), left.transpose(-1, -2)).transpose(-1, -2)
    if right.ndim == 1:
        with mode:
            return torch.matmul(left, right.unsqueeze(-1)).squeeze(-1)
    if right.ndim != 2 or left.ndim < 2:
        return _batched(mode, left, right)
    with mode:
        transposed = right.transpose(0, 1)
    return mode.product(left, transposed, None, lambda: torch.matmul(left, right.detach()))


def _batched(mode: Multiplying, left: Tensor, right: Tensor) -> Any:  # noqa: ANN401
    """Multiply several matrices at once, one by one: a parameter of three dimensions is several layers."""
    derived, data = (left, right) if mode.is_derived(left) else (right, left)
    if mode.is_derived(data) or not left.ndim == right.ndim == 3 or left.shape[0] != right.shape[0]:
        return NotImplemented
    if derived.stride(0) == 0:
        with mode:
            return torch.matmul(left[0], right) if derived is left else torch.matmul(left, right[0])
    if mode.leads(data):
        return NotImplemented
    with mode:
        return torch.stack([torch.matmul(left[place], right[place]) for place in range(left.shape[0])])


def _addmm(mode: Multiplying, added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:  # noqa: ANN401
    if beta != 1 or alpha != 1:
        return NotImplemented
    with mode:
        if added.ndim == 1 and mode.is_derived(right) and not mode.is_derived(left):
            return functional.linear(left, right.transpose(0, 1), added)
        return torch.matmul(left, right) + added


def _grouped(
    mode: Multiplying, left: Tensor, right: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None
) -> Any:  # noqa: ANN401
    """Multiply rows that are sorted by their matrix, of which ``offs`` says where each one's end."""
    if offs is None or bias is not None or mode.is_derived(left) or left.ndim != 2 or right.ndim != 3:
        return NotImplemented
    parts, start = [], 0
    with mode:
        for place, stop in enumerate(offs.tolist()):
            if start == stop:
                continue
            index = torch.arange(start, stop, device=left.device)
            parts.append(torch.matmul(torch.index_select(left, 0, index), right[place]))
            start = stop
        if start < left.shape[0]:
            parts.append(left.new_zeros(left.shape[0] - start, right.shape[2]))
        return mode.with_rows(torch.cat(parts), mode.rows_of(left))


def _einsum(mode: Multiplying, equation: str, *operands: Any) -> Any:  # noqa: ANN401
    """Multiply two operands, one derived, whose letters are either summed with the data's or only its own."""
    pair = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    entering, _, leaving = equation.replace(" ", "").partition("->")
    letters = entering.split(",")
    if len(pair) != 2 or not leaving or "." in equation or mode.is_derived(pair[0]) == mode.is_derived(pair[1]):
        return NotImplemented
    first = int(mode.is_derived(pair[0]))
    data, derived = pair[first], pair[1 - first]
    own, matrix = letters[first], letters[1 - first]
    summed = [letter for letter in matrix if letter in own and letter not in leaving]
    free = [letter for letter in matrix if letter not in own]
    kept = [letter for letter in own if letter not in summed]
    known = len(set(own)) == len(own) and len(set(matrix)) == len(matrix) and sorted(kept + free) == sorted(leaving)
    if not known or not summed or set(summed + free) != set(matrix):
        return NotImplemented
    with mode:
        rows = data.permute([own.index(letter) for letter in kept + summed]).flatten(len(kept))
        arranged = derived.permute([matrix.index(letter) for letter in summed + free])
        sizes = arranged.shape[len(summed) :]
        product = torch.matmul(rows, arranged.reshape(rows.shape[-1], -1))
        product = product.reshape(*product.shape[:-1], *sizes) if free else product.squeeze(-1)
        return product.permute([(kept + free).index(letter) for letter in leaving])


def expansion_of(tensor: Tensor, *times: Any, repeats: Sequence[int] | None = None) -> Tensor | None:  # noqa: ANN401
    """Return ``tensor.repeat(*times)`` as an expansion, whose copies are alike by their stride.

    Args:
        tensor: A tensor of any shape.
        times: Repetitions of each dimension of the result, as numbers or as one sequence of them.
        repeats: The same by torch's keyword; None where they are positional.

    Returns:
        A view of the repetition's shape; None where a dimension longer than one is repeated.
    """
    counts = repeats if repeats is not None else times[0] if isinstance(times[0], (tuple, list)) else times
    shape = [1] * (len(counts) - tensor.ndim) + list(tensor.shape)
    if any(size != 1 and time != 1 for size, time in zip(shape, counts, strict=True)):
        return None
    return tensor.expand([size if time == 1 else time for size, time in zip(shape, counts, strict=True)])


def _affine(
    mode: Multiplying, plain: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]
) -> Tensor:
    """Scale and shift a normalised tensor by operations that are seen."""
    with mode:
        scaled = plain if weight is None else plain * weight.view(shape)
        return scaled if bias is None else scaled + bias.view(shape)


def _norm_options(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None, float]:
    """Return weight, bias and epsilon, which torch's layer and group norm take after the first two arguments."""
    options = dict(zip(("weight", "bias", "eps"), args, strict=False)) | dict(kwargs)
    return options.get("weight"), options.get("bias"), options.get("eps", 1e-5)


def _layer_norm(mode: Multiplying, entered: Tensor, shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    weight, bias, eps = _norm_options(args, kwargs)
    with mode:
        plain = torch.layer_norm(entered, shape, None, None, eps)
    return _affine(mode, plain, weight, bias, tuple(shape))


def _rms_norm(
    mode: Multiplying, entered: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:  # noqa: ANN401
    with mode:
        plain = torch.rms_norm(entered, shape, None, eps)
    return _affine(mode, plain, weight, None, tuple(shape))


def _group_norm(mode: Multiplying, entered: Tensor, groups: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    weight, bias, eps = _norm_options(args, kwargs)
    with mode:
        plain = torch.group_norm(entered, groups, None, None, eps)
    return _affine(mode, plain, weight, bias, (1, -1, *[1] * (entered.ndim - 2)))


def _batch_norm(mode: Multiplying, entered: Tensor, *options: Any) -> Any:  # noqa: ANN401
    """Normalise by running statistics: with those of the batch one example's output depends on the others."""
    weight, bias, mean, variance, training, _, eps, _ = options
    if training or mean is None or variance is None or any(map(mode.is_derived, (entered, mean, variance))):
        return NotImplemented
    shape = (1, -1, *[1] * (entered.ndim - 2))
    with mode:
        plain = ((entered - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape)).to(entered.dtype)
    return _affine(mode, plain, weight, bias, shape)


def _prelu(mode: Multiplying, entered: Tensor, weight: Tensor) -> Any:  # noqa: ANN401
    shape = (1, -1, *[1] * (entered.ndim - 2)) if weight.numel() > 1 else (1,) * entered.ndim
    with mode:
        return torch.where(entered >= 0, entered, entered * weight.view(shape))


def _bilinear(mode: Multiplying, left: Tensor, right: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # noqa: ANN401
    """Compute ``Σ_ij x_i W_oij y_j`` as a linear map of ``x yᵀ``, unless that is too wide for an A."""
    if mode.is_derived(left) or mode.is_derived(right) or left.shape[-1] * right.shape[-1] > _WIDEST:
        return NotImplemented
    rows = [mode.rows_of(tensor) for tensor in (left, right) if mode.is_data(tensor)]
    if any(each is None or each.labels is not None or each != rows[0] for each in rows):
        return NotImplemented
    outer = mode.with_rows((left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2), rows[0] if rows else None)
    with mode:
        return functional.linear(outer, weight.flatten(1), bias)


def _embedding_bag(mode: Multiplying, weight: Tensor, ids: Tensor, offsets: Tensor, *args: Any) -> Any:  # noqa: ANN401
    """Sum, average or maximise over each bag of ids: a lookup of every id, and then that."""
    options = (*args, *(False, 0, False, None, False, None)[len(args) :])
    by_frequency, reduction, scales, with_end, padding = (options[place] for place in (0, 1, 3, 4, 5))
    rows = mode.rows_of(ids)
    starts = offsets[:-1] if with_end else offsets
    counts = torch.diff(starts, append=starts.new_tensor([ids.numel()]))
    if by_frequency or rows is None or ids.ndim != 1 or bool((counts < 0).any()):
        return NotImplemented
    bags = torch.repeat_interleave(counts)
    bag_rows = mode.rows_put(ids, bags, counts)
    if bag_rows is None:
        # a bag of two examples' ids
        return NotImplemented
    counted = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
    with mode:
        vectors = functional.embedding(ids, weight)
    scaled = vectors if scales is None else vectors * scales.unsqueeze(1)
    pooled = _pooled(scaled, bags, counts, counted, reduction)
    return mode.with_rows(pooled, bag_rows), bags, counts, counts


def _pooled(vectors: Tensor, bags: Tensor, counts: Tensor, counted: Tensor, reduction: int) -> Tensor:
    """Put the vectors (P, d) that count together by bag: their sum (0), mean (1) or maximum (2); none give zeros."""
    number = counts.new_zeros(counts.numel()).index_add_(0, bags, counted.long()).unsqueeze(1)
    if reduction < 2:
        # the gradient of what does not count is zero, not that of a product with zero: it may be infinite
        sums = vectors.new_zeros(counts.numel(), vectors.shape[1])
        sums = sums.index_add(0, bags[counted], vectors[counted])
        return sums / number.clamp(min=1) if reduction else sums
    within = torch.arange(bags.numel(), device=bags.device) - (counts.cumsum(0) - counts)[bags]
    table = bags.new_full((counts.numel(), max(1, int(counts.max()))), bags.numel())
    table[bags[counted], within[counted]] = counted.nonzero()[:, 0]
    beyond = vectors.new_full((1, vectors.shape[1]), -torch.inf)
    return torch.cat([vectors, beyond])[table].max(1).values.masked_fill(number == 0, 0)


def _getitem(mode: Multiplying, entered: Tensor, index: Any) -> Any:  # noqa: ANN401
    """Take a slice that the data choose, of which there is one: an expert."""
    parts = index if isinstance(index, tuple) else (index,)
    numbers = tuple(int(part) if _is_number(part) else part for part in parts)
    if not mode.is_derived(entered) or any(isinstance(part, (Tensor, list)) for part in numbers):
        return NotImplemented
    with mode:
        return entered[numbers]


def _like(method: str) -> Callable[..., Any]:
    """Make a rewrite by which a derived tensor takes only its type or its shape from the data."""

    def taken(mode: Multiplying, entered: Tensor, other: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if mode.is_derived(other) or not isinstance(other, Tensor):
            return NotImplemented
        with mode:
            if method == "to":
                return entered.to(other.device, other.dtype, *args, **kwargs)
            return getattr(entered, method)(other.shape)

    return taken


def _is_number(part: object) -> bool:
    return isinstance(part, Tensor) and part.ndim == 0 and not part.is_floating_point() and part.dtype != torch.bool


REWRITES: Mapping[str, Callable[..., Any]] = {
    "getitem": _getitem,
    "to": _like("to"),
    "type_as": _like("to"),
    "expand_as": _like("expand"),
    "view_as": _like("view"),
    "reshape_as": _like("reshape"),
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "rmatmul": lambda mode, right, left: _matmul(mode, left, right),
    "bmm": _batched,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "grouped_mm": _grouped,
    "einsum": _einsum,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "prelu": _prelu,
    "bilinear": _bilinear,
    "embedding_bag": _embedding_bag,
}
