"""The reader of plain values into what an annotation declares: records, words, numbers, lists of them.

The words and types are those of the declarations themselves (``Literal``, ``int``, ``tuple[…]``, records), so no list
of choices is written twice. A program that reads foreign files derives a reader with rules and words of its own.
"""

import dataclasses
import functools
import math
import numbers
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from catalog.field_errors import nearest, spellings, suggestion
from catalog.record import FieldError, WrongType

_MOST_SHOWN = 60
_UNIONS, _CONVERTED = (Union, types.UnionType), (int, float, Path)
Scalars = Mapping[Any, tuple[str, Callable[[Any], bool]]]
"""The name of each type of scalar, and whether a value is one."""


def _is_finite(value: object) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type] # a number by its type
    except OverflowError:
        return False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and (value.isascii() or re.search("[\ud800-\udfff]", value) is None)


JSON_SCALARS: Scalars = {
    int: ("a whole number of 0 or more", lambda value: type(value) is int and 0 <= value < 2**63),
    float: ("a finite number", _is_finite),
    str: ("a text", _is_text),
    bool: ("true or false", lambda value: type(value) is bool),
    types.NoneType: ("null", lambda value: value is None),
    Mapping: ("an object", lambda value: isinstance(value, Mapping)),
}
"""Those of JSON, by its own names for them."""


class Reader:
    """A reader of the values that a caller gives: every fault is a ``FieldError`` with path, value and remedy."""

    exact: ClassVar[bool] = False
    """Whether values are JSON: a list is refused whole where an item does not fit, and numbers stay as they are."""
    slashed: ClassVar[bool] = False
    """Whether paths are written with slashes."""
    list_name: ClassVar[str] = "a list, each {}"
    union_name: ClassVar[str] = ", or "
    scalars: ClassVar[Scalars] = {
        bool: ("True or False", lambda value: isinstance(value, bool)),
        int: ("a whole number", lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool)),
        float: ("a number", lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool)),
        str: ("a string", lambda value: isinstance(value, str)),
        types.NoneType: ("None", lambda value: value is None),
        Path: ("a path", lambda value: isinstance(value, (str, Path))),
        Mapping: ("a mapping", lambda value: isinstance(value, Mapping)),
    }

    def __init__(self, *, strict: bool = True) -> None:
        """Set up a reader; one that is not strict leaves alone whatever fields a record does not have."""
        self.strict = strict

    def read(self, annotation: Any, value: Any, field: str) -> Any:  # noqa: ANN401 - whatever the annotation says
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
        scalar, (origin, arguments) = self.scalars.get(annotation), _form(annotation)
        if scalar is not None and scalar[1](value):
            return value if self.exact or annotation not in _CONVERTED else _converted(annotation, value, field)
        if origin in _UNIONS:
            return self.read(self._member(annotation, value, field), value, field)
        if not self.fits(annotation, value) or (
            origin is Literal and not self.exact and not _is_choice(arguments, value)
        ):
            self.refuse(field, annotation, value)
        if value is not None and _is_record(annotation):
            return self.record(annotation, value, field)
        if value is not None and origin in (tuple, Sequence):
            return tuple(
                self.read(arguments[0], each, self.at(field, f"[{place}]")) for place, each in enumerate(value)
            )
        if value is not None and origin is Mapping and arguments[1] is not Any:
            return {name: self.read(arguments[1], each, self.at(field, f"[{name!r}]")) for name, each in value.items()}
        return value

    def record(self, cls: type, value: Any, field: str) -> Any:  # noqa: ANN401
        """Read a record from a mapping of its fields, or again from a record."""
        fields = value if isinstance(value, Mapping) else {name: getattr(value, name) for name in _hints(cls)}
        hints = _hints(cls)
        for name in fields if self.strict else ():
            if name not in hints:
                self.refuse_name(field, str(name), cls)
        made = {
            name: self.read(hints[name], each, self.at(field, name)) for name, each in fields.items() if name in hints
        }
        made |= {
            name: self.absent(self.at(field, name), hints[name]) for name in required_fields(cls) if name not in made
        }
        try:
            return cls(**made)
        except FieldError as error:
            self.refuse_meaning(self.at(field, error.field), error)

    def refuse_meaning(self, field: str, error: FieldError) -> NoReturn:
        """Refuse a value by the sentence of its record."""
        raise type(error)(field, error.message) from error

    def fits(self, annotation: Any, value: Any) -> bool:  # noqa: ANN401
        """Return whether a value has the form that an annotation asks for, whatever stands in it."""
        scalar, (origin, arguments) = self.scalars.get(annotation), _form(annotation)
        if scalar is not None:
            return scalar[1](value)
        if origin in _UNIONS:
            return any(self.fits(member, value) for member in arguments)
        if origin is Literal:
            return _is_choice(arguments, value) if self.exact else type(value) in map(type, arguments)
        if annotation is Any or _is_record(annotation):
            return annotation is Any or isinstance(value, (annotation, Mapping))
        if origin in (tuple, Sequence):
            is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
            whole = not self.exact or _is_record(arguments[0])
            return is_list and (whole or all(self.fits(arguments[0], each) for each in value))
        scalar = self.scalars.get(origin)
        return isinstance(value, annotation) if scalar is None else scalar[1](value)

    def at(self, field: str, name: str) -> str:
        """Return the path of a member: a field's, or an item's in brackets."""
        if self.slashed:
            return f"{field}/{name.strip('[]')}".removeprefix("/")
        return f"{field}{name}" if name.startswith("[") or not field else f"{field}.{name}"

    def described(self, annotation: Any) -> str:  # noqa: ANN401
        """Return what a value must be, as an error names it."""
        origin, arguments = _form(annotation)
        if origin in _UNIONS:
            return self.union_name.join(dict.fromkeys(self.described(member) for member in arguments))
        if origin is Literal:
            return f"one of {', '.join(map(str, arguments))}"
        if _is_record(annotation):
            return f"{annotation.__name__} or a mapping of its fields"
        if origin in (tuple, Sequence):
            return self.list_name.format(self.described(arguments[0]))
        scalar = self.scalars.get(origin or annotation)
        return getattr(annotation, "__name__", str(annotation)) if scalar is None else scalar[0]

    def refuse(self, field: str, annotation: Any, value: Any) -> NoReturn:  # noqa: ANN401
        """Refuse a value of another form than its annotation's, or a word that is none of the choices."""
        said = f"must be {self.described(annotation)} (got {_shown(value)})"
        if _form(annotation)[0] is Literal:
            words = [each for each in get_args(annotation) if isinstance(each, str)]
            raise FieldError(field, said + suggestion(value, words))
        if _is_record(annotation):
            said = f"is {type(value).__name__}; give {self.described(annotation)}"
        raise WrongType(field, said)

    def refuse_name(self, field: str, name: str, cls: type) -> NoReturn:
        """Refuse a field that a record does not have."""
        names, known = list(_hints(cls)), spellings(cls)
        near = nearest(name, names)
        remedy = f"did you mean `{near}`?" if near else f"there are {', '.join(names)}"
        if name in known:
            remedy = f"it is {known[name].written} here"
        raise FieldError(field, f"has no field `{name[:_MOST_SHOWN]}`; {remedy}")

    def absent(self, field: str, annotation: Any) -> Any:  # noqa: ANN401
        """Refuse that a field is absent which has no default, or return what stands for it."""
        raise FieldError(field, f"is missing; give {self.described(annotation)}")

    def _member(self, union: Any, value: Any, field: str) -> Any:  # noqa: ANN401
        """Return the member of a union that the value has the form of."""
        fitting = [member for member in get_args(union) if self.fits(member, value)]
        if not fitting:
            self.refuse(field, union, value)
        if len(fitting) == 1:
            return fitting[0]
        tagged = {str(tag): member for member in fitting if (tag := _tag(member)) is not None}
        if len(tagged) > 1:
            chosen = value.get("source") if isinstance(value, Mapping) else getattr(value, "source", None)
            return tagged[self.read(Literal[tuple(tagged)], chosen, self.at(field, "source"))]
        words = (each for each in fitting if _form(each)[0] is Literal and _is_choice(get_args(each), value))
        return next(words, fitting[0])


