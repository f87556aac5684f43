"""The inputs behind the gradient rows that a layer's G is kept as: C of the data's own gradient ``V = Sᵀ C``.

While the gradient is taken, every call of the layer shows the rows that entered it and, later, the gradient of its
output. Each gradient row is held against the next row that G keeps: the two are the same number for number, up to what
storing has rounded, or the layer's rows are not those of these examples in this order, and the general route is taken.
Rows of zero add nothing to the gradient and are passed over on both sides. At the end ``Sᵀ C`` itself is held against
the gradient that autograd has.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.accumulation.output_gradients import watch_gradient
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.factors.low_rank import LowRank
from engine.layers.layer import TreatedLayer
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
        plain = self._layer.activation_rows(entered.detach().clone())
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
    """Return what gathers the inputs of every layer whose G is kept as gradient rows, where that can be.

    Args:
        treated: The model's layers, as the survey treats them.
        dtype: Precision of the passes.
        fits: Tells whether so many bytes of the host are free.

    Returns:
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
