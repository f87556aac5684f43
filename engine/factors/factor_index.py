"""The index of stored factors, read value by value: it may be damaged, or of foreign origin.

What does not fit the type of its field raises ``BrokenFactors`` with the entry's place, such as `layers/3/in_dim`: an
``int`` is 0 or more, a ``float`` finite, a ``str`` text that UTF-8 can hold. Nothing is converted: `"3"` and `3.0` are
not whole numbers, so that no damaged value passes for another.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NoReturn, get_args, get_origin

from typing_extensions import override

from catalog.analyses.analysis import LookedAt
from catalog.record import FieldError, canonical_json
from catalog.record_reader import JSON_SCALARS, Reader
from catalog.requests.collection import Collection
from catalog.requests.woodbury import Woodbury
from engine.errors import BrokenFactors
from engine.factors.factor_set import (
    CollectionCounts,
    CollectionFacts,
    CountedExamples,
    LayerFacts,
    ParameterShape,
)
from engine.factors.representation import KINDS
from engine.layers.coverage import DeclaredLayer
from engine.model.example_digests import EnteredExamples

FORMAT = "kronoscope-factors/1"
INDEX = "factors/factors.index.json"
_MOST_ROWS = 2**32
"""Rows of a factor; beyond it even the count of a triangle's numbers is not one."""
_MOST_NAME_CHARACTERS = 4096
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SIDES = ("activation_covariance", "gradient_covariance")
_EKFAC = ("eigenvectors_A", "eigenvectors_G", "corrected_eigenvalues")
_OBJECT = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LayerEntry:
    """One layer of the index, with what reading its tensors takes."""

    facts: LayerFacts
    scale_A: float
    scale_G: float
    metadata_G: Mapping[str, str]
    """Metadata that reading a structured G needs besides its tensors; empty for a dense one."""
    digests: Mapping[str, str]
    """SHA-256 of the stored tensors by their names; an index from before there were any has none."""


@dataclass(frozen=True, kw_only=True)
class FactorIndex(CollectionFacts):
    """The whole index."""

    layers: tuple[LayerEntry, ...]

    def sha256(self) -> str | None:
        """Return the digest of the set, by ``set_digest``; None where the index is from before it had digests."""
        return set_digest([(each.facts.name, *(each.digests.get(side) for side in _SIDES)) for each in self.layers])  # type: ignore[misc] # two sides


def set_digest(layers: Sequence[tuple[str, str | None, str | None]]) -> str | None:
    """Return the digest of factors, from those of each layer's A and G by ordinal; None where one is missing."""
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
    entries = value.get("layers")
    if not isinstance(entries, list):
        _refuse("layers", "a list", entries)
    for table in ("layers", "declared", "parameters"):
        _require_short(value.get(table), table)
    layers = tuple(_layer(entry, f"layers/{place}") for place, entry in enumerate(entries))
    _require_consistent([layer.facts for layer in layers])
    return FactorIndex(
        layers=layers,
        declared=TABLES.read(tuple[DeclaredLayer, ...], value.get("declared"), "declared"),
        collection=_OPTIONS.read(Collection, value.get("collection"), "collection"),
        # an index from before there were any has dense ones
        woodbury=_OPTIONS.read(Woodbury, value.get("woodbury", {"policy": "dense"}), "woodbury"),
        **vars(TABLES.read(CollectionCounts, value, "")),
        parameters=_optional(tuple[ParameterShape, ...], value, "parameters"),
        looked_at=_optional(LookedAt, value, "looked_at"),
        counted=_optional(CountedExamples, value, "counted"),
        entered=_optional(EnteredExamples, value, "entered"),
    )


