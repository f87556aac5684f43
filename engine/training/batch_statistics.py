"""Statistics of a batch that couple its examples: which normalisations take them, and how they are frozen.

BatchNorm in training mode gives y = γ (x − μ) / √(σ² + ε) + β with μ and σ² over all examples of the batch, so that no
example's features depend on that example alone, and a pass in chunks computes another function.

Coupling of examples, measured: how far the features of an example depend on the others of its batch.

A pass in chunks has the gradient of the whole one only where z_i is a function of x_i alone. No list of layers shows
that, since a model may take means over a batch by code of its own. Two measurements show where it does not hold:

    other neighbours:  f(x_1 … x_m, y_1 … y_m)_i  against  f(x_1 … x_m, y'_1 … y'_m)_i,  from one random state
    no neighbours:     f(x_1 … x_m, y_1 … y_m)_i  against  f(x_1 … x_m)_i

The first has equal shapes, hence equal dropout, and needs no module to be in evaluation. The second sees what depends
on the number of examples; a model that draws random numbers is in evaluation for it.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from engine.errors import TrainingRefused
from engine.model.state.preserve_state import in_evaluation
from engine.training.repeated_features import RepeatedFeatures, relative_difference, rounding_of

BatchNormMode = Literal["whole", "frozen", "per_chunk"]
"""Statistics of all inputs; running ones; those of each chunk, which is refused."""


def coupling_normalisations(model: nn.Module) -> tuple[str, ...]:
    """List the BatchNorm modules in training mode, and those without running statistics in any mode."""
    return tuple(name for name, module in _normalisations(model) if module.training or module.running_mean is None)


def require_batch_norm(batch_norm: str) -> None:
    """Refuse a way of normalising that is unknown, or that gives the gradient of another function.

    ``TrainingRefused`` if it is neither ``whole`` nor ``frozen``.
    """
    if batch_norm == "per_chunk":
        raise TrainingRefused(
            "batch_norm must be whole or frozen (got 'per_chunk'): statistics of each chunk make another function of "
            "the inputs, and its gradient is another one. 'whole' takes the statistics of all inputs (memory is saved "
            "by checkpointing), 'frozen' the running ones (exact in chunks)"
        )
    if batch_norm not in ("whole", "frozen"):
        raise TrainingRefused(f"batch_norm must be whole or frozen (got {batch_norm!r})")


@contextlib.contextmanager
def freeze_statistics(model: nn.Module, *, wanted: bool = True) -> Iterator[None]:
    """Run BatchNorm alone in evaluation mode, by its running statistics, and restore its mode afterwards.

    All other modules (dropout) keep their mode; ``wanted=False`` leaves the model as it is. ``TrainingRefused`` if a
    BatchNorm has no running statistics.
    """
    modules = _normalisations(model) if wanted else []
    absent = [name for name, module in modules if module.running_mean is None]
    if absent:
        raise TrainingRefused(
            f"batch_norm 'frozen' needs running statistics, and {', '.join(absent)} has none "
            "(track_running_stats=False); take 'whole'"
        )
    modes = [(module, module.training) for _, module in modules]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def _normalisations(model: nn.Module) -> list[tuple[str, nn.modules.batchnorm._BatchNorm]]:
    return [
        (name or type(module).__name__, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - the common ancestor has no other name
    ]


_EXAMPLES = 2
"""Examples that are looked at, and as many neighbours."""


def couples_examples(model: nn.Module, inputs: Tensor, *, batch_norm: BatchNormMode = "whole") -> float | None:
    """Measure whether a model's features of one example depend on the other examples of the batch.

    The model is in the mode that it trains in, and with `frozen` BatchNorm runs by its running statistics; its mode,
    its buffers and the random state are left as they were. Four examples (N, …) are taken; two at least, and not all
    alike. The result is the relative difference of the features that the others make, where it is beyond rounding (√ε
    of their type); None where it is not.
    """
    images = inputs[: 2 * _EXAMPLES].detach()
    few = len(images) // 2
    if not few:
        return None
    repeat = RepeatedFeatures(model, inputs)
    with repeat.running(), torch.no_grad(), freeze_statistics(model, wanted=batch_norm == "frozen"):
        together = repeat(images)[:few]
        drawn = repeat.has_drawn()
        others = torch.arange(len(images), device=images.device) % few
        difference = relative_difference(repeat(images[others])[:few], together)
        with in_evaluation(model) if drawn else contextlib.nullcontext():
            difference = max(difference, relative_difference(repeat(images[:few]), repeat(images)[:few]))
    return difference if difference > rounding_of(together) else None


def require_uncoupled(model: nn.Module, inputs: Tensor, *, batch_norm: BatchNormMode = "whole") -> None:
    """Refuse chunks for a model for which ``couples_examples`` finds that features of one example depend on the others.

    ``TrainingRefused`` has the relative difference.
    """
    difference = couples_examples(model, inputs, batch_norm=batch_norm)
    if difference is not None:
        raise TrainingRefused(
            f"chunks need a model whose features of an input depend on that input alone, and those of "
            f"{type(model).__name__} change by {difference:.2g} of the largest with the other inputs of the batch; "
            "leave chunk out, or take what couples them (a mean over the batch) out of the model and into the loss"
        )
