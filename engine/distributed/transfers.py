"""Transfers: pieces of tensors on their way between ranks, and reductions made of them.

The backend moves bytes and adds nothing: every sum is made here, in float64, in the order of the ranks. So a sum has
the same bits whatever the order in which pieces arrive and whatever the backend, and any dtype moves, bfloat16 and
int64 as well as float64.

A reduction is a generator that yields each transfer it waits for. Several are under way at once: while the pieces of
one layer travel, those of the next are packed.

    sum over ranks of n numbers   pieces to their owners (f·n), sums back to all (f·n);   f = (W − 1)/W
    sum at one owner              all numbers to it (n from each other rank)
"""

import itertools
import math
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.group import Ranks

T = TypeVar("T")
NUMBERS_AT_ONCE = 2**21
"""Numbers of a panel: a reduction holds a few panels beside what it reduces."""
UNDER_WAY = 2
"""Reductions that are under way together."""


@dataclass(frozen=True)
class Label:
    """The layer and the operation that a transfer is counted under."""

    layer: str
    operation: str


@dataclass
class Transfer:
    """Bytes on their way."""

    ranks: Ranks
    label: Label
    work: Any
    pieces: list[Tensor]
    """Tensors from each rank to this one, in the order of the ranks, once ``wait`` has returned."""

    def wait(self) -> list[Tensor]:
        """Wait until everything has arrived.

        Returns:
            One piece of each rank, its own among them.

        Raises:
            RankFailed: If a rank has failed.
            RankTimedOut: If a rank does not send in time.
        """
        self.ranks.wait(self.work, self.label.operation, self.label.layer)
        return self.pieces


Reduction = Generator[Transfer, None, T]


def exchange(ranks: Ranks, send: Sequence[Tensor], counts: Sequence[int], label: Label) -> Transfer:
    """Send a piece to every rank, and receive one of each.

    Args:
        send: One piece for each rank, shape (n,), of one dtype and device.
        counts: Numbers that each rank sends to this one; that of this rank is ignored.
        label: Layer and operation.

    Memory:
        What is sent and received once more each.
    """
    own = send[ranks.rank]
    width = own.element_size()
    outgoing = [0 if place == ranks.rank else piece.numel() * width for place, piece in enumerate(send)]
    incoming = [0 if place == ranks.rank else count * width for place, count in enumerate(counts)]
    ranks.traffic.count(label.layer, label.operation, sent=sum(outgoing), received=sum(incoming))
    leaving = torch.cat([piece[:0] if place == ranks.rank else piece for place, piece in enumerate(send)])
    arriving = torch.empty(sum(incoming), dtype=torch.uint8, device=own.device)
    with ranks.naming(label.operation, label.layer):
        work = dist.all_to_all_single(
            arriving,
            leaving.view(torch.uint8),
            incoming,
            outgoing,
            group=ranks.group_of(own.device),
            async_op=True,
        )
    pieces = [piece.view(own.dtype) for piece in torch.split(arriving, incoming)]
    pieces[ranks.rank] = own
    return Transfer(ranks, label, work, pieces)


def spread(ranks: Ranks, tensor: Tensor, source: int, label: Label) -> Transfer:
    """Send a tensor of one rank to all.

    Args:
        tensor: On ``source`` what is sent, elsewhere what takes it; contiguous, of one shape and dtype.
        source: The rank that sends.
        label: Layer and operation.

    Returns:
        The transfer, with the tensor as its only piece.
    """
    size = tensor.numel() * tensor.element_size()
    mine = ranks.rank == source
    ranks.traffic.count(
        label.layer, label.operation, sent=size * (ranks.size - 1) if mine else 0, received=0 if mine else size
    )
    work = None
    if size:
        with ranks.naming(label.operation, label.layer):
            work = dist.broadcast(
                tensor.view(-1).view(torch.uint8), source, group=ranks.group_of(tensor.device), async_op=True
            )
    return Transfer(ranks, label, work, [tensor])


def hand_over(
    ranks: Ranks, tensor: Tensor, source: int, receivers: Sequence[int], shape: Sequence[int], label: Label
) -> Tensor | None:
    """Send a tensor of one rank to some of the others, and wait until it has arrived.

    Args:
        tensor: On ``source`` what is sent; elsewhere any tensor of that dtype and device.
        source: The rank that sends.
        receivers: The ranks that receive; ``source`` among them keeps its own.
        shape: Shape of the tensor.
        label: Layer and operation.

    Returns:
        The tensor on the ranks that have it; None on the others.

    Raises:
        RankFailed: If a rank has failed.
        RankTimedOut: If it does not arrive in time.

    Memory:
        What is sent or received once more.
    """
    mine = ranks.rank == source
    flat = tensor.contiguous().view(-1)
    send = [flat if mine and place in receivers and place != source else flat[:0] for place in range(ranks.size)]
    takes = not mine and ranks.rank in receivers
    counts = [math.prod(shape) if takes and place == source else 0 for place in range(ranks.size)]
    pieces = exchange(ranks, send, counts, label).wait()
    if mine:
        return tensor
    return pieces[source].view(tuple(shape)) if takes else None


