"""The arguments of ``kronoscope.local.measure`` in the forms that a notebook has them."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from torch.utils.data import Dataset

from catalog.inputs import Task, TaskType
from catalog.record import FieldError
from engine.model.batches import count_examples
from engine.model.examples import read_chunks

Batches = (
    Iterable[tuple[Any, ...]]
    | Iterable[Mapping[str, Any]]
    | Dataset[Any]
    | tuple[Any, ...]
    | Callable[[], Iterable[tuple[Any, ...]]]
)
"""Chunks of data, a dataset of examples, one pair of tensors, or a callable that gives one of these anew."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Source:
    """Chunks that can be read again and again, in the same order."""

    read: Callable[[], Iterator[Any]]
    examples: int | None
    """How many there are; None where only a pass tells."""


def repeatable(batches: Batches) -> Source:
    """Return data as chunks that are the same at every pass.

    Args:
        batches: As ``measure`` takes them. What can be iterated only once, or might come in another order the next
            time (a ``DataLoader``), is read now and kept.

    Returns:
        The chunks.

    Raises:
        WrongShape: If what is read now has no targets.
    """
    if callable(batches):
        return Source(lambda: read_chunks(batches()), None)
    if isinstance(batches, Dataset) and hasattr(batches, "__getitem__") and hasattr(batches, "__len__"):
        return Source(lambda: read_chunks(batches), len(batches))
    chunks = list(read_chunks(batches))
    return Source(lambda: iter(chunks), count_examples(chunks))


def options_record(kind: type[T], options: T | Mapping[str, Any] | None, name: str) -> T:
    """Return a record of options.

    Args:
        kind: The record's class.
        options: The record, a mapping of its fields, or None for the defaults.
        name: The argument's name, for messages.

    Returns:
        The record.

    Raises:
        TypeError: If the options are neither.
        ValueError: If a field is unknown, or a value is refused.
    """
    if options is None:
        return kind()
    if isinstance(options, kind):
        return options
    if not isinstance(options, Mapping):
        message = f"`{name}` is {type(options).__name__}; give {kind.__name__} or a mapping of its fields"
        raise TypeError(message)
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    unknown = [str(each) for each in options if each not in fields]
    if unknown:
        near = difflib.get_close_matches(unknown[0], fields, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(fields)}"
        raise ValueError(f"`{name}` has no field `{unknown[0]}`; {hint}")
    try:
        return kind(**options)
    except FieldError as error:
        raise ValueError(f"`{name}.{error.field}` {error.message}") from error


def task_record(task: Task | Mapping[str, Any] | str) -> Task:
    """Return the task that an argument names.

    Args:
        task: The record, a mapping of its fields, or its type alone.

    Returns:
        The task.

    Raises:
        ValueError: If the type is not one of the document's, or a field is refused.
    """
    fields = {"type": task} if isinstance(task, str) else task
    chosen = fields.type if isinstance(fields, Task) else fields.get("type")
    if chosen not in get_args(TaskType):
        raise ValueError(f"`task` is {chosen!r}; take one of {', '.join(get_args(TaskType))}")
    return options_record(Task, fields, "task")
