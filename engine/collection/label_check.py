"""Labels against the classes of the model, before a pass is made: a label that no class has would end the last one."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from catalog.requests.inputs import Task
from engine.errors import WrongShape


def require_known_labels(
    labels: Callable[[], Iterator[tuple[Tensor, Tensor]]] | None, classes: int, task: Task
) -> None:
    """Require that every label that can be read without its inputs is a class of the model.

    Args:
        labels: Reads targets (n, …) with the indices (n,) of their examples; None where only a pass shows them.
        classes: Classes of the model.
        task: The task; only labels of a cross-entropy are looked at, and no tokens, of which padding may be any.

    Raises:
        WrongShape: If a label is below 0 or above the last class, and is not the one to be ignored.
    """
    if labels is None or task.likelihood != "cross_entropy" or task.type == "causal_lm":
        return
    for targets, index in labels():
        if targets.is_floating_point() or targets.is_complex() or not targets.numel():
            continue
        whole = targets.to(torch.int64).reshape(len(index), -1)
        unknown = torch.nonzero(((whole < 0) | (whole >= classes)) & (whole != task.ignore_index))
        if len(unknown):
            example, term = (int(place) for place in unknown[0])
            raise WrongShape(
                f"the label of example {int(index[example])} is {int(whole[example, term])}, but the model has "
                f"{classes} classes (0 to {classes - 1}); correct the labels, mark them {task.ignore_index} to be "
                "ignored, or take a model with a class for each",
                pointer="/data",
            )
