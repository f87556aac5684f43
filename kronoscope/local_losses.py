"""Losses of PyTorch as tasks, where they are one exactly: the same likelihood, and a mean over the same terms.

    CrossEntropyLoss     classification, `cross_entropy`, its classes on dimension 1
    BCEWithLogitsLoss    classification, `bce`
    MSELoss              regression, `mse`

What another reduction, or a weight that a task does not have, would change is refused with the remedy.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from catalog.requests.inputs import Task
from kronoscope.local_inputs import OptionRefused, refusing

TorchLoss = nn.Module | Callable[..., Tensor]
"""A loss of PyTorch, as a module or a function."""

_FUNCTIONS: dict[Callable[..., Tensor], Callable[[], nn.Module]] = {
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.mse_loss: nn.MSELoss,
}
_REMEDIES = {
    nn.NLLLoss: "let the model return logits, and take torch.nn.CrossEntropyLoss",
    nn.BCELoss: "let the model return logits, and take torch.nn.BCEWithLogitsLoss",
    nn.GaussianNLLLoss: "take torch.nn.MSELoss, a Gaussian of one variance",
}
_ANY = "take CrossEntropyLoss, BCEWithLogitsLoss or MSELoss, or let the model return its loss and take `loss: model`"


def loss_task(loss: object) -> Task | None:
    """Return the task that a loss of PyTorch is; None where it is neither a loss module nor one of the three functions.

    ``OptionRefused`` if it is a loss that is not exactly a task, or the class of one in place of an object.
    """
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise OptionRefused(f"`task` is the class {loss.__name__}; give an object of it: {loss.__name__}()")
    made = _FUNCTIONS[loss]() if callable(loss) and _is_known(loss) else loss
    if not isinstance(made, nn.Module):
        return None
    name = type(made).__name__
    fields = _READERS.get(type(made))
    if fields is None:
        remedy = next((text for kind, text in _REMEDIES.items() if type(made) is kind), _ANY)
        raise OptionRefused(f"`task` is {name}, which is not exactly a task; {remedy}")
    reduction = getattr(made, "reduction", "mean")
    if reduction != "mean":
        raise OptionRefused(
            f"`task` is {name} with reduction={reduction!r}: the curvature is that of the mean over terms; take "
            "reduction='mean', and multiply the curvature by the number of terms for that of the sum"
        )
    with refusing():
        return Task(**fields(made))


def _is_known(loss: Callable[..., Any]) -> bool:
    try:
        return loss in _FUNCTIONS
    except TypeError:
        # what cannot be hashed is none of them
        return False


def _cross_entropy(loss: nn.CrossEntropyLoss) -> dict[str, Any]:
    return {
        "type": "classification",
        "loss": "cross_entropy",
        "class_axis": 1,
        "class_weights": _numbers(loss.weight),
        "label_smoothing": float(loss.label_smoothing),
        "ignore_index": int(loss.ignore_index),
    }


def _binary_cross_entropy(loss: nn.BCEWithLogitsLoss) -> dict[str, Any]:
    if loss.weight is not None:
        raise OptionRefused(
            "`task` is BCEWithLogitsLoss with `weight`, a factor of each number of a batch, which no task has; take "
            "`pos_weight`, or leave it out"
        )
    return {"type": "classification", "loss": "bce", "positive_weights": _numbers(loss.pos_weight)}


def _mean_squared_error(loss: nn.MSELoss) -> dict[str, Any]:
    weight = getattr(loss, "weight", None)
    if weight is not None:
        raise OptionRefused("`task` is MSELoss with `weight`, which no task has; leave it out")
    return {"type": "regression", "loss": "mse"}


def _numbers(weight: Tensor | None) -> tuple[float, ...] | None:
    if weight is None:
        return None
    if weight.ndim > 1:
        raise OptionRefused(f"`task` has weights of shape {tuple(weight.shape)}; a task takes one for each output")
    return tuple(float(each) for each in weight.reshape(-1).tolist())


_READERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    nn.CrossEntropyLoss: _cross_entropy,
    nn.BCEWithLogitsLoss: _binary_cross_entropy,
    nn.MSELoss: _mean_squared_error,
}
