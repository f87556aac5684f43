"""Output gradients of one call, and their path into the sums; and the inputs of the calls that they arrive at.

A takes in what entered the calls that the loss depends on, and nothing else. The input of a call is at hand during the
forward pass, long before it is known whether a gradient will ever come back to that call. Nearly every call gets one,
so inputs enter A at once and need not be kept. Where a batch shows that a layer has calls with a gradient and calls
without (an output that is detached, or that nothing reads), the pass is begun anew with the inputs of that layer kept
until their own gradient arrives.

The observer of rows: it sees what the hooks of a pass hand to a layer's sums, and changes nothing of it.

A gradient has the shape of its call's output, which may be any. A ``scale`` is the number that directions are
multiplied by; None is one, and then nothing waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.accumulation.example_gradients import Meeting
from engine.accumulation.layer_statistics import LayerStatistics
from engine.errors import Unwinding
from engine.layers.layer import TreatedLayer, Use
from engine.model.activation_memory import hook_gradient
from engine.model.mixed_precision import LossScale
from engine.row_layout.attention_masks import Key
from engine.row_layout.layer_calls import require_unwritten, version


class RowObserver(Protocol):
    """Sees the rows of one layer as they are summed; ``Collector.observers`` holds those of a batch."""

    def add_input_(self, use: Use) -> None:
        """See the input of one call enter A; the model may write to it later."""

    def follow(self, use: Use) -> Callable[[Tensor], None]:
        """See one call whose output's gradient is followed: its input, examples first, and the positions that count.

        Returns:
            A function of the gradient, examples first, not scaled; it is called once for each direction.
        """

    def add_example_gradients_(self, gradients: Tensor, start: int, examples: int) -> None:
        """See gradients (n, numbers) with respect to a bare parameter, of n of N examples from ``start`` on."""


def arrival(
    statistics: LayerStatistics,
    use: Use,
    meeting: Meeting | None,
    arrange: Callable[[Tensor, int], Tensor] | None,
    *,
    calls: Callable[[], int],
    looks: Sequence[Callable[[Tensor], None]],
) -> Callable[[Tensor], None]:
    """Return the hook that lets one call's gradient enter the sums of its layer.

    Args:
        statistics: Those sums.
        use: The call.
        meeting: Collects the gradients of the layer's calls; None where these are wanted alone.
        arrange: Puts the examples of the output first; None where they are.
        calls: Returns how often the layer was called in this forward pass.
        looks: Are shown the gradient, its examples leading, before it enters.

    Raises:
        InputOverwritten: By the hook, if the model has written to the tensor that entered the layer.
    """
    read = None if use.entered is None else version(use.entered)

    def enter(gradient: Tensor) -> None:
        if read is not None:
            require_unwritten(use.input, read, statistics.layer.name)
        # operations of our own are not the model's, whose casts may be under way
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - its only name
            if arrange is not None:
                gradient = arrange(gradient, use.examples)
            for look in looks:
                look(gradient)
            statistics.add_gradient_(use, gradient)
            if meeting is not None:
                meeting.arrive(use, gradient, calls())

    return enter


def show_gradient(output: Tensor, looks: Sequence[Callable[[Tensor], None]], scale: LossScale | None) -> None:
    """Have ``looks`` shown the gradient of an output, if it needs one, that enters no sum.

    The tensor stays the one that the model goes on with.
    """

    def show(gradient: Tensor) -> None:
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - its only name
            for look in looks:
                look(unscaled(gradient, scale))

    if looks and output.requires_grad:
        hook_gradient(output, show)


def note_reached(
    reached: list[tuple[Key, Tensor]], call: tuple[Key, Tensor] | None, layer: TreatedLayer, gradient: Tensor
) -> None:
    """Note whether a gradient, examples first, is anything but zero in the positions that the mask drops from a call.

    ``reached`` takes the call's key with a boolean scalar. The call's dropped positions are (P,) booleans; it is None
    where the mask drops none.
    """
    if call is None:
        return
    key, dropped = call
    largest = torch.linalg.vector_norm(layer.gradient_rows(gradient), ord=torch.inf, dim=1)
    reached.append((key, ((largest != 0) & dropped).any()))


def unscaled(gradient: Tensor, scale: LossScale | None) -> Tensor:
    """Divide a gradient by what its direction was multiplied by.

    The gradient itself where nothing is to be divided, else a copy of its shape in float32 or wider.
    """
    if scale is None:
        return gradient
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
    return wide.div_(scale.value)


@dataclass
class Direction:
    """The gradients of one direction, which wait for each other where directions are scaled."""

    _held: list[tuple[Callable[[Tensor], None], Tensor]] = field(default_factory=list)
    """Gradients, each with what lets it enter the sums."""

    def receive(self, gradient: Tensor, enter: Callable[[Tensor], None], scale: LossScale | None) -> None:
        """Hand to ``enter`` one gradient that has arrived: at once, or when the others of its direction are there."""
        if scale is None:
            enter(gradient)
        else:
            self._held.append((enter, gradient))

    def is_finite(self, scale: LossScale | None, others: Sequence[Tensor]) -> bool:
        """Tell whether the gradients that wait may enter; those of a direction that overflowed are let go of.

        False where one of them or of ``others``, further gradients of a scaled direction, holds NaN or Inf.
        """
        arrived = [] if scale is None else [*(gradient for _, gradient in self._held), *others]
        if not arrived or bool(torch.stack([gradient.isfinite().all() for gradient in arrived]).all()):
            return True
        self._held.clear()
        return False

    def enter(self, scale: LossScale | None) -> None:
        """Let the gradients that wait enter the sums."""
        held, self._held = self._held, []
        for enter, gradient in held:
            enter(unscaled(gradient, scale))


class UnusedCalls(Unwinding):
    """Some calls of a layer got a gradient and others none, though the inputs of all had entered A."""

    def __init__(self, layers: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(layers)))
        self.layers = layers


@dataclass(eq=False)
class InputArrival:
    """Lets the inputs of one batch's calls enter A, and finds calls that no gradient reached."""

    deferred: frozenset[str]
    """Layers whose inputs wait for the gradient of their call."""
    required: bool
    """A call without a gradient is an error; else nothing is compared."""
    _pulled: bool = False
    """Some direction of this batch was pulled back."""
    _waiting: dict[int, tuple[LayerStatistics, Callable[[], None] | None]] = field(default_factory=dict)
    """Calls without a gradient so far: their layer, and what lets a deferred input enter."""
    _entered: int = 0

    def begin(self) -> None:
        """Prepare for one forward pass."""
        self._waiting.clear()
        self._pulled = False

    def enter(
        self, statistics: LayerStatistics, use: Use, takers: Sequence[LayerStatistics | RowObserver]
    ) -> Callable[[], None]:
        """Let the input of one call enter A: now, or with its gradient.

        Args:
            statistics: Sums of the layer that was called.
            use: The call, with its input.
            takers: Those sums and all that see the input enter.

        Returns:
            What is to be called when a gradient arrives at the call, once or several times.
        """
        number = self._entered
        self._entered += 1
        if statistics.layer.name in self.deferred:
            add = partial(_add_unwritten, takers, use, version(use.input), statistics.layer.name)
            self._waiting[number] = statistics, add
        else:
            for each in takers:
                each.add_input_(use)
            if self.required:
                self._waiting[number] = statistics, None
        return partial(self._arrive, number)

    def _arrive(self, number: int) -> None:
        _, add = self._waiting.pop(number, (None, None))
        if add is not None:
            add()

    def pulled_back(self) -> None:
        """Note that one direction has been pulled back through the whole graph."""
        self._pulled = True

    def end(self) -> None:
        """Close one batch.

        Raises:
            UnusedCalls: If layers have calls with a gradient and calls without, whose inputs had entered A.
        """
        waiting, unused = list(self._waiting.values()), set()
        self._waiting.clear()
        for statistics, add in waiting:
            if not self._pulled and add is not None:
                # no loss term in the batch: its inputs count as those of any position without a gradient
                add()
            elif self._pulled and add is None and statistics.flaw is None:
                statistics.unproven |= statistics.gradients == 0
                if not statistics.unproven:
                    unused.add(statistics.layer.name)
        if unused:
            raise UnusedCalls(frozenset(unused))

    def require_proven(self, statistics: tuple[LayerStatistics, ...]) -> None:
        """Raise ``UnusedCalls`` if a layer got its first gradient after inputs of batches in which it had none."""
        late = {each.layer.name for each in statistics if each.gradients and each.flaw is None and each.unproven}
        if late:
            raise UnusedCalls(frozenset(late))


def _add_unwritten(takers: Sequence[LayerStatistics | RowObserver], use: Use, read: int, layer: str) -> None:
    require_unwritten(use.input, read, layer)
    for each in takers:
        each.add_input_(use)
