"""The gradient of a loss over many inputs, computed in chunks of them.

Let z_i = f(x_i; θ) be features and L(z_1 … z_N; φ) any loss, however it couples them. With u_i = ∂L/∂z_i

    ∂L/∂θ = Σ_i (∂z_i/∂θ)ᵀ u_i

which two passes compute where f acts on each input alone:

1. chunk by chunk without a graph: keep the random state, compute z;
2. with z as a leaf: L, ∂L/∂φ and u, term by term where the loss comes in terms;
3. chunk by chunk: restore the random state, compute z again with a graph, and add the gradient of Σ_i ⟨u_i, z_i⟩.

It costs one forward pass more, and holds one chunk's activations, N features and cotangents, and the graph of the loss.
Dropout draws the same masks in 3 as in 1. The gradient is that of the undivided loss for the masks drawn so.

Where BatchNorm takes statistics of the batch, f does not act on each input alone: nothing is sliced then, and memory is
saved by checkpointing blocks (``checkpointed_chain``), or by freezing the statistics.

References:
    Gao et al. (2021), Scaling deep contrastive learning batch size under memory limited setup (gradient caching)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.errors import EmptyData, TrainingRefused, WrongShape
from engine.model.determinism import hold_attention, leave_strict
from engine.model.sharding.gathering import uncached_casts
from engine.model.state.generators import Generators, set_generators
from engine.model.state.preserve_state import order_gradients
from engine.training.batch_statistics import (
    BatchNormMode,
    coupling_normalisations,
    freeze_statistics,
    require_batch_norm,
)
from engine.training.checkpointed_chain import find_chain, run_chain
from engine.training.mixed_precision import TrainingPrecision
from engine.training.repeated_features import buffers_of, device_of, relative_difference, require_rows, rounding_of

Loss = Callable[[Tensor], Tensor | Iterable[Tensor]]
"""A function of all features that returns the loss, or terms that add up to it."""


def slices_inputs(model: nn.Module, batch_norm: BatchNormMode) -> bool:
    """Return whether inputs are computed in chunks: no, where a normalisation takes statistics of all of them.

    The model is in the mode that it trains in.
    """
    return batch_norm == "frozen" or not coupling_normalisations(model)


def require_chunks(inputs: object, chunk: int | None, batch_norm: str) -> None:
    """Refuse inputs that cannot be cut into such chunks, and a way of normalising that cannot be.

    Raises:
        EmptyData: If there are no inputs.
        TrainingRefused: If a chunk holds none, or by ``require_batch_norm``.
        WrongShape: If the inputs are not a tensor of N and more dimensions.
    """
    require_batch_norm(batch_norm)
    if chunk is not None and chunk < 1:
        raise TrainingRefused(f"chunk must be at least 1 (got {chunk})")
    if not isinstance(inputs, Tensor) or not inputs.ndim:
        got = "one without dimensions" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise WrongShape(f"inputs must be a tensor of shape (N, …) (got {got}); give one, such as torch.stack(inputs)")
    if not len(inputs):
        raise EmptyData("there must be an input at least (got none)")


def split_gradients(
    model: nn.Module,
    loss_of_features: Loss,
    inputs: Tensor,
    *,
    chunk: int | None = None,
    batch_norm: BatchNormMode = "whole",
    checkpointing: bool = False,
    precision: TrainingPrecision | None = None,
) -> Tensor:
    """Add the gradient of a loss over all inputs to ``.grad``, a chunk of the inputs at a time.

    No optimiser steps. Gradients are added to those that are there, as ``backward`` does. The random state afterwards
    is the one that the loss has left: chunks that are computed again draw nothing further.

    Args:
        model: Maps inputs to features, shape (N, …), any float dtype. It runs in the mode that it is in.
        loss_of_features: Takes all features, in the dtype that the model gives, and returns a scalar, or scalars that
            add up to the loss. Each is differentiated before the next is asked for, so that a generator holds the graph
            of one; two of them must not share a graph.
        inputs: All inputs, shape (N, …).
        chunk: Inputs of one pass; the last may have fewer. None, or N and more: all of them in one.
        batch_norm: ``whole``: the statistics of all inputs where BatchNorm is in training mode; inputs are then not
            sliced, whatever ``chunk`` is (``slices_inputs``). ``frozen``: BatchNorm alone in evaluation mode.
        checkpointing: Compute the blocks of the model (``find_chain``) again in the backward pass.
        precision: The precision of the features; None for that of the model. With a scaler the gradients are those of
            the scaled loss, as ``OptimiserStep`` takes them.

    Returns:
        The loss, a scalar without a graph, not scaled.

    Raises:
        TrainingRefused: If ``batch_norm`` is ``per_chunk``; if the model is no chain of blocks and is to be
            checkpointed; if it writes to a buffer or its inputs in a chunk's pass, or gives other features when a chunk
            is computed again; if the loss has no graph, or terms share one.
        EmptyData: If there is no input, or the loss has no term.
        WrongShape: If the inputs are not a tensor (N, …), there is not a row of features for each input, or a term is
            not a scalar.
    """
    require_chunks(inputs, chunk, batch_norm)
    device = device_of(model, inputs)
    run = _Features(model, find_chain(model) if checkpointing else None, precision or TrainingPrecision(), device)
    size = len(inputs) if chunk is None or not slices_inputs(model, batch_norm) else chunk
    with freeze_statistics(model, wanted=batch_norm == "frozen"), order_gradients(model), torch.enable_grad():
        if size < len(inputs):
            return _differentiate_in_chunks(run, loss_of_features, inputs, size)
        features = run(inputs)
        require_rows(features, inputs)
        leaf = features.detach().requires_grad_(features.requires_grad)
        loss = _differentiate_terms(loss_of_features, leaf, run.precision.scaler)
        if leaf.grad is not None:
            _pull_back(features, leaf.grad)
        return loss


@dataclass(frozen=True)
class _Features:
    """A model's features of inputs, in the precision and by the blocks that were chosen."""

    model: nn.Module
    blocks: tuple[nn.Module, ...] | None
    precision: TrainingPrecision
    device: torch.device

    def __call__(self, inputs: Tensor) -> Tensor:
        with self.precision.autocast(self.device):
            if self.blocks is not None and torch.is_grad_enabled():
                return run_chain(self.blocks, inputs)
            left: Tensor = self.model(inputs)
            return left


