"""Turns: the number that one rank's batch has among the batches of all ranks.

Ranks take turns: batch k of rank r is batch ``k·W + r`` of the whole, and without indices of their own examples are
numbered ``(k·W + r)·B + j`` for batches of B. So W ranks that are given the batches r, r + W, r + 2W, … measure what
one rank measures of all of them: labels, which are keyed by these numbers, every Nth update, and the moving average,
whose weight of an update is ``β`` to the number of updates after it, whichever rank made those.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.distributed.group import Ranks
from engine.errors import RanksRefused
from engine.model.batches import tensors


@dataclass(frozen=True)
class Turns:
    """Which batches of one rank enter the factors, and as which updates."""

    rank: int
    size: int
    update_freq: int

    @classmethod
    def of(cls, ranks: Ranks, update_freq: int) -> "Turns":
        """Return the turns of this rank, where every ``update_freq``-th batch of the whole enters."""
        return cls(ranks.rank, ranks.size, update_freq)

    def update(self, batch: int) -> int | None:
        """Return the update, from 0, that a batch of this rank is; None where it does not enter."""
        number, rest = divmod(batch * self.size + self.rank, self.update_freq)
        return None if rest else number

    def last_update(self, batches: int) -> int | None:
        """Return the last update of the first batches of this rank; None where none of them enters."""
        for batch in range(batches - 1, max(batches - 1 - self.update_freq, -1), -1):
            update = self.update(batch)
            if update is not None:
                return update
        return None

    def updates_since(self, batch: int) -> int:
        """Count the updates from this rank's last one up to that of a batch; 0 where nothing has entered before."""
        now, before = self.update(batch), self.last_update(batch)
        return 0 if now is None or before is None else now - before


def require_turns(batches: Iterable[int], update_freq: int, ema_decay: float | None) -> None:
    """Require that ranks have held batches in turn, where the numbers of batches decide anything."""
    counts = list(batches)
    if update_freq == 1 and ema_decay is None:
        return
    if counts != sorted(counts, reverse=True) or counts[0] - counts[-1] > 1:
        name = "ema_decay" if ema_decay is not None else "update_freq"
        raise RanksRefused(
            f"`collection.{name}` counts the batches of all ranks in turn, so each rank must hold as many as the "
            f"next, or one more (got {', '.join(map(str, counts))}); deal the batches out in turn",
            pointer=f"/collection/{name}",
        )


def numbered(chunks: Iterable[Any], ranks: Ranks, batch_size: int) -> Iterator[Any]:
    """Yield chunks with the numbers of their examples among those of all ranks."""
    seen = 0
    for chunk in chunks:
        if not isinstance(chunk, (tuple, list)):
            # refused where chunks are read
            yield chunk
            continue
        first = next(iter(tensors(chunk[0])), None) if len(chunk) == 2 else None
        if first is None or not first.ndim:
            # numbered already, or refused later as well
            yield chunk
            continue
        own = torch.arange(seen, seen + first.shape[0])
        seen += first.shape[0]
        turn = own.div(batch_size, rounding_mode="floor") * ranks.size + ranks.rank
        yield (*chunk, turn * batch_size + own.remainder(batch_size))
