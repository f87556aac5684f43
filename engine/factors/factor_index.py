"""The index of stored factors, read value by value: it may be damaged, or written by somebody else.

A record is read by the types of its fields::

    int        a whole number of 0 or more          tuple[X, …]    a list whose every item is an X
    float      a finite number                      X | None       an X, or null
    str        text that UTF-8 can hold             Literal        one of its values

What does not fit raises ``BrokenFactors`` with the entry's place, such as `layers/3/in_dim`. Nothing is converted:
`"3"` and `3.0` are not whole numbers, so that no damaged value passes for another.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from catalog.analyses.analysis import LookedAt
from catalog.record import FieldError, canonical_json
from catalog.requests.collection import Collection
from catalog.requests.woodbury import Woodbury
from engine.errors import BrokenFactors
from engine.factors.factor_set import CountedExamples, LayerFacts, ParameterShape
from engine.factors.representation import KINDS
from engine.layers.coverage import DeclaredLayer
from engine.model.example_digests import EnteredExamples

FORMAT = "kronoscope-factors/1"
INDEX = "factors/factors.index.json"
_MOST_ROWS = 2**32
"""Rows of a factor; beyond it even the count of a triangle's numbers is not one."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SIDES = ("activation_covariance", "gradient_covariance")
_EKFAC = ("eigenvectors_A", "eigenvectors_G", "corrected_eigenvalues")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LayerEntry:
    """One layer of the index, with what reading its tensors takes."""

    facts: LayerFacts
    scale_A: float
    scale_G: float
    metadata_G: Mapping[str, str]
    """What reading a structured G takes besides its tensors; empty for a dense one."""
    digests: Mapping[str, str]
    """SHA-256 of the stored tensors by their names; an index from before there were any has none."""


@dataclass(frozen=True, kw_only=True)
class CollectionCounts:
    """The counts of the collection, and how it computed."""

    trainable_parameters: int
    examples: int
    updates: int
    passes: int
    micro_batch: int | None = None
    nondeterministic: tuple[str, ...] | None = None
    amp: str = "off"
    amp_fallback: str | None = None
    loss_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class FactorIndex:
    """The whole index."""

    layers: tuple[LayerEntry, ...]
    declared: tuple[DeclaredLayer, ...]
    collection: Collection
    woodbury: Woodbury
    counts: CollectionCounts
    parameters: tuple[ParameterShape, ...] | None
    """The model's trainable parameters; an index from before they were kept has none."""
    looked_at: LookedAt | None
    """Batches that the self-check looked at."""
    counted: CountedExamples | None = None
    """Which examples these are; an index from before that was kept has none."""
    entered: EnteredExamples | None = None
    """The examples that entered, by their digest; an index from before that was kept has none."""

    def sha256(self) -> str | None:
        """Return the digest of the set, by ``set_digest``; None where the index is from before it had digests."""
        return set_digest([(each.facts.name, *(each.digests.get(side) for side in _SIDES)) for each in self.layers])  # type: ignore[misc] # two sides


def set_digest(layers: Sequence[tuple[str, str | None, str | None]]) -> str | None:
    """Return the digest of a set of factors.

    Args:
        layers: The name of each layer and the digests of its A and G, in the order of the ordinals.

    Returns:
        SHA-256 in hexadecimal; None where a digest is missing.
    """
    if any(digest is None for layer in layers for digest in layer):
        return None
    return hashlib.sha256(canonical_json(layers).encode()).hexdigest()


