"""Directions: the vectors v whose pullbacks ``g = Jᵀ v`` make up G, for each likelihood and Fisher, and their pullback.

For a batch with outputs f (N, R, C), the sum over the yielded v of ``v vᵀ`` is, per loss term,

====================  ===========================================================================
``type2``             the loss's Hessian exactly, by its square-root columns, one at a time
``mc``                an unbiased sample of the same: the gradient at labels drawn from the model
``empirical``         the gradient at the data's own labels (not the Fisher)
====================  ===========================================================================

Losses are sums over examples and terms. ``mse`` is Σ(f−y)² without ½, so the model is Gaussian
with variance ½; ``mse`` and ``bce`` average over the C outputs of a term, which divides the
Hessian by C. A sampled gradient is therefore divided by √C, so that its second moment is that
Hessian; the gradient at the data's own labels is torch's own, divided by C.

A weight is a count: a term of weight w is w terms of weight one, so its directions carry √w under
every Fisher. With class weights w and smoothing ε, torch's term is ``−Σ_c t_c log p_c`` for
``t = (1−ε) w_y e_y + (ε/C) w``; it weighs ``W = Σ t``, has the Hessian ``W (diag p − p pᵀ)`` and, at
the data's label, the direction ``(W p − t)/√W``. ``bce`` with positive weights v weighs an output
``W = 1 + (v−1) y`` alike.

References:
    Martens (2020), New insights and perspectives on the natural gradient method
    Kunstner, Balles & Hennig (2019), Limitations of the empirical Fisher approximation
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from catalog.requests.collection import Collection
from catalog.requests.inputs import Loss, Task
from engine.errors import EngineError, ModelRefused, NoLikelihood, Unwinding, WrongShape
from engine.memory.out_of_memory import lost_device, ran_out_of_memory
from engine.model.class_targets import label_weights, smoothed_labels
from engine.model.counter_rng import categories, normals, uniforms
from engine.model.determinism import leave_strict
from engine.model.outputs import Prediction


def at_own_labels(collection: Collection) -> Collection:
    """Return a collection with its gradients at the data's own labels, of which there is one for each term."""
    return replace(collection, fisher="empirical", samples=1)


def directions(prediction: Prediction, index: Tensor, task: Task, collection: Collection) -> Iterator[Tensor]:
    """Yield the vectors to pull back through the graph of a prediction.

    Args:
        prediction: Outputs, shape (N, R, C), with the terms that count and their weights.
        index: Index of each example, shape (N,), int64, which keys its sampled labels.
        task: The likelihood, class weights and label smoothing.
        collection: The Fisher, its number of samples and the seed.

    Yields:
        Vectors v, shape (N, R, C), dtype of the outputs: ``samples`` of them for `mc`, one for `empirical`, at most R ·
        C for `type2`, none for `forward_only`.

    Raises:
        WrongShape: If `empirical` is asked for and the data has no targets.
        NoLikelihood: If anything but `empirical` is asked of the model's own loss.
    """
    if collection.fisher == "forward_only":
        return
    outputs, loss = prediction.outputs.detach(), task.likelihood
    if loss == "model":
        if collection.fisher != "empirical":
            raise NoLikelihood(
                f"`loss: model` is a number without a known likelihood, so there is nothing to take "
                f"`fisher: {collection.fisher}` of; take `collection.fisher: empirical`, or name the loss",
                pointer="/collection/fisher",
            )
        # the model's own loss is a mean over its terms; G is of the sum
        yield torch.full_like(outputs, float(prediction.terms))
        return
    counted = prediction.valid.unsqueeze(-1).to(outputs.dtype)
    if prediction.weights is not None:
        counted = counted * prediction.weights.sqrt()
    # outputs may be as wide as a vocabulary, and each pass over them counts
    all_alike = prediction.weights is None and prediction.terms == prediction.valid.numel()
    if collection.fisher == "mc":
        for sample in range(collection.samples):
            sampled = _sampled(outputs, index, loss, collection.seed, sample)
            if not all_alike:
                sampled.mul_(counted)
            yield sampled if collection.samples == 1 else sampled.div_(math.sqrt(collection.samples))
            del sampled
    elif collection.fisher == "empirical":
        if prediction.targets is None:
            raise WrongShape(
                "`fisher: empirical` needs targets in the data; give them, or take `fisher: mc`", pointer="/data"
            )
        yield _observed(prediction, prediction.targets, task).mul_(counted)
    else:
        yield from _columns(outputs, prediction.valid, counted, loss)


