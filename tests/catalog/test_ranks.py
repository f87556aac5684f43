"""`world_size`: what is taken, and what is refused with the field to mend."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from catalog import DOCUMENT
from catalog.field_errors import complaints
from catalog.requests.ranks import MAX_WORLD_SIZE

ADAPTER = TypeAdapter(DOCUMENT)
GOOD: dict[str, Any] = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}


def parse(**changes: Any) -> Any:
    document = {name: value for name, value in (GOOD | changes).items() if value is not None}
    return ADAPTER.validate_json(json.dumps(document), strict=True)


@pytest.mark.parametrize("ranks", [1, 2, MAX_WORLD_SIZE])
def test_a_number_of_ranks_is_taken(ranks: int) -> None:
    assert parse(world_size=ranks).world_size == ranks


def test_one_rank_is_the_default_and_refuses_nothing() -> None:
    assert parse().world_size == 1
    assert parse(world_size=1, capacity={"cross_check": "ggn"}).world_size == 1


@pytest.mark.parametrize(
    ("changes", "pointer", "said"),
    [
        (
            {"memory": {"model_sharding": "on"}},
            "/memory/model_sharding",
            "is on, and one process shares the model with nobody; give `world_size`",
        ),
        ({"world_size": 0}, "/world_size", "is 0; take 1 to 64 devices of one node, or `shards`"),
        ({"world_size": -2}, "/world_size", "is -2"),
        ({"world_size": 65}, "/world_size", "is 65"),
        ({"world_size": "2"}, "/world_size", "integer"),
        ({"world_size": 2.5}, "/world_size", "integer"),
        ({"world_size": 2, "collection": {"nested": True}}, "/collection/nested", "ranks read them side by side"),
        ({"world_size": 2, "collection": {"reduction": "none"}}, "/collection/reduction", "its own examples alone"),
        ({"world_size": 2, "shards": 2}, "/shards", "contradicts `world_size: 2`"),
        ({"world_size": 2, "capacity": {"cross_check": "ggn"}}, "/world_size", "passes over all data in one process"),
        (
            {"world_size": 2, "kind": "natural_gradient"},
            "/natural_gradient/gradient",
            "in one process, and `world_size` is 2",
        ),
        (
            {"world_size": 2, "kind": "capacity", "factors": {"path": "x"}, "model": None, "data": None, "task": None},
            "/world_size",
            "`factors` were collected already",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused(changes: dict[str, Any], pointer: str, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse(**changes)
    (complaint,) = complaints(caught.value.errors(include_url=False), DOCUMENT)
    assert complaint.pointer == pointer
    assert said in complaint.message
