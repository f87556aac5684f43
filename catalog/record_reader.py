"""The reader of plain values into what an annotation declares: records, words, numbers, lists of them.

The words and types are those of the declarations themselves (``Literal``, ``int``, ``tuple[…]``, records), so no list
of choices is written twice. It is for values that no JSON validator has seen: the arguments of a notebook. Every fault
is a ``FieldError`` with the field's whole path, the value and the remedy.
"""

import dataclasses
import functools
import math
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from catalog.field_errors import nearest, spellings, suggestion
from catalog.record import FieldError, WrongType

_MOST_SHOWN = 60


def read(annotation: Any, value: Any, field: str) -> Any:  # noqa: ANN401 - whatever the annotation says
    """Read a value as an annotation declares it.

    Args:
        annotation: A record, or any annotation of a record's field: a ``Literal``, a scalar, a ``tuple``, a
            ``Mapping``, a union of these, or another class, of which the value must be an instance.
        value: The value. A record may be given as a mapping of its fields, a tuple as a list. A record is read
            again, field by field, since its constructor looks at no words.
        field: Path of the value, for errors, such as ``collection.fisher``.

    Returns:
        The value: records made, lists as tuples, numbers as Python's own.

    Raises:
        FieldError: If a word is none of the choices, a field is unknown or missing, or a record refuses a value.
        WrongType: If the value is of another type.
    """
    annotation = _bare(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _word(arguments, value, field)
    if origin in (Union, types.UnionType):
        return _member(arguments, value, field)
    if _is_record(annotation):
        return _record(annotation, value, field)
    if not _fits(annotation, value):
        raise WrongType(field, f"must be {_described(annotation)} (got {_shown(value)})")
    return _plain(annotation, value, field)


def _plain(annotation: Any, value: Any, field: str) -> Any:  # noqa: ANN401
    """Read a value that has the form of a scalar, a list or a mapping."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (tuple, Sequence):
        return tuple(read(arguments[0], each, f"{field}[{place}]") for place, each in enumerate(value))
    if origin is Mapping:
        return {name: read(arguments[1], each, f"{field}[{name!r}]") for name, each in value.items()}
    return _number(annotation, value, field) if annotation in (int, float) else value


def _word(choices: tuple[Any, ...], value: Any, field: str) -> Any:  # noqa: ANN401
    if _fits_word(choices, value):
        return value
    raise FieldError(
        field,
        f"must be one of {', '.join(map(str, choices))} (got {_shown(value)})"
        f"{suggestion(value, [each for each in choices if isinstance(each, str)])}",
    )


def _fits_word(choices: tuple[Any, ...], value: Any) -> bool:  # noqa: ANN401
    return any(type(value) is type(each) and value == each for each in choices)


def _member(members: tuple[Any, ...], value: Any, field: str) -> Any:  # noqa: ANN401
    """Read the value as the member of a union that it has the form of."""
    fitting = [member for member in members if _fits(member, value)]
    tagged = [member for member in fitting if _tag(member) is not None]
    if len(tagged) > 1:
        return read(_tagged(tagged, value, field), value, field)
    exact = next((each for each in fitting if get_origin(each) is Literal and _fits_word(get_args(each), value)), None)
    if fitting:
        return read(exact or fitting[0], value, field)
    others = [member for member in members if member is not types.NoneType]
    said = [_described(each) for each in others] + (["None"] if len(others) < len(members) else [])
    raise WrongType(field, f"must be {', or '.join(dict.fromkeys(said))} (got {_shown(value)})")


def _tagged(members: Sequence[type], value: Any, field: str) -> type:  # noqa: ANN401
    """Return the member of a union of records that the value's tag names."""
    chosen = value.get("source") if isinstance(value, Mapping) else getattr(value, "source", None)
    by_tag = {str(_tag(member)): member for member in members}
    return by_tag[_word(tuple(by_tag), chosen, f"{field}.source")]


def _record(cls: type, value: Any, field: str) -> Any:  # noqa: ANN401
    if not _fits(cls, value):
        raise WrongType(field, f"is {type(value).__name__}; give {cls.__name__} or a mapping of its fields")
    fields = value if isinstance(value, Mapping) else {each.name: getattr(value, each.name) for each in _fields(cls)}
    hints = _hints(cls)
    for name in fields:
        if name not in hints:
            raise FieldError(field, f"has no field `{str(name)[:_MOST_SHOWN]}`; {_remedy(str(name), cls)}")
    made = {name: read(hints[name], each, f"{field}.{name}") for name, each in fields.items()}
    for each in _fields(cls):
        required = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if required and each.name not in made:
            raise FieldError(f"{field}.{each.name}", f"is missing; give {_described(hints[each.name])}")
    try:
        return cls(**made)
    except FieldError as error:
        raise type(error)(f"{field}.{error.field}", error.message) from error


def _remedy(wrong: str, cls: type) -> str:
    known = spellings(cls)
    if wrong in known:
        return f"it is {known[wrong].written} here"
    names = [each.name for each in _fields(cls)]
    near = nearest(wrong, names)
    return f"did you mean `{near}`?" if near else f"there are {', '.join(names)}"


def _number(annotation: type, value: Any, field: str) -> int | float:  # noqa: ANN401
    if annotation is int:
        return int(value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FieldError(field, f"must be a finite number (got {_shown(value)})")
    return number


_SCALARS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool)),
    str: ("a string", lambda value: isinstance(value, str)),
    types.NoneType: ("None", lambda value: value is None),
    Mapping: ("a mapping", lambda value: isinstance(value, Mapping)),
}


def _fits(annotation: Any, value: Any) -> bool:  # noqa: ANN401
    """Whether a value has the form that an annotation asks for, whatever stands in it."""
    annotation = _bare(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_fits(member, value) for member in arguments)
    if annotation is Any or origin is Literal:
        return annotation is Any or any(type(value) is type(each) for each in arguments)
    if _is_record(annotation):
        return isinstance(value, (annotation, Mapping))
    if origin in (tuple, Sequence):
        return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    known = _SCALARS.get(origin or annotation)
    return isinstance(value, annotation) if known is None else known[1](value)


def _described(annotation: Any) -> str:  # noqa: ANN401
    """What a value must be, as an error names it."""
    annotation = _bare(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return ", or ".join(dict.fromkeys(_described(member) for member in arguments))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if _is_record(annotation):
        return f"{annotation.__name__} or a mapping of its fields"
    if origin in (tuple, Sequence):
        return f"a list, each {_described(arguments[0])}"
    known = _SCALARS.get(origin or annotation)
    return getattr(annotation, "__name__", str(annotation)) if known is None else known[0]


def _bare(annotation: Any) -> Any:  # noqa: ANN401
    return _bare(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def _shown(value: object) -> str:
    if value is None or isinstance(value, (str, int, float, list, tuple)):
        text = repr(value)
        return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _is_record(annotation: Any) -> bool:  # noqa: ANN401
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _tag(member: Any) -> str | None:  # noqa: ANN401
    """Return the word by which a record is told from others of a union; None where it has none."""
    hint = _hints(member).get("source") if _is_record(member) else None
    return str(get_args(hint)[0]) if get_origin(hint) is Literal else None


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls, include_extras=True)