def _sampled(outputs: Tensor, index: Tensor, loss: Loss, seed: int, sample: int) -> Tensor:
    """Return the gradient of the summed loss at labels drawn from the model, (N, R, C)."""
    _, terms, width = outputs.shape
    example = index[:, None]
    term = torch.arange(terms, device=outputs.device)[None, :]
    if loss == "cross_entropy":
        narrow = outputs.dtype.itemsize < 4
        probability = torch.softmax(outputs, -1, dtype=torch.float32 if narrow else None)
        drawn = categories(probability, uniforms(seed, example, term, sample))
        gradient = probability.to(outputs.dtype)
        return gradient.scatter_add_(-1, drawn.unsqueeze(-1), _minus_one(gradient))
    component = torch.arange(width, device=outputs.device)[None, None, :]
    key = (example.unsqueeze(-1), term.unsqueeze(-1), sample, component)
    if loss == "mse":
        # y = f + ε with variance ½: the gradient is −2ε
        noise = normals(seed, *key).to(outputs.dtype) * math.sqrt(0.5)
        return noise.mul_(-2 / math.sqrt(width))
    probability = torch.sigmoid(outputs)
    labels = uniforms(seed, *key) < probability
    return (probability - labels.to(outputs.dtype)).div_(math.sqrt(width))


def _observed(prediction: Prediction, targets: Tensor, task: Task) -> Tensor:
    """Return the gradient of the summed loss at the data's labels, for a weight of one, (N, R, C)."""
    outputs, weights, loss = prediction.outputs.detach(), prediction.weights, task.likelihood
    if loss == "cross_entropy":
        gradient = torch.softmax(outputs, -1)
        if targets.ndim == gradient.ndim:
            return _subtract_probabilities_(gradient, targets, weights, task)
        # ignored targets lie outside the classes; their terms are zeroed by the caller
        labels = torch.where(prediction.valid, targets, 0).unsqueeze(-1)
        return _subtract_label_(gradient, labels, weights, task)
    width = outputs.shape[-1]
    if loss == "mse":
        return (outputs - targets).mul_(2 / width)
    probability = torch.sigmoid(outputs)
    if weights is not None:
        # v y (σ − 1) + (1 − y) σ = W σ − v y, and W − v y = 1 − y
        targets = torch.where(weights > 0, 1 - (1 - targets) / weights, probability)
    return (probability - targets).div_(width)


def _subtract_label_(gradient: Tensor, labels: Tensor, weights: Tensor | None, task: Task) -> Tensor:
    """Subtract t/W, the label as the loss sees it, from ``gradient`` (N, R, C), for ``labels`` (N, R, 1)."""
    width, smoothing = gradient.shape[-1], task.label_smoothing
    own = torch.full_like(gradient[..., :1], smoothing - 1)
    if weights is None or task.class_weights is None:
        if smoothing:
            gradient.sub_(smoothing / width)
        return gradient.scatter_add_(-1, labels, own)
    classes = label_weights(task.class_weights, "class_weights", gradient)
    share = weights.reciprocal().where(weights > 0, torch.zeros_like(weights))  # a term of no weight is zeroed later
    if smoothing:
        gradient.sub_(share * classes, alpha=smoothing / width)
    return gradient.scatter_add_(-1, labels, own * share * classes[labels])


def _subtract_probabilities_(gradient: Tensor, targets: Tensor, weights: Tensor | None, task: Task) -> Tensor:
    """Make ``p − t/W`` of ``gradient`` p (N, R, C), for probabilities; where terms weigh one, ``p Σt − t``."""
    labels = smoothed_labels(targets, task)
    if weights is None:
        return gradient.mul_(labels.sum(-1, keepdim=True)).sub_(labels)
    share = weights.reciprocal().where(weights > 0, torch.zeros_like(weights))  # a term of no weight is zeroed later
    return gradient.sub_(labels * share)


def _columns(outputs: Tensor, valid: Tensor, counted: Tensor, loss: Loss) -> Iterator[Tensor]:
    """Columns S of the loss Hessian's square root, S Sᵀ = H, of one loss term at a time.

    ``counted`` (N, R, 1 or C) is the root of what each term weighs.

    Terms go one by one: pulled back together, the cross products of two terms would enter G.
    """
    _, terms, width = outputs.shape
    for term in range(terms):
        if not bool(valid[:, term].any()):
            continue
        here = outputs[:, term]
        keep = counted[:, term]
        for component in range(width):
            column = torch.zeros_like(outputs)
            column[:, term] = keep * _column(here, component, loss)
            yield column


def _column(outputs: Tensor, component: int, loss: Loss) -> Tensor:
    """Return column ``component`` of each example's square root, (N, C)."""
    width = outputs.shape[-1]
    unit = torch.zeros_like(outputs)
    unit[:, component] = 1
    if loss == "cross_entropy":
        # diag(p) − p pᵀ = S Sᵀ with S = (I − p 1ᵀ) diag(√p), since Σp = 1
        probability = torch.softmax(outputs, -1)
        return (unit - probability) * probability[:, component, None].sqrt()
    if loss == "mse":
        return unit * math.sqrt(2 / width)
    probability = torch.sigmoid(outputs)
    return unit * (probability * (1 - probability) / width).sqrt()


