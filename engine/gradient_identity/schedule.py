"""The schedule of self-checks: how many examples each one runs, and its cost.

The glance: the outputs of one example in the batch that is summed, against the same example alone.

One forward pass of one example, without a graph. How often it comes is counted, never timed: what is covered must not
depend on how busy a machine is. Of a batch of N examples it takes

    (5/4 w + 16 r + n) / (N (3 w + s) + 6 n)

with the multiplications of one example w, those of its sums s, the numbers r of the weights, which are read for that
one example, and what operations and the pass around them take beside their numbers n.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.gradient_identity.checked_model import Forward, Subject, observe, run, unwritten
from engine.gradient_identity.recorded_rows import GradientSketch, relative
from engine.gradient_identity.summed_rows import AllExamples, Group, SummedRows, project_outputs
from engine.layers.layer import TreatedLayer
from engine.model.batches import Batch, map_tensors, tensors
from engine.model.state.generators import set_generators
from engine.workspace import Workspace


def pick_examples(batch: Batch, places: Sequence[int]) -> Batch:
    """Pick examples of a batch by their places, in the order wanted; one may come more than once."""
    index = torch.tensor(places, device=batch.index.device)

    def pick(tensor: Tensor) -> Tensor:
        return tensor[index.to(tensor.device)]

    return Batch(
        inputs=map_tensors(batch.inputs, pick), targets=map_tensors(batch.targets, pick), index=pick(batch.index)
    )


def different_examples(batch: Batch, count: int) -> list[int]:
    """Choose examples whose inputs differ, spread over the batch: a model may treat its parts in different ways.

    Up to ``count`` ascending places; equal ones are among them where too few differ.
    """
    chosen: list[int] = []
    parts = tensors(batch.inputs)
    for place in _spread(batch.size):
        if len(chosen) == count:
            return sorted(chosen)
        if not any(all(torch.equal(each[place], each[other]) for each in parts) for other in chosen):
            chosen.append(place)
    rest = [place for place in range(batch.size) if place not in chosen]
    return sorted(chosen + rest[: min(count, batch.size) - len(chosen)])


def _spread(count: int) -> Iterator[int]:
    """Yield the places 0 to ``count`` − 1: the first, the last, and then whatever halves the widest gaps."""
    yield from range(min(1, count))
    yield from range(count - 1, max(0, count - 2), -1)
    gaps = deque([(0, count - 1)])
    while gaps:
        low, high = gaps.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            yield middle
            gaps += [(low, middle), (middle, high)]


FIRST_EXAMPLES = 4
"""Different examples of the first batch that are held against themselves alone."""
_MANY = 16
"""Examples of a batch, of which the first ones are few."""
_LONG = 128
"""Numbers of an example from which on it takes longer than what surrounds it."""


def first_examples(batch: Batch) -> int:
    """Choose how many examples of the first batch are held against themselves alone.

    Four, or as many as there are; half of that of few long ones, each of which alone takes a large part of the time.
    """
    most = min(FIRST_EXAMPLES, batch.size)
    numbers = max(each[:1].numel() for each in tensors(batch.inputs))
    return most if batch.size >= _MANY or numbers < _LONG else -(-most // 2)


@dataclass(frozen=True, kw_only=True)
class CheckWork:
    """The work of the checks of one collection, in passes there and back."""

    examples: float
    """Examples that go there and back, weight gradients counted."""
    passes: int
    """Passes, of few examples each."""


def check_work(workspace: Workspace, batches: int) -> CheckWork:
    """Count examples and passes of all checks of a collection, of batches that are taken to be alike.

    The first batch goes through the model once more, and there and back in halves; some of its examples go alone
    twice, once with the gradients of the weights; of a later batch one example does so.
    """
    collection = workspace.options.collection
    if collection.self_check == "off":
        return CheckWork(examples=0.0, passes=0)
    # there and back, and there and back once more with the gradients of the weights
    alone = 1 + 4 / 3
    later = (batches - 1).bit_length() if collection.self_check == "growing" else 0
    checked = min(FIRST_EXAMPLES, collection.batch_size) + later
    return CheckWork(examples=collection.batch_size * 2 + checked * alone, passes=3 + 2 * checked)


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
        """Count the batches that get a glance, by what one takes of a batch.

        Multiplications and operations are those of one forward pass, the former of one example; ``sums`` are those that
        its rows take to be summed, ``weights`` the numbers of the weights.
        """
        around = operations * _OPERATION + _FORWARD
        glance = _ALONE * multiplications + _READ * weights + around
        batch = examples * (3 * multiplications + sums) + _PASS * around
        every = max(1, min(_SELDOM, -int(-glance // (SHARE * batch))))
        return cls(every=every, first=_SMALL_BATCHES if glance - _FORWARD < _SMALL else 0)

    def turn(self, number: int) -> int | None:
        """Return which glance a batch gets, from 0; None where it gets none."""
        if number < self.first:
            return number
        return None if number % self.every else self.first + number // self.every


def differs_alone(subject: Subject, summed: SummedRows) -> bool:
    """Tell whether the outputs of the kept examples differ from those that they have alone."""
    return any(_differs(subject, summed, group) for group in summed.groups)


def find_mixed(subject: Subject, summed: SummedRows) -> tuple[Forward, int] | None:
    """Find an example whose outputs differ from those that it has alone, among a few spread over each group."""
    for part in summed.parts():
        together = _outputs(subject, part)
        for place in spread_places(part.size):
            alone = _outputs(subject, pick_examples(part, [place]))
            if _is_other(together[place : place + 1], alone, subject):
                return Forward(batch=part, start=summed.groups[0].start), place
    return None


def spread_places(size: int) -> list[int]:
    """Return the places of a few examples of a group, from the first on."""
    count = min(_OTHERS, size)
    return [number * size // count for number in range(count)]


def find_mixed_in_halves(
    subject: Subject, layers: Sequence[TreatedLayer], summed: SummedRows
) -> tuple[Forward, int] | None:
    """Find an example that is another in its group than in one half of it, among all examples.

    What meets in a group meets other examples in its halves, or fewer: a largest one, a mean, a place in a queue. By
    its outputs, and by the gradients that arrive at each layer. A model that draws has its other half exchanged in
    place of left out, so that each example is drawn the same.

    Returns:
        The group or the half, whichever has other outputs than the example alone, with the state of the generators
        that its forward pass begins with; and the example's place there.
    """
    for part, whole in zip(summed.parts(), summed.all_examples or (), strict=False):
        first = 0
        for half in part.slices(-(-part.size // 2)) if part.size > 1 else ():
            stop = first + half.size
            place = _first_moved(subject, layers, Forward(batch=half, start=whole.start), whole, slice(first, stop))
            if place is not None:
                alone = _outputs(subject, pick_examples(half, [place]))
                here = _is_moved(subject, whole.projected[first + place : first + place + 1], alone).any()
                batch, number = (part, first + place) if here else (half, place)
                return Forward(batch=batch, start=whole.start), number
            first = stop
    return None


def find_mixed_by_exchange(subject: Subject, summed: SummedRows) -> tuple[Forward, int] | None:
    """Find an example whose outputs are others beside other examples, in a batch of the same shape.

    Of a model that draws: the draws of the forward pass are the same. Arguments and result are those of
    ``find_mixed_in_halves``.
    """
    for part, whole in zip(summed.parts(), summed.all_examples or (), strict=False):
        places = range(part.size)
        # any two examples differ in one of these bits of their places, so that one stays where the other does not
        for bit, value in ((1 << power, value) for power in range((part.size - 1).bit_length()) for value in (0, 1)):
            stays = [place for place in places if bool(place & bit) == bool(value)]
            exchanged = [place if place in stays else min(place ^ bit, stays[-1]) for place in places]
            set_generators(whole.start, subject.device)
            outputs = _outputs(subject, pick_examples(part, exchanged))
            moved = _is_moved(subject, whole.projected[stays], outputs[stays]).nonzero()
            if len(moved):
                return Forward(batch=part, start=whole.start), stays[int(moved[0])]
    return None


def _first_moved(
    subject: Subject, layers: Sequence[TreatedLayer], half: Forward, whole: AllExamples, span: slice
) -> int | None:
    """The first example of a half whose outputs, or gradients of a layer, are not those that it has in its group."""
    sketches = {name: GradientSketch(half.batch.size) for name in whole.sketches}
    if not sketches:
        moved = _is_moved(subject, whole.projected[span], _outputs(subject, half.batch))
    else:
        prediction = observe(subject, layers, half, sketches)[0]
        moved = _is_moved(subject, whole.projected[span], prediction.outputs.detach())
    for name, own in sketches.items():
        if isinstance(own.square, Tensor) and isinstance(known := whole.sketches[name].form, Tensor):
            norm = own.square.sqrt()
            # what is rounding beside the largest decides nothing
            moved |= (known[span] - own.form).abs() > subject.tolerance * (norm + subject.tolerance * norm.max())
    places = moved.nonzero()
    return int(places[0]) if len(places) else None


def _is_moved(subject: Subject, projected: Tensor, outputs: Tensor) -> Tensor:
    """Which examples' outputs, (N, R, C), are not those of which (N, R) are known along one direction: (N,)."""
    distance = torch.linalg.vector_norm(projected - project_outputs(outputs), dim=1)
    moved: Tensor = distance > subject.tolerance * torch.linalg.vector_norm(outputs.flatten(1), dim=1)
    return moved


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
