"""Outputs of a model as (examples, loss terms, numbers per term), whatever the task.

Every example has R loss terms of C numbers each: one term of C logits for a classifier, T−1
terms of V logits for a causal language model (the outputs of position t answer for token t+1),
one term of d numbers for a pooled sentence embedding. Terms whose target is ignored, or whose
position is padding, are not valid.
"""

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from catalog.requests.inputs import EMBEDDINGS, Task
from engine.errors import EngineError, ModelRefused, NonFiniteLoss, Unwinding, WrongShape
from engine.memory.out_of_memory import lost_device, ran_out_of_memory
from engine.model.batches import Batch, tensors, with_virtual_tokens
from engine.model.class_targets import (
    find_class_axis,
    find_output_axis,
    label_weights,
    read_class_targets,
    require_labels,
)
from engine.model.determinism import hold_attention, leave_strict
from engine.model.dtype_casts import casts_of, conversion_of, is_mismatch
from engine.model.output_selection import loss_of, mean_over_positions, output_of, require_real
from engine.model.sharding.gathering import refusing_absent_reads
from engine.model.state.model_state import forward_of

_OF_TRANSFORMS = ("BatchedTensorImpl", "GradTrackingTensor", "torch.func")
"""Words of torch's messages about tensors inside ``torch.func.vmap`` and its like."""
_BYTES = (
    "the inputs are uint8, and whether the model takes pixels from 0 to 255, from 0 to 1 or normalised is its own: "
    "give them as it was trained, as floats (`images.float() / 255`), or state their scale (`pixels`); "
    "or give token ids as int64; "
)

_Arrange = Callable[[Any, Batch, Task], "Prediction"]
"""Makes a prediction of what a model returned."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Outputs of one batch beside what they should be."""

    outputs: Tensor
    """(N, R, C), attached to the graph; (1, 1, 1), the mean loss, for the model's own loss."""
    targets: Tensor | None
    """(N, R) int64 classes, or (N, R, C) numbers or probabilities of classes."""
    valid: Tensor
    """(N, R) booleans: loss terms that count."""
    weights: Tensor | None = None
    """(N, R, 1), or (N, R, C) for `bce`: what the Hessian of each term is multiplied by; None where by one."""
    weighed: Tensor | None = None
    """(N,) sums of the label's weights over the terms that count, which torch's weighted mean divides by."""
    logits: Tensor | None = None
    """(N, …, C) the model's own tensor of which ``outputs`` are the first terms of each example; None where they are
    arranged otherwise, or are no logits of classes."""

    @property
    def terms(self) -> int:
        """Loss terms that count."""
        return int(self.valid.sum())

    @property
    def divisor(self) -> float:
        """The divisor by which the mean loss follows from the sum over these terms."""
        return self.terms if self.weighed is None else float(self.weighed.sum())

    @property
    def shares(self) -> Tensor:
        """Each example's part of the divisor, (N,) float64."""
        return self.valid.sum(1).to(torch.float64) if self.weighed is None else self.weighed


def predict(model: nn.Module, batch: Batch, task: Task) -> Prediction:
    """Run a model on a batch and arrange its outputs for a task.

    Args:
        model: The model, in the mode and precision that it is measured in.
        batch: Its inputs and targets, on its device.
        task: Decides which output is taken, which terms there are and which of them count.

    Returns:
        The prediction, whose outputs (N, R, C) are attached to the graph.

    Raises:
        ModelRefused: If the model raises; the message quotes it.
        WrongShape: If outputs and targets do not fit each other or the task.
        NonFiniteLoss: If the outputs hold NaN or Inf.
    """
    own_loss = task.likelihood == "model"
    _require_tensor_targets(batch.targets, task)
    if batch.index.is_cuda:
        leave_strict()
    returned = call_model(model, batch, labelled=own_loss)
    batch = with_virtual_tokens(model, batch, task)
    classified: _Arrange = partial(_classified, model=model)
    arrangements: Mapping[str, _Arrange] = {
        "classification": classified,
        "sequence_classification": classified,
        "token_classification": _each_label,
        "causal_lm": _next_token,
        "masked_lm": _each_token,
        "regression": _regressed,
        "sentence_embedding": partial(_pooled, model=model),
        "embedding": partial(_pooled, model=model),
    }
    arrange = arrangements[task.type]
    prediction = _own_loss(returned, batch, task) if own_loss else arrange(returned, batch, task)
    if not _finite(prediction.outputs.detach()):
        raise NonFiniteLoss(
            f"the model's outputs hold NaN or Inf for examples {int(batch.index[0])} to {int(batch.index[-1])}; "
            "look for non-finite inputs or weights"
        )
    if prediction.outputs.is_cuda:
        hold_attention(prediction.outputs)
    return prediction


