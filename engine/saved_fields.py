"""Saved fields: the fields of a record as a checkpoint holds them, found by the record itself.

Every field of a dataclass is saved, unless the class names it in ``NOT_SAVED`` with the reason why a later attempt has
it all the same. So a field that is added later is saved without a further line, or its type is refused here:

    bool, int, float, str, None, Literal     themselves; NaN and infinities, which JSON lacks, by their names
    list, tuple, set, frozenset              lists; sets in order
    dict with strings as keys                objects
    other dicts                              lists of pairs
    dataclasses                              objects of their own saved fields
"""

import collections.abc
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_SCALARS = (bool, int, float, str, NoneType)
_LISTS = (list, tuple, set, frozenset)
_MAPPINGS = (dict, collections.abc.Mapping)


@cache
def saved_names(kind: type) -> tuple[str, ...]:
    """List the fields of a class that a checkpoint holds.

    Args:
        kind: A dataclass; its ``NOT_SAVED``, if it has one, holds the other fields with their reasons.

    Returns:
        Names of the fields, in order.

    Raises:
        TypeError: If ``NOT_SAVED`` names something that is not a field.
    """
    reasons: Mapping[str, str] = getattr(kind, "NOT_SAVED", {})
    names = [entry.name for entry in fields(kind)]
    unknown = reasons.keys() - set(names)
    if unknown:
        raise TypeError(
            f"`{kind.__name__}.NOT_SAVED` must name fields of the class (got {sorted(unknown)}); correct it"
        )
    return tuple(name for name in names if name not in reasons)


def save_fields(record: object) -> dict[str, Any]:
    """Write the saved fields of a record as plain values.

    Args:
        record: A dataclass.

    Returns:
        What JSON holds, by field; ``load_fields`` reads it.

    Raises:
        TypeError: If a checkpoint cannot hold a field's type.
    """
    kind: type = type(record)
    return {name: _save(getattr(record, name), hint, f"{kind.__name__}.{name}") for name, hint in _hints(kind).items()}


def load_fields(kind: type, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Read the saved fields of a record.

    Args:
        kind: The record's class.
        stored: What ``save_fields`` returned, or what JSON made of that.

    Returns:
        Values by field, in objects of their own.

    Raises:
        ValueError: If a field is missing, unknown, or does not hold what its type says.
        TypeError: If a checkpoint cannot hold a field's type.
    """
    hints = _hints(kind)
    if stored.keys() != hints.keys():
        raise ValueError(f"the fields of `{kind.__name__}` are others than those that were saved")
    return {name: _load(stored[name], hint, f"{kind.__name__}.{name}") for name, hint in hints.items()}


def save_number(value: Any) -> Any:  # noqa: ANN401 - what JSON holds
    """Write a plain value, or a list of them, so that JSON holds it.

    Returns:
        The value itself; of NaN and infinities, an object with its name.
    """
    if isinstance(value, list):
        return [save_number(each) for each in value]
    return {"number": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def load_number(stored: Any) -> Any:  # noqa: ANN401 - what JSON holds
    """Read what ``save_number`` has written."""
    if isinstance(stored, list):
        return [load_number(each) for each in stored]
    return float(stored["number"]) if isinstance(stored, Mapping) else stored


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hints[name] for name in saved_names(kind)}


def _save(value: Any, hint: Any, where: str) -> Any:  # noqa: ANN401 - any field
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None else _save(value, _member(hint, where), where)
    if origin is Literal or hint in _SCALARS:
        return save_number(value)
    if origin in _LISTS and arguments:
        written = [_save(each, own, where) for each, own in zip(value, _items(arguments, len(value)), strict=True)]
        return sorted(written, key=json.dumps) if origin in (set, frozenset) else written
    if origin in _MAPPINGS and arguments:
        of_key, of_value = arguments
        pairs = [[_save(key, of_key, where), _save(each, of_value, where)] for key, each in value.items()]
        return dict(pairs) if of_key is str else pairs
    if is_dataclass(origin):
        return save_fields(value)
    raise _refusal(hint, where)


def _load(stored: Any, hint: Any, where: str) -> Any:  # noqa: ANN401 - any field
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return None if stored is None else _load(stored, _member(hint, where), where)
    if origin is Literal:
        return _fitting(stored, stored in arguments, where)
    if hint in _SCALARS:
        value = load_number(stored)
        return _fitting(value, type(value) is hint or (hint is float and type(value) is int), where)
    if origin in _LISTS and arguments:
        _fitting(stored, isinstance(stored, list), where)
        made: Callable[[Any], Any] = origin
        return made(_load(each, own, where) for each, own in zip(stored, _items(arguments, len(stored)), strict=True))
    if origin in _MAPPINGS and arguments:
        of_key, of_value = arguments
        pairs = stored.items() if isinstance(stored, Mapping) else stored
        return {_load(key, of_key, where): _load(each, of_value, where) for key, each in pairs}
    if isinstance(origin, type) and is_dataclass(origin):
        return origin(**load_fields(origin, stored))
    raise _refusal(hint, where)


def _items(arguments: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The type of each item of a list; a tuple may have one for each place."""
    return (arguments[0],) * count if len(arguments) == 1 or arguments[1] is ... else arguments


def _member(hint: Any, where: str) -> Any:  # noqa: ANN401 - a form of typing
    """The type that an optional field has where it is not None."""
    members = [each for each in get_args(hint) if each is not NoneType]
    if len(members) == 1:
        return members[0]
    if set(members) <= {int, float}:
        return float
    raise _refusal(hint, where)


def _fitting(value: Any, holds: bool, where: str) -> Any:  # noqa: ANN401 - any field
    if not holds:
        raise ValueError(f"`{where}` does not hold what it was saved with (got {value!r:.60})")
    return value


def _refusal(hint: Any, where: str) -> TypeError:  # noqa: ANN401 - a form of typing
    return TypeError(
        f"`{where}` is of a type that checkpoints do not hold ({hint}); take plain values, or name the field in "
        "`NOT_SAVED` with the reason why a later attempt has it all the same"
    )
