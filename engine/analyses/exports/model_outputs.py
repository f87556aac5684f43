"""The number of a model's outputs, as far as stored factors prove it.

A gradient of the cross entropy by the logits is ``w (p − y)``, whose entries add up to 0, so that the head's G has
``G 1 = 0``; the Hessian of the mean squared error over n outputs is ``2/n I``. The last layer of the model is taken for
its head where its G is of that form. Where it is not, the number is not known: the head may stand elsewhere, or may
not be trained.
"""

from torch import Tensor

from engine.factors.factor_set import FactorSet

_TOLERANCE = 1e-3
"""Relative to ‖G‖: rounding of half-precision gradients is below it, and the G of another layer is far above it."""


def known_outputs(factors: FactorSet) -> int | None:
    """Return the number of the model's outputs; None where the factors do not show it. At most one layer is read."""
    head = factors.layers[-1] if factors.layers else None
    # a head whose rows are split into several terms of the loss has several outputs to a term
    if head is None or head.form != "kronecker" or head.terms > head.positions:
        return None
    if head.representation_G == "softmax_head":
        return head.out_dim
    fisher = factors.collection.fisher
    # the squared error shows its outputs in its Hessian alone, not in samples of it
    shows = None
    if factors.loss == "cross_entropy" and fisher != "forward_only":
        shows = _is_of_logits
    elif factors.loss == "mse" and fisher == "type2":
        shows = _is_of_squares
    if shows is None or head.representation_G != "dense":
        return None
    return head.out_dim if shows(factors.load(head.ordinal).widened_G) else None


def _is_of_logits(gradient: Tensor) -> bool:
    """Return whether every row of G (n, n) adds up to 0, and no output is without a gradient."""
    sums = gradient.sum(1).norm()
    return bool((gradient.diagonal() > 0).all()) and bool(sums <= _TOLERANCE * gradient.norm())


def _is_of_squares(gradient: Tensor) -> bool:
    """Return whether G (n, n) is ``2/n I``."""
    rest = gradient.clone()
    rest.diagonal().sub_(2 / len(gradient))
    return bool(rest.norm() <= _TOLERANCE * gradient.norm())