def _require_tensor_targets(targets: object, task: Task) -> None:
    """Refuse targets that are not a tensor, which would be taken for none, or complex but for the model's own loss."""
    if isinstance(targets, Tensor) and task.type not in EMBEDDINGS and task.likelihood != "model":
        require_real(targets, "targets", "/data")
    if targets is None or isinstance(targets, Tensor) or task.type in EMBEDDINGS:
        return
    first = next(iter(targets), None) if isinstance(targets, (tuple, list)) else None
    shown = type(targets).__name__ + ("" if first is None else f" of {type(first).__name__}, first {first!r:.60}")
    remedy = "number the names from 0" if isinstance(first, str) else "give one tensor with the examples first"
    raise WrongShape(
        f"targets must be a tensor, an array or a list of numbers (got {shown}); {remedy}", pointer="/data"
    )


def _finite(outputs: Tensor) -> bool:
    """Tell whether all outputs are finite; one sum settles it, unless it overflows where none of them does."""
    return bool(outputs.sum().isfinite()) or bool(torch.isfinite(outputs).all())


def class_terms(batch: Batch, task: Task, each: int) -> int:
    """Count the loss terms of a batch that is to be classified, without running the model.

    Args:
        batch: Inputs and targets.
        task: A task with classes for targets.
        each: Terms of an example, taken where neither targets nor token ids say.
    """
    classes = batch.targets
    if task.type == "causal_lm":
        classes = (_ids(batch) if classes is None else classes)[:, 1:]
        if batch.mask is not None:
            classes = torch.where(batch.mask[:, 1:] & batch.mask[:, :-1], classes, task.ignore_index)
    if not isinstance(classes, Tensor) or classes.is_floating_point():
        return each * batch.size
    return int((classes != task.ignore_index).sum())


def call_model(model: nn.Module, batch: Batch, *, labelled: bool) -> Any:  # noqa: ANN401 - models return anything
    """Return what a model returns for a batch.

    Args:
        batch: Inputs as a mapping of keyword arguments, a tuple of positional ones, or a single one.
        labelled: Whether the model is given the targets too: by name as ``labels``, else as the last argument.

    Raises:
        ModelRefused: If the model raises; the message quotes it.
    """
    inputs = batch.inputs
    try:
        with forward_of(model), casts_of(model), refusing_absent_reads():
            if isinstance(inputs, Mapping):
                return model(**inputs, labels=batch.targets) if labelled else model(**inputs)
            positional = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
            return model(*positional, batch.targets) if labelled else model(*positional)
    except (EngineError, Unwinding):
        raise
    except Exception as error:
        if ran_out_of_memory(error) or lost_device(error):
            raise
        shapes = (
            ", ".join(str(tuple(t.shape)) for t in inputs.values())
            if isinstance(inputs, Mapping)
            else (str(tuple(inputs.shape)) if isinstance(inputs, Tensor) else "a tuple")
        )
        said = str(error)[:500] + _refusing_layer(model, error)
        transformed = any(word in str(error) for word in _OF_TRANSFORMS)
        remedy, pointer = "check that data and model belong together", "/data"
        conversion = conversion_of(model) if is_mismatch(error) else None
        if transformed:
            remedy = (
                "its `forward` calls its layers inside a transform of `torch.func` (vmap, grad), where they cannot be "
                "watched; write that part for a whole batch"
            )
            pointer = "/model"
        elif any(each.dtype == torch.uint8 for each in tensors(inputs)):
            remedy = _BYTES + remedy
        elif conversion is not None:
            other = (
                "" if conversion[0] not in ("float32", "float64") else f"take `collection.dtype: {conversion[0]}`, or "
            )
            remedy = (
                f"its tensors of {conversion[0]} were converted to {conversion[1]}, as `collection.dtype` says, and a "
                f"part of it does not follow: {other}write that part in operations that take any type"
            )
            pointer = "/collection/dtype"
        refused = ModelRefused(
            f"the model raised on inputs of shape {shapes}: {type(error).__name__}: {said}; {remedy}", pointer=pointer
        )
        refused.examples = None if batch.index.is_meta else tuple(batch.index.tolist())
        raise refused from error


def _refusing_layer(model: nn.Module, error: Exception) -> str:
    """Return a clause on the innermost layer that raised, with what it takes and was given; empty where none did."""
    names, clause = {id(module): name for name, module in model.named_modules()}, ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer, entered = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(entered, Tensor) and isinstance(layer, nn.Module) and next(layer.children(), None) is None:
            name = names.get(id(layer), "")
            clause = f" (in `{name}`, {layer}, which was given {tuple(entered.shape)} {entered.dtype})"[:300]
    return clause


