"""The gradient of the mean loss at the data's own labels, over the examples that entered a job's factors.

With loss terms of weight w_n and losses l_n it is ``g = Σ_n w_n ∇l_n / W``, divided as the factors are
(docs/convention.md): W counts loss terms, or sums the weights of their labels as torch's weighted mean does. With a
moving average every batch weighs as it does in the factors. It is plain autograd in the precision of the passes, on a
model that is held still; slices of a batch are halved where memory runs out, which changes it by rounding only.

A direction of the empirical Fisher is a gradient where no term is weighed: a term of weight w counts as w terms, so
that its direction carries √w where the gradient carries w.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.collection.pass_job import PassJob
from engine.errors import EmptyData, EngineError, ModelRefused, NonFiniteLoss, Unwinding, WrongShape
from engine.memory.out_of_memory import free_memory, lost_device, ran_out_of_memory
from engine.model.batches import Batch
from engine.model.determinism import set_numerics
from engine.model.dtype_casts import casts_of
from engine.model.example_digests import EnteredExamples
from engine.model.loss_directions import loss_gradient
from engine.model.outputs import predict
from engine.model.state.generators import Generators, seed_generators, set_generators
from engine.model.state.preserve_state import preserve_state


class Watcher(Protocol):
    """Sees the inputs of layers and the gradients of their outputs while the gradient is taken."""

    def attached(self) -> contextlib.AbstractContextManager[None]:
        """Watch the model while inside."""

    def begin(self, examples: int) -> None:
        """Prepare for examples that go through the model together; what was seen and not taken is dropped."""

    def take(self, weight: float, *, weighed: bool) -> None:
        """Take what the last examples have shown: they have entered the gradient."""


@dataclass(frozen=True, kw_only=True)
class DataGradient:
    """The gradient of the mean loss."""

    by_name: Mapping[str, Tensor]
    """One tensor of the parameter's shape for each trainable parameter, on the host, in the precision of the passes."""
    divisor: float
    """W."""


@dataclass(kw_only=True)
class GradientPass:
    """One pass over the data that takes the gradient."""

    job: PassJob
    names: Sequence[str]
    """The trainable parameters, a tied one once."""
    updates: int
    """Batches that entered the factors."""
    report: Callable[[], None]
    """Called after every batch."""
    watchers: Sequence[Watcher] = ()
    _micro_batch: int | None = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the micro-batch of the collection."""
        self._micro_batch = self.job.micro_batch

    def run(self) -> DataGradient:
        """Take the gradient.

        Returns:
            The gradient by parameter; zero for one that the loss does not depend on.

        Raises:
            WrongShape: If the data has no targets.
            ModelRefused: If the model refuses a batch, or has no derivative.
            NonFiniteLoss: If the gradient is not finite.
            EmptyData: If no loss term weighs anything.
            DataDiffer: If other examples enter than entered the collection.

        Memory:
            Twice the trainable parameters, and the graph of a slice.
        """
        job, collection = self.job, self.job.collection
        with (
            preserve_state(job.model, job.dtype),
            set_numerics(job.numerics, job.heard),
            contextlib.ExitStack() as seen,
        ):
            known = dict(job.model.named_parameters())
            parameters = {name: known[name] for name in self.names}
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            for watcher in self.watchers:
                seen.enter_context(watcher.attached())
            totals = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
            # a model that draws numbers in evaluation mode draws those of the collection
            seed_generators(collection.seed)
            divisor, update, entered = 0.0, 0, EnteredExamples()
            for place, arrived in enumerate(job.stream()):
                job.workspace.ports.raise_if_cancelled()
                if place % collection.update_freq == 0:
                    past = 1.0 if collection.ema_decay is None else collection.ema_decay
                    weight = past ** (self.updates - 1 - update)
                    batch = job.moved(arrived)
                    entered = job.enter(entered, batch, update)
                    divisor += weight * self._entered(batch, parameters, totals, weight)
                    update += 1
                self.report()
        if job.entered is not None:
            job.entered.require(entered, "the gradient")
        if not divisor > 0:
            raise EmptyData(
                "no loss term of the data weighs anything, so there is no mean loss; correct the targets",
                pointer="/data",
            )
        found = {name: total.div_(divisor).to("cpu") for name, total in totals.items()}
        for name, gradient in found.items():
            _require_finite(name, gradient)
        return DataGradient(by_name=found, divisor=divisor)

    def _entered(
        self, batch: Batch, parameters: Mapping[str, Tensor], totals: Mapping[str, Tensor], weight: float
    ) -> float:
        """Let the slices of one batch enter; halve them where memory runs out."""
        size = min(self._micro_batch or batch.size, batch.size)
        if size < batch.size:
            return sum(self._entered(part, parameters, totals, weight) for part in batch.slices(size))
        start = Generators.here(self.job.workspace.machine.device)
        try:
            return self._entered_whole(batch, parameters, totals, weight)
        except (EngineError, Unwinding):
            raise
        except Exception as error:
            if ran_out_of_memory(error) and batch.size > 1:
                pass
            elif ran_out_of_memory(error) or lost_device(error):
                raise
            else:
                raise ModelRefused(
                    f"the model raised in its backward pass: {type(error).__name__}: {str(error)[:500]}; a model that "
                    "can be trained has a gradient: mend it, or give `natural_gradient.gradient`",
                    pointer="/model",
                ) from error
        # outside of the except block, whose traceback holds the graph
        free_memory(self.job.workspace.machine.device)
        set_generators(start, self.job.workspace.machine.device)
        self._micro_batch = -(-batch.size // 2)
        self.job.workspace.ports.log(
            "warning", f"the gradient ran out of memory; it goes on with {self._micro_batch} examples at a time"
        )
        return self._entered(batch, parameters, totals, weight)

    def _entered_whole(
        self, batch: Batch, parameters: Mapping[str, Tensor], totals: Mapping[str, Tensor], weight: float
    ) -> float:
        job = self.job
        for watcher in self.watchers:
            watcher.begin(batch.size)
        with torch.enable_grad():
            prediction = predict(job.model, batch, job.task)
            divisor, outputs = prediction.divisor, prediction.outputs
            if not prediction.terms or not outputs.requires_grad:
                return divisor
            if prediction.targets is None and job.task.likelihood != "model":
                raise WrongShape(
                    "the gradient of the loss needs targets, and the data has none; give them, or a gradient of your "
                    "own (`natural_gradient.gradient`)",
                    pointer="/data",
                )
            direction, weighed = loss_gradient(prediction, job.task), prediction.weights is not None
            del prediction
            with casts_of(job.model):
                found = torch.autograd.grad(outputs, list(parameters.values()), direction, allow_unused=True)
        # all of them before any is added: a slice that runs out of memory enters again
        for total, gradient in zip(totals.values(), found, strict=True):
            if gradient is not None:
                total.add_(gradient if gradient.layout == torch.strided else gradient.to_dense(), alpha=weight)
        for watcher in self.watchers:
            watcher.take(weight, weighed=weighed)
        return divisor


def _require_finite(name: str, gradient: Tensor) -> None:
    bad = gradient.numel() - int(torch.isfinite(gradient).sum())
    if bad:
        raise NonFiniteLoss(
            f"the gradient of `{name}` holds {bad} NaN or infinite numbers of {gradient.numel()}; look for outputs "
            "beyond the precision of the passes: take `collection.dtype: float64`, or scale the model's inputs or loss"
        )
