"""Whatever an attempt changes is in a checkpoint, or stands here or in ``NOT_SAVED`` with the reason why not."""

import json
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.accumulation.batch_variance import BatchVariance
from engine.accumulation.gradient_rows import GradientRows
from engine.accumulation.hooks import Collector
from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.output_gradients import InputArrival
from engine.accumulation.sketched_rows import SketchRows
from engine.accumulation.tied_statistics import TiedHeadStatistics
from engine.collection.collection_state import RECORDS, CollectionState, Cursor, fields_of_state
from engine.collection.pass_job import PassJob
from engine.distributed.traffic import Traffic
from engine.gradient_identity.findings import LayerCheck
from engine.gradient_identity.self_check import SelfCheck
from engine.model.mixed_precision import LossScale
from engine.row_layout.row_order import Layout
from engine.saved_fields import load_fields, save_fields, saved_names

PARTS = (GradientRows, SketchRows, BatchVariance)
PLAIN = [each for each in RECORDS if not issubclass(each, (LayerStatistics, *PARTS))]

HELD: dict[type, dict[str, str]] = {
    PassJob: {
        "workspace": "the job itself: its ports, options and machine",
        "model": "its parameters do not change; its buffers are in the checkpoint",
        "task": "a condition of the checkpoint",
        "collection": "a condition of the checkpoint",
        "dtype": "an option of the collection",
        "numerics": "a condition of the checkpoint",
        "heard": "the same set as `CollectionState.nondeterministic`",
        "micro_batch": "a choice of the plan, which is a condition",
        "offload": "a choice of the plan, which is a condition",
        "precision": "an option of the collection and a property of the device",
        "layout": "see its own fields",
        "sizes": "an option of the collection, and the number of examples",
        "representations": "they follow from the plan",
        "head": "found by every attempt's probe",
        "cut_padding": "found by every attempt's first check",
        "first_check": "made by every attempt; what passes find is `CollectionState.self_check`, a copy",
        "shared_first": "read by every attempt",
        "probed": "read by every attempt",
        "entered": "of a collection that has ended; the state holds what enters this one",
    },
    Layout: {
        "tables": "found by every attempt's probe",
        "operations": "found by every attempt's probe",
        "masking": "found by every attempt's probe; what passes find is `CollectionState.unmasked`",
        "orders": "found by every attempt's probe",
        "overwritten": "found by every attempt's probe; what passes find is `CollectionState.overwritten`",
    },
    Collector: {
        "statistics": "in the checkpoint, layer by layer",
        "gradients": "an option of the collection",
        "examples": "of the current batch",
        "mask": "of the current batch",
        "layout": "of the job",
        "head": "of the job; what it holds is of the current batch",
        "scale": "in the cursor",
        "inputs": "see its own fields",
        "observers": "they see the rows of the current batch alone",
        "shapes": "taken after every batch; those seen so far are in `SelfCheck.shapes`",
    },
    InputArrival: {
        "deferred": "in the state of the collection",
        "required": "an option of the collection",
    },
    LossScale: {"value": "in the cursor", "steady": "in the cursor"},
}
"""Records that passes hold and no checkpoint does: where each field comes from in a later attempt."""


SCALARS: dict[Any, Any] = {
    bool: lambda seed: seed > 0,
    str: lambda seed: f"text {seed}",
    int: lambda seed: seed + 6,
    float: lambda seed: seed + 0.25,
}


