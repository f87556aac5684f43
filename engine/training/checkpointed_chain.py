"""A chain of blocks that is computed again, block by block, in the backward pass.

For f = f_K ∘ … ∘ f_1 only the inputs of the blocks are kept: the backward pass of f_k first computes its inside again.
The gradients are those of the pass that keeps everything, bit for bit, since a block is computed again from the same
input, the same random state, and buffers as they were: running statistics move once.

References:
    Chen et al. (2016), Training deep nets with sublinear memory cost
"""

import contextlib
import functools
import math
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.errors import TrainingRefused
from engine.training.repeated_features import (
    RepeatedFeatures,
    buffers_of,
    relative_difference,
    rounding_of,
    use_copies,
)


def find_chain(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the blocks, first to last, that a model is the composition of.

    The model has a method ``chain()`` that returns them in order, or is an ``nn.Sequential``; its own hooks do not run
    where its blocks do. ``TrainingRefused`` if it is neither, or has no block.
    """
    chain = getattr(model, "chain", None)
    if callable(chain) and not isinstance(chain, nn.Module):
        blocks = tuple(chain())
    elif isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        blocks = tuple(model)
    else:
        raise TrainingRefused(
            f"checkpointing needs a chain of blocks, and {type(model).__name__} is not known to be one: give it a "
            "method chain() that returns the modules whose composition is its forward, or make it an nn.Sequential; "
            "batch_norm 'frozen' is exact in chunks without a chain"
        )
    if not blocks:
        raise TrainingRefused(f"checkpointing needs a block at least, and {type(model).__name__} has none")
    return blocks


def run_chain(blocks: Iterable[nn.Module], inputs: Tensor) -> Tensor:
    """Compute a chain of blocks, first to last, keeping what enters each and nothing of its inside.

    The graph of its output computes each block again. ``TrainingRefused`` if a block writes into its input, from which
    it could not be computed again.
    """
    passed = inputs
    for block in blocks:
        version = passed._version  # noqa: SLF001 - torch counts writes under no other name
        context = functools.partial(_contexts, block)
        left: Tensor = checkpoint(block, passed, use_reentrant=False, context_fn=context)
        if passed._version != version:  # noqa: SLF001 - as above
            raise TrainingRefused(
                f"checkpointing computes a block again from its input, and {type(block).__name__} writes into it; "
                "build it with inplace=False, or put it into one block with the module before it"
            )
        passed = left
    return passed


def require_composition(model: nn.Module, blocks: Iterable[nn.Module], inputs: Tensor) -> None:
    """Refuse blocks, first to last, that do not compose the model, as features of four of the inputs (N, …) show.

    The model is in the mode that it trains in; its buffers and the random state are left as they were.
    ``TrainingRefused`` has the relative difference.
    """
    images, repeat = inputs[:4].detach(), RepeatedFeatures(model, inputs)
    with repeat.running(), torch.no_grad():
        truth = repeat(images)
        composed = repeat(
            images, by=lambda passed: functools.reduce(lambda hidden, block: block(hidden), blocks, passed)
        )
    difference = relative_difference(composed, truth) if composed.shape == truth.shape else math.inf
    if difference > rounding_of(truth):
        raise TrainingRefused(
            f"chain() must return the modules whose composition is the forward pass; for {type(model).__name__} they "
            f"differ by {difference:.2g} of the largest feature (shapes {tuple(composed.shape)}, {tuple(truth.shape)})"
        )


class _AsBefore(contextlib.AbstractContextManager[None]):
    """Lets a module compute on copies of its buffers as they were when this was made; it can be entered many times."""

    def __init__(self, module: nn.Module) -> None:
        # all of them: batch_norm writes to running statistics without a word to torch's count of writes
        self._before = [(place, name, buffer.clone()) for place, name, buffer in buffers_of(module)]

    def __enter__(self) -> None:
        self._copies = use_copies(self._before)
        self._copies.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._copies.__exit__(kind, error, traceback)


def _contexts(block: nn.Module) -> tuple[contextlib.AbstractContextManager[None], _AsBefore]:
    """Return the contexts of a block's pass, and of the one that computes it again."""
    return contextlib.nullcontext(), _AsBefore(block)
