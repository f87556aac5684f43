"""Data passes: every batch that entered a collection goes by once more, with the weight that it had there.

A batch goes through in micro-batches, which are halved where memory runs out; sums of slices do not depend on it but by
rounding. With a moving average of decay β, the sums of update i of n weigh ``β^(n−1−i)``.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, nn

from engine.collection.pass_job import PassJob
from engine.errors import EngineError, ModelRefused, Unwinding
from engine.memory.out_of_memory import free_memory, lost_device, ran_out_of_memory
from engine.model.batches import Batch
from engine.model.determinism import set_numerics
from engine.model.example_digests import EnteredExamples
from engine.model.state.generators import Generators, seed_generators, set_generators
from engine.model.state.own_gradients import needing_gradients
from engine.model.state.preserve_state import preserve_state
from engine.operators.exact.columns import trained

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """Facts that passes have learnt of memory, data and model: with them a later attempt makes the same products."""

    micro_batch: int | None
    """Examples that go through the model at once, where memory sufficed."""
    entered: EnteredExamples | None
    """The examples that every pass lets enter."""
    route: str | None
    """Why products go by second gradients; None where they need not so far."""


@dataclass(kw_only=True)
class DataPasses:
    """Passes over the examples that entered a job's factors, in the precision of its own passes."""

    job: PassJob
    updates: int
    """Batches that entered; with a moving average, each weighs as it does there."""
    report: Callable[[], None]
    """Called after every batch."""
    what: str
    """Purpose of the passes, as a warning names it."""
    remedy: str
    """Remedy where the model cannot be differentiated as asked for."""
    trouble: str = "the model cannot be differentiated twice"
    """How an error of the model's is introduced."""
    pointer: str | None
    """The part of the document that asked for it."""
    labels_drawn: bool = False
    """Whether labels are drawn, which must be the same in every pass."""
    _micro_batch: int | None = field(init=False)
    _entered: EnteredExamples | None = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the micro-batch of the collection."""
        self._micro_batch = self.job.micro_batch
        self._entered = self.job.entered

    def learnt(self, route: str | None) -> Learnt:
        """Return what passes have learnt so far."""
        return Learnt(micro_batch=self._micro_batch, entered=self._entered, route=route)

    def take_over(self, learnt: Learnt) -> None:
        """Go on with what the passes of an earlier attempt have learnt."""
        self._micro_batch, self._entered = learnt.micro_batch, learnt.entered

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Hold the model still, as a collection does."""
        job = self.job
        with (
            preserve_state(job.model, job.dtype),
            set_numerics(job.numerics, job.heard),
            _differentiable(job.model),
        ):
            yield

    def run(
        self,
        names: tuple[str, ...],
        compute: Callable[[Batch, Mapping[str, Tensor]], tuple[Result, float]],
        add: Callable[[Result, float], None],
    ) -> float:
        """Let every batch of the collection enter.

        Args:
            names: Parameters whose gradients are wanted.
            compute: Computes from a slice and the parameters what it adds, and the weight of its loss terms. It runs
                again on halves where memory runs out, so it must add nothing itself.
            add: Adds it, with the weight of its update.

        Returns:
            The total weight of the loss terms.

        Raises:
            ModelRefused: If the model raises, or cannot be differentiated.
            DataDiffer: If other examples enter than entered the collection, or the first pass.
        """
        job, collection = self.job, self.job.collection
        parameters = trained(job.model, names)
        divisor, update, entered = 0.0, 0, EnteredExamples()
        # a model that draws numbers in evaluation mode draws those of the collection
        seed_generators(collection.seed)
        with needing_gradients(parameters.values()):
            for place, arrived in enumerate(job.stream()):
                job.workspace.ports.raise_if_cancelled()
                if place % collection.update_freq == 0:
                    past = 1.0 if collection.ema_decay is None else collection.ema_decay
                    weight = past ** (self.updates - 1 - update)
                    batch = job.moved(arrived)
                    entered = job.enter(entered, batch, update)
                    for found, own in self._sliced(batch, parameters, compute):
                        add(found, weight)
                        divisor += weight * own
                        del found
                    update += 1
                self.report()
        if self._entered is None:
            self._entered = entered
        self._entered.require(entered, self.what, labels_drawn=self.labels_drawn)
        return divisor

    def _sliced(
        self,
        batch: Batch,
        parameters: Mapping[str, Tensor],
        compute: Callable[[Batch, Mapping[str, Tensor]], tuple[Result, float]],
    ) -> Iterator[tuple[Result, float]]:
        """Compute the slices of one batch; halve them where memory runs out."""
        size = min(self._micro_batch or batch.size, batch.size)
        if size < batch.size:
            for part in batch.slices(size):
                yield from self._sliced(part, parameters, compute)
            return
        start = Generators.here(self.job.workspace.machine.device)
        found = self._tried(batch, parameters, compute)
        if found is not None:
            yield found
            return
        # outside of the except block, whose traceback holds the graph
        free_memory(self.job.workspace.machine.device)
        set_generators(start, self.job.workspace.machine.device)
        self._micro_batch = -(-batch.size // 2)
        self.job.workspace.ports.log(
            "warning", f"{self.what} ran out of memory; it goes on with {self._micro_batch} examples at a time"
        )
        yield from self._sliced(batch, parameters, compute)

    def _tried(
        self,
        batch: Batch,
        parameters: Mapping[str, Tensor],
        compute: Callable[[Batch, Mapping[str, Tensor]], tuple[Result, float]],
    ) -> tuple[Result, float] | None:
        """Compute one slice; None where it needs more memory than there is."""
        try:
            return compute(batch, parameters)
        except (EngineError, Unwinding):
            raise
        except Exception as error:
            if ran_out_of_memory(error) and batch.size > 1:
                return None
            if ran_out_of_memory(error) or lost_device(error):
                raise
            raise self.refusal(error) from error

    def refusal(self, error: Exception) -> ModelRefused:
        """Return what is said of a model that raised."""
        said = f"{self.trouble}: {type(error).__name__}: {str(error)[:500]}; {self.remedy}"
        return ModelRefused(said, pointer=self.pointer)


@contextlib.contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Keep the model from what has no second derivative: gradients of sparse rows."""
    sparse = [module for module in model.modules() if getattr(module, "sparse", None) is True]
    try:
        for module in sparse:
            module.sparse = False  # type: ignore[assignment]
        yield
    finally:
        for module in sparse:
            module.sparse = True  # type: ignore[assignment]
