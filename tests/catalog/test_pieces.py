"""Pieces of a divided job: which documents can be divided, and which parts are one piece."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from catalog import DOCUMENT, JobDocument
from catalog.field_errors import complaints
from catalog.frames import Divided, decode, encode
from catalog.record import FieldError, canonical_json, plain
from catalog.requests.pieces import MAX_SHARDS, Piece, read_piece

ADAPTER = TypeAdapter(DOCUMENT)
GOOD: dict[str, Any] = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}
STORED = {"kind": "capacity", "factors": {"path": "out"}, "shards": 2}


def parse(document: Any) -> JobDocument:
    return ADAPTER.validate_json(json.dumps(document), strict=True)


def refusals(document: Any) -> list[tuple[str, str]]:
    with pytest.raises(ValidationError) as caught:
        parse(document)
    return [(c.pointer, c.message) for c in complaints(caught.value.errors(include_url=False), DOCUMENT)]


@pytest.mark.parametrize("shards", [1, 6, MAX_SHARDS, "auto", None])
def test_a_number_of_pieces_is_taken_and_stored(shards: Any) -> None:
    document = parse({**GOOD, "shards": shards})
    assert document.shards == shards
    assert parse(json.loads(canonical_json(document))) == document


@pytest.mark.parametrize(
    ("change", "pointer", "message"),
    [
        ({"shards": 0}, "/shards", f"is 0; take 1 to {MAX_SHARDS}"),
        ({"shards": -3}, "/shards", "is -3; take 1 to"),
        ({"shards": MAX_SHARDS + 1}, "/shards", f"is {MAX_SHARDS + 1}; take 1 to"),
        ({"shards": 2.5}, "/shards", "take a whole number or 'auto'"),
        ({"shards": True}, "/shards", "take a whole number or 'auto'"),
        ({"shards": "3"}, "/shards", "take a whole number or 'auto'"),
        ({"shards": [2]}, "/shards", "take a whole number or 'auto'"),
        ({"shards": 2, "collection": {"ema_decay": 0.9}}, "/collection/ema_decay", "or leave `shards` out"),
        ({"shards": 2, "capacity": {"cross_check": "ggn"}}, "/shards", "`capacity.cross_check: ggn` passes over all"),
        ({"shards": 2, "kind": "spectrum", "spectrum": {"of": ["kfac", "ggn"]}}, "/shards", "`spectrum.of: ggn`"),
        ({"shards": 2, "kind": "sensitivity"}, "/shards", "`sensitivity` passes over all"),
        ({"shards": 2, "kind": ["influence", "sensitivity"], "influence": {"query": GOOD["data"]}}, "/shards",
         "`sensitivity` passes over all"),
        ({"world_size": 2, "kind": "influence", "influence": {"query": GOOD["data"]}}, "/world_size", "`influence`"),
        ({"shards": "auto", "kind": "natural_gradient"}, "/natural_gradient/gradient", "give `gradient: {path:"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(change: Any, pointer: str, message: str) -> None:
    ((found, said),) = refusals({**GOOD, **change})
    assert found == pointer
    assert message in said


def test_stored_factors_are_not_divided() -> None:
    ((pointer, message),) = refusals(STORED)
    assert pointer == "/shards"
    assert "leave `shards` out" in message


def test_what_needs_no_data_again_can_be_divided() -> None:
    gradient = {"natural_gradient": {"gradient": {"path": "g.safetensors"}}}
    assert parse({**GOOD, "kind": "natural_gradient", **gradient, "shards": 2}).shards == 2
    assert parse({**GOOD, "kind": "spectrum", "spectrum": {"of": "kfac"}, "shards": 2}).shards == 2
    # an analysis with a round of its own
    assert parse({**GOOD, "kind": "influence", "influence": {"query": GOOD["data"]}, "shards": 2}).shards == 2
    # options of an analysis that is not asked for are no hindrance
    assert parse({**GOOD, "kind": "factors", "capacity": {"cross_check": "ggn"}, "shards": 2}).shards == 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"round": "gather"}, "round"),
        ({"count": 0}, "count"),
        ({"index": 3}, "index"),
        ({"index": -1}, "index"),
        ({"begin": 64, "end": 64}, "begin"),
        ({"end": None}, "begin"),
        ({"end": 200}, "begin"),
        ({"layers": ("fc",)}, "begin"),
        ({"round": "score", "layers": ("fc",)}, "begin"),
        ({"round": "decompose"}, "layers"),
        ({"round": "decompose", "begin": None, "end": None, "layers": ()}, "layers"),
    ],
)
def test_a_piece_is_a_part_of_its_round(change: Any, field: str) -> None:
    good: Any = {"round": "collect", "index": 1, "count": 3, "begin": 64, "end": 128, "total": 150}
    assert (Piece(**good).title, Piece(**good).unit) == ("piece 2 of 3", "examples")
    assert Piece(**{**good, "round": "score"}).unit == "queries"
    with pytest.raises(FieldError) as caught:
        Piece(**{**good, **change})
    assert caught.value.field == field


def test_pieces_cross_the_pipe() -> None:
    pieces = (
        Piece(round="decompose", index=0, count=2, layers=("conv", "fc")),
        Piece(round="decompose", index=1, count=2, layers=("head",)),
    )
    frame = decode(encode(Divided(round="decompose", pieces=tuple(plain(each) for each in pieces))))
    assert isinstance(frame, Divided)
    assert tuple(read_piece(each) for each in frame.pieces) == pieces
