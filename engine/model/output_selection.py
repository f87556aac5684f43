"""The choice of the output, among all tensors that a model returns, that the loss is taken of."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from catalog.requests.inputs import Task
from engine.errors import WrongShape


def output_of(returned: Any, task: Task, usual: str) -> Tensor:  # noqa: ANN401 - models return anything
    """Return the tensor that ``task.output`` names, or else the one that there is no doubt about.

    Without a name that is, in this order: the field or entry called ``usual``; the tensor itself; the
    first of a tuple; the only tensor, scalars aside, among the entries of a mapping or an object.

    Args:
        returned: What the model's forward returned.
        task: Its ``output`` decides where it is not None.
        usual: The usual name of such an output, as in Hugging Face's models.

    Raises:
        WrongShape: If there is no such tensor, or several are as good; the message names them.
    """
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
        WrongShape: If there is none.
    """
    field = _entry(returned, "loss")
    first = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    for tensor in (field, first):
        if isinstance(tensor, Tensor):
            return tensor
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