def filled(hint: Any, seed: int = 1) -> Any:
    """A value of a type that differs from what is empty, zero or False."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return filled(next(each for each in arguments if each is not types.NoneType), seed)
    if origin is typing.Literal or hint in SCALARS:
        return SCALARS[hint](seed) if hint in SCALARS else arguments[-1]
    if origin in (list, set, frozenset) or (origin is tuple and arguments[-1] is ...):
        return origin([filled(arguments[0], seed), filled(arguments[0], seed + 1)])
    if origin is tuple:
        return tuple(filled(each, seed) for each in arguments)
    if typing.get_origin(hint) is not None and len(arguments) == 2:
        return {filled(arguments[0], each): filled(arguments[1], each) for each in (seed, seed + 1)}
    if isinstance(origin, type) and is_dataclass(origin):
        hints = typing.get_type_hints(origin)
        return origin(**{name: filled(hints[name], seed) for name in saved_names(origin)})
    raise AssertionError(f"no value of {hint} is known here; add one")


def full(record: type, seed: int = 1) -> Any:
    """A record with every saved field filled, and the others as they begin."""
    hints = typing.get_type_hints(record)
    values = {name: filled(hints[name], seed) for name in saved_names(record)}
    others = [each for each in fields(record) if each.name not in values and each.init]
    missing = {each.name for each in others if each.default is MISSING and each.default_factory is MISSING}
    return record(**values, **{name: {} if name in ("statistics", "factors") else None for name in missing})


@pytest.mark.parametrize("record", PLAIN, ids=lambda each: each.__name__)
def test_every_field_of_a_record_comes_back(record: type) -> None:
    made = full(record)
    stored = json.loads(json.dumps(save_fields(made), allow_nan=False))
    for name, value in load_fields(record, stored).items():
        assert value == getattr(made, name), name
        assert value not in ({}, [], 0, None, False, frozenset()), f"`{name}` is not filled here, so nothing is shown"


@pytest.mark.parametrize("record", RECORDS, ids=lambda each: each.__name__)
def test_every_reason_is_a_sentence_about_a_field(record: type) -> None:
    reasons = getattr(record, "NOT_SAVED", {})
    assert reasons.keys() <= {each.name for each in fields(record)}
    assert all(len(reason) > 10 for reason in reasons.values())


def test_every_record_inside_another_is_named_among_them() -> None:
    def inside(hint: Any) -> set[type]:
        own = {hint} if isinstance(hint, type) and is_dataclass(hint) else set()
        return own.union(*(inside(each) for each in typing.get_args(hint)))

    for record in RECORDS:
        hints = typing.get_type_hints(record)
        found = set().union(*(inside(hints[name]) for name in saved_names(record)))
        assert found <= set(RECORDS), f"{record.__name__} holds {found - set(RECORDS)}"


@pytest.mark.parametrize("holder", HELD, ids=lambda each: each.__name__)
def test_what_passes_hold_besides_is_accounted_for(holder: type) -> None:
    names = {each.name for each in fields(holder) if not each.name.startswith("_")}
    assert names == HELD[holder].keys(), "name each new field with what a later attempt has it from, or save it"


@pytest.mark.parametrize("kind", [LayerStatistics, TiedHeadStatistics])
def test_every_field_of_a_layers_statistics_comes_back(kind: type[LayerStatistics]) -> None:
    hints = typing.get_type_hints(kind)

    def made(*, empty: bool) -> LayerStatistics:
        found = kind(layer=None, sharing="expand")  # type: ignore[arg-type]
        for place, name in enumerate(saved_names(kind)):
            hint = hints[name]
            if hint is BatchVariance or name == "gradient_rows":
                continue
            if Tensor in (hint, *typing.get_args(hint)):
                setattr(found, name, torch.full((2, 2), 0.0 if empty else 1.0 + place))
            elif not empty:
                setattr(found, name, filled(hint))
        return found

    whole, later = made(empty=False), made(empty=True)
    later.put_plain(json.loads(json.dumps(whole.plain(), allow_nan=False)))
    for name, value in whole.state().items():
        if isinstance(value, Tensor):
            later.put(name, value.clone(), torch.device("cpu"))
    own = {name.partition(".")[0] for name in whole.state()}
    assert own == set(saved_names(kind))
    for name, value in whole.state().items():
        found = later.state()[name]
        assert torch.equal(found, value) if isinstance(value, Tensor) else found == value, name


def test_sums_that_overflow_come_back() -> None:
    """JSON has no infinity, and a checkpoint that cannot be written would end a sound job."""
    found, later = (LayerStatistics(layer=None, sharing="expand") for _ in range(2))  # type: ignore[arg-type]
    found.trace_sums, found.weight_G = [float("inf"), None, 2.0], float("inf")
    later.put_plain(json.loads(json.dumps(found.plain(), allow_nan=False)))
    assert (later.trace_sums, later.weight_G) == (found.trace_sums, found.weight_G)


def test_every_field_of_the_parts_of_statistics_is_in_their_state() -> None:
    numbers = torch.ones(1, 2, 2)
    rows = GradientRows(rows=numbers, scales=torch.ones(1, 2), largest=torch.ones(1, 2), working=torch.float32)
    rows.triangle, rows.count = numbers, 2
    sketch = SketchRows.sketching(1, 4, 2, torch.float32, torch.device("cpu"), of_terms=False)
    sketch.triangle = torch.ones(1, 4, 4)
    for part in (rows, sketch, BatchVariance.of(torch.ones(2, 2))):
        assert part.state().keys() == set(saved_names(type(part))), type(part).__name__


def test_the_checks_of_ranks_join_in_every_field() -> None:
    def check(**values: Any) -> SelfCheck:
        return SelfCheck(subject=None, mode="growing", **values)  # type: ignore[arg-type]

    hints = typing.get_type_hints(SelfCheck)
    for name in saved_names(SelfCheck):
        before, found, joined = check(), check(**{name: filled(hints[name])}), check()
        joined.join(before.state(), [before.state(), found.state()])
        assert getattr(joined, name) == getattr(found, name), f"`SelfCheck.join` leaves `{name}` out"


def test_a_check_without_an_example_alone_joins_too() -> None:
    """Of a model that draws, one forward pass alone is looked at."""
    known = LayerCheck(error=1e-9, identity="completeness", examples=0, proof="same_forward", failed=False)
    worse = replace(known, error=1e-3, failed=True)
    joined = SelfCheck(subject=None, mode="growing")  # type: ignore[arg-type]
    before, found = replace(joined, layers={"a": known}), replace(joined, layers={"a": worse})
    joined.join(before.state(), [before.state(), found.state()])
    assert joined.layers == {"a": worse}


def test_a_state_takes_over_all_of_another() -> None:
    def state() -> CollectionState:
        check = SelfCheck(subject=None, mode="growing")  # type: ignore[arg-type]
        return CollectionState(statistics={}, factors={}, shared={}, self_check=check, traffic=Traffic())

    told = full(CollectionState)
    told.self_check, told.checked, told.traffic = full(SelfCheck), full(SelfCheck, 3), full(Traffic)
    later = state()
    heard = later.nondeterministic
    later.take_over(json.loads(json.dumps(told.state())))
    assert later.state() == told.state()
    # what warnings enter
    assert later.nondeterministic is heard


def test_a_pass_that_did_not_end_leaves_what_it_has_shown_alone() -> None:
    names = {each.name for each in fields(CollectionState)}
    assert names >= CollectionState._LEARNT
    state = full(CollectionState)
    before, expected = state.settled(), {name: save_fields(state)[name] for name in saved_names(CollectionState)}
    changed = full(CollectionState, 5)
    for name in saved_names(CollectionState):
        setattr(state, name, getattr(changed, name))
    state.restore(before)
    for name, value in save_fields(state).items():
        assert (value == expected[name]) == (name not in CollectionState._LEARNT), name


def test_another_set_of_fields_is_another_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fields_of_state()

    @dataclass(kw_only=True)
    class Later(Cursor):
        more: int = 0

    monkeypatch.setattr(
        "engine.collection.collection_state.RECORDS", tuple(Later if each is Cursor else each for each in RECORDS)
    )
    assert fields_of_state() != before