def _require_short(table: object, place: str) -> None:
    """Require that names of a table's entries, and what else is text in them, are short."""
    for number, entry in enumerate(table if isinstance(table, list) else ()):
        for name, value in entry.items() if isinstance(entry, Mapping) else ():
            longest = max((len(text) for text in (value, *_listed(value)) if isinstance(text, str)), default=0)
            if longest > _MOST_NAME_CHARACTERS:
                raise BrokenFactors(
                    f"`{INDEX}`: `{place}/{number}/{name[:60]}` has {longest:,} characters; at most "
                    f"{_MOST_NAME_CHARACTERS:,} are read. Name the model's modules shorter, and collect again",
                    pointer="/factors",
                )


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _optional(kind: Any, index: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    return None if index.get(name) is None else TABLES.read(kind, index[name], name)


def _layer(entry: object, place: str) -> LayerEntry:
    facts = TABLES.read(LayerFacts, entry, place)
    own: Mapping[str, Any] = TABLES.read(_OBJECT, entry, place)
    for name in ("in_dim", "out_dim"):
        if not 1 <= own[name] <= _MOST_ROWS:
            _refuse(f"{place}/{name}", f"a whole number from 1 to {_MOST_ROWS}", own[name])
    if facts.representation_G not in KINDS:
        _refuse(f"{place}/representation_G", f"one of {', '.join(sorted(KINDS))}", facts.representation_G)
    stored = {name: TABLES.read(_OBJECT, own.get(name) or {}, f"{place}/{name}") for name in (*_SIDES, *_EKFAC)}
    metadata = TABLES.read(
        _OBJECT, stored["gradient_covariance"].get("metadata", {}), f"{place}/gradient_covariance/metadata"
    )
    if not all(TABLES.fits(str, text) for text in (*metadata, *metadata.values())):
        _refuse(f"{place}/gradient_covariance/metadata", "an object of texts", metadata)
    scale_G = _scale(stored["gradient_covariance"], f"{place}/gradient_covariance/scale")
    if facts.representation_G != "dense" and scale_G != 1:
        _refuse(f"{place}/gradient_covariance/scale", f"1 beside `{facts.representation_G}`", scale_G)
    return LayerEntry(
        facts=facts,
        scale_A=_scale(stored["activation_covariance"], f"{place}/activation_covariance/scale"),
        scale_G=scale_G,
        metadata_G=metadata,
        digests={
            name: _digest(side["sha256"], f"{place}/{name}/sha256") for name, side in stored.items() if "sha256" in side
        },
    )


def _scale(side: Mapping[str, Any], place: str) -> float:
    """A power of two that the stored tensor is multiplied by; an index from before there were any has none."""
    scale = side.get("scale", 1.0)
    if not TABLES.fits(float, scale) or not scale > 0:
        _refuse(place, "a finite number above 0", scale)
    return float(scale)


def _digest(value: object, place: str) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        _refuse(place, "64 hexadecimal digits", value)
    return value


def _require_consistent(layers: list[LayerFacts]) -> None:
    """Require that ordinals name one layer each, and that a shared A is one that is there."""
    seen: dict[int, LayerFacts] = {}
    for place, facts in enumerate(layers):
        if facts.ordinal in seen:
            _refuse(f"layers/{place}/ordinal", "different in each layer", facts.ordinal)
        seen[facts.ordinal] = facts
    for place, facts in enumerate(layers):
        holder = facts if facts.shared_A_with is None else seen.get(facts.shared_A_with)
        if holder is None or holder.in_dim != facts.in_dim:
            _refuse(f"layers/{place}/shared_A_with", "the ordinal of a layer with an A as wide", facts.shared_A_with)


def _refuse(place: str, expected: str, value: object) -> NoReturn:
    # a number of 5,000 digits has no text within Python's own limit
    shown = "a number too large to show" if isinstance(value, int) and abs(value) >= 10**30 else repr(value)[:60]
    raise BrokenFactors(
        f"`{INDEX}`: `{place}` must be {expected} (got {shown}); collect the factors again", pointer="/factors"
    )


class TableReader(Reader):
    """The reader of the index, and of tables that stand beside it."""

    exact = slashed = True
    list_name = "a list whose every item is {}"
    union_name = " or "
    scalars = JSON_SCALARS

    @override
    def described(self, annotation: Any) -> str:
        if is_dataclass(annotation):
            return "an object"
        is_table = get_origin(annotation) is tuple and is_dataclass(get_args(annotation)[0])
        return "a list" if is_table else super().described(annotation)

    @override
    def refuse_meaning(self, field: str, error: FieldError) -> NoReturn:
        raise BrokenFactors(f"`{INDEX}`: `{field}` {error.message}", pointer="/factors") from error

    @override
    def refuse(self, field: str, annotation: Any, value: Any) -> NoReturn:
        _refuse(field, self.described(annotation), value)

    @override
    def absent(self, field: str, annotation: Any) -> NoReturn:
        raise BrokenFactors(f"`{INDEX}` holds no `{field}`", pointer="/factors")

    @override
    def refuse_name(self, field: str, name: str, cls: type) -> NoReturn:
        _refuse(self.at(field, name), "an option that this version knows", name)


TABLES, _OPTIONS = TableReader(strict=False), TableReader()
"""Readers of tables, which may hold more than this version reads, and of options, which may not."""
