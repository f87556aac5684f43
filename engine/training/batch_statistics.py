"""Statistics of a batch that couple its examples: which normalisations take them, and how they are frozen.

BatchNorm in training mode gives y = γ (x − μ) / √(σ² + ε) + β with μ and σ² over all examples of the batch, so that no
example's features depend on that example alone, and a pass in chunks computes another function.

Coupling of examples, measured: how far the features of an example depend on the others of its batch.

A pass in chunks of c has the gradient of the whole one only where z_i is a function of x_i alone. No list of layers
shows that, since a model may take means over a batch by code of its own. Features of one batch, of all its rows, are
compared with those of other batches that have the same examples, from one random state and the same buffers:

    examples        one batch               against                                         passes of c examples
    N ≤ 2c          all N                   the two chunks                                  2 N/c
    N > 2c          the first chunk         its two halves                                  2
    c divides N     the first chunk         a chunk across the border of the first two      1
    else            the last, smaller one   a chunk that ends with it, across its border    at most 2

A chunk of fewer than 4 is compared with a batch of 4. A model that draws random numbers draws others for another batch:

    in training     x_1 … x_m, y_1 … y_m    x_1 … x_m, x_1 … x_m and y_1 … y_m, y_1 … y_m   3, of equal shapes and draws
    in evaluation   the batches above, unless it draws there too                            1 to see that, and the above

The first has equal shapes, hence equal dropout, and needs no module to be in evaluation.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from engine.errors import TrainingRefused
from engine.model.sharding.gathering import uncached_casts
from engine.model.state.preserve_state import in_evaluation
from engine.training.repeated_features import RepeatedFeatures, relative_difference, require_rows, rounding_of

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


_CHUNK = 8
"""Examples of a chunk where the caller names none."""
_LEAST = 4
"""Examples that a chunk of fewer is compared with: chunks of one example have no halves."""


def couples_examples(
    model: nn.Module, inputs: Tensor, *, chunk: int = _CHUNK, batch_norm: BatchNormMode = "whole"
) -> float | None:
    """Measure whether a model's features of one example depend on the other examples of the batch.

    The model is in the mode that it trains in, and with `frozen` BatchNorm runs by its running statistics; its mode,
    its buffers, its inputs and torch's random state are left as they were. Passes have no graph, and hold the
    activations of ``chunk`` examples, or of all where these are at most twice as many; of 4 at least.

    Four couplings are not seen: one that appears only in batches of more than ``chunk`` examples, where there are more
    than twice as many (of a chunk of 1 to 3: only in batches of more than 4); one that the examples of the first and
    the last chunk do not show; one within rounding; and, since another number of examples draws other random numbers,
    one by their number alone in a model that draws, where evaluation mode does not show it or draws too.

    Args:
        inputs: All inputs, shape (N, …); two at least, and not all alike.
        chunk: Examples of one pass, as ``split_gradients`` takes them; of N and more, the halves of all are compared.

    Returns:
        The largest relative difference of the features that the others make, where it is beyond rounding (√ε of their
        type), infinite where a number is finite in one batch alone; None where it is not.
    """
    examples = inputs.detach()
    if len(examples) <= 1:
        return None
    first = examples[: _batch_size(len(examples), chunk)]
    repeat = RepeatedFeatures(model, inputs)
    with (
        repeat.running(),
        torch.no_grad(),
        uncached_casts(),
        freeze_statistics(model, wanted=batch_norm == "frozen"),
    ):
        together = _rows(repeat, first)
        if not repeat.has_drawn():
            difference = _compare_batches(repeat, examples, together, chunk)
        else:
            difference = _exchange_neighbours(repeat, first, together)
            with in_evaluation(model):
                evaluated = _rows(repeat, first)
                if not repeat.has_drawn():
                    difference = max(difference, _compare_batches(repeat, examples, evaluated, chunk))
    return difference if difference > rounding_of(together) else None


def _batch_size(examples: int, chunk: int) -> int:
    """Return the size of the batch that smaller ones are compared with."""
    return examples if examples <= 2 * chunk else min(examples, max(chunk, _LEAST))


def _compare_batches(repeat: RepeatedFeatures, examples: Tensor, together: Tensor, chunk: int) -> float:
    """Compare the features of the first batch with those of parts of it, and of a batch across a border of chunks."""
    size = len(together)
    half = -(-size // 2)
    part = chunk if chunk < size else half
    parts = [_rows(repeat, examples[begin : min(begin + part, size)]) for begin in range(0, size, part)]
    difference = _difference(torch.cat(parts), together)
    if size == len(examples):
        return difference
    last = len(examples) % chunk
    if last:
        across, truth = _rows(repeat, examples[-size:])[-last:], _rows(repeat, examples[-last:])
    else:
        across, truth = _rows(repeat, examples[half : half + size])[: size - half], together[half:]
    return max(difference, _difference(across, truth[: len(across)]))


def _exchange_neighbours(repeat: RepeatedFeatures, first: Tensor, together: Tensor) -> float:
    """Compare the features of each half of a batch with those that it has beside itself, from equal draws."""
    few = len(first) // 2
    places = torch.arange(len(first), device=first.device)
    before = _rows(repeat, first[places % few])[:few]
    difference = _difference(before, together[:few])
    after = _rows(repeat, first[torch.where(places < few, places + few, places)])[few:]
    return max(difference, _difference(after, together[few:]))


def _rows(repeat: RepeatedFeatures, examples: Tensor) -> Tensor:
    # a copy, since a model may write into its inputs
    features = repeat(examples.clone())
    require_rows(features, examples)
    return features


def _difference(features: Tensor, truth: Tensor) -> float:
    """Return the relative difference of two features; infinite where they are not finite at the same places."""
    if features.shape != truth.shape or not torch.equal(features.isfinite(), truth.isfinite()):
        return math.inf
    return relative_difference(*(each.nan_to_num(nan=0, posinf=0, neginf=0) for each in (features, truth)))


def require_uncoupled(
    model: nn.Module, inputs: Tensor, *, chunk: int = _CHUNK, batch_norm: BatchNormMode = "whole"
) -> None:
    """Refuse chunks for a model for which ``couples_examples`` finds that features of one example depend on the others.

    ``TrainingRefused`` has the relative difference.
    """
    difference = couples_examples(model, inputs, chunk=chunk, batch_norm=batch_norm)
    if difference is not None:
        raise TrainingRefused(
            f"chunks need a model whose features of an input depend on that input alone, and those of "
            f"{type(model).__name__} change by {difference:.2g} of the largest with the other inputs of the batch; "
            "leave chunk out, or take what couples them (a mean over the batch) out of the model and into the loss"
        )
