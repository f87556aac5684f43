"""Every field of a record is saved and read back with its type, or named with a reason; other types are refused."""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from engine.saved_fields import load_fields, save_fields, saved_names


@dataclass(frozen=True)
class Inner:
    place: tuple[str, int]
    error: float = 0.0


@dataclass
class Outer:
    NOT_SAVED: ClassVar[dict[str, str]] = {"device": "every attempt has one"}

    device: object = None
    named: dict[str, Inner] = field(default_factory=dict)
    numbered: dict[int, list[float | None]] = field(default_factory=dict)
    calls: frozenset[tuple[str, int]] = frozenset()
    names: set[str] = field(default_factory=set)
    runs: list[list[int]] = field(default_factory=list)
    places: tuple[str, ...] = ()
    kind: Literal["a", "b"] = "a"
    inner: Inner | None = None
    whole: bool = False


def through_json(record: object) -> Any:
    return json.loads(json.dumps(save_fields(record), allow_nan=False))


def test_every_field_comes_back_with_its_type() -> None:
    full = Outer(
        device=object(),
        named={"x": Inner(("x", 1), float("inf"))},
        numbered={3: [1.5, None, -float("inf")]},
        calls=frozenset({("b", 2), ("a", 10)}),
        names={"z", "y"},
        runs=[[0, 4], [6, 7]],
        places=("p", "q"),
        kind="b",
        inner=Inner(("i", 0), 0.1),
        whole=True,
    )
    stored = through_json(full)
    assert "device" not in stored
    assert Outer(device=full.device, **load_fields(Outer, stored)) == full
    assert Outer(**load_fields(Outer, through_json(Outer()))) == Outer()


def test_what_is_not_a_number_comes_back() -> None:
    stored = through_json(Inner(("x", 1), float("nan")))
    assert load_fields(Inner, stored)["error"] != load_fields(Inner, stored)["error"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: stored.pop("runs"),
        lambda stored: stored.update(later=1),
        lambda stored: stored.update(kind="c"),
        lambda stored: stored.update(whole=1),
        lambda stored: stored.update(places="text"),
        lambda stored: stored["named"]["x"].pop("error"),
    ],
)
def test_what_does_not_fit_is_refused(damage: Any) -> None:
    stored = through_json(Outer(named={"x": Inner(("x", 1))}))
    damage(stored)
    with pytest.raises(ValueError, match=r"Outer|Inner"):
        load_fields(Outer, stored)


def test_a_type_that_cannot_be_held_is_refused_by_its_field() -> None:
    @dataclass
    class Later:
        sums: Tensor

    with pytest.raises(TypeError, match=r"`Later.sums`.*NOT_SAVED"):
        save_fields(Later(torch.zeros(2)))


def test_a_reason_for_a_field_that_is_gone_is_refused() -> None:
    @dataclass
    class Stale:
        NOT_SAVED: ClassVar[dict[str, str]] = {"gone": "it was there"}
        kept: int = 0

    with pytest.raises(TypeError, match="gone"):
        saved_names(Stale)
