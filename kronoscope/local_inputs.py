"""The arguments of ``kronoscope.local.measure`` in the forms that a notebook has them."""

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import nn
from torch.utils.data import Dataset

from catalog import ANALYSES, DOCUMENT
from catalog.field_errors import suggestion
from catalog.record import FieldError, WrongType
from catalog.record_reader import read
from catalog.requests.data_sources import Pixels
from catalog.requests.inputs import DataFactory, ModelFactory, Task, TaskType
from engine.errors import UsageError
from engine.model.batches import count_examples, map_tensors, tensors
from engine.model.examples import read_chunks, scale_pixels
from engine.model.state.model_state import host_by_default
from engine.workspace import JobOptions, ModelInputs

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


def repeatable(batches: Batches, name: str = "batches") -> Source:
    """Return data, as ``measure`` takes them, as chunks that are the same at every pass.

    What can be iterated only once, or might come in another order the next time (a ``DataLoader``), is read now and
    kept; ``WrongShape`` if that has no targets, ``WrongOptionType`` if it cannot be iterated.
    """
    if callable(batches):
        require_function(batches, name, ())
        return Source(lambda: read_chunks(_iterable(batches(), f"{name}()")), None)
    _iterable(batches, name)
    if isinstance(batches, Dataset) and hasattr(batches, "__getitem__") and hasattr(batches, "__len__"):
        return Source(lambda: read_chunks(batches), len(batches))
    chunks = list(read_chunks(batches))
    return Source(lambda: iter(chunks), count_examples(chunks))


def _iterable(data: T, name: str) -> T:
    """Return data that hold chunks or examples; ``WrongOptionType`` if they can hold none."""
    if not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")) or getattr(data, "ndim", None) == 0:
        raise WrongOptionType(
            f"`{name}` is {_kind_of(data)}; give a list of (inputs, targets), one such pair, a Dataset, a DataLoader, "
            "or a function that returns one of these"
        )
    return data


