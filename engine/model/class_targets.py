"""Class targets: the dimension that a classifier's classes stand on, and targets of a cross-entropy, as torch has them.

Outputs (N, C) leave no choice of the axis. Outputs of more dimensions are (N, C, …), as torch's losses take them, or
(N, …, C), as sequence models return them. What decides, the first that does:

1. `task.class_axis`;
2. the targets' shape, which is that of the outputs without the class axis; of targets as long as the outputs (a
   probability for each class), the axis along which they sum to one;
3. the model's own number of classes, where one of the two dimensions has that many;
4. token ids (N, T) among the inputs of a model that has such a number: its outputs (N, T, …) are its tokens'.

Where two readings are left, neither is taken: another batch would be read otherwise, or all of them wrongly.

====================  =============================================================================
targets               what they are, for outputs (N, …, C)
====================  =============================================================================
(N, …) integers       classes from 0 to C−1, or ``ignore_index``
(N, …, C) floats      probabilities of the classes, which sum to one in each term; no term is ignored
(N, …, C) integers    the same as a one-hot code
====================  =============================================================================

The weight of a term is the sum of its label, smoothed and weighed by ``class_weights``: ``W = Σ_c t_c`` for
``t = w ∘ ((1−ε) p + ε/C)``, p the label's probabilities. By torch's mean a sum over classes is divided by the weights
``w_y`` of its labels, and one over probabilities by the number of terms.

The Hessian of a term in the logits f is ``W (diag(q) − q qᵀ)`` with ``q = softmax(f)``: of the probabilities it has
their sum alone. Where rounding to 16 bits leaves that beside one, W is what it is, as torch has it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from catalog.requests.inputs import Task
from engine.errors import WrongShape
from engine.model.batches import Batch, tensors

_SUM = 1e-2
"""How far probabilities in 16 bits may sum from one."""
_ROUNDING = 1e-5
"""How far they may in float32, where a sum counts as one."""


@dataclass(frozen=True, kw_only=True)
class ClassTargets:
    """The targets of each loss term, with their validity and weights."""

    targets: Tensor
    """(N, R) int64 classes, or (N, R, C) probabilities in the outputs' dtype."""
    valid: Tensor
    """(N, R) booleans: terms that count."""
    weights: Tensor | None = None
    """(N, R, 1) weights of the terms; None where each is one."""
    weighed: Tensor | None = None
    """(N,) float64 sums of the label's weights over the terms that count; None where terms are counted."""


def read_class_targets(flat: Tensor, targets: Tensor, shape: torch.Size, task: Task, index: Tensor) -> ClassTargets:
    """Read the targets of a cross-entropy.

    Args:
        flat: Outputs, shape (N, R, C).
        targets: As the module's table has them, classes last.
        shape: The outputs' shape (N, …, C), before their terms were put into one dimension.
        task: The class weights, the label smoothing and the class to be ignored.
        index: Numbers of the examples, shape (N,), int64, for messages.

    Returns:
        Targets, terms that count and their weights.

    Raises:
        WrongShape: If the targets are of another shape or kind, or are no classes of the model.
    """
    if targets.shape == shape:
        return _probabilities(flat, targets.reshape(flat.shape), task, index)
    if targets.shape != shape[:-1] or targets.is_floating_point():
        raise _unusable(targets, shape)
    classes = targets.reshape(flat.shape[:2]).to(torch.int64)
    valid = classes != task.ignore_index
    _require_known(classes[valid], flat.shape[-1], task)
    if task.class_weights is None:
        return ClassTargets(targets=classes, valid=valid)
    weights = label_weights(task.class_weights, "class_weights", flat)
    own = weights[torch.where(valid, classes, 0)]
    weighed = own.to(torch.float64).mul(valid).sum(1)
    # the smoothed part of a label weighs what all classes do on average, whatever the label
    smoothed = own if task.label_smoothing == 0 else own.lerp(weights.mean(), task.label_smoothing)
    return ClassTargets(targets=classes, valid=valid, weights=smoothed.unsqueeze(-1), weighed=weighed)


def smoothed_labels(probabilities: Tensor, task: Task) -> Tensor:
    """Return the labels t as the loss sees them: smoothed, and weighed by their classes.

    Args:
        probabilities: Labels p, shape (N, R, C), any float dtype.
        task: The class weights and the label smoothing.

    Returns:
        ``w ∘ ((1−ε) p + ε/C)``, of the same shape and dtype.
    """
    labels, smoothing = probabilities, task.label_smoothing
    if smoothing:
        labels = labels * (1 - smoothing) + smoothing / labels.shape[-1]
    return labels if task.class_weights is None else labels * label_weights(task.class_weights, "class_weights", labels)


def sum_to_one(targets: Tensor, axis: int) -> bool:
    """Return whether targets are probabilities along an axis: none below zero, and one together.

    Args:
        targets: Any numbers; NaN is not a probability.
        axis: A dimension of them.
    """
    wide = targets.to(torch.float64)
    return bool((wide >= 0).all()) and bool(((wide.sum(axis) - 1).abs() <= _SUM).all())


