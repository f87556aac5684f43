"""A *record*: the one frozen, keyword-only dataclass behind everything that crosses a wall.

The same class is request body, engine argument, database payload and OpenAPI schema. The
ground floor imports the standard library alone, so pydantic is addressed through a plain
attribute that it looks for; those that validate (the API, the worker's child) bring pydantic.

The string under a field describes it. Pydantic can read these itself (``use_attribute_docstrings``), but parses a
class's whole file for each class: a tenth of a second for a job's document and a third for the API, in every process
that validates. Here a file is parsed once, and only where a field's whole metadata is asked for.
"""

import ast
import dataclasses
import functools
import inspect
import json
import linecache
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

from catalog.brief import Brief


class DescribedMetadata(Mapping[str, Any]):
    """The metadata of a field, and its description under the name by which pydantic takes one.

    Args:
        owner: The record that declares the field.
        name: The field's name.
        own: The metadata that the field was declared with.
    """

    def __init__(self, owner: type, name: str, own: Mapping[Any, Any]) -> None:
        self._owner, self._name, self._own = owner, name, own

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - as the metadata holds
        if key in self._own or key != "description":
            return self._own[key]
        return self._descriptions[self._name]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        if "description" not in self._own and self._name in self._descriptions:
            yield "description"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def _descriptions(self) -> Mapping[str, str]:
        return _described(self._owner.__module__).get(self._owner.__qualname__, {})


@functools.cache
def _described(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the strings under the fields of a module's classes, by the class's name and the field's."""
    lines = linecache.getlines(getattr(sys.modules.get(module), "__file__", None) or "")
    return {
        statement.name: {
            field.target.id: inspect.cleandoc(under.value.value)
            for field, under in pairwise(statement.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(under, ast.Expr)
            and isinstance(under.value, ast.Constant)
            and isinstance(under.value.value, str)
        }
        for statement in ast.parse("".join(lines)).body
        if isinstance(statement, ast.ClassDef)
    }


T = TypeVar("T")

_SCALARS = frozenset({type(None), bool, int, float, str})
_PYDANTIC = {
    "extra": "forbid",
    "allow_inf_nan": False,
}


class FieldError(ValueError):
    """A value that fits its type but not its meaning.

    Raised in a record's ``__post_init__``. Pydantic reports only the record, so the name of
    the field travels in the error and completes the pointer (see ``catalog.field_errors``).
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        """Return the whole sentence, which the field is the subject of."""
        return f"`{self.field}` {self.message}"


class WrongType(FieldError, TypeError):
    """A value of another type than its field declares."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen keyword-only dataclass that pydantic validates strictly."""
    cls.__pydantic_config__ = dict(_PYDANTIC)  # type: ignore[attr-defined]
    made = dataclasses.dataclass(frozen=True, kw_only=True, repr=not issubclass(cls, Brief))(cls)
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        if field.name in inspect.get_annotations(cls):
            # the string under a field is its description in OpenAPI and in the menu
            field.metadata = MappingProxyType(DescribedMetadata(cls, field.name, field.metadata))
    return made


def option(default: Any, *, known_as: str | Mapping[str, str] = "") -> Any:  # noqa: ANN401 - as dataclasses.field
    """Declare a field with a default and, where people know it from older scripts, those spellings.

    Args:
        default: The value, or a callable that makes it.
        known_as: An older spelling; or several, each with what its values are here (empty: the same).

    Returns:
        The field, as `dataclasses.field` returns it.
    """
    spellings = {known_as: ""} if isinstance(known_as, str) else dict(known_as)
    metadata = {"known_as": spellings} if known_as else {}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Tagged:
    """Annotation of a union whose members are distinguished by one literal field.

    Pydantic calls ``__get_pydantic_core_schema__`` and takes a plain dict, which keeps this
    floor free of it; the error then names the unknown tag instead of every member's failure.
    """

    def __init__(self, field: str) -> None:
        self.field = field

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:  # noqa: ANN401
        """Describe the union to pydantic as a tagged one."""
        choices = {}
        for member in get_args(source):
            (tag,) = get_args(get_type_hints(member)[self.field])
            choices[tag] = handler.generate_schema(member)
        return {"type": "tagged-union", "discriminator": self.field, "choices": choices}


class TextFormat:
    """An annotation of a text with the JSON Schema format that it has, such as ``date-time``.

    Pydantic calls ``__get_pydantic_json_schema__`` and takes a plain dict; it validates nothing.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return the text's schema with the format's name."""
        return {**handler(core_schema), "format": self.name}


def plain(value: Any) -> Any:  # noqa: ANN401 - any record goes in, JSON comes out
    """Convert a record to values that JSON holds.

    Args:
        value: A record, or a tree of mappings, lists and tuples that may hold records.

    Returns:
        Dicts with text keys, lists and scalars.
    """
    if type(value) in _SCALARS:  # most are: no further questions
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def canonical_json(value: Any) -> str:  # noqa: ANN401
    """Return the one JSON text of a value: sorted keys, no spaces, no NaN; digests are taken of it.

    Args:
        value: A record, or anything that JSON holds.

    Returns:
        The text, with characters beyond ASCII as they are.

    Raises:
        ValueError: If a number is NaN or infinite (undefined values are ``None``).
    """
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
