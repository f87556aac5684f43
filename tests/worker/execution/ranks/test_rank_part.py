"""A rank's part: together the ranks read what one process reads, batch for batch and number for number."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from catalog.requests.assignment import read_assignment
from engine.distributed.group import Ranks
from engine.memory.budget import free_host_bytes
from engine.model.batches import make_batches
from engine.workspace import ModelInputs
from worker.execution.ranks.rank_part import (
    assignment_of_rank,
    bounds_of_rank,
    own_batches,
    own_examples,
    require_same_data,
    take_part,
)
from worker.execution.refusal import Refusal

CHUNKS = {
    "even": [(torch.arange(24.0).view(12, 2), torch.arange(12))],
    "uneven": [(torch.arange(46.0).view(23, 2), torch.arange(23))],
    "ragged": [
        (torch.ones(5, 3), torch.arange(5)),
        (torch.ones(6, 4), torch.arange(5, 11)),
        (torch.ones(7, 4), torch.arange(11, 18)),
        (torch.ones(1, 2), torch.arange(18, 19)),
    ],
    "numbered": [(torch.ones(9, 2), torch.arange(9), torch.arange(9) * 10 + 3)],
    "fewer than ranks": [(torch.ones(3, 2), torch.arange(3))],
}


def seen_by(rank: int, size: int, **more: Any) -> Any:
    return SimpleNamespace(rank=rank, size=size, **more)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CHUNKS)
def test_the_ranks_batches_are_those_of_one_process_in_turn(name: str, size: int) -> None:
    whole = list(make_batches(CHUNKS[name], 4))
    parts = [list(own_batches(lambda: iter(CHUNKS[name]), seen_by(rank, size), 4)()) for rank in range(size)]
    for number, batch in enumerate(whole):
        inputs, targets, index = parts[number % size][number // size]
        assert torch.equal(inputs, batch.inputs)
        assert torch.equal(targets, batch.targets)
        assert torch.equal(index, batch.index)
    assert sum(map(len, parts)) == len(whole)


@pytest.mark.parametrize("examples", [0, 1, 3, 4, 5, 12, 23, 96])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_example_is_counted_once(examples: int, size: int) -> None:
    data = [(torch.ones(examples, 1), torch.arange(examples))] if examples else []
    for rank in range(size):
        ranks = seen_by(rank, size)
        read = sum(len(index) for _, _, index in own_batches(lambda: iter(data), ranks, 4)()) if examples else 0
        assert own_examples(examples, ranks, 4) == read
    assert own_examples(None, seen_by(0, 2), 4) is None


def test_inputs_keep_the_number_of_all() -> None:
    inputs = ModelInputs(model=None, batches=lambda: iter(CHUNKS["uneven"]), examples=23)
    take_part(inputs, seen_by(1, 2, gather=lambda value, _: [value, value]), 4, "same")
    assert (inputs.examples, inputs.examples_of_all) == (11, 23)
    alone = ModelInputs(model=None, batches=None, examples=23)
    take_part(alone, Ranks.alone(), 4, "same")
    assert (alone.examples, alone.examples_of_all) == (23, None)


def test_a_model_that_differs_between_ranks_is_named_with_both_digests() -> None:
    ranks = seen_by(0, 3, gather=lambda value, _: [value, value, "b" * 64])
    inputs = ModelInputs(model=None, batches=None)
    with pytest.raises(Refusal, match=f"is {'a' * 64} on rank 0 and {'b' * 64} on rank 2.*seed whatever") as refused:
        take_part(inputs, ranks, 4, "a" * 64)
    assert (refused.value.code, refused.value.pointer) == ("model_differs", "/model")


def test_what_was_leased_bounds_a_rank_and_else_its_share_of_what_is_free() -> None:
    leased = {"device_bytes": 5, "host_bytes": 7}
    assert bounds_of_rank(leased, seen_by(0, 4)) == leased
    before = free_host_bytes()
    share = bounds_of_rank({}, seen_by(0, 4))["host_bytes"]
    assert 0 < share < 0.5 * before


def test_ranks_share_no_scratch_folder(tmp_path: Any) -> None:
    folders = {"artifacts": str(tmp_path), "scratch": str(tmp_path / "2"), "earlier": [str(tmp_path / "1")]}
    given = read_assignment(json.dumps({"document": {}, **folders}).encode())
    parts = [assignment_of_rank(given, seen_by(rank, 2)) for rank in range(2)]
    assert [each.scratch for each in parts] == [tmp_path / "2" / "rank-0", tmp_path / "2" / "rank-1"]
    assert parts[1].earlier == (tmp_path / "1" / "rank-1",)


def test_data_that_differ_between_ranks_are_named_with_both_digests() -> None:
    ranks = seen_by(0, 2, gather=lambda value, _: [value, "b" * 64])
    with pytest.raises(Refusal, match=f"is {'a' * 64} on rank 0 and {'b' * 64} on rank 1.*seed what") as refused:
        require_same_data(ranks, "a" * 64)
    assert (refused.value.code, refused.value.pointer) == ("data_differ", "/data")
    require_same_data(Ranks.alone(), "a" * 64)
