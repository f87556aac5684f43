"""The choice of the output, among all tensors that a model returns, that the loss is taken of."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from catalog.requests.inputs import Task
from engine.errors import WrongShape

_CHANNELS_LAST = frozenset({"sam2_hiera_det_model", "sam2_vision_model"})
"""Types of transformers whose `last_hidden_state` is (N, rows, columns, channels); elsewhere channels come first."""


def output_of(returned: Any, task: Task, usual: str) -> Tensor:  # noqa: ANN401 - models return anything
    """Return the tensor that ``task.output`` names, or else the one that there is no doubt about.

    Without a name that is, in this order: the field or entry called ``usual``; the tensor itself; the
    first of a tuple; the only tensor, scalars aside, among the entries of a mapping or an object.

    Args:
        returned: What the model's forward returned.
        task: Its ``output`` decides where it is not None.
        usual: The usual name of such an output, as in Hugging Face's models.

    Raises:
        WrongShape: If there is no such tensor, several are as good, which the message names, or it is complex.
    """
    return require_real(_selected(returned, task, usual), "the model's outputs", "/model")


def require_real(tensor: Tensor, what: str, pointer: str) -> Tensor:
    """Return a tensor that enters the loss; ``WrongShape``, which calls it ``what``, if its numbers are complex."""
    if tensor.is_complex():
        raise WrongShape(
            f"{what} must be real numbers, of which the losses are (got {tensor.dtype}); give the real and imaginary "
            "parts as numbers of their own (`torch.view_as_real`)",
            pointer=pointer,
        )
    return tensor


def _selected(returned: Any, task: Task, usual: str) -> Tensor:  # noqa: ANN401
    if task.output is not None:
        return _named(returned, task.output)
    field = _entry(returned, usual)
    if isinstance(field, Tensor):
        return field
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, (tuple, list)) and returned and isinstance(returned[0], Tensor):
        return returned[0]
    tensors = {name: entry for name, entry in _tensors(returned).items() if entry.ndim > 0}
    if len(tensors) == 1:
        return next(iter(tensors.values()))
    kind = type(returned).__name__
    if tensors:
        raise WrongShape(
            f"the model returned `{kind}` with {len(tensors)} tensors ({_listed(tensors)}) and none called `{usual}`; "
            "name the one that the loss is taken of in `task.output`",
            pointer="/task/output",
        )
    raise WrongShape(
        f"the model returned `{kind}` without a tensor; the task needs a tensor, or a mapping or object that holds one",
        pointer="/model",
    )


def loss_of(returned: Any) -> Tensor:  # noqa: ANN401 - models return anything
    """Return the loss that the model computed: its field ``loss``, the tensor itself or the first of a tuple.

    Args:
        returned: What the model's forward returned.

    Returns:
        The loss, of the shape that the model gave it: () or (1,) where it is a mean.

    Raises:
        WrongShape: If there is none, or it is complex.
    """
    field = _entry(returned, "loss")
    first = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    for tensor in (field, first):
        if isinstance(tensor, Tensor):
            return require_real(tensor, "the model's loss", "/model")
    raise WrongShape(
        f"`loss: model` needs a tensor, or an output with `loss`; the model returned `{type(returned).__name__}`",
        pointer="/model",
    )


def _named(returned: Any, name: str) -> Tensor:  # noqa: ANN401
    entry = _entry(returned, name)
    if isinstance(entry, Tensor):
        return entry
    tensors = _tensors(returned)
    raise WrongShape(
        f"`task.output` must name a tensor that the model returns (got '{name}'); `{type(returned).__name__}` holds "
        f"{_listed(tensors) or 'none by name'}",
        pointer="/task/output",
    )


def _entry(returned: Any, name: str) -> object:  # noqa: ANN401
    if isinstance(returned, Mapping):
        return returned.get(name)
    return None if isinstance(returned, Tensor) else getattr(returned, name, None)


def _tensors(returned: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """Return every tensor that a mapping or an object holds by name."""
    if isinstance(returned, Mapping):
        entries = dict(returned)
    elif isinstance(returned, tuple) and hasattr(returned, "_asdict"):
        entries = returned._asdict()
    else:
        entries = {} if isinstance(returned, Tensor) else dict(getattr(returned, "__dict__", {}))
    return {str(name): entry for name, entry in entries.items() if isinstance(entry, Tensor)}


def _listed(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"`{name}` {tuple(tensor.shape)}" for name, tensor in tensors.items())


def mean_over_positions(outputs: Tensor, mask: Tensor | None, task: Task, model: nn.Module) -> Tensor:
    """Return the mean of hidden states over the positions of each example, without those that are padding.

    Args:
        outputs: Hidden states, (N, T, d), (N, d, …) of an image, or (N, d) that are pooled already.
        mask: Tokens of the inputs that count, (N, T).
        task: For `embedding` the inputs may be others than tokens.
        model: Its type says where channels stand.

    Returns:
        Embeddings, (N, d).

    Raises:
        WrongShape: If inputs are padded, and which positions of the hidden states are is not known.
    """
    if outputs.ndim > 3 and task.type == "embedding":
        last = getattr(getattr(model, "config", None), "model_type", None) in _CHANNELS_LAST
        outputs = outputs.flatten(1, -2).mean(1) if last else outputs.flatten(2).mean(2)
    if outputs.ndim != 3:
        return outputs
    if mask is not None and task.type == "embedding" and mask.shape != outputs.shape[:2]:
        mask = _mask_of_frames(mask, outputs, model)
    if mask is None:
        return outputs.mean(1)
    weights = mask.to(outputs.dtype)
    return (outputs * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp_min(1)


def _mask_of_frames(mask: Tensor, outputs: Tensor, model: nn.Module) -> Tensor | None:
    """Return the mask of hidden states that have positions of their own, as frames of a sound have; None of all."""
    if mask.is_meta or bool(mask.all()):
        return None
    # what the models of transformers mask their own attention with
    framed = getattr(model, "_get_feature_vector_attention_mask", None)
    if framed is None:
        raise WrongShape(
            f"`attention_mask` has {mask.shape[1]} positions and marks some as padding, but the hidden states have "
            f"{outputs.shape[1]}, so which of them are padding is not known: give inputs of one length, without a mask",
            pointer="/data",
        )
    found: Tensor = framed(outputs.shape[1], mask)
    return found
