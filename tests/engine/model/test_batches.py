"""Batches: the index of a chunk is whole numbers, one per example, or is refused by name."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import WrongShape
from engine.model.batches import make_batches

INTEGERS = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def read_index(index: Any) -> list[int]:
    """The index of the one batch of four examples."""
    (batch,) = make_batches([(torch.zeros(4, 2), torch.zeros(4), index)], 4)
    assert batch.index.dtype == torch.int64
    return batch.index.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_of_any_width_are_an_index(dtype: torch.dtype) -> None:
    assert read_index(torch.tensor([3, 1, 2, 7]).to(dtype)) == [3, 1, 2, 7]


@pytest.mark.parametrize(
    "index",
    [
        [3, 1, 2, 7],
        (3, np.int16(1), torch.tensor(2), 7),
        np.array([3, 1, 2, 7], dtype=np.int32),
        [np.array(3), np.array(1), np.array(2), np.array(7)],
    ],
)
def test_lists_and_arrays_of_integers_are_an_index(index: Any) -> None:
    assert read_index(index) == [3, 1, 2, 7]


@pytest.mark.parametrize("index", [[], torch.zeros(0, dtype=torch.int32)])
def test_an_empty_chunk_has_an_empty_index(index: Any) -> None:
    empty = (torch.zeros(0, 2), torch.zeros(0), index)
    assert not list(make_batches([empty], 4, may_be_empty=True))


@pytest.mark.parametrize(
    ("index", "got"),
    [
        (torch.arange(4) / 16, r"torch\.float32 \[0\.0, 0\.0625, 0\.125, …\]"),
        (torch.arange(4.0), r"torch\.float32 \[0\.0, 1\.0"),
        (torch.full((4,), torch.nan), r"torch\.float32 \[nan"),
        (torch.arange(4) > 1, r"torch\.bool \[False"),
        (torch.arange(4) * 1j, r"torch\.complex64 \[0j"),
        (np.arange(4) / 16, r"torch\.float64 \[0\.0"),
        ([0, 1, 0.5, 2], r"got float 0\.5"),
        ([0, 1, 2.0, 3], r"got float 2\.0"),
        ([0, True, 2, 3], "got bool True"),
        ([0, 1, torch.tensor(2.0), 3], r"got Tensor tensor\(2\.\)"),
        (["0", "1", "2", "3"], "got str '0'"),
        ([0, 1, 2, None], "got NoneType None"),
        ([[0], [1], [2], [3]], r"got list \[0\]"),
        (None, "got NoneType None"),
        ("0123", "got str '0123'"),
        ([0, 1, 2, 2**63], "got int 9223372036854775808"),
        (torch.tensor([0, 1, 2, 2**64 - 1], dtype=torch.uint64), "got 18446744073709551615"),
        (np.array(["0", "1", "2", "3"]), "got ndarray"),
    ],
)
def test_an_index_of_anything_but_whole_numbers_is_refused(index: Any, got: str) -> None:
    with pytest.raises(WrongShape, match=got) as caught:
        read_index(index)
    assert caught.value.pointer == "/data"
    assert caught.value.message.startswith("`index`, the third entry of a chunk, must hold whole numbers")
    assert caught.value.message.endswith("or leave it out: examples are then numbered as they come")


def test_an_index_of_another_length_is_refused() -> None:
    with pytest.raises(WrongShape, match=r"index has shape \(3,\); it must be \(4,\)"):
        read_index([0, 1, 2])


@pytest.mark.parametrize(
    ("chunks", "got"),
    [([[5, 5, 5, 5]], "got 5 for 4 examples of one batch"), ([[0, 1], [1, 2]], "got 1 for 2 examples of one batch")],
)
def test_an_index_that_two_examples_of_a_batch_have_is_refused(chunks: list[list[int]], got: str) -> None:
    stream = [(torch.zeros(len(index), 2), torch.zeros(len(index)), index) for index in chunks]
    with pytest.raises(WrongShape, match=got) as caught:
        list(make_batches(stream, 4))
    assert caught.value.message.startswith("`index`, the third entry of a chunk, must hold whole numbers")


def test_an_index_may_come_again_in_another_pass() -> None:
    stream = [(torch.zeros(4, 2), torch.zeros(4), [3, 1, 2, 7])]
    first, second = (list(make_batches(stream, 4)) for _ in range(2))
    assert first[0].index.equal(second[0].index)