def read_index(value: object) -> FactorIndex:
    """Read the index of stored factors.

    Args:
        value: The index, as decoded from JSON.

    Returns:
        The index with every value of its type.

    Raises:
        BrokenFactors: If it is not of this format, or a value is missing or of another type; the message names it.
    """
    if not isinstance(value, Mapping) or value.get("format") != FORMAT:
        raise BrokenFactors(f"`{INDEX}` is not of the format {FORMAT}", pointer="/factors")
    layers = tuple(_layer(entry, f"layers/{place}") for place, entry in enumerate(_listed(value, "layers")))
    _require_consistent([layer.facts for layer in layers])
    return FactorIndex(
        layers=layers,
        declared=tuple(
            _record(DeclaredLayer, entry, f"declared/{place}") for place, entry in enumerate(_listed(value, "declared"))
        ),
        collection=_options(Collection, value.get("collection"), "collection"),
        # an index from before there were any has dense ones
        woodbury=_options(Woodbury, value.get("woodbury", {"policy": "dense"}), "woodbury"),
        counts=_record(CollectionCounts, value, ""),
        parameters=None
        if value.get("parameters") is None
        else tuple(
            _record(ParameterShape, entry, f"parameters/{place}")
            for place, entry in enumerate(_listed(value, "parameters"))
        ),
        looked_at=None if value.get("looked_at") is None else _record(LookedAt, value["looked_at"], "looked_at"),
        counted=None if value.get("counted") is None else _record(CountedExamples, value["counted"], "counted"),
        entered=None if value.get("entered") is None else _record(EnteredExamples, value["entered"], "entered"),
    )


def read_record(kind: type[T], value: object, place: str) -> T:
    """Read a record of a table that stands beside the index, with the same checks.

    Args:
        kind: A dataclass.
        value: Its fields, as decoded from JSON.
        place: Where it stands, for the message.

    Returns:
        The record.

    Raises:
        BrokenFactors: If a value is missing or of another type; the message names it.
    """
    return _record(kind, value, place)


def _layer(entry: object, place: str) -> LayerEntry:
    facts = _record(LayerFacts, entry, place)
    own = _mapping(entry, place)
    for name in ("in_dim", "out_dim"):
        if not 1 <= own[name] <= _MOST_ROWS:
            _refuse(f"{place}/{name}", f"a whole number from 1 to {_MOST_ROWS}", own[name])
    if facts.representation_G not in KINDS:
        _refuse(f"{place}/representation_G", f"one of {', '.join(sorted(KINDS))}", facts.representation_G)
    stored = {name: _mapping(own.get(name) or {}, f"{place}/{name}") for name in (*_SIDES, *_EKFAC)}
    metadata = _mapping(stored["gradient_covariance"].get("metadata", {}), f"{place}/gradient_covariance/metadata")
    if not all(_fits(text, str) for text in (*metadata, *metadata.values())):
        _refuse(f"{place}/gradient_covariance/metadata", "an object of texts", metadata)
    return LayerEntry(
        facts=facts,
        scale_A=_scale(stored["activation_covariance"], f"{place}/activation_covariance/scale"),
        scale_G=_scale(stored["gradient_covariance"], f"{place}/gradient_covariance/scale"),
        metadata_G=metadata,
        digests={
            name: _digest(side["sha256"], f"{place}/{name}/sha256") for name, side in stored.items() if "sha256" in side
        },
    )


def _scale(side: Mapping[str, Any], place: str) -> float:
    """A power of two that the stored tensor is multiplied by; an index from before there were any has none."""
    scale = side.get("scale", 1.0)
    if not _fits(scale, float) or not scale > 0:
        _refuse(place, "a finite number above 0", scale)
    return float(scale)


def _digest(value: object, place: str) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        _refuse(place, "64 hexadecimal digits", value)
    return value


def _require_consistent(layers: list[LayerFacts]) -> None:
    """Require that ordinals name one layer each, and that whoever shares an A shares one that is there."""
    seen: dict[int, LayerFacts] = {}
    for place, facts in enumerate(layers):
        if facts.ordinal in seen:
            _refuse(f"layers/{place}/ordinal", "different in each layer", facts.ordinal)
        seen[facts.ordinal] = facts
    for place, facts in enumerate(layers):
        holder = facts if facts.shared_A_with is None else seen.get(facts.shared_A_with)
        if holder is None or holder.in_dim != facts.in_dim:
            _refuse(f"layers/{place}/shared_A_with", "the ordinal of a layer with an A as wide", facts.shared_A_with)


def _options(kind: type[T], value: object, place: str) -> T:
    """Read a record of the catalog, which checks the meaning of its values itself."""
    known = _kinds(kind)  # type: ignore[arg-type] # a class is hashable
    unknown = sorted(str(name) for name in _mapping(value, place) if name not in known)
    if unknown:
        _refuse(f"{place}/{unknown[0]}", "an option that this version knows", unknown[0])
    try:
        return _record(kind, value, place)
    except FieldError as error:
        raise BrokenFactors(f"`{INDEX}`: `{place}/{error.field}` {error.message}", pointer="/factors") from error


