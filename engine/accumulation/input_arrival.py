"""Inputs: A takes in what entered the calls that the loss depends on, and nothing else.

The input of a call is at hand during the forward pass, long before it is known whether a gradient
will ever come back to that call. Nearly every call gets one, so inputs enter A at once and need not
be kept. Where a batch shows that a layer has calls with a gradient and calls without (an output that
is detached, or that nothing reads), the pass is begun anew with the inputs of that layer kept until
their own gradient arrives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.row_observer import RowObserver
from engine.errors import Unwinding
from engine.layers.layer import Use
from engine.row_layout.layer_calls import require_unwritten, version


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
        self, statistics: LayerStatistics, use: Use, takers: Sequence[LayerStatistics | RowObserver] | None = None
    ) -> Callable[[], None]:
        """Let the input of one call enter A: now, or with its gradient.

        Args:
            statistics: Sums of the layer that was called.
            use: The call, with its input.
            takers: Those sums and everybody who sees the input enter; None is the sums alone.

        Returns:
            What is to be called when a gradient arrives at the call, once or several times.
        """
        takers = (statistics,) if takers is None else takers
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
        """Require that no layer got its first gradient after inputs of batches in which it had none.

        Args:
            statistics: Sums of all layers.

        Raises:
            UnusedCalls: If such inputs had entered A.
        """
        late = {each.layer.name for each in statistics if each.gradients and each.flaw is None and each.unproven}
        if late:
            raise UnusedCalls(frozenset(late))


def _add_unwritten(takers: Sequence[LayerStatistics | RowObserver], use: Use, read: int, layer: str) -> None:
    require_unwritten(use.input, read, layer)
    for each in takers:
        each.add_input_(use)