def root_product(prediction: Prediction, probe: Tensor, task: Task) -> Tensor:
    """Compute ``S u`` for the root ``S Sᵀ = H`` of the summed loss's Hessian, all terms at once.

    Args:
        prediction: Outputs, shape (N, R, C), with the terms that count and their weights.
        probe: The vector u, shape (N, R, C).
        task: The likelihood.

    Returns:
        The product, shape (N, R, C); zero in terms that do not count.

    Raises:
        NoLikelihood: If the loss is the model's own.
    """
    outputs, counted = prediction.outputs.detach(), counted_terms(prediction, task)
    probe = probe * counted.sqrt()
    width = outputs.shape[-1]
    if task.likelihood == "cross_entropy":
        probability = torch.softmax(outputs, -1)
        probe = probe.mul_(probability.sqrt())
        return probe.sub_(probability.mul_(probe.sum(-1, keepdim=True)))
    if task.likelihood == "mse":
        return probe.mul_(math.sqrt(2 / width))
    probability = torch.sigmoid(outputs)
    return probe.mul_((probability * (1 - probability)).div_(width).sqrt_())


def loss_gradient(prediction: Prediction, task: Task) -> Tensor:
    """Compute the gradient of the summed loss with respect to the outputs, at the data's own labels.

    Args:
        prediction: Outputs, shape (N, R, C), with their targets, the terms that count and their weights.
        task: The likelihood, class weights and label smoothing.

    Returns:
        The gradient, shape (N, R, C); zero in terms that do not count.

    Raises:
        WrongShape: If the data has no targets.
    """
    if task.likelihood == "model":
        # the model's own loss is a mean over its terms
        return torch.full_like(prediction.outputs.detach(), float(prediction.terms))
    if prediction.targets is None:
        raise WrongShape(
            "the gradient of the loss needs targets in the data; give them, or take a curvature that knows no labels "
            "(`ggn` or `fisher`)",
            pointer="/data",
        )
    return _observed(prediction, prediction.targets, task).mul_(counted_terms(prediction, task))


def counted_terms(prediction: Prediction, task: Task) -> Tensor:
    """Return the weight of each term.

    Args:
        prediction: Outputs, shape (N, R, C), with the terms that count and their weights.
        task: The likelihood.

    Returns:
        Weights, shape (N, R, 1) or (N, R, C), dtype of the outputs; zero for a term that does not count.

    Raises:
        NoLikelihood: If the loss is the model's own.
    """
    if task.likelihood == "model":
        raise NoLikelihood(
            "`loss: model` is a number without a known likelihood, so its Hessian is not known; name the loss",
            pointer="/task/loss",
        )
    counted = prediction.valid.unsqueeze(-1).to(prediction.outputs.dtype)
    return counted if prediction.weights is None else counted * prediction.weights


def _minus_one(like: Tensor) -> Tensor:
    return torch.full((*like.shape[:-1], 1), -1.0, dtype=like.dtype, device=like.device)


def pull_back(
    end: GradientEdge,
    direction: Tensor,
    *,
    retain_graph: bool = False,
    within: contextlib.AbstractContextManager[object] | None = None,
) -> None:
    """Pull ``direction`` back from ``end``, to whatever hooks wait for its gradients.

    Args:
        end: Where the graph ends.
        direction: A vector of the shape of the outputs.
        retain_graph: Keep the graph for another direction.
        within: What the forward pass ran in, for parts of it that activation checkpointing runs again.

    Raises:
        ModelRefused: If the model's backward pass raises; the message quotes it.
    """
    try:
        with within or contextlib.nullcontext():
            run_backward(end, direction, retain_graph=retain_graph)
    except (EngineError, Unwinding):
        raise
    except Exception as error:
        leave_strict()
        if ran_out_of_memory(error) or lost_device(error):
            raise
        raise ModelRefused(
            f"the model raised in its backward pass: {type(error).__name__}: {str(error)[:500]}; "
            "a model that can be trained can be measured: mend it, or take `fisher: forward_only`",
            pointer="/model",
        ) from error


def run_backward(end: GradientEdge, direction: Tensor, *, retain_graph: bool = False) -> None:
    """Run autograd's engine, as ``torch.autograd.backward`` does.

    Given a direction, that function compares shapes by way of sympy, which it loads: half a second of every process and
    30 MB.

    Args:
        end: Where the graph ends.
        direction: A vector of the shape of the outputs.
        retain_graph: Keep the graph for another direction.

    Raises:
        RuntimeError: If the direction has another shape than the outputs.
    """
    shape = torch.Size(end.node._input_metadata[end.output_nr].shape)  # noqa: SLF001 - its only name
    if shape != direction.shape:
        raise RuntimeError(f"the direction must have the outputs' shape {tuple(shape)} (got {tuple(direction.shape)})")
    _engine_run_backward((end,), (direction,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)


@contextlib.contextmanager
def drain_backward_queue(device: torch.device) -> Iterator[None]:
    """Leave nothing of a backward pass that fails inside in autograd's queue, which would hold its graph.

    What is queued goes by the age of its operation, the youngest first. An operation that is older than all of the pass
    is therefore reached last, once everything that was left has been thrown away.

    Args:
        device: Device whose queue is drained: the one that the pass runs on.

    Returns:
        A context manager to enter before the forward pass, since the older operation is made on entry.
    """
    with torch.enable_grad():
        oldest = torch.zeros((), device=device, requires_grad=True) * 1
    try:
        yield
    except Exception:
        torch.autograd.backward(oldest)
        raise
