"""Head fields of a ``config.json``: how many classes the head has, and which loss it was trained with.

================  ==========================================================================
field             what becomes of it
================  ==========================================================================
`id2label`        read: as many classes as it has names
`num_labels`      read where there is no `id2label`; a notice where both are there and differ
`problem_type`    a notice where its loss is not the task's; listed where the task has no head
================  ==========================================================================
"""

from typing import Any

from catalog.requests.inputs import Task
from worker.execution.loader_context import LoaderContext
from worker.execution.models.architectures.config_fields import MAX_LABELS, read_integer

_LOSSES = {"regression": "mse", "single_label_classification": "cross_entropy", "multi_label_classification": "bce"}
"""The loss that transformers takes for each `problem_type`."""
_REMEDIES = {
    "mse": "take `task: {type: regression}`",
    "cross_entropy": "take a classification with `loss: cross_entropy`",
    "bce": "take `task.loss: bce`, with a target for each output",
}
_HEADED = ("classification", "sequence_classification", "regression")
"""Tasks that take a head of one output vector an example, whose loss `problem_type` chooses."""


def read_labels(config: dict[str, Any], context: LoaderContext, pointer: str) -> int | None:
    """Return how many classes the head has; None where config.json does not say."""
    labels, count = config.get("id2label"), config.get("num_labels")
    if not isinstance(labels, dict):
        return read_integer("num_labels", count, 1, MAX_LABELS, pointer) if "num_labels" in config else None
    named = read_integer("id2label", len(labels), 1, MAX_LABELS, pointer)
    if count is not None and (type(count) is not int or count != named):
        context.unused("config.json: `num_labels`")
        context.notice(
            f"config.json: `num_labels` is {repr(count)[:40]} and `id2label` names {named:,} classes: the head is read "
            f"with {named:,}; write `num_labels: {named}`, or leave it out"
        )
    return named


def account_for_problem(configuration: Any, task: Task, context: LoaderContext) -> None:  # noqa: ANN401 - of transformers
    """List a `problem_type` that is not used, with a notice where the head was trained with another loss."""
    problem = getattr(configuration, "problem_type", None)
    if problem is None or task.likelihood in ("model", _LOSSES.get(problem)):
        return
    context.unused("config.json: `problem_type`")
    if problem in _LOSSES and task.type in _HEADED:
        loss = _LOSSES[problem]
        context.notice(
            f"config.json: `problem_type` is `{problem}`, which transformers trains with `{loss}`, and "
            f"`{task.type}` measures `{task.likelihood}`; if the model was trained with `{loss}`, {_REMEDIES[loss]}"
        )
