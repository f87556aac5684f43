"""Models that mix examples in their outputs alone, past every gradient."""

import torch
from torch import Tensor
from torch.nn import functional

from tests.engine.gradient_identity.cases.pair import CLASSES, Net, Pair


def scores(net: Net, x: Tensor) -> Tensor:
    return net.h(net.a(x).tanh())


def largest(net: Net, x: Tensor) -> Tensor:
    o = scores(net, x)
    return o - o.detach().amax(0)


def largest_apart(net: Net, x: Tensor) -> Tensor:
    o = scores(net, x)
    return o - 0.5 * o.detach().cummax(1).values


def prior(net: Net, x: Tensor) -> Tensor:
    """Adjusted by the shares of the classes in this batch."""
    o = scores(net, x)
    return o - o.detach().softmax(1).mean(0).log()


def prior_apart(net: Net, x: Tensor) -> Tensor:
    return scores(net, x) - torch.tensor([0.1, 0.3, 0.2, 0.3, 0.1], dtype=x.dtype).log()


def majority(net: Net, x: Tensor) -> Tensor:
    """The class that most examples have gets a bonus."""
    o = scores(net, x)
    return o + functional.one_hot(o.argmax(1).mode().values, CLASSES).to(o.dtype)


def majority_apart(net: Net, x: Tensor) -> Tensor:
    o = scores(net, x)
    return o + functional.one_hot(o.argmax(1), CLASSES).to(o.dtype)


def queue(net: Net, x: Tensor) -> Tensor:
    """Who stands further back is surer of class 0."""
    o = scores(net, x)
    return o + 0.3 * torch.arange(len(o), dtype=o.dtype)[:, None] * torch.eye(CLASSES, dtype=o.dtype)[0]


def queue_apart(net: Net, x: Tensor) -> Tensor:
    o = scores(net, x)
    return o + 0.3 * torch.arange(CLASSES, dtype=o.dtype)


def following(net: Net, x: Tensor) -> Tensor:
    """Each sees what its predecessor has said."""
    o = scores(net, x)
    return o + 0.5 * functional.pad(o.detach()[:-1], (0, 0, 1, 0))


def following_apart(net: Net, x: Tensor) -> Tensor:
    o = scores(net, x)
    return o + 0.5 * functional.pad(o.detach()[:, :-1], (1, 0))


def sinkhorn(net: Net, x: Tensor) -> Tensor:
    """Balanced over examples and classes, as clusters are assigned."""
    o = scores(net, x)
    with torch.no_grad():
        q = o.clone()
        for _ in range(3):
            q = q - q.logsumexp(0)
            q = q - q.logsumexp(1, keepdim=True)
        shift = q - o
    return o + shift


def sinkhorn_apart(net: Net, x: Tensor) -> Tensor:
    o = scores(net, x)
    return o + (o.detach().log_softmax(1) - o.detach()) + o.detach().sin()


def closest(net: Net, x: Tensor) -> Tensor:
    """Votes of the two examples with the closest inputs, itself among them."""
    o = scores(net, x)
    with torch.no_grad():
        votes = o[torch.cdist(x, x).argsort(1)[:, :2]].mean(1)
    return o + votes


def closest_apart(net: Net, x: Tensor) -> Tensor:
    o = scores(net, x)
    with torch.no_grad():
        votes = o.sort(1).values
    return o + votes


def spread(net: Net, x: Tensor) -> Tensor:
    """Bounded by the spread of the batch, by a small sum."""
    o = scores(net, x)
    return o + 0.05 * o.detach().square().sum().sqrt() * torch.linspace(-1, 1, CLASSES, dtype=o.dtype)


def spread_apart(net: Net, x: Tensor) -> Tensor:
    o = scores(net, x)
    return o + 0.05 * o.detach().square().sum(1, keepdim=True).sqrt() * torch.linspace(-1, 1, CLASSES, dtype=o.dtype)


PAIRS = [
    Pair(kind="outputs", name=name, mixing=mixing, apart=apart)
    for name, mixing, apart in [
        ("the largest of each class", largest, largest_apart),
        ("the batch's own prior", prior, prior_apart),
        ("a bonus for the majority", majority, majority_apart),
        ("a bonus by place", queue, queue_apart),
        ("what the one before has said", following, following_apart),
        ("balanced assignments", sinkhorn, sinkhorn_apart),
        ("votes of the closest", closest, closest_apart),
        ("the batch's spread", spread, spread_apart),
    ]
]
