"""Descriptions of a record's fields: the string that stands under a field, read from the source when it is asked for.

Pydantic can read them itself (``use_attribute_docstrings``), but parses a class's whole file for each class: a tenth
of a second for a job's document and a third for the API, in every process that validates. Here a file is parsed once,
and only where somebody asks for all that a field says of itself, as pydantic does.
"""

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any


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