def _record(kind: type[T], value: object, place: str) -> T:
    """Read the fields of a record; what else an entry holds is left alone."""
    entry = _mapping(value, place)
    found: dict[str, Any] = {}
    for name, (expected, required) in _kinds(kind).items():  # type: ignore[arg-type] # a class is hashable
        where = f"{place}/{name}" if place else name
        if name not in entry:
            if required:
                raise BrokenFactors(f"`{INDEX}` holds no `{where}`", pointer="/factors")
            continue
        own = entry[name]
        nested = _nested(expected)
        if nested is not None and isinstance(own, (list, tuple)):
            found[name] = tuple(_record(nested, each, f"{where}/{number}") for number, each in enumerate(own))
            continue
        single = _single(expected)
        if single is not None and isinstance(own, Mapping):
            found[name] = _record(single, own, where)
            continue
        if not _fits(own, expected):
            _refuse(where, _described(expected), own)
        found[name] = tuple(own) if isinstance(own, list) else own
    return kind(**found)


@cache
def _nested(expected: Any) -> type | None:  # noqa: ANN401 - a type or a form of typing
    """The record of which a field holds several; None of any other field."""
    for form in (expected, *get_args(expected)):
        if get_origin(form) is tuple and is_dataclass(get_args(form)[0]):
            return get_args(form)[0]  # type: ignore[no-any-return] # a record is a type
    return None


@cache
def _single(expected: Any) -> type | None:  # noqa: ANN401 - a type or a form of typing
    """The record that a field holds; None of any other field."""
    return next((each for each in (expected, *get_args(expected)) if is_dataclass(each)), None)  # type: ignore[return-value] # a record is a type


@cache
def _kinds(kind: type) -> Mapping[str, tuple[Any, bool]]:
    """The type of each field, and whether it must be there."""
    hints = get_type_hints(kind)
    return {
        each.name: (hints[each.name], each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
    }


def _fits(value: object, kind: Any) -> bool:  # noqa: ANN401 - a type or a form of typing
    origin, arguments = _form(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(_fits(each, arguments[0]) for each in value)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    check = _CHECKS.get(kind)
    return check is not None and check(value)


@cache
def _form(kind: Any) -> tuple[Any, tuple[Any, ...]]:  # noqa: ANN401 - a type or a form of typing
    """The origin of a form of typing and its arguments; looking them up takes longer than the check itself."""
    return get_origin(kind), get_args(kind)


def _is_finite(value: object) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type] # a number by its type
    except OverflowError:
        return False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


_CHECKS: Mapping[Any, Callable[[Any], bool]] = {
    int: lambda value: type(value) is int and 0 <= value < 2**63,
    float: _is_finite,
    str: _is_text,
    bool: lambda value: type(value) is bool,
    NoneType: lambda value: value is None,
}
_NAMES = {int: "a whole number of 0 or more", float: "a finite number", str: "a text", bool: "true or false",
          NoneType: "null"}  # fmt: skip


def _described(kind: Any) -> str:  # noqa: ANN401 - a type or a form of typing
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_described(each) for each in arguments)
    if origin is tuple:
        return f"a list whose every item is {_described(arguments[0])}"
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    return _NAMES.get(kind, "something else")


def _listed(index: Mapping[str, Any], name: str) -> list[Any]:
    found = index.get(name)
    if not isinstance(found, list):
        _refuse(name, "a list", found)
    return found


def _mapping(value: object, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(place, "an object", value)
    return value


def _refuse(place: str, expected: str, value: object) -> NoReturn:
    # a number of 5,000 digits has no text within Python's own limit
    shown = "a number too large to show" if isinstance(value, int) and abs(value) >= 10**30 else repr(value)[:60]
    raise BrokenFactors(
        f"`{INDEX}`: `{place}` must be {expected} (got {shown}); collect the factors again", pointer="/factors"
    )