def _own_loss(returned: Any, batch: Batch, task: Task) -> Prediction:  # noqa: ANN401
    loss = loss_of(returned)
    if loss.numel() != 1:
        raise WrongShape(f"`loss: model` needs a scalar; the model returned shape {tuple(loss.shape)}", pointer="/task")
    targets = batch.targets
    if not isinstance(targets, Tensor):
        raise WrongShape("`loss: model` needs targets in the data", pointer="/data")
    shifted = targets[:, 1:] if task.type == "causal_lm" else targets
    classes = not (targets.is_floating_point() or targets.is_complex())
    if classes:
        valid = shifted.reshape(batch.size, -1) != task.ignore_index
    else:
        # (N, …, C) numbers are one term for each vector of C
        valid = torch.ones(batch.size, math.prod(targets.shape[1:-1]), dtype=torch.bool, device=targets.device)
    if not bool(valid.any()):
        # the mean over no term is NaN; such examples still count in A
        loss = torch.zeros_like(loss.detach())
    return Prediction(outputs=loss.reshape(1, 1, 1), targets=None, valid=valid)


def _classified(returned: Any, batch: Batch, task: Task, model: nn.Module) -> Prediction:  # noqa: ANN401
    outputs, targets = output_of(returned, task, "logits"), batch.targets
    if task.likelihood != "cross_entropy":
        return _numbers(outputs, targets, batch, task)
    if outputs.ndim < 2 or outputs.shape[0] != batch.size:
        remedy = "; of one logit for each example take `task.loss: bce`" if outputs.shape == (batch.size,) else ""
        raise WrongShape(
            f"outputs of shape {tuple(outputs.shape)} for {batch.size} examples; "
            f"classification needs (examples, …, classes){remedy}",
            pointer="/task/loss" if remedy else "/model",
        )
    axis = find_class_axis(outputs.shape, batch, task, model)
    if axis == outputs.ndim - 1:
        return replace(_classes(outputs, targets, batch, task), logits=outputs)
    if isinstance(targets, Tensor) and targets.shape == outputs.shape:
        targets = targets.movedim(axis, -1)
    return _classes(outputs.movedim(axis, -1), targets, batch, task)


def _next_token(returned: Any, batch: Batch, task: Task) -> Prediction:  # noqa: ANN401
    outputs = _tokens(returned, batch, task)
    ids = batch.targets if batch.targets is not None else _ids(batch)
    if not isinstance(ids, Tensor) or ids.shape != outputs.shape[:2]:
        raise WrongShape(
            f"`causal_lm` needs targets of shape {tuple(outputs.shape[:2])}, the token ids themselves (they are "
            f"shifted here); got {tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__}",
            pointer="/data",
        )
    if outputs.shape[1] < 2:
        raise WrongShape("a causal language model needs sequences of 2 tokens or more", pointer="/data")
    targets = ids[:, 1:]
    if batch.mask is not None:
        targets = torch.where(batch.mask[:, 1:] & batch.mask[:, :-1], targets, task.ignore_index)
    return replace(_classes(outputs[:, :-1], targets, batch, task), logits=outputs)


def _each_token(returned: Any, batch: Batch, task: Task) -> Prediction:  # noqa: ANN401
    outputs, targets = _tokens(returned, batch, task), batch.targets
    if not isinstance(targets, Tensor):
        raise WrongShape(
            f"`masked_lm` needs targets: the token at each masked position, {task.ignore_index} elsewhere",
            pointer="/data",
        )
    return replace(_classes(outputs, targets, batch, task), logits=outputs)


def _each_label(returned: Any, batch: Batch, task: Task) -> Prediction:  # noqa: ANN401
    outputs = _tokens(returned, batch, task)
    found = _classes(outputs, batch.targets, batch, task)
    if batch.targets is None and batch.mask is not None and batch.mask.shape == found.valid.shape:
        # a label for each token of the text, and none for padding
        found = replace(found, valid=batch.mask)
    return replace(found, logits=outputs)


def _regressed(returned: Any, batch: Batch, task: Task) -> Prediction:  # noqa: ANN401
    return _numbers(output_of(returned, task, "logits"), batch.targets, batch, task)


def _pooled(returned: Any, batch: Batch, task: Task, model: nn.Module) -> Prediction:  # noqa: ANN401
    outputs = mean_over_positions(output_of(returned, task, "last_hidden_state"), batch.mask, task, model)
    return _numbers(outputs, None, batch, task)  # a Gaussian model of the embedding itself, without targets


