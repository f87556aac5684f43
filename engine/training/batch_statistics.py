"""Statistics of a batch that couple its examples: which normalisations take them, and how they are frozen.

BatchNorm in training mode gives y = γ (x − μ) / √(σ² + ε) + β with μ and σ² over all examples of the batch, so that no
example's features depend on that example alone, and a pass in chunks computes another function.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

from torch import nn

from engine.errors import TrainingRefused

BatchNormMode = Literal["whole", "frozen", "per_chunk"]
"""Statistics of all inputs; running ones; those of each chunk, which is refused."""


def coupling_normalisations(model: nn.Module) -> tuple[str, ...]:
    """List the normalisations that take statistics of the batch as the model stands.

    Args:
        model: The model, in the mode that it will run in.

    Returns:
        Names of the BatchNorm modules in training mode, and of those without running statistics in any mode.
    """
    return tuple(name for name, module in _normalisations(model) if module.training or module.running_mean is None)


def require_batch_norm(batch_norm: str) -> None:
    """Refuse a way of normalising that is unknown, or that gives the gradient of another function.

    Args:
        batch_norm: The word as it was given.

    Raises:
        TrainingRefused: If it is neither ``whole`` nor ``frozen``.
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

    Args:
        model: The model; all other modules (dropout) keep their mode.
        wanted: False leaves the model as it is.

    Returns:
        A context manager.

    Raises:
        TrainingRefused: If a BatchNorm has no running statistics.
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
