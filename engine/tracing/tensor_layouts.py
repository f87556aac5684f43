"""Memory layouts of rewritten operations: the order of the dimensions in memory that torch's own result has.

A rewrite computes the same numbers by other operations, which may leave them in another order, and a
`view` of the model's own then fails that torch's result allows.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

REARRANGED = frozenset({"matmul", "rmatmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
"""Operations whose rewrites transpose what they return."""


def layout_of(run: Callable[[Callable[[Tensor], Tensor]], Any]) -> Tensor:
    """Return the result of ``run`` without numbers.

    Args:
        run: Runs an operation with each of its tensors replaced by what the function it is given returns.

    Returns:
        A tensor on the meta device, with the shape and the strides of torch's own result.
    """
    result: Tensor = run(lambda tensor: tensor.detach().to("meta"))
    return result


def arrange_like(left: Tensor, layout: Tensor) -> Tensor:
    """Arrange a tensor in the order of other strides.

    Args:
        left: What a rewrite returned, any shape.
        layout: A tensor of that shape, with strides as torch's own result has them.

    Returns:
        The tensor itself where its order is the same, else a copy of the same shape.
    """
    if left.shape != layout.shape or _steps(left) == _steps(layout):
        return left
    order = sorted(range(layout.ndim), key=lambda dim: (layout.stride(dim), layout.shape[dim] == 1), reverse=True)
    back = sorted(range(layout.ndim), key=order.__getitem__)
    return left.permute(order).contiguous().permute(back)


def _steps(tensor: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one place."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