def _kind_of(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def scale_inputs(source: Source, pixels: Pixels) -> Source:
    """Return chunks with floats in the place of uint8 inputs, made at each pass; other inputs stay as they are."""
    return dataclasses.replace(source, read=lambda: (_scale_chunk(chunk, pixels) for chunk in source.read()))


def query_inputs(query: Batches, pixels: Pixels | None) -> ModelInputs:
    """Return the examples that an analysis explains."""
    given = repeatable(query, "query")
    source = given if pixels is None else scale_inputs(given, pixels)
    return ModelInputs(batches=source.read, examples=source.examples)


def with_query(options: Mapping[str, Any], query: Batches | None) -> dict[str, Any]:
    """Note in the options, by kind, that a notebook gives the examples to explain itself; None notes nothing.

    ``OptionRefused`` if no analysis explains examples.
    """
    takers = {kind: each for kind, each in options.items() if hasattr(each, "query")}
    named = next((kind for kind, each in takers.items() if each.query is not None), None)
    if named is not None:
        raise OptionRefused(
            f"`params['{named}'].query` names data of a job; in a notebook give the examples as `query`"
        )
    if query is None:
        return dict(options)
    if not takers:
        raise OptionRefused("`query` holds examples for `influence`; add it to `kinds`, or leave `query` out")
    given = DataFactory(source="factory", factory="notebook:query")
    return {**options, **{kind: dataclasses.replace(each, query=given) for kind, each in takers.items()}}


def _scale_chunk(chunk: Any, pixels: Pixels) -> Any:  # noqa: ANN401 - a caller's own
    """Return a chunk with floats in the place of its uint8 inputs."""
    if not isinstance(chunk, tuple) or not tensors(chunk[0]):
        return chunk
    images = any(each.dtype == torch.uint8 for each in tensors(chunk[0]))
    # where none are, the first one is refused
    inputs = map_tensors(
        chunk[0], lambda each: each if images and each.dtype != torch.uint8 else scale_pixels(each, pixels)
    )
    return (inputs, *chunk[1:])


class OptionRefused(UsageError, ValueError):
    """An argument with a word, a field or a number that it cannot have; said before any data are read."""


class WrongOptionType(OptionRefused, TypeError):
    """An argument of another type than is taken."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn what the catalog refuses within into ``OptionRefused``, one of the engine's errors and a ``ValueError``."""
    try:
        yield
    except FieldError as error:
        kind = WrongOptionType if isinstance(error, WrongType) else OptionRefused
        raise kind(str(error)) from error


def argument(annotation: Any, value: object, name: str) -> Any:  # noqa: ANN401 - whatever the annotation says
    """Return an argument as its annotation declares it; ``OptionRefused``, with its ``name``, if it is another."""
    with refusing():
        return read(annotation, value, name)


def require_model(model: object) -> None:
    """Refuse what is not a module: ``TypeError``."""
    if not isinstance(model, nn.Module):
        of_export = ", the one that was exported" if isinstance(model, torch.export.ExportedProgram) else ""
        message = f"`model` is {_kind_of(model)}; give a torch.nn.Module{of_export}"
        raise TypeError(message)


def require_function(value: object, name: str, taken: Sequence[str]) -> None:
    """Refuse an argument that cannot be called with values of these names: ``WrongOptionType``."""
    shown = f"a function of ({', '.join(taken)})" if taken else "a function without arguments"
    if not callable(value):
        raise WrongOptionType(f"`{name}` is {_kind_of(value)}; give {shown}")
    try:
        signature = inspect.signature(value)
    except ValueError:
        # functions in C may have none that Python can read
        return
    try:
        signature.bind(*taken)
    except TypeError as error:
        raise WrongOptionType(f"`{name}` takes other arguments ({error}); give {shown}") from error


def options_record(kind: type[T], options: T | Mapping[str, Any] | None, name: str) -> T:
    """Return a record of options, each of its words and numbers checked; None takes the defaults.

    ``OptionRefused``, with the argument's ``name``, if a field is unknown, or a value is refused.
    """
    made: T = kind() if options is None else argument(kind, options, name)
    return made


def choices(declared: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments, each read as a ``TypedDict`` declares it.

    ``OptionRefused`` if one is unknown, or has a value that it cannot have.
    """
    hints = get_type_hints(declared)
    with refusing():
        for name in given:
            if name not in hints:
                raise FieldError(name, f"must be one of {', '.join(hints)}{suggestion(name, hints)}")
        return {name: read(hints[name], value, name) for name, value in given.items()}


def task_record(task: object) -> Task:
    """Return the task that a record, a mapping of its fields or its type alone names; else ``OptionRefused``."""
    if not isinstance(task, (str, Mapping, Task)):
        raise WrongOptionType(
            f"`task` is {_kind_of(task)}; name what the outputs mean: take one of {', '.join(get_args(TaskType))}, or "
            "a mapping such as {'type': 'classification', 'loss': 'cross_entropy'}"
        )
    if isinstance(task, str) and task not in get_args(TaskType):
        words = get_args(TaskType)
        raise OptionRefused(f"`task` is {task!r}; take one of {', '.join(words)}{suggestion(task, words)}")
    return options_record(Task, {"type": task} if isinstance(task, str) else task, "task")


def kinds_tuple(kinds: Any) -> tuple[str, ...]:  # noqa: ANN401 - whatever can be iterated
    """Return the kinds that an argument names, each once, or one alone; ``OptionRefused`` if it is not such a list."""
    menu = f"give one, or a list, of {', '.join(ANALYSES)}"
    try:
        named = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    except TypeError as error:
        raise WrongOptionType(f"`kinds` is {kinds!r}; {menu}") from error
    for kind in named:
        if not isinstance(kind, str) or kind not in ANALYSES:
            raise OptionRefused(f"`kinds` holds {kind!r}; {menu}{suggestion(kind, ANALYSES)}")
    if len(set(named)) != len(named) or not named:
        raise OptionRefused(f"`kinds` {'is empty' if not named else 'names an analysis twice'}; {menu}, each once")
    return named


def params_records(kinds: Sequence[str], params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a record of options for each analysis asked for; None for one without options.

    Options of other kinds are checked, too; ``OptionRefused`` if a kind is unknown or has no options, or a field is
    refused.
    """
    if params is not None and not isinstance(params, Mapping):
        raise WrongOptionType(f"`params` is {type(params).__name__}; give a mapping of options by kind")
    known = {kind: analysis.params for kind, analysis in ANALYSES.items() if analysis.params is not None}
    given = {} if params is None else dict(params)
    for kind, options in given.items():
        if kind not in known and (kind not in ANALYSES or options):
            near = suggestion(kind, known)
            raise OptionRefused(f"`params` has options of {kind!r}; there are those of {', '.join(known)}{near}")
    made = {
        kind: options_record(known[kind], options, f"params['{kind}']")
        for kind, options in given.items()
        if kind in known
    }
    return {kind: made.get(kind) or (known[kind]() if kind in known else None) for kind in kinds}


def require_document(task: Task, options: JobOptions) -> None:
    """Require what a job's document requires of blocks that stand beside each other, before any data are read.

    ``OptionRefused`` if two of them contradict each other.
    """
    params = {kind: each for kind, each in options.params.items() if each is not None}
    try:
        DOCUMENT(
            kind=options.kinds,
            model=ModelFactory(source="factory", factory="notebook:model"),
            data=DataFactory(source="factory", factory="notebook:data"),
            task=task,
            collection=options.collection,
            stabilisation=options.stabilisation,
            woodbury=options.woodbury,
            **params,
        )
    except FieldError as error:
        block, dot, rest = error.field.partition(".")
        place = f"params['{block}']{dot}{rest}" if block in params else error.field
        raise OptionRefused(f"`{place}` {error.message}") from error


_TURN = threading.RLock()


@contextlib.contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Let threads take turns, outside of the caller's autocast and default device.

    Torch's switches and generators, and a model that two threads have, are the process's; autocast would narrow the
    products of sums and decompositions, which ``collection.amp`` never does; and ``torch.set_default_device`` is meant
    for what the model makes, which keeps it, not for what stands on the host here.
    """
    with _TURN, contextlib.ExitStack() as stack:
        if torch.get_default_device().type != "cpu":
            stack.enter_context(host_by_default())
        for kind in {device.type, "cpu"}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def usable_device(given: object) -> torch.device:
    """Return the device that a caller names; ``OptionRefused`` if this machine's PyTorch has no such device."""
    named = argument(str | torch.device, given, "device")
    try:
        found = torch.device(named)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        first = str(error).partition("\n")[0]
        raise OptionRefused(f"`device` must be one that this machine's PyTorch has (got {given!r}: {first})") from error
    return found
