"""Repeated features: a model run again from one random state and the same buffers, and how far two runs differ."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from engine.errors import WrongShape
from engine.model.state.generators import Generators, set_generators
from engine.model.state.preserve_state import products_at_full_width

Place = tuple[nn.Module, str, Tensor]
"""A module, the name of its buffer, and a tensor for it."""


def device_of(model: nn.Module, inputs: Tensor) -> torch.device:
    """Return the device of a model's first parameter; that of its inputs where it has none."""
    return next((parameter.device for parameter in model.parameters()), inputs.device)


def relative_difference(features: Tensor, truth: Tensor) -> float:
    """Return max |features − truth| / max |truth|: 0 where they are equal, infinite where all of the truth is zero."""
    difference, largest = float((features - truth).abs().max()), float(truth.abs().max())
    if not difference:
        return 0.0
    return difference / largest if largest else math.inf


def rounding_of(features: Tensor) -> float:
    """Return the relative difference below which features count as equal: √ε of their type."""
    return math.sqrt(torch.finfo(features.dtype).eps)


def require_rows(features: object, inputs: Tensor) -> None:
    """Refuse features that are not a tensor with a row for each of the inputs (N, …): ``WrongShape``."""
    if not isinstance(features, Tensor) or features.dim() < 1 or len(features) != len(inputs):
        got = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise WrongShape(
            f"a model must return a tensor with a row of features for each of {len(inputs)} inputs (got {got})"
        )


def buffers_of(module: nn.Module) -> list[Place]:
    """List the buffers of a module and of all modules in it."""
    return [
        (each, name, buffer)
        for each in module.modules()
        for name, buffer in each._buffers.items()  # noqa: SLF001 - named_buffers() names no module
        if buffer is not None
    ]


@contextlib.contextmanager
def use_copies(places: Iterable[Place]) -> Iterator[None]:
    """Let modules compute on copies of given buffers, and put their present ones back afterwards."""
    present = [(module, name, module._buffers[name], kept) for module, name, kept in places]  # noqa: SLF001 - as above
    try:
        for module, name, _, kept in present:
            module._buffers[name] = kept.clone()  # noqa: SLF001 - as above
        yield
    finally:
        for module, name, buffer, _ in present:
            module._buffers[name] = buffer  # noqa: SLF001 - as above


class RepeatedFeatures:
    """Features of a model that each call computes from the same random state and buffers."""

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        self._model, self._device = model, device_of(model, inputs)
        self._start, self._buffers = Generators.here(self._device), buffers_of(model)

    def __call__(self, inputs: Tensor, *, by: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the features of some inputs, by the model or by another way through its modules."""
        set_generators(self._start, self._device)
        with use_copies(self._buffers):
            left: Tensor = (by or self._model)(inputs)
        return left

    def has_drawn(self) -> bool:
        """Tell whether the last call has drawn a random number."""
        now = Generators.here(self._device).tensors()
        return any(not torch.equal(state, now[name]) for name, state in self._start.tensors().items())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Leave the random state as it was before all calls inside, whose products are at full width.

        TF32 rounds by more than features may differ, and batches of two sizes may be multiplied by two kernels.
        """
        try:
            with products_at_full_width():
                yield
        finally:
            set_generators(self._start, self._device)
