"""The gradient of the mean loss at the data's own labels, over the examples that entered a job's factors.

With loss terms of weight w_n and losses l_n it is ``g = Σ_n w_n ∇l_n / W``, divided as the factors are
(docs/convention.md): W counts loss terms, or sums the weights of their labels as torch's weighted mean does. With a
moving average every batch weighs as it does in the factors. It is plain autograd in the precision of the passes, on a
model that is held still; slices of a batch are halved where memory runs out, which changes it by rounding only.

A direction of the empirical Fisher is a gradient where no term is weighed: a term of weight w counts as w terms, so
that its direction carries √w where the gradient carries w.

Where G is kept as gradient rows, C of ``V = Sᵀ C`` is gathered beside it: every call of the layer shows the rows that
entered it and, later, the gradient of its output. Each gradient row is held against the next row that G keeps: the two
are the same number for number, up to what storing has rounded, or the layer's rows are not those of these examples in
this order, and the general route is taken. Rows of zero add nothing to the gradient and are passed over on both sides.
At the end ``Sᵀ C`` itself is held against the gradient that autograd has.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.collection.pass_job import PassJob
from engine.errors import EmptyData, NonFiniteLoss, WrongShape
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.factors.low_rank import LowRank
from engine.layers.layer import TreatedLayer
from engine.model.activation_memory import watch_gradient
from engine.model.batches import Batch
from engine.model.determinism import set_numerics
from engine.model.dtype_casts import casts_of
from engine.model.loss_directions import loss_gradient
from engine.model.outputs import predict
from engine.model.state.preserve_state import preserve_state
from engine.operators.exact.columns import trained
from engine.operators.exact.data_passes import DataPasses
from engine.row_layout.layer_calls import entered_by

_STORED = 8.0
"""Times ε of the storage that a row may differ by, of its length."""
_COMPUTED = 1e-4
"""The change of a row in float32 that another order of additions may bring, as a share of its length."""
_GRADIENT = 1e-2
"""The distance of ``Sᵀ C`` of 16-bit rows from the gradient that is allowed, as a share of its length."""


class RowInputs:
    """C of one layer, gathered row by row while the gradient is taken.

    Memory:
        T · in_dim numbers in the precision of the passes, and the rows of one slice.
    """

    def __init__(self, facts: LayerFacts, layer: TreatedLayer, rows: LowRank, dtype: torch.dtype) -> None:
        """Begin with zeros.

        Args:
            layer: Its module, as the survey treats it.
            rows: G, on the host.
            dtype: Precision of the passes.
        """
        self.facts = facts
        self.inner = torch.zeros(rows.count, facts.in_dim, dtype=dtype)
        """C but for 1/√w and the weight of a term, shape (T, in_dim), on the host."""
        self.why: str | None = None
        """Why the rows are not matched; None so far."""
        self._layer, self._rows = layer, rows
        norms = torch.linalg.vector_norm(rows.rows.to(torch.float32), dim=1) * rows.scales.to(torch.float32)
        self._places: Tensor = torch.nonzero(norms).flatten()
        """Rows that are not zero."""
        self._next = 0
        self._examples = 0
        self._arrived: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the layer while inside."""
        handle = self._layer.module.register_forward_hook(self._after, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            handle.remove()
            self._arrived.clear()

    def begin(self, examples: int) -> None:
        """Prepare for examples that go through the model together.

        Args:
            examples: How many.
        """
        self._examples = examples
        self._arrived.clear()

    def take(self, weight: float, *, weighed: bool) -> None:
        """Hold the slice's rows against those of G, and keep their inputs.

        Args:
            weight: Of the batch, as in the factors.
            weighed: Whether loss terms have weights of their own, so that rows of the gradient are no rows of G.
        """
        arrived, self._arrived = self._arrived, []
        if weighed:
            self._refuse("loss terms are weighed, and a row of the gradient is no multiple of a row of G")
        for gradients, inputs in arrived:
            if self.why is None:
                self._match(gradients, inputs, weight)

    def finished(self, gradient: Tensor, divisor: float) -> Tensor | None:
        """Return C of ``V = Sᵀ C``, or None where the rows are not matched, for the reason in ``why``.

        Args:
            gradient: V as autograd has it, shape (out_dim, in_dim), on the host.
            divisor: W.

        Returns:
            Shape (T, in_dim), in the precision of the passes.
        """
        if self.why is None and self._next < self._places.numel():
            self._refuse(f"G keeps {self._places.numel() - self._next} rows that the data's gradient does not have")
        if self.why is not None:
            return None
        inner = self.inner.mul_(math.sqrt(self._rows.weight) / divisor)
        wide = gradient.to(torch.float64)
        differs = float((self._rows.combine(inner.to(torch.float64)) - wide).norm())
        if differs > _GRADIENT * float(wide.norm()):
            self._refuse(f"the gradient made of them differs from the loss's by {differs / float(wide.norm()):.2g}")
            return None
        return inner

    def _refuse(self, why: str) -> None:
        self.why = self.why or why
        self._arrived.clear()

    def _after(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        if self.why is not None or not torch.is_grad_enabled():
            return None
        entered = entered_by(args, kwargs)
        if not self._layer.batch_first(entered, self._examples):
            self._refuse("the examples do not come first in its input")
            return None
        # a layer may be written to afterwards, and what the gradient meets must be what entered
        plain = self._layer.of_call(entered, output).activation_rows(entered.detach().clone())
        return watch_gradient(output, partial(self._arrive, plain))

    def _arrive(self, inputs: Tensor, gradient: Tensor) -> None:
        if self.why is None:
            self._arrived.append((self._layer.gradient_rows(gradient.detach()), inputs))

    def _match(self, gradients: Tensor, inputs: Tensor, weight: float) -> None:
        """Hold rows of the gradient (P, out) against the next rows of G, and keep their inputs (P, in)."""
        if gradients.shape[0] != inputs.shape[0]:
            self._refuse("its positions in the input and in the output differ")
            return
        rows = gradients.to("cpu", torch.float64).mul_(math.sqrt(weight))
        norms = rows.norm(dim=1)
        some = torch.nonzero(norms).flatten()
        places = self._places[self._next : self._next + some.numel()]
        if places.numel() < some.numel():
            self._refuse("G keeps fewer rows than the data's gradient has: they were made one, or pooled")
            return
        kept = self._rows.rows[places].to(torch.float64) * self._rows.scales[places, None].to("cpu")
        allowed = max(_STORED * torch.finfo(self._rows.rows.dtype).eps, _COMPUTED)
        if bool(((rows[some] - kept).norm(dim=1) > allowed * norms[some]).any()):
            self._refuse("they are not those of the data's gradient, in its order")
            return
        own = inputs.to("cpu", self.inner.dtype)[some]
        wide = self.inner[:, : own.shape[1]] if self._layer.weight else self.inner[:, :0]
        wide[places] = own.mul(math.sqrt(weight))[:, : wide.shape[1]]
        if self._layer.bias:
            self.inner[places, -1] = math.sqrt(weight)
        self._next += some.numel()


def row_inputs(
    factors: FactorSet, treated: Sequence[TreatedLayer], dtype: torch.dtype, fits: Callable[[int], bool]
) -> tuple[dict[int, RowInputs], dict[int, str]]:
    """Return what gathers the inputs of every layer whose G is kept as gradient rows, where so many bytes ``fits``.

    Watchers by ordinal; and for every other layer whose G is kept so, why there is none.
    """
    known = {layer.name: layer for layer in treated}
    found: dict[int, RowInputs] = {}
    refused: dict[int, str] = {}
    held = 0
    for facts in factors.layers:
        if facts.representation_G != "woodbury":
            continue
        layer = known.get(facts.name)
        size = facts.positions * facts.in_dim * dtype.itemsize
        if factors.collection.fisher != "empirical":
            refused[facts.ordinal] = (
                f"G is kept of `fisher: {factors.collection.fisher}`, in whose rows the data's gradient does not lie"
            )
        elif facts.sharing != "expand":
            refused[facts.ordinal] = "positions are pooled before they enter G (`sharing: reduce`)"
        elif layer is None or layer.groups > 1 or layer.also or len(layer.roles) > 1 or facts.form != "kronecker":
            refused[facts.ordinal] = "it is no module of its own, called by itself"
        elif not fits(held + size):
            refused[facts.ordinal] = f"the inputs of its rows take {size} bytes more than are free"
        else:
            rows = factors.load(facts.ordinal).G
            if isinstance(rows, LowRank):
                found[facts.ordinal] = RowInputs(facts, layer, rows, dtype)
                held += size
    return found, refused


@dataclass(frozen=True, kw_only=True)
class DataGradient:
    """The gradient of the mean loss."""

    by_name: Mapping[str, Tensor]
    """One tensor of the parameter's shape for each trainable parameter, on the host, in the precision of the passes."""
    divisor: float
    """W."""


_Taken = tuple[Sequence[Tensor | None] | None, bool, float]
"""Gradients of a slice, whether its terms are weighed, and the weight of all."""


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
    watchers: Sequence[RowInputs] = ()
    """See the inputs of layers, and the gradients of their outputs."""
    _totals: dict[str, Tensor] = field(init=False)
    _slices: list[tuple[float, float]] = field(init=False, default_factory=list)
    """Weights of the slices of one batch, and of their terms."""
    _divisor: float = field(init=False, default=0.0)

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
        job, names = self.job, tuple(self.names)
        passes = DataPasses(
            job=job, updates=self.updates, report=self._close, what="the gradient", pointer="/model",
            trouble="the model raised in its backward pass",
            remedy="a model that can be trained has a gradient: mend it, or give `natural_gradient.gradient`",
        )  # fmt: skip
        with (
            preserve_state(job.model, job.dtype),
            set_numerics(job.numerics, job.heard),
            contextlib.ExitStack() as seen,
        ):
            for watcher in self.watchers:
                seen.enter_context(watcher.attached())
            self._totals = {name: torch.zeros_like(own) for name, own in trained(job.model, names).items()}
            passes.run(names, self._compute, self._add)
        if not self._divisor > 0:
            raise EmptyData(
                "no loss term of the data weighs anything, so there is no mean loss; correct the targets",
                pointer="/data",
            )
        found = {name: total.div_(self._divisor).to("cpu") for name, total in self._totals.items()}
        for name, gradient in found.items():
            bad = gradient.numel() - int(torch.isfinite(gradient).sum())
            if bad:
                raise NonFiniteLoss(
                    f"the gradient of `{name}` holds {bad} NaN or infinite numbers of {gradient.numel()}; look for "
                    "outputs beyond the precision of the passes: take `collection.dtype: float64`, or scale the "
                    "model's inputs or loss"
                )
        return DataGradient(by_name=found, divisor=self._divisor)

    def _compute(self, batch: Batch, parameters: Mapping[str, Tensor]) -> tuple[_Taken, float]:
        job = self.job
        for watcher in self.watchers:
            watcher.begin(batch.size)
        with torch.enable_grad():
            prediction = predict(job.model, batch, job.task)
            divisor, outputs, weighed = prediction.divisor, prediction.outputs, prediction.weights is not None
            if not prediction.terms or not outputs.requires_grad:
                return (None, weighed, divisor), divisor
            if prediction.targets is None and job.task.likelihood != "model":
                raise WrongShape(
                    "the gradient of the loss needs targets, and the data has none; give them, or a gradient of your "
                    "own (`natural_gradient.gradient`)",
                    pointer="/data",
                )
            direction = loss_gradient(prediction, job.task)
            del prediction
            with casts_of(job.model):
                found = torch.autograd.grad(outputs, list(parameters.values()), direction, allow_unused=True)
        return (found, weighed, divisor), divisor

    def _add(self, taken: _Taken, weight: float) -> None:
        found, weighed, divisor = taken
        self._slices.append((weight, divisor))
        if found is None:
            return
        for total, gradient in zip(self._totals.values(), found, strict=True):
            if gradient is not None:
                total.add_(gradient if gradient.layout == torch.strided else gradient.to_dense(), alpha=weight)
        for watcher in self.watchers:
            watcher.take(weight, weighed=weighed)

    def _close(self) -> None:
        """Count the terms of a batch, together before they are weighed: so the divisor is that of any slices."""
        if self._slices:
            self._divisor += self._slices[0][0] * sum(terms for _, terms in self._slices)
            self._slices.clear()
        self.report()
