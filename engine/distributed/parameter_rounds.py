"""Parameter rounds: how ranks bring a sharded unit's parameters together, each when it needs them.

FSDP gathers a unit by a collective that every rank enters at the same place of the same forward pass. Ranks that
measure differ in their passes: one has more batches than another, or larger ones, checks a batch, looks for the module
that makes a NaN, or begins anew with smaller slices. So each gathering is a round in which every rank says what it
needs, a unit or nothing, and sends its parts to the ranks that need them:

    a rank that needs a unit       enters one round, and has the unit afterwards
    a rank that waits for others   enters rounds, needing nothing, until one in which no rank needs anything

Ranks wait for each other at meetings alone (``Ranks.meet``), which all of them come to in the same order. So a rank
enters a round at every moment at which another may need one, no pass has to be made for company, and a rank without
data serves the others from the meeting at the end of its pass.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.group import Ranks
from engine.distributed.sharded_tensors import ShardedParameter
from engine.distributed.transfers import Label, Transfer, exchange, spread

OPERATION = "parameters"
"""The operation under which bytes of parameters are counted."""
_NOTHING = -1


class ParameterRounds:
    """The units of one sharded model, which ranks bring together on request.

    Args:
        units: The parameters of each unit, the same units in the same order on every rank.
        names: Name of each unit.
    """

    def __init__(self, ranks: Ranks, units: Sequence[Sequence[ShardedParameter]], names: Sequence[str]) -> None:
        self._ranks, self._units = ranks, units
        # a layer of the same name counts its own bytes
        self._labels = [Label(f"unit `{name}`", OPERATION) for name in names]

    def bring(self, unit: int, targets: Sequence[Tensor]) -> None:
        """Fill tensors with the whole parameters of a unit.

        Args:
            targets: One tensor for each of its parameters, of its shape, contiguous, any float dtype.

        Raises:
            RankFailed: If a rank has failed.
            RankTimedOut: If a rank does not come in time.

        Memory:
            Where another rank needs another unit, or numbers are converted: one parameter more at a time.
        """
        if self._ranks.size == 1:
            for parameter, target in zip(self._units[unit], targets, strict=True):
                target.copy_(parameter.local)
        else:
            self._round(unit, targets)

    def serve(self) -> None:
        """Send parts to the ranks that need them, until every rank waits.

        Raises:
            RankFailed: If a rank has failed.
            RankTimedOut: If a rank does not come in time.
        """
        while self._round(_NOTHING, ()):
            pass

    def _round(self, own: int, targets: Sequence[Tensor]) -> bool:
        """Move what ranks need in one round; returns False where none needs anything."""
        ranks = self._ranks
        needed = [torch.zeros((), dtype=torch.int64) for _ in range(ranks.size)]
        with ranks.naming(OPERATION):
            work = dist.all_gather(needed, torch.tensor(own), group=ranks.host, async_op=True)
        ranks.wait(work, OPERATION, "" if own == _NOTHING else self._labels[own].layer)
        units = [int(each) for each in needed]
        for unit in sorted({*units} - {_NOTHING}):
            receivers = [rank for rank, each in enumerate(units) if each == unit]
            self._move(unit, receivers, targets if unit == own else ())
        return max(units) != _NOTHING

    def _move(self, unit: int, receivers: list[int], targets: Sequence[Tensor]) -> None:
        ranks, parameters = self._ranks, self._units[unit]
        together = len(receivers) == ranks.size and all(len(each.copies) == 1 for each in parameters)
        for place, parameter in enumerate(parameters):
            target = targets[place] if ranks.rank in receivers else None
            local = parameter.local.contiguous().to(ranks.device)
            if together and target is not None:
                self._spread(parameter, local, target, self._labels[unit])
            else:
                self._exchange(parameter, local, receivers, target, self._labels[unit])

    def _spread(self, parameter: ShardedParameter, local: Tensor, target: Tensor, label: Label) -> None:
        """Let every rank send its part to all, straight to its place where numbers stand there as they are sent."""
        ranks, under_way = self._ranks, list[tuple[Tensor, Transfer]]()
        for holder in parameter.holders(ranks.rank):
            first, last = parameter.bounds(holder)
            place = target.narrow(parameter.dim, first, last - first)
            if holder == ranks.rank:
                place.copy_(local)
                piece = local
            elif place.is_contiguous() and place.dtype == local.dtype:
                piece = place
            else:
                piece = local.new_empty(parameter.part_shape(holder))
            under_way.append((place, spread(ranks, piece, holder, label)))
        for place, transfer in under_way:
            (piece,) = transfer.wait()
            if piece is not local and piece is not place:
                place.copy_(piece)

    def _exchange(
        self, parameter: ShardedParameter, local: Tensor, receivers: Sequence[int], target: Tensor | None, label: Label
    ) -> None:
        """Send this rank's part to the receivers of its copy, and receive the others of its own."""
        ranks, flat = self._ranks, local.view(-1)
        own = parameter.holders(ranks.rank)
        send = [flat if rank in receivers and rank in own else flat[:0] for rank in range(ranks.size)]
        counts = [
            parameter.part_shape(rank).numel() if target is not None and rank in own else 0
            for rank in range(ranks.size)
        ]
        pieces = exchange(ranks, send, counts, label).wait()
        if target is None:
            return
        for holder in own:
            first, last = parameter.bounds(holder)
            piece = flat if holder == ranks.rank else pieces[holder]
            target.narrow(parameter.dim, first, last - first).copy_(piece.view(parameter.part_shape(holder)))
