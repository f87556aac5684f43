"""The glance: the outputs of one example in the batch that is summed, against the same example alone.

One forward pass of one example, without a graph. How often it comes is counted, never timed: what is covered must not
depend on how busy a machine is. Of a batch of N examples it takes

    (5/4 w + 16 r + n) / (N (3 w + s) + 6 n)

with the multiplications of one example w, those of its sums s, the numbers r of the weights, which are read for that
one example, and what operations and the pass around them take beside their numbers n.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import EngineError, Unwinding
from engine.gradient_identity.checked_model import Subject, unwritten
from engine.gradient_identity.comparison import relative
from engine.gradient_identity.recorded_rows import run
from engine.gradient_identity.schedule import pick_examples
from engine.gradient_identity.summed_rows import Group, SummedRows
from engine.model.batches import Batch

SHARE = 0.02
"""Most that glances may take of a batch's time."""
_OPERATION = 300_000
"""Multiplications in the time that an operation takes beside its numbers."""
_FORWARD = 2 * 10**8
"""Multiplications in the time that a forward pass takes beside its operations, its model's state put back."""
_ALONE = 1.25
"""Multiplications of an example beside others in the time of one of an example alone, whose rows fill fewer tiles."""
_READ = 16
"""Multiplications in the time that a number of a weight is read from memory."""
_PASS = 6
"""The same of a batch's whole pass, in those of a forward pass alone."""
_SMALL = 2 * 10**7
"""Multiplications of a glance that takes less than what surrounds a whole collection."""
_SMALL_BATCHES = 32
"""Batches that each get a glance then."""
_OTHERS = 8
"""Examples of a batch in which something new ran that get a glance each."""
_SELDOM = 64
"""Batches of which one gets a glance in any case."""


@dataclass(frozen=True)
class Glances:
    """The batches that get a glance."""

    every: int = 1
    """One of so many."""
    first: int = 0
    """And each of so many at the beginning."""

    @classmethod
    def of(cls, multiplications: int, sums: int, operations: int, examples: int, *, weights: int = 0) -> "Glances":
        """Count what a glance takes of a batch.

        Args:
            multiplications: Multiplications of one example's forward pass.
            sums: Those that its rows take to be summed.
            operations: Operations of a forward pass.
            examples: Examples of a batch.
            weights: Numbers of the weights.

        Returns:
            The batches that get one.
        """
        around = operations * _OPERATION + _FORWARD
        glance = _ALONE * multiplications + _READ * weights + around
        batch = examples * (3 * multiplications + sums) + _PASS * around
        every = max(1, min(_SELDOM, -int(-glance // (SHARE * batch))))
        return cls(every=every, first=_SMALL_BATCHES if glance - _FORWARD < _SMALL else 0)

    def turn(self, number: int) -> int | None:
        """Number the glances.

        Args:
            number: A batch, from 0.

        Returns:
            Which glance this batch gets, from 0; None where it gets none.
        """
        if number < self.first:
            return number
        return None if number % self.every else self.first + number // self.every


def differs_alone(subject: Subject, summed: SummedRows) -> bool:
    """Tell whether the outputs of the kept examples differ from those that they have alone."""
    return any(_differs(subject, summed, group) for group in summed.groups)


def find_mixed(subject: Subject, parts: Iterator[Batch]) -> tuple[Batch, int] | None:
    """Find an example whose outputs differ from those that it has alone, among a few spread over each group."""
    try:
        for part in parts:
            together, count = _outputs(subject, part), min(_OTHERS, part.size)
            for place in (number * part.size // count for number in range(count)):
                alone = _outputs(subject, pick_examples(part, [place]))
                if _is_other(together[place : place + 1], alone, subject):
                    return part, place
    except (EngineError, Unwinding):
        pass
    return None


def _outputs(subject: Subject, batch: Batch) -> Tensor:
    own = subject.moved(batch)
    with unwritten(subject.model), torch.no_grad():
        return run(subject, own).outputs


def _is_other(mine: Tensor, alone: Tensor, subject: Subject) -> bool:
    if mine.shape != alone.shape:
        raise EngineError("the outputs of one example have another shape alone")
    return relative(mine - alone, alone) > subject.tolerance


def _differs(subject: Subject, summed: SummedRows, group: Group) -> bool:
    if group.outputs is None:
        return False
    whole = summed.forward(group).batch
    return any(
        _is_other(group.outputs[number : number + 1], _outputs(subject, pick_examples(whole, [place])), subject)
        for number, place in enumerate(group.places)
    )
