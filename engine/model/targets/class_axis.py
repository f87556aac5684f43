"""The class axis: the dimension of a classifier's outputs that its classes stand on.

Outputs (N, C) leave no choice. Outputs of more dimensions are (N, C, …), as torch's losses take them, or (N, …, C), as
sequence models return them. What decides, the first that does:

1. `task.class_axis`;
2. the targets' shape, which is that of the outputs without the class axis; of targets as long as the outputs (a
   probability for each class), the axis along which they sum to one;
3. the model's own number of classes, where one of the two dimensions has that many;
4. token ids (N, T) among the inputs of a model that has such a number: its outputs (N, T, …) are its tokens'.

Where two readings are left, neither is taken: another batch would be read otherwise, or all of them wrongly.
"""

from typing import Any

import torch
from torch import Tensor, nn

from catalog.requests.inputs import Task
from engine.errors import WrongShape
from engine.model.batches import Batch, tensors
from engine.model.targets.class_targets import sum_to_one

_NUMBERS = ("num_labels", "num_classes")


def find_class_axis(shape: torch.Size, batch: Batch, task: Task, model: nn.Module) -> int:
    """Find the dimension that a classifier's classes stand on.

    Args:
        shape: Shape (N, …) of the model's outputs, of two dimensions or more.
        batch: The inputs and targets that they are for.
        task: A classification; its ``class_axis`` decides, where it is not None.
        model: The model, which may say how many classes it has.

    Returns:
        The dimension, from 1.

    Raises:
        WrongShape: If ``task.class_axis`` is no such dimension, or two readings are left; the message names both.
    """
    if task.class_axis is not None:
        return _given(shape, task.class_axis)
    first, last = 1, len(shape) - 1
    readings = _fitting(shape, batch.targets, (first, last) if first < last else (last,))
    if len(readings) > 1:
        count = class_count(model)
        readings = [axis for axis in readings if shape[axis] == count] or readings
        if len(readings) > 1 and count == shape[last] and _reads_tokens(batch, shape):
            return last
    if len(readings) > 1:
        raise _open(shape, first, last)
    return readings[0]


def class_count(model: nn.Module) -> int | None:
    """Return the number of classes that a model or its ``config`` states, as `num_labels` or `num_classes`."""
    for holder in (model, getattr(model, "config", None), getattr(model, "module", None)):
        for name in _NUMBERS:
            count: Any = getattr(holder, name, None)
            if isinstance(count, int) and not isinstance(count, bool):
                return count
    return None


def _given(shape: torch.Size, axis: int) -> int:
    found = axis if axis > 0 else len(shape) + axis
    if not 0 < found < len(shape):
        raise WrongShape(
            f"`task.class_axis` must be a dimension of the outputs after the examples' (got {axis} for outputs of "
            f"shape {tuple(shape)}); take one from 1 to {len(shape) - 1}",
            pointer="/task/class_axis",
        )
    return found


def _fitting(shape: torch.Size, targets: object, axes: tuple[int, ...]) -> list[int]:
    """Those of ``axes`` that the targets leave; the last one where none fits, and the targets will be refused."""
    if len(axes) == 1 or not isinstance(targets, Tensor):
        return list(axes)
    if targets.shape == shape:
        if shape[axes[0]] == 1:
            # one logit, which is refused as such
            return [axes[0]]
        # of shapes alone a plan takes torch's reading
        return [axes[0]] if targets.is_meta else [axis for axis in axes if sum_to_one(targets, axis)] or list(axes)
    fitting = [axis for axis in axes if tuple(targets.shape) == _terms(shape, axis)]
    return fitting or [axes[-1]]


def _terms(shape: torch.Size, axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _reads_tokens(batch: Batch, shape: torch.Size) -> bool:
    """Whether the inputs have ids or a mask (N, T), and the outputs T positions after the examples."""
    return any(
        not tensor.is_floating_point() and tensor.ndim == 2 and tensor.shape == shape[:2]
        for tensor in tensors(batch.inputs)
    )


def _open(shape: torch.Size, first: int, last: int) -> WrongShape:
    return WrongShape(
        f"the outputs of shape {tuple(shape)} can be read in two ways: {shape[first]} classes on dimension {first}, as "
        f"torch's losses take them, for terms of shape {_terms(shape, first)}; or {shape[last]} classes on dimension "
        f"{last}, as sequence models return them, for terms of shape {_terms(shape, last)}. Say which by "
        f"`task.class_axis: {first}` or `task.class_axis: {last}`; for a label of each token take "
        "`task.type: token_classification`",
        pointer="/task/class_axis",
    )
