"""A plan is of one rank, or of the largest piece with the merge of all, as the job that runs would make it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from catalog.frames import Planned
from catalog.requests.assignment import Assignment, read_assignment
from engine.distributed.group import Ranks
from engine.memory.budget import free_host_bytes
from engine.workspace import ModelInputs
from kronoscope.display.plan_tables import plan_lines
from tests.worker.execution.pieces.conftest import Runner
from tests.worker.execution.pieces.test_division import DIGITS
from worker.execution.attempt import parse_document
from worker.execution.data.stream import DataStream
from worker.execution.ranks.rank_part import bounds_of_plan
from worker.execution.refusal import Refusal
from worker.execution.sources import plan_part


def data(examples: int | None) -> DataStream:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        raise AssertionError("a plan reads no data to cut them")

    return DataStream(batches=batches, examples=examples)


@pytest.mark.parametrize(
    ("options", "examples", "own", "whole", "pieces"),
    [
        ({}, 118, 118, 118, 1),
        ({"world_size": 4}, 118, 32, 118, 1),  # of 8 batches of 16 or fewer, two
        ({"world_size": 4}, None, None, None, 1),
        ({"shards": 3}, 118, 48, 118, 3),
        ({"shards": 100}, 118, 16, 118, 8),
        ({"shards": "auto"}, 118, 118, 118, 1),
        ({"shards": 3}, None, None, None, 1),
    ],
)
def test_the_examples_are_those_of_one_rank_or_piece(
    options: Any, examples: int | None, own: int | None, whole: int | None, pieces: int
) -> None:
    inputs = ModelInputs(model=None, batches=None, examples=examples)
    merged, _ = plan_part(parse_document({**DIGITS, **options}), data(examples), inputs)
    assert (inputs.examples, inputs.foreseen_examples(Ranks.alone()), merged) == (own, whole, pieces)
    with pytest.raises(Refusal, match="take 118 or fewer"):
        plan_part(parse_document({**DIGITS, "shards": 119}), data(118), ModelInputs(examples=118))


@pytest.mark.parametrize(("world_size", "parts"), [(1, 1), (4, 4)])
def test_a_rank_has_its_part_of_the_host(world_size: int, parts: int, tmp_path: Path) -> None:
    def given(*, estimate: bool) -> Assignment:
        value = {"document": {"world_size": world_size}, "artifacts": str(tmp_path), "estimate": estimate}
        return bounds_of_plan(read_assignment(json.dumps(value).encode()))

    assert given(estimate=False).bounds == {}
    bound = given(estimate=True).bounds.get("host_bytes")
    assert bound is None if parts == 1 else bound < free_host_bytes() / 2


def test_a_plan_says_what_it_is_of_and_counts_the_merge(runner: Runner) -> None:
    def plan(**options: Any) -> Any:
        asked = {"document": {**DIGITS, **options}, "artifacts": str(runner.folder / "plan"), "estimate": True}
        frames, _ = runner.attempt(asked)
        return next(frame.plan for frame in frames if isinstance(frame, Planned))

    whole, piece, rank = plan(), plan(shards=2), plan(world_size=2)
    assert not any(line.startswith("figures of") for line in plan_lines(whole))
    assert "figures of one of 2 pieces, with at most 64 of 118 examples" in " ".join(plan_lines(piece))
    assert "figures of one of 2 ranks, which measures 64 of 118 examples" in " ".join(plan_lines(rank))
    stored = {term["name"] for term in piece["terms"]} - {term["name"] for term in whole["terms"]}
    assert stored == {"merge", "factors of the pieces"}

    def seconds(first: Any, **options: Any) -> float:
        """The quietest of three moments: each plan is by the speed that the machine has at its own."""
        plans = first, plan(**options), plan(**options)
        return min(float(each["stages"]["collection"]["seconds"]) for each in plans)

    alone = seconds(whole)
    for divided in (seconds(piece, shards=2), seconds(rank, world_size=2)):
        assert 0.2 < divided / alone < 2
    assert piece["smallest_budget"]["host_bytes"] >= piece["stages"]["decomposition"]["host_bytes"]
