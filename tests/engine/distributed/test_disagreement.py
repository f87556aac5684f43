"""Ranks that do not go the same way: one without data, one that fails, leaves, runs out of memory, or dies."""

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import EngineError
from tests.engine.distributed.rank_processes import asked_for, run_ranks
from tests.engine.distributed.rank_scenarios import SCENARIOS, Scenario, outcome, perceptron
from tests.engine.distributed.test_ranks import apart


class SometimesDetached(nn.Module):
    """Calls its layer once more, without a gradient, where a number of the inputs is large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        if bool((x > 10).any()):
            hidden = hidden + self.inner(0.1 * x).detach()
        return self.outer(hidden)


class NarrowRank(nn.Module):
    """Says that memory is out for more than four examples at once, on rank 1 alone, after the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = perceptron(), 0

    def forward(self, x: Tensor) -> Tensor:
        if os.environ.get("RANK") == "1" and x.shape[0] > 4 and float(x[0, 0]) != float(x[1, 0]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return self.layers(x)


ROWS = SCENARIOS["rows"]
DETACHED = Scenario(SometimesDetached, collection={"self_check": "off"})
NARROW = Scenario(NarrowRank, collection={"self_check": "off"})
EVERY_OTHER = Scenario(perceptron, collection={"self_check": "off", "update_freq": 2})


def with_a_large_number(scenario: Scenario) -> list[Any]:
    batches = scenario.batches()
    batches[3][0][2, 1] = 20.0
    return batches


def not_finite(batches: list[Any], rank: int) -> list[Any]:
    if rank == 1:
        batches[1][0][0, 0] = torch.nan
    return batches


def dies(batches: list[Any], rank: int) -> list[Any]:
    if rank == 1:
        os._exit(9)
    return batches


def another_model(scenario: Scenario, batches: list[Any], rank: int, **options: Any) -> Any:
    own = Scenario(
        scenario.make if rank == 0 else lambda: nn.Sequential(perceptron(), nn.Tanh()), collection=scenario.collection
    )
    return own.measured(batches, **options)


def caught(function: Callable[[], Any]) -> Any:
    try:
        return outcome(function())
    except EngineError as error:
        return type(error).__name__, str(error), error.category


def disagreements(rank: int, size: int, names: Collection[str]) -> Mapping[str, Any]:
    """All that are asked for in one process group: what failed before leaves nothing behind."""

    def dealt(scenario: Scenario) -> list[Any]:
        return scenario.batches()[rank::size]

    everything = {size - 1: ROWS.batches()}
    every: dict[str, Callable[[], Any]] = {
        "empty": lambda: ROWS.measured(everything.get(rank, [])),
        "uneven": lambda: ROWS.measured(ROWS.batches()[:5] if rank == 0 else ROWS.batches()[5:]),
        "nobody": lambda: ROWS.measured([]),
        "not finite": lambda: ROWS.measured(not_finite(dealt(ROWS), rank)),
        "nested": lambda: ROWS.measured(dealt(ROWS), nested=True),
        "none": lambda: ROWS.measured(dealt(ROWS), reduction="none"),
        "none of one": lambda: ROWS.measured(everything.get(rank, []), reduction="none"),
        "not in turn": lambda: EVERY_OTHER.measured(
            EVERY_OTHER.batches()[:5] if rank == 0 else EVERY_OTHER.batches()[5:]
        ),
        "another model": lambda: another_model(ROWS, dealt(ROWS), rank),
        "left": lambda: DETACHED.measured(with_a_large_number(DETACHED)[rank::size]),
        "narrow": lambda: NARROW.measured(dealt(NARROW)),
        "numbered": lambda: ROWS.measured([(x, y) for x, y, _ in dealt(ROWS)]),
        "filled up": lambda: ROWS.measured(dealt(ROWS) + ROWS.batches()[1 : 2 - rank]),
        "once": lambda: ROWS.measured(dealt(ROWS)),
        "again": lambda: ROWS.measured(dealt(ROWS)),
    }
    return {name: caught(function) for name, function in every.items() if name in names}


ALWAYS = ("not finite", "left", "narrow", "once", "again")
"""Scenarios that tests of their own look at."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[Any]:
    results = run_ranks(2, disagreements, 2, {*ALWAYS, *asked_for(request, "name")})
    for each in results:
        if isinstance(each, Exception):
            raise each
    return results


def require_equal(result: Any, expected: Any) -> None:
    assert not isinstance(result, tuple), result
    for layer, sides in expected["factors"].items():
        for own, one in zip(result["factors"][layer], sides, strict=True):
            assert apart(own, one) <= 1e-12, layer


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("name", ["empty", "uneven", "none of one", "numbered"])
def test_ranks_may_hold_any_part_of_the_data(name: str, found: list[Any]) -> None:
    alone = outcome(ROWS.measured(ROWS.batches()))
    for each in found:
        require_equal(each[name], alone)
        assert each[name]["examples"] == alone["examples"]


def test_a_pass_that_one_rank_leaves_is_begun_anew_by_all(found: list[Any]) -> None:
    alone = outcome(DETACHED.measured(with_a_large_number(DETACHED)))
    for each in found:
        require_equal(each["left"], alone)


def test_all_ranks_take_smaller_slices_where_one_runs_out_of_memory(found: list[Any]) -> None:
    alone = outcome(NARROW.measured(NARROW.batches()))
    for each in found:
        require_equal(each["narrow"], alone)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("nobody", "EmptyData", "2 ranks hold no example"),
        ("nested", "RanksRefused", "collection.nested"),
        ("none", "RanksRefused", "take `gram`, `gather`, `dense` or `auto`"),
        ("not in turn", "RanksRefused", "got 5, 1"),
        ("filled up", "RanksRefused", "example 8 is held by two"),
        ("another model", "RanksRefused", "same model, and rank 1 differs"),
    ],
)
def test_all_ranks_refuse_alike(name: str, error: str, words: str, found: list[Any]) -> None:
    for each in found:
        assert each[name][0] == error
        assert words in each[name][1]


def test_an_error_of_one_rank_ends_all_and_names_it(found: list[Any]) -> None:
    assert found[1]["not finite"][0] == "NonFiniteLoss"
    kind, message, category = found[0]["not finite"]
    assert (kind, category) == ("RankFailed", "usage")
    assert message.startswith("rank 1 of 2 failed: NonFiniteLoss")


def test_two_runs_have_equal_digests_on_every_rank(found: list[Any]) -> None:
    digests = [each[name]["digests"] for each in found for name in ("once", "again")]
    assert all(each == digests[0] for each in digests)


def dying(rank: int) -> Any:
    return caught(lambda: ROWS.measured(dies(ROWS.batches()[rank::2], rank)))


def test_a_rank_that_dies_is_named_within_the_timeout() -> None:
    kind, message, category = run_ranks(2, dying, timeout_seconds=3.0)[0]
    assert kind == "RankTimedOut"
    assert "for rank 1" in message
    assert category == "transient"
