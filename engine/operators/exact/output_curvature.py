"""Output curvature: the matrix between ``J v`` and ``Jᵀ``, applied where the model's outputs stand.

For the loss terms of a batch, with outputs f of examples n:

==============  ==========================================================================
``ggn``         the loss's Hessian H with respect to f: ``diag p − p pᵀ`` for cross-entropy
``fisher``      ``Σ_s d_s d_sᵀ`` of each example, d_s the gradient at labels drawn from the model
``empirical``   ``d dᵀ`` of each example, d the gradient at the data's own labels
==============  ==========================================================================

d holds all terms of its example, as the gradient of the example's summed loss does. Outputs may be as wide as a
vocabulary: the product overwrites its vector, and p overwrites the logits where nothing else reads them, a few rows at
a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from engine.collection.pass_job import PassJob
from engine.model.loss_directions import at_own_labels, counted_terms, directions
from engine.model.outputs import Prediction

Curvature = Literal["ggn", "hessian", "fisher", "empirical"]
"""Which curvature: Gauss-Newton, the loss's own Hessian, the Fisher by sampled labels, the empirical Fisher."""

_NUMBERS_AT_ONCE = 2**17


@dataclass(kw_only=True)
class OutputCurvature:
    """The matrix of one batch, with its numbers ready to be multiplied."""

    prediction: Prediction
    index: Tensor
    """(N,) int64, which keys sampled labels."""
    job: PassJob
    of: Curvature
    samples: int
    reusable: bool
    """The logits' memory may be overwritten."""
    carrier: Tensor = field(init=False)
    """The tensor to pull back at: the model's own logits, of which the outputs are the first terms, or the outputs."""
    _chances: Tensor | None = field(init=False, default=None)
    _weights: Tensor = field(init=False)
    _directions: list[Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Choose the carrier; make probabilities or directions."""
        prediction, task = self.prediction, self.job.task
        outputs, logits = prediction.outputs, prediction.logits
        examples, terms, width = outputs.shape
        wide = logits is not None and logits.shape[0] == examples and logits.is_contiguous()
        self.carrier = logits if wide and logits is not None else outputs
        if self.of in ("fisher", "empirical"):
            own, sampled = self.job.collection, self.of == "fisher"
            as_collected = replace(own, fisher="mc", samples=self.samples) if sampled else at_own_labels(own)
            seen = replace(prediction, outputs=outputs.detach().to(self.job.dtype), logits=None)
            self._directions = list(directions(seen, self.index, task, as_collected))
            return
        counted = counted_terms(prediction, task).to(self.job.dtype)
        rows = self.carrier.numel() // (examples * width) if examples * width else 0
        self._weights = counted.new_zeros(examples, rows, counted.shape[-1])
        self._weights[:, :terms] = counted
        self._weights = self._weights.flatten(0, 1)
        if task.likelihood != "mse":
            self._chances = self._made_chances()

    def product_(self, tangent: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply a tangent of the carrier, in its own memory.

        Args:
            tangent: x, of the carrier's shape and dtype, contiguous; overwritten with the product.

        Returns:
            The product, zero in terms that do not count, and ``xᵀ H x`` as a float64 scalar tensor.
        """
        width = tangent.shape[-1] if tangent.ndim else 1
        if self._directions:
            return self._projected_(tangent)
        rows = tangent.view(-1, width)
        form = torch.zeros((), dtype=torch.float64, device=tangent.device)
        for part in _parts(*rows.shape):
            own = rows[part].to(self.job.dtype)
            product = self._row_product(own, part)
            form += torch.dot(own.reshape(-1), product.reshape(-1))
            rows[part] = product
        return tangent, form

    def _row_product(self, own: Tensor, part: slice) -> Tensor:
        """``H x`` of some rows, (rows, C), in memory of its own."""
        weights, width = self._weights[part], own.shape[-1]
        if self._chances is None:
            return own * (weights * (2 / width))
        chances = self._chances[part].to(self.job.dtype)
        if self.job.task.likelihood == "cross_entropy":
            product = chances * own
            product.addcmul_(chances, product.sum(-1, keepdim=True), value=-1)
            return product.mul_(weights)
        return (chances * (1 - chances)).div_(width).mul_(own).mul_(weights)

    def _projected_(self, tangent: Tensor) -> tuple[Tensor, Tensor]:
        examples, terms, width = self.prediction.outputs.shape
        whole = tangent.view(examples, -1, width)
        seen = whole[:, :terms].to(self.job.dtype)
        parts = [torch.einsum("nrc,nrc->n", direction, seen) for direction in self._directions]
        form = torch.stack([part.double().square().sum() for part in parts]).sum()
        del seen
        whole.zero_()
        for direction, part in zip(self._directions, parts, strict=True):
            whole[:, :terms].addcmul_(direction.to(whole.dtype), part[:, None, None].to(whole.dtype))
        return tangent, form

    def _made_chances(self) -> Tensor:
        # not ``detach``, by which autograd would see the writing, and remake the gradient of a view
        logits = self.carrier.data
        flat = logits.reshape(-1, logits.shape[-1])
        chances = flat if self.reusable else torch.empty_like(flat, dtype=self.job.dtype)
        for part in _parts(*flat.shape):
            own = flat[part].to(self.job.dtype)
            categorical = self.job.task.likelihood == "cross_entropy"
            chances[part] = torch.softmax(own, -1) if categorical else torch.sigmoid(own)
        return chances


def _parts(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _NUMBERS_AT_ONCE // max(width, 1))
    return (slice(first, first + step) for first in range(0, rows, step))
