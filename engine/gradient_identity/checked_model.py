"""The subject of a check: a model, and how a collection runs it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.model.batches import Batch
from engine.model.dtype_casts import AllCasts, casts_of
from engine.model.mixed_precision import Precision
from engine.model.sharding.gathered_parameters import converted, numbers_at_once, put_back
from engine.row_layout.row_order import Layout

NARROW_TOLERANCE = 3e-2
"""Relative difference that rounding may explain where the model computes in 16 bits."""
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: NARROW_TOLERANCE,
    torch.float16: NARROW_TOLERANCE,
}
"""The same by what it computes in."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and how a collection runs it."""

    model: nn.Module
    task: Task
    collection: Collection
    dtype: torch.dtype
    device: torch.device
    precision: Precision
    layout: Layout
    widens: bool = False
    """Narrower types that the model names stand for float64."""

    def without_gradients(self) -> "Subject":
        """Return the same subject of which inputs and outputs alone are looked at."""
        return replace(self, collection=replace(self.collection, fisher="forward_only"))

    @property
    def has_gradients(self) -> bool:
        """Whether the collection pulls anything back."""
        return self.collection.fisher != "forward_only"

    @property
    def tolerance(self) -> float:
        """Relative difference that rounding may explain."""
        return TOLERANCES[self.dtype] if self.precision.amp == "off" else NARROW_TOLERANCE

    @property
    def rounding(self) -> float:
        """Unit roundoff of what the model computes in."""
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return torch.finfo(narrow.get(self.precision.amp, self.dtype)).eps

    @property
    def rounding_of_repetition(self) -> float:
        """Relative difference between two runs of the same batch: of sums that a device adds in another order."""
        return 0.0 if self.device.type == "cpu" else self.tolerance

    @property
    def is_exact(self) -> bool:
        """Whether the model computes in float64, the widest that there is."""
        return self.dtype == torch.float64

    def negligible(self, norm: float) -> float:
        """Return the norm below which a gradient is rounding beside the largest one.

        Args:
            norm: Norm of the largest layer's gradient.

        Returns:
            That norm in float64, which decides; 0 in any other precision.
        """
        return 10 * self.rounding * norm if self.is_exact else 0.0

    def moved(self, batch: Batch) -> Batch:
        """Copy a batch to the device, in the model's precision.

        Args:
            batch: Examples, on any device.

        Returns:
            A copy, which the model may write to.
        """
        return batch.to(self.device, self.dtype)

    @contextlib.contextmanager
    def casting(self) -> Iterator[None]:
        """The context of a forward pass, and of the backward pass that may run parts of it again."""
        with AllCasts() if self.widens else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def returning(self) -> Iterator[None]:
        """The context of a backward pass."""
        with self.casting(), casts_of(self.model):
            yield

    @contextlib.contextmanager
    def widened(self, *, widens: bool = False) -> Iterator["Subject"]:
        """The same model in float64, for the time inside; its own tensors come back bit for bit.

        Args:
            widens: Let the narrower types that the model names stand for float64 too.

        Memory:
            8 bytes for each number of the model.
        """
        narrow = [
            (tensor, tensor.data)
            for tensor in (*self.model.parameters(), *self.model.buffers())
            if tensor.is_floating_point() and tensor.dtype != torch.float64
        ]
        try:
            for tensor, _ in narrow:
                tensor.data = converted(tensor, torch.float64)
            yield replace(self, dtype=torch.float64, precision=Precision(), widens=widens)
        finally:
            for tensor, data in narrow:
                put_back(tensor, data)


def widened_bytes(model: nn.Module) -> int:
    """Compute the bytes that ``Subject.widened`` takes.

    Returns:
        8 bytes for each floating-point number of it that stands here at once.
    """
    return 8 * numbers_at_once((*model.parameters(), *model.buffers()))


@contextlib.contextmanager
def unwritten(model: nn.Module) -> Iterator[None]:
    """Put the model's buffers back afterwards as they were: each run begins from the same ones.

    Returns:
        A context; buffers that are not stored densely are left alone.

    Memory:
        A copy of every buffer.
    """
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if buffer.layout == torch.strided]
    try:
        yield
    finally:
        for buffer, before in kept:
            if not torch.equal(buffer, before):
                buffer.data.copy_(before)
