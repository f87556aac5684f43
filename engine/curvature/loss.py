"""Directions: the vectors v whose pullbacks ``g = Jᵀ v`` make up G, for each likelihood and Fisher.

For a batch with outputs f (N, R, C), the sum over the yielded v of ``v vᵀ`` is, per loss term,

====================  ===========================================================================
``type2``             the loss's Hessian exactly, by its square-root columns, one at a time
``mc``                an unbiased sample of the same: the gradient at labels drawn from the model
``empirical``         the gradient at the data's own labels (not the Fisher)
====================  ===========================================================================

Losses are sums over examples and terms. ``mse`` is Σ(f−y)² without ½, so the model is Gaussian
with variance ½; ``mse`` and ``bce`` average over the C outputs of a term, which divides the
Hessian by C.

References:
    Martens (2020), New insights and perspectives on the natural gradient method
    Kunstner, Balles & Hennig (2019), Limitations of the empirical Fisher approximation
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from catalog.collection import Collection
from catalog.inputs import Loss
from engine.curvature.prediction import Prediction
from engine.curvature.sampling import categories, normals, uniforms
from engine.errors import WrongShape


def directions(prediction: Prediction, index: Tensor, loss: Loss, collection: Collection) -> Iterator[Tensor]:
    """Vectors (N, R, C) to pull back through the graph of ``prediction.outputs``; none for `forward_only`.

    Raises:
        WrongShape: If `empirical` is asked for and the data has no targets.
    """
    if collection.fisher == "forward_only":
        return
    outputs = prediction.outputs.detach()
    if loss == "model":
        # the model's own loss is a mean over its terms; G is of the sum
        yield torch.full_like(outputs, float(prediction.terms))
        return
    counted = prediction.valid.unsqueeze(-1).to(outputs.dtype)
    if collection.fisher == "mc":
        for sample in range(collection.samples):
            sampled = _sampled(outputs, index, loss, collection.seed, sample)
            yield sampled.mul_(counted).div_(math.sqrt(collection.samples))
    elif collection.fisher == "empirical":
        if prediction.targets is None:
            raise WrongShape(
                "`fisher: empirical` needs targets in the data; give them, or take `fisher: mc`", pointer="/data"
            )
        yield _observed(outputs, prediction.targets, prediction.valid, loss).mul_(counted)
    else:
        yield from _columns(outputs, prediction.valid, loss)


def _sampled(outputs: Tensor, index: Tensor, loss: Loss, seed: int, sample: int) -> Tensor:
    """Gradient of the summed loss at labels drawn from the model, as (N, R, C)."""
    _, terms, width = outputs.shape
    example = index[:, None]
    term = torch.arange(terms, device=outputs.device)[None, :]
    if loss == "cross_entropy":
        drawn = categories(outputs, uniforms(seed, example, term, sample))
        gradient = torch.softmax(outputs, -1)
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


def _observed(outputs: Tensor, targets: Tensor, valid: Tensor, loss: Loss) -> Tensor:
    """Gradient of the summed loss at the data's labels, as (N, R, C)."""
    if loss == "cross_entropy":
        gradient = torch.softmax(outputs, -1)
        # ignored targets lie outside the classes; their terms are zeroed by the caller
        labels = torch.where(valid, targets, 0)
        return gradient.scatter_add_(-1, labels.unsqueeze(-1), _minus_one(gradient))
    width = outputs.shape[-1]
    if loss == "mse":
        return (outputs - targets).mul_(2 / math.sqrt(width))
    return (torch.sigmoid(outputs) - targets).div_(math.sqrt(width))


def _columns(outputs: Tensor, valid: Tensor, loss: Loss) -> Iterator[Tensor]:
    """Columns S of the loss Hessian's square root, S Sᵀ = H, of one loss term at a time.

    Terms go one by one: pulled back together, the cross products of two terms would enter G.
    """
    _, terms, width = outputs.shape
    for term in range(terms):
        if not bool(valid[:, term].any()):
            continue
        here = outputs[:, term]
        keep = valid[:, term, None].to(outputs.dtype)
        for component in range(width):
            column = torch.zeros_like(outputs)
            column[:, term] = keep * _column(here, component, loss)
            yield column


def _column(outputs: Tensor, component: int, loss: Loss) -> Tensor:
    """Column ``component`` of each example's square root, (N, C)."""
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


def _minus_one(like: Tensor) -> Tensor:
    return torch.full((*like.shape[:-1], 1), -1.0, dtype=like.dtype, device=like.device)