def label_weights(weights: tuple[float, ...], field: str, outputs: Tensor) -> Tensor:
    """Make a tensor of weights for the outputs of a term.

    Args:
        weights: One number per output.
        field: Name of the weights in the task, for the message.
        outputs: Outputs, shape (…, C); dtype and device are taken from them.

    Returns:
        The weights, shape (C,).

    Raises:
        WrongShape: If there is not one for each output.
    """
    width = outputs.shape[-1]
    if len(weights) != width:
        raise WrongShape(
            f"`{field}` holds {len(weights)} numbers, but the model has {width} outputs; give one for each",
            pointer=f"/task/{field}",
        )
    return torch.tensor(weights, dtype=outputs.dtype, device=outputs.device)


def require_labels(weights: tuple[float, ...] | None, field: str) -> None:
    """Refuse weights by label where the data has no labels."""
    if weights is not None:
        raise WrongShape(
            f"`{field}` weighs each term by its label, and the data has no targets; "
            f"give targets, or leave `{field}` out",
            pointer=f"/task/{field}",
        )


def _probabilities(flat: Tensor, targets: Tensor, task: Task, index: Tensor) -> ClassTargets:
    if not sum_to_one(targets, -1):
        raise WrongShape(
            "targets with a number for each class must be probabilities of 0 or more that sum to 1 in each term (got "
            f"{_worst_term(targets, index)}); correct the targets (`targets / targets.sum(-1, keepdim=True)` where all "
            "are 0 or more), give integer classes, or take `task.loss: bce` for labels that do not exclude each other",
            pointer="/data",
        )
    valid = torch.ones(flat.shape[:2], dtype=torch.bool, device=flat.device)
    labels = targets.to(flat.dtype)
    sums = smoothed_labels(labels, task).sum(-1, keepdim=True)
    if task.class_weights is None and bool(((sums - 1).abs() <= _ROUNDING).all()):
        return ClassTargets(targets=labels, valid=valid)
    return ClassTargets(targets=labels, valid=valid, weights=sums)


def _worst_term(targets: Tensor, index: Tensor) -> str:
    """Return a clause on the first term (N, R, C) that is not of probabilities: its example, sum and least number."""
    wide = targets.to(torch.float64)
    sums, least = wide.sum(-1), wide.amin(-1)
    wrong = ~((sums - 1).abs() <= _SUM) | ~(least >= 0)
    row, term = (int(place) for place in torch.nonzero(wrong)[0])
    of = f"term {term} of example" if sums.shape[1] > 1 else "example"
    total, lowest = float(sums[row, term]), float(least[row, term])
    return f"{of} {int(index[row])}, which sums to {total:.4g}, with numbers from {lowest:.4g}"


def _require_known(counted: Tensor, classes: int, task: Task) -> None:
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= classes):
        worst = int(counted.min()) if int(counted.min()) < 0 else int(counted.max())
        raise WrongShape(
            f"a target is {worst}, but the model has classes 0 to {classes - 1}; "
            f"correct the targets, or mark them {task.ignore_index} to be ignored",
            pointer="/data",
        )


def _unusable(targets: Tensor, shape: torch.Size) -> WrongShape:
    remedy = ""
    if targets.shape == shape[:-1]:
        remedy = f"; {_of_numbers(targets)}"
    elif targets.numel() == shape[:-1].numel():
        remedy = f"; these are as many: give them as `targets.reshape({', '.join(map(str, (-1, *shape[1:-1])))})`"
    return WrongShape(
        f"targets of shape {tuple(targets.shape)} ({targets.dtype}) do not fit outputs of shape {tuple(shape)}; "
        f"cross-entropy needs integer classes of shape {tuple(shape[:-1])}, or probabilities of shape {tuple(shape)}"
        + remedy,
        pointer="/data",
    )


def _of_numbers(targets: Tensor) -> str:
    """Return the remedy for targets with one number for each term that are not integers."""
    if not bool(targets.isfinite().all()):
        return "these hold NaN or Inf: correct or leave out those examples, and give integers"
    broken = targets[targets != targets.round()]
    if not broken.numel():
        return "these are whole numbers: give them as integers (`targets.long()`)"
    return f"these are numbers such as {float(broken[0]):.4g}: take `task.type: regression`, or give classes"


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


def find_output_axis(shape: torch.Size, task: Task) -> int:
    """Return the dimension of the C outputs of a term under `mse` or `bce`: of images (N, C, H, W) as torch has them.

    ``WrongShape`` if ``task.class_axis`` is no dimension of the outputs' ``shape`` (N, …).
    """
    if task.class_axis is not None:
        return _given(shape, task.class_axis)
    return 1 if len(shape) > 3 else len(shape) - 1


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
