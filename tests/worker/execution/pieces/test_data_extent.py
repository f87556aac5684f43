"""Cutting data into pieces: every batch of the undivided job stands in one piece, with the indices it has there."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from catalog.requests.collection import Collection
from engine.errors import EmptyData
from engine.model.batches import make_batches
from worker.execution.data.stream import Chunk, DataStream
from worker.execution.pieces.data_extent import Extent, cut_pieces, measure_extent, read_share
from worker.execution.refusal import Refusal


def stream(
    sizes: list[int], widths: list[int] | None = None, *, counted: bool = True, own_index: bool = False
) -> DataStream:
    """Chunks of the given numbers of examples, whose inputs are their numbers; some as wide as others."""
    total = sum(sizes)

    def batches() -> Iterator[Chunk]:
        start = 0
        for place, size in enumerate(sizes):
            numbers = torch.arange(start, start + size)
            inputs = numbers[:, None].expand(size, 1 if widths is None else widths[place])
            yield (inputs, numbers % 3, 1000 + 2 * numbers) if own_index else (inputs, numbers % 3)
            start += size

    def labels() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, total, 7):
            numbers = torch.arange(start, min(start + 7, total))
            yield numbers % 3, numbers

    return DataStream(batches=batches, examples=total if counted else None, labels=labels)


def numbered(make: Callable[[], Any], size: int) -> list[tuple[list[int], list[int], list[int]]]:
    return [
        (batch.inputs[:, 0].tolist(), batch.targets.tolist(), batch.index.tolist())
        for batch in make_batches(make(), size)
    ]


RAGGED = {"sizes": [5, 9, 4, 4, 1], "widths": [2, 2, 3, 2, 2]}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("update_freq", [1, 2, 3])
@pytest.mark.parametrize(
    "data",
    [
        {"sizes": [40]},
        {"sizes": [7, 7, 7, 7, 3]},
        {"sizes": [31], "own_index": True},
        {"sizes": [33], "counted": False},
        {**RAGGED, "counted": False},
    ],
)
def test_pieces_hold_every_batch_of_the_whole_once(data: Any, update_freq: int, count: int) -> None:
    whole, collection = stream(**data), Collection(batch_size=4, update_freq=update_freq)
    extent = measure_extent(whole, collection, lambda: None)
    assert extent.examples == sum(data["sizes"])
    pieces = cut_pieces(extent, count)
    batches = numbered(whole.batches, 4)
    assert len(pieces) == min(count, -(-len(batches) // update_freq))
    apart = [numbered(read_share(whole, piece, 4).batches, 4) for piece in pieces]
    assert [batch for share in apart for batch in share] == batches
    # numbered from 0, each piece leaves out the batches that the whole leaves out
    entered = [batch for share in apart for number, batch in enumerate(share) if number % update_freq == 0]
    assert entered == batches[::update_freq]
    assert [piece.begin for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == extent.examples
    assert {(piece.total, piece.count) for piece in pieces} == {(extent.examples, len(pieces))}


def test_labels_of_a_piece_are_those_of_its_examples() -> None:
    whole = stream([40])
    for piece in cut_pieces(measure_extent(whole, Collection(batch_size=4), lambda: None), 3):
        share = read_share(whole, piece, 4)
        assert share.examples == (piece.end or 0) - (piece.begin or 0)
        assert share.labels is not None
        found = [
            (int(label), int(place))
            for labels, index in share.labels()
            for label, place in zip(labels, index, strict=True)
        ]
        assert found == [(place % 3, place) for place in range(piece.begin or 0, piece.end or 0)]


def test_pieces_differ_by_one_batch_at_most() -> None:
    extent = Extent(examples=1797, cuts=tuple(range(0, 1797, 64)))
    sizes = [end - begin for begin, end in extent.shares(7)]
    assert sum(sizes) == 1797
    assert sizes == [320, 256, 256, 256, 256, 256, 197]


def test_more_pieces_than_examples_are_refused() -> None:
    extent = measure_extent(stream([5]), Collection(batch_size=2), lambda: None)
    with pytest.raises(Refusal, match=r"is 6, and the data hold 5 examples; take 5 or fewer") as caught:
        cut_pieces(extent, 6)
    assert caught.value.pointer == "/shards"
    # as many as there are batches, where there are examples enough
    assert len(cut_pieces(extent, 5)) == 3


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(EmptyData):
        measure_extent(stream([], counted=False), Collection(), lambda: None)


@pytest.mark.parametrize(
    ("sizes", "message"), [([9], "the data end after 9 examples"), ([6, 6], "a batch holds the examples 8 to 12")]
)
def test_other_data_than_were_divided_are_refused(sizes: list[int], message: str) -> None:
    piece = cut_pieces(measure_extent(stream([11]), Collection(batch_size=4), lambda: None), 2)[1]
    assert (piece.begin, piece.end) == (8, 11)
    with pytest.raises(Refusal, match=message) as caught:
        list(read_share(stream(sizes), piece, 4).batches())
    assert caught.value.code == "data_differ"
    assert "piece 2 of 2" in caught.value.message


def test_counting_can_be_stopped() -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    with pytest.raises(Stop):
        measure_extent(stream([9], counted=False), Collection(), stop)