def bounds(numbers: int, size: int) -> list[tuple[int, int]]:
    """Cut numbers into one part for each rank, as even as may be.

    Args:
        numbers: How many there are.
        size: Ranks.

    Returns:
        Begin and end of each part, in the order of the ranks.
    """
    marks = [numbers * rank // size for rank in range(size + 1)]
    return list(itertools.pairwise(marks))


def total_of(pieces: Sequence[Tensor]) -> Tensor:
    """Add pieces in the order of the ranks, in float64.

    Args:
        pieces: Of one shape and dtype.
    """
    total = pieces[0].to(torch.float64, copy=True)
    for piece in pieces[1:]:
        total += piece
    return total.to(pieces[0].dtype)


def sum_numbers(ranks: Ranks, numbers: Tensor, label: Label, owner: int | None = None) -> Reduction[Tensor]:
    """Add one rank's numbers to those of the others.

    Args:
        numbers: Shape (n,), the same n on every rank, any float dtype.
        label: Layer and operation.
        owner: The only rank that needs the sum; None where all do.

    Yields:
        The transfers that it waits for.

    Returns:
        The sum (n,), in that dtype; on ranks other than the owner, where there is one, shape (0,).
    """
    length = numbers.numel()
    if owner is not None:
        send = [numbers if place == owner else numbers[:0] for place in range(ranks.size)]
        transfer = exchange(ranks, send, [length if ranks.rank == owner else 0] * ranks.size, label)
        yield transfer
        pieces = transfer.wait()
        return total_of(pieces) if ranks.rank == owner else numbers[:0]
    parts = bounds(length, ranks.size)
    first, last = parts[ranks.rank]
    transfer = exchange(ranks, [numbers[a:b] for a, b in parts], [last - first] * ranks.size, label)
    yield transfer
    own = total_of(transfer.wait())
    transfer = exchange(ranks, [own] * ranks.size, [b - a for a, b in parts], label)
    yield transfer
    return torch.cat(transfer.wait())


def sum_tensor_(ranks: Ranks, tensor: Tensor, label: Label) -> Reduction[None]:
    """Add a tensor of every rank, in place.

    Args:
        tensor: Contiguous, of one shape and dtype on all ranks.
        label: Layer and operation.

    Yields:
        The transfers that it waits for.
    """
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), NUMBERS_AT_ONCE):
        part = flat[start : start + NUMBERS_AT_ONCE]
        part.copy_((yield from sum_numbers(ranks, part, label)))


def sum_triangle_(ranks: Ranks, matrices: Tensor, label: Label, owner: int | None = None) -> Reduction[None]:
    """Add the upper triangles of symmetric matrices of every rank, in place; the lower ones are not touched.

    Args:
        matrices: Shape (n, n) or (groups, n, n), of one dtype on all ranks.
        label: Layer and operation.
        owner: The only rank that needs the sum; None where all do.

    Yields:
        The transfers that it waits for.

    Memory:
        A few panels of 2 Mi numbers.
    """
    size = matrices.shape[-1]
    for matrix in matrices.view(-1, size, size):
        start = 0
        while start < size:
            stop = min(size, start + max(1, NUMBERS_AT_ONCE // (size - start)))
            rows = matrix[start:stop, start:]
            upper = torch.ones(rows.shape, dtype=torch.bool, device=rows.device).triu_()
            total = yield from sum_numbers(ranks, rows[upper], label, owner)
            if owner in (None, ranks.rank):
                rows[upper] = total
            start = stop


def run_together(reductions: Iterable[Reduction[T]], under_way: int = UNDER_WAY) -> list[T]:
    """Run reductions, a few of them at once, in an order that does not depend on what arrives first.

    Args:
        reductions: One generator for each; every rank has the same ones in the same order.
        under_way: How many are under way together.

    Returns:
        What each has returned, in their order.

    Raises:
        RankFailed: If a rank has failed.
        RankTimedOut: If a rank does not come in time.
    """
    results: dict[int, T] = {}
    waiting: deque[tuple[int, Reduction[T], Transfer]] = deque()

    def go_on(place: int, reduction: Reduction[T]) -> None:
        try:
            waiting.append((place, reduction, next(reduction)))
        except StopIteration as end:
            results[place] = end.value

    for place, reduction in enumerate(reductions):
        go_on(place, reduction)
        while len(waiting) >= under_way:
            first, running, transfer = waiting.popleft()
            transfer.wait()
            go_on(first, running)
    while waiting:
        first, running, transfer = waiting.popleft()
        transfer.wait()
        go_on(first, running)
    return [results[place] for place in sorted(results)]
