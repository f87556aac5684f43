"""Extent: the examples of a job's data, and the places at which they may be cut.

A cut stands only where a batch of the undivided job begins whose number is a multiple of `collection.update_freq`.
So every batch of a piece is a batch of the whole, and a piece that numbers its batches from 0 leaves out the same ones.
Where the source says how many examples it holds, batches begin at the multiples of their size. Where it does not, one
pass that no model takes part in counts them.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from catalog.requests.collection import Collection
from catalog.requests.pieces import Piece, Round
from engine.model.batches import make_batches
from worker.execution.data.stream import Chunk, DataStream
from worker.execution.pieces.read_digests import ReadDigests
from worker.execution.refusal import Refusal


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The examples of the data, and where they may be cut."""

    examples: int
    cuts: tuple[int, ...]
    """Examples before each possible cut, ascending from 0."""

    def shares(self, count: int) -> tuple[tuple[int, int], ...]:
        """Return contiguous ranges of examples, as equal in cuts as they can be, the larger ones first."""
        units = len(self.cuts)
        count = min(count, units)
        places = [0]
        for index in range(count):
            places.append(places[-1] + units // count + (index < units % count))
        ends = (*self.cuts, self.examples)
        return tuple((ends[first], ends[last]) for first, last in itertools.pairwise(places))


def measure_extent(stream: DataStream, collection: Collection, checkpoint: Callable[[], None]) -> Extent:
    """Find where the data may be cut; they are read once where their source does not say how many they are."""
    if stream.examples is not None:
        unit = collection.batch_size * collection.update_freq
        return Extent(examples=stream.examples, cuts=tuple(range(0, stream.examples, unit)))
    examples, cuts = 0, []
    for number, batch in enumerate(make_batches(stream.batches(), collection.batch_size)):
        checkpoint()
        if number % collection.update_freq == 0:
            cuts.append(examples)
        examples += batch.size
    return Extent(examples=examples, cuts=tuple(cuts))


def cut_pieces(extent: Extent, count: int, round_name: Round = "collect") -> tuple[Piece, ...]:
    """Cut the examples into the pieces of a round."""
    if count > extent.examples:
        raise Refusal(
            f"is {count}, and the data hold {extent.examples} examples; take {extent.examples} or fewer",
            pointer="/shards",
        )
    shares = extent.shares(count)
    return tuple(
        Piece(round=round_name, index=index, count=len(shares), begin=begin, end=end, total=extent.examples)
        for index, (begin, end) in enumerate(shares)
    )


def read_share(stream: DataStream, piece: Piece, batch_size: int, digests: ReadDigests | None = None) -> DataStream:
    """Return the data of one piece: batches of the undivided job, each example with the index that it has there.

    The examples before the piece are read and dropped; reading stops at its end.
    """
    begin, end = piece.begin or 0, piece.end or 0

    def batches() -> Iterator[Chunk]:
        position, whole = 0, make_batches(stream.batches(), batch_size)
        for batch in whole if digests is None else digests.watch(whole, begin, end):
            after = position + batch.size
            if after > begin:
                if position < begin or after > end:
                    raise _other_data(piece, f"a batch holds the examples {position} to {after}")
                yield batch.inputs, batch.targets, batch.index
            position = after
            if position >= end:
                return
        raise _other_data(piece, f"the data end after {position} examples")

    def labels() -> Iterator[tuple[Tensor, Tensor]]:
        position = 0
        for targets, index in () if stream.labels is None else stream.labels():
            first, last = max(begin - position, 0), min(end - position, len(index))
            if first < last:
                yield targets[first:last], index[first:last]
            position += len(index)

    return DataStream(batches=batches, examples=end - begin, labels=None if stream.labels is None else labels)


def _other_data(piece: Piece, found: str) -> Refusal:
    return Refusal(
        f"are not those that were divided: {piece.title} has the examples {piece.begin} to {piece.end} of "
        f"{piece.total}, and {found}; a source must give the same examples in the same order and chunks every time: "
        "seed what it draws or shuffles by, and change no file while the job runs",
        pointer="/data",
        code="data_differ",
    )
