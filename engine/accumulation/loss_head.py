"""The loss's head: the linear layer whose output is, unchanged, the logits of a cross-entropy.

Its G needs no gradients: for each loss term the Hessian in the logits is ``diag p − p pᵀ``, and so is
the mean over labels of what `mc` samples. Identity of the tensor decides, not equality: what is
scaled, masked or rounded after the layer has another gradient there.

Terms are independent given the data, so the expectation of one example's squared gradient is the sum
over its terms, ``Σ_t ω_t (1 − ‖p_t‖²)(‖a_t‖² + 1)``: the exact trace needs no products of positions.

A prediction has outputs (N, R, V), and says which of their terms are valid.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.accumulation.gradient_rows import Terms
from engine.accumulation.layer_statistics import LayerStatistics
from engine.layers.layer import TreatedLayer, Use
from engine.layers.linear import LinearLayer
from engine.model.outputs import Prediction
from engine.row_layout.layer_calls import Call, version


def head_of(calls: Sequence[Call], logits: Tensor | None) -> TreatedLayer | None:
    """Find the linear layer, or linear part of one, whose only call in this forward pass put out the logits.

    Calls are all of this pass; logits (N, …, V) are as the model returned them, None where the loss has none. None
    where there is no such layer, or the model wrote to its output.
    """
    found = [call for call in calls if call.output is logits]
    if logits is None or len(found) != 1:
        return None
    (call,) = found
    again = sum(1 for other in calls if other.layer is call.layer)
    plain = isinstance(call.layer, LinearLayer) and call.layer.groups == 1
    unwritten = call.written == version(logits)
    return call.layer if plain and again == 1 and unwritten and call.layer.fan_out == logits.shape[-1] else None


@dataclass(frozen=True)
class _PutOut:
    """One call of the head."""

    output: "weakref.ref[Tensor]"
    version: int
    kept: Tensor | None
    """(P,) booleans: the positions that count; None where all do."""
    squares: Tensor | None
    """(P,) float64 ``‖[a 1]‖²``, where the exact trace is wanted."""


@dataclass(eq=False)
class LossHead:
    """Watches one head, and returns its loss terms."""

    role: TreatedLayer
    """The linear layer."""
    traced: bool
    """The squared norms of its inputs are wanted."""
    _calls: list[_PutOut] = field(default_factory=list)

    def begin(self) -> None:
        """Prepare for one forward pass."""
        self._calls.clear()

    def put_out(self, use: Use, output: Tensor) -> None:
        """Remember one call, and its output, of any shape, which the model goes on with."""
        squares = None
        if self.traced:
            rows = self.role.activation_rows(use.input)
            squares = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_() * int(self.role.weight)
            squares += int(self.role.bias)
        self._calls.append(_PutOut(weakref.ref(output), version(output), use.kept, squares))

    def drops_terms(self, prediction: Prediction) -> Tensor | None:
        """Tell whether positions that do not count have loss terms.

        A boolean scalar on the device of the outputs; None where all positions count.
        """
        kept = self._calls[0].kept if len(self._calls) == 1 else None
        if kept is None:
            return None
        examples, terms = prediction.valid.shape
        return (prediction.valid & ~kept.view(examples, -1)[:, :terms]).any()

    def enter_terms_(self, statistics: LayerStatistics, prediction: Prediction) -> Tensor | None:
        """Let the loss terms of one batch enter the head's sums; a head whose output is not the logits is flawed.

        Returned is what ``drops_terms`` returns.
        """
        terms, dropped = self.terms(prediction), self.drops_terms(prediction)
        if terms is None:
            statistics.flaw = "unforeseen_use"
        else:
            statistics.add_terms_(prediction.outputs.detach(), terms)
        return dropped

    def terms(self, prediction: Prediction) -> Terms | None:
        """Return the loss terms that count; None where the logits are not the head's output this time."""
        logits = prediction.logits
        if logits is None or len(self._calls) != 1:
            return None
        (call,) = self._calls
        if call.output() is not logits or call.version != version(logits):
            return None
        examples, terms, _ = prediction.outputs.shape
        counted = prediction.valid
        if call.kept is not None:
            counted = counted & call.kept.view(examples, -1)[:, :terms]
        example, term = counted.nonzero(as_tuple=True)
        weights = torch.ones_like(example, dtype=torch.float64)
        if prediction.weights is not None:
            weights = prediction.weights[example, term, 0].to(torch.float64)
        squares = None if call.squares is None else call.squares.view(examples, -1)[example, term]
        return Terms(example, term, weights, squares)