def _tokens(returned: Any, batch: Batch, task: Task) -> Tensor:  # noqa: ANN401
    outputs = output_of(returned, task, "logits")
    if outputs.ndim != 3 or outputs.shape[0] != batch.size:
        raise WrongShape(
            f"outputs of shape {tuple(outputs.shape)}; a language model needs ({batch.size}, tokens, vocabulary)",
            pointer="/model",
        )
    return outputs


def _ids(batch: Batch) -> Any:  # noqa: ANN401
    if isinstance(batch.inputs, Mapping):
        return batch.inputs.get("input_ids")
    return batch.inputs if isinstance(batch.inputs, Tensor) else None


def _classes(outputs: Tensor, targets: Any, batch: Batch, task: Task) -> Prediction:  # noqa: ANN401
    flat = outputs.reshape(batch.size, -1, outputs.shape[-1])
    fitting = not isinstance(targets, Tensor) or targets.shape in (outputs.shape, outputs.shape[:-1])
    if flat.shape[-1] < 2 and fitting:
        raise WrongShape(
            f"`cross_entropy` needs two logits or more for each term (got outputs of shape {tuple(outputs.shape)}): "
            "with one, the loss is 0 whatever the label, and so is its curvature; take `task.loss: bce` with targets 0 "
            "and 1, a head of two logits, or `task.type: regression`",
            pointer="/task/loss",
        )
    if not isinstance(targets, Tensor):
        require_labels(task.class_weights, "class_weights")
        valid = torch.ones(flat.shape[:2], dtype=torch.bool, device=flat.device)
        return Prediction(outputs=flat, targets=None, valid=valid)
    read = read_class_targets(flat, targets, outputs.shape, task, batch.index)
    return Prediction(outputs=flat, targets=read.targets, valid=read.valid, weights=read.weights, weighed=read.weighed)


def _numbers(outputs: Tensor, targets: Any, batch: Batch, task: Task) -> Prediction:  # noqa: ANN401
    if outputs.ndim < 1 or outputs.shape[0] != batch.size:
        raise WrongShape(
            f"outputs of shape {tuple(outputs.shape)} for {batch.size} examples; dimension 0 must be the examples",
            pointer="/model",
        )
    wide = outputs.unsqueeze(-1) if outputs.ndim == 1 else outputs
    axis = find_output_axis(wide.shape, task)
    last = wide.movedim(axis, -1)
    flat = last.reshape(batch.size, -1, last.shape[-1])
    wanted = None
    if isinstance(targets, Tensor) and task.type not in EMBEDDINGS:
        if targets.shape not in (outputs.shape, wide.shape, last.shape[:-1] if last.shape[-1] == 1 else wide.shape):
            raise WrongShape(
                f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}; "
                f"`{task.likelihood}` needs the same shape",
                pointer="/data",
            )
        wanted = targets.movedim(axis, -1) if targets.shape == wide.shape else targets
        wanted = wanted.reshape(flat.shape).to(flat.dtype)
        _require_finite(wanted, batch)
    valid = torch.ones(flat.shape[:2], dtype=torch.bool, device=flat.device)
    weights = _positive(flat, wanted, task) if task.likelihood == "bce" else None
    return Prediction(outputs=flat, targets=wanted, valid=valid, weights=weights)


def _require_finite(targets: Tensor, batch: Batch) -> None:
    if not _finite(targets):
        wrong = int(torch.nonzero(~torch.isfinite(targets).flatten(1).all(1))[0])
        raise WrongShape(
            f"the targets of example {int(batch.index[wrong])} hold NaN or Inf; correct or leave out that example",
            pointer="/data",
        )


def _positive(outputs: Tensor, targets: Tensor | None, task: Task) -> Tensor | None:
    """Return the weight of each output (N, R, C) in the Hessian: w where the label is 1, one where it is 0."""
    if targets is None:
        require_labels(task.positive_weights, "positive_weights")
        return None
    if targets.numel() and not (float(targets.min()) >= 0 and float(targets.max()) <= 1):
        raise WrongShape(
            f"`bce` needs targets between 0 and 1; they reach from {float(targets.min()):.4g} to "
            f"{float(targets.max()):.4g}: correct the targets, or take `loss: mse`",
            pointer="/data",
        )
    if task.positive_weights is None:
        return None
    weights = task.positive_weights
    spread = weights * outputs.shape[-1] if len(weights) == 1 else weights
    return (label_weights(spread, "positive_weights", outputs) - 1) * targets + 1