class VersionReader(Reader):
    """A reader of JSON that another version has written: what it added is left alone, and what it lacks is None."""

    exact = True

    def fits(self, annotation: Any, value: Any) -> bool:  # noqa: ANN401
        """Return whether a value has the type of an annotation; None has any, and a word may be a new one."""
        origin, arguments = _form(annotation)
        if value is not None and origin is tuple:
            return isinstance(value, list) and all(self.fits(arguments[0], each) for each in value)
        is_word = origin is Literal and type(value) in map(type, arguments)
        return value is None or is_word or super().fits(annotation, value)

    def absent(self, field: str, annotation: Any) -> None:  # noqa: ANN401
        """Leave None in its place."""


read = Reader().read


def _is_choice(choices: tuple[Any, ...], value: Any) -> bool:  # noqa: ANN401
    return any(type(value) is type(each) and value == each for each in choices)


def _converted(annotation: type, value: Any, field: str) -> int | float | Path:  # noqa: ANN401
    if annotation is not float:
        return annotation(value)  # type: ignore[no-any-return] # a whole number, or a path
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FieldError(field, f"must be a finite number (got {_shown(value)})")
    return number


def _shown(value: object) -> str:
    if value is None or isinstance(value, (str, int, float, list, tuple)):
        text = repr(value)
        return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
    return value.__name__ if isinstance(value, type) else type(value).__name__


@functools.cache
def _is_record(annotation: Any) -> bool:  # noqa: ANN401
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _tag(member: Any) -> str | None:  # noqa: ANN401
    """Return the word that distinguishes a record from others of a union; None where it has none."""
    hint = _hints(member).get("source") if _is_record(member) else None
    return str(get_args(hint)[0]) if get_origin(hint) is Literal else None


def _form(annotation: Any) -> tuple[Any, tuple[Any, ...]]:  # noqa: ANN401
    """Return the origin of a form of typing and its arguments."""
    # not cached: words in another order are an equal key, and an error lists them in their own
    return get_origin(annotation), get_args(annotation)


@functools.cache
def required_fields(cls: Any) -> tuple[str, ...]:  # noqa: ANN401 - a record
    """Return the names of the fields without a default."""
    return tuple(
        each.name for each in dataclasses.fields(cls) if each.default is each.default_factory is dataclasses.MISSING
    )


@functools.cache
def _hints(cls: Any) -> Mapping[str, Any]:  # noqa: ANN401 - a record
    hints = get_type_hints(cls)
    return {each.name: hints[each.name] for each in dataclasses.fields(cls)}