def _differentiate_in_chunks(run: _Features, loss_of_features: Loss, inputs: Tensor, size: int) -> Tensor:
    """Do steps 1, 2 and 3."""
    pieces = [slice(first, first + size) for first in range(0, len(inputs), size)]
    features, starts = _compute_features(run, inputs, pieces)
    features.requires_grad_(inputs.requires_grad or any(each.requires_grad for each in run.model.parameters()))
    loss = _differentiate_terms(loss_of_features, features, run.precision.scaler)
    if features.grad is None:
        return loss
    after = Generators.here(run.device)
    try:
        for piece, start in zip(pieces, starts, strict=True):
            set_generators(start, run.device)
            again = run(inputs[piece])
            _require_equal(again.detach(), features.detach()[piece])
            if again.requires_grad:
                _pull_back(again, features.grad[piece])
            del again
    finally:
        set_generators(after, run.device)
    return loss


def _compute_features(run: _Features, inputs: Tensor, pieces: list[slice]) -> tuple[Tensor, list[Generators]]:
    """Do step 1: return all features, and the random state before each chunk."""
    features: Tensor | None = None
    starts: list[Generators] = []
    before = [(*place, place[2].clone()) for place in buffers_of(run.model)]
    version = inputs._version  # noqa: SLF001 - torch counts writes under no other name
    with torch.no_grad(), uncached_casts():
        for piece in pieces:
            starts.append(Generators.here(run.device))
            of_chunk = run(inputs[piece])
            require_rows(of_chunk, inputs[piece])
            if features is None:
                features = of_chunk.new_empty((len(inputs), *of_chunk.shape[1:]))
                _require_unmoved(before)
            features[piece] = of_chunk
            if inputs._version != version:  # noqa: SLF001 - as above
                raise TrainingRefused(
                    f"chunks are computed twice, and {type(run.model).__name__} writes into its inputs; build its "
                    "first module with inplace=False"
                )
    if features is None:
        raise EmptyData("there must be an input at least (got none)")
    return features, starts


def _require_unmoved(before: Iterable[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    """Refuse a model whose pass has written to a buffer, and put the buffers back."""
    moved = [
        (module, name, buffer, copy)
        for module, name, buffer, copy in before
        if module._buffers[name] is not buffer  # noqa: SLF001 - named_buffers() names no module
        or not torch.isclose(buffer, copy, rtol=0, atol=0, equal_nan=True).all()
    ]
    for module, name, buffer, copy in moved:
        module._buffers[name] = buffer.copy_(copy)  # noqa: SLF001 - as above
    if moved:
        module, name, *_ = moved[0]
        raise TrainingRefused(
            f"chunks need a forward pass that leaves buffers alone, and {type(module).__name__} moves its {name!r}, "
            "which each chunk would move twice; leave chunk out, or put that module into evaluation mode"
        )


def _differentiate_terms(loss_of_features: Loss, features: Tensor, scaler: torch.amp.GradScaler | None) -> Tensor:
    """Do step 2: add the gradients of each term to those of the features and of the loss's own parameters."""
    total: Tensor | None = None
    has_graph = False
    terms = loss_of_features(features)
    for term in (terms,) if isinstance(terms, Tensor) or not isinstance(terms, Iterable) else terms:
        if not isinstance(term, Tensor) or term.numel() != 1:
            got = f"shape {tuple(term.shape)}" if isinstance(term, Tensor) else f"{term!r}"[:80]
            raise WrongShape(f"a loss must return a scalar, or scalars that add up to it (got {got})")
        value = term.detach().reshape(())
        total = value if total is None else total + value
        if term.requires_grad:
            has_graph = True
            _differentiate(term if scaler is None else scaler.scale(term))
        # the graph goes before the next term is made
        del term
    if total is None:
        raise EmptyData("a loss must have a term at least (got none)")
    if not has_graph:
        raise TrainingRefused(
            f"a loss must have a graph, by which it is differentiated (got {float(total):.4g} without one); compute it "
            "without `detach`, `item` and `no_grad`, of a model or a loss with a parameter that requires a gradient"
        )
    return total


def _pull_back(features: Tensor, gradient: Tensor) -> None:
    """Pull a gradient back from features, whose fused attention on a device is held to its deterministic form."""
    if features.is_cuda:
        hold_attention(features)
    try:
        features.backward(gradient)  # type: ignore[no-untyped-call]
    finally:
        leave_strict()


def _differentiate(term: Tensor) -> None:
    try:
        term.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "a second time" not in str(error):
            raise
        raise TrainingRefused(
            "each term of a loss must have a graph of its own, since it is released before the next is made, and two "
            "terms share a part; compute that part again in each term, or return one scalar"
        ) from error


def _require_equal(again: Tensor, features: Tensor) -> None:
    difference = relative_difference(again, features)
    if difference > rounding_of(features):
        raise TrainingRefused(
            f"chunks are computed twice, and the second time the features differ by {difference:.2g} of the largest: "
            "the model draws random numbers by a generator other than torch's, or keeps what earlier passes computed; "
            "leave chunk out"
        )
