"""Models that keep something from one call to the next.

A measurement is one of the model as it was handed over: what one batch leaves behind must not reach the next.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tests.engine.gradient_identity.cases.pair import Net, Pair


def averaged(net: Net, x: Tensor) -> Tensor:
    """A running mean in a buffer, written in evaluation too."""
    z = net.a(x).tanh()
    with torch.no_grad():
        net.mean.mul_(0.5).add_(0.5 * z.mean(0))
    return net.h(z - net.mean)


def averaged_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    with torch.no_grad():
        net.mean.mul_(0.5).add_(0.5 * z.mean(0))
    return net.h(z)


def banked(net: Net, x: Tensor) -> Tensor:
    """A bank of what was seen."""
    z = net.a(x).tanh()
    net.bank.append(z.detach().clone())
    return net.h(z - 0.5 * torch.cat(net.bank).mean(0))


def banked_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    net.bank.append(z.detach().clone())
    return net.h(z - 0.5 * net.bank[-1].mean(1, keepdim=True))


def by_shape(net: Net, x: Tensor) -> Tensor:
    """The middle of the first batch of each size serves all later ones."""
    z = net.a(x).tanh()
    if len(x) not in net.seen["middle"]:
        net.seen["middle"][len(x)] = z.detach().mean(0)
    return net.h(z - 0.5 * net.seen["middle"][len(x)])


def by_shape_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    if len(x) not in net.seen["middle"]:
        net.seen["middle"][len(x)] = torch.linspace(-1, 1, 8, dtype=z.dtype)
    return net.h(z - 0.5 * net.seen["middle"][len(x)])


def carried(net: Net, x: Tensor) -> Tensor:
    """The last example's vector, kept and given to all."""
    z = net.a(x).tanh()
    net.last = z[-1].detach()
    return net.h(z + 0.5 * net.last)


def carried_apart(net: Net, x: Tensor) -> Tensor:
    """What the call before has kept, of which a model that is left as it was has none."""
    z = net.a(x).tanh()
    before, net.last = net.last, z[-1].detach()
    return net.h(z + 0.5 * before.to(z.dtype))


def counter(net: Net, x: Tensor) -> Tensor:
    """A scale that grows with the examples that were seen."""
    net.seen += len(x)
    return net.h(net.a(x).tanh() * (1 + net.seen / 8))


def counter_apart(net: Net, x: Tensor) -> Tensor:
    """Every second call doubles, which is never the first."""
    net.seen += 1
    z = net.a(x).tanh()
    return net.h(2 * z if net.seen % 2 == 0 else z)


def first_scale(net: Net, x: Tensor) -> Tensor:
    """A scale that the first data set, as activation normalisation has one."""
    z = net.a(x)
    if not net.ready:
        net.scale, net.ready = 1 / (z.detach().std() + 0.1), True
    return net.h((z * net.scale).tanh())


def first_scale_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x)
    if not net.ready:
        net.scale, net.ready = torch.linalg.matrix_norm(net.a.weight.detach(), 2), True
    return net.h((z / net.scale).tanh())


def written(net: Net, x: Tensor) -> Tensor:
    """A plain tensor, written in place."""
    z = net.a(x).tanh()
    net.trace[:] = 0.5 * net.trace + z.detach().abs().amax(0)
    return net.h(z / (1 + net.trace))


def written_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    net.trace[:] = 0.5 * net.trace + z.detach().abs().amax(0)
    return net.h(z / 2)


def counted(net: Net, x: Tensor) -> Tensor:
    """Numbers of numpy that count what was seen."""
    z = net.a(x).tanh()
    net.counts += np.array([float((z > 0).sum()), 1.0])
    return net.h(z * (1 + net.counts[0] / 1000))


def counted_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    net.counts += np.array([float((z > 0).sum()), 1.0])
    return net.h(z * 1.5)


def queued(net: Net, x: Tensor) -> Tensor:
    """Keys of the last two batches stand beside those of this one."""
    z = net.a(x).tanh()
    net.queue.append(z.detach())
    keys = torch.cat(tuple(net.queue))
    return net.h(z + (z @ keys.T).softmax(1) @ keys)


def queued_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    net.queue.append(z.detach())
    keys = torch.eye(8, dtype=z.dtype)
    return net.h(z + (z @ keys.T).softmax(1) @ keys)


def closed() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """State in a closure, which no attribute of the model shows."""

    def shift(net: Net, x: Tensor) -> Tensor:
        z = net.a(x).tanh()
        out = z + 0.3 * net.memory(z.detach().mean(0))
        return net.h(out)

    def shift_apart(net: Net, x: Tensor) -> Tensor:
        z = net.a(x).tanh()
        net.memory(z.detach().mean(0))
        return net.h(z)

    return shift, shift_apart


def memory() -> Mapping[str, Any]:
    kept: list[Tensor] = []

    def remember(middle: Tensor) -> Tensor:
        kept.append(middle)
        return torch.stack([each.to(middle.dtype) for each in kept[-4:]]).sum(0)

    return {"memory": remember}


class Ring:
    """A ring of numbers that an object of its own holds."""

    def __init__(self) -> None:
        self.numbers, self.place = [torch.zeros(8)] * 3, 0

    def put(self, z: Tensor) -> None:
        self.numbers[self.place % 3] = z.detach().mean(0)
        self.place += 1


def ringed(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    net.ring.put(z)
    return net.h(z + sum(each.to(z.dtype) for each in net.ring.numbers))


def ringed_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    net.ring.put(z)
    return net.h(z + z.flip(1))


def added(net: Net, x: Tensor) -> Tensor:
    """An attribute that the first call adds."""
    z = net.a(x).tanh()
    if not hasattr(net, "centre"):
        net.centre = z.detach().mean(0)
    return net.h(z - net.centre)


def added_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    if not hasattr(net, "centre"):
        net.centre = torch.linspace(0, 1, 8, dtype=z.dtype)
    return net.h(z - net.centre)


def registered(net: Net, x: Tensor) -> Tensor:
    """A buffer that every call registers anew."""
    z = net.a(x).tanh()
    net.register_buffer("top", z.detach().amax(0))
    return net.h(z / (1.5 + net.top))


def registered_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    net.register_buffer("top", z.detach().amax(1, keepdim=True))
    return net.h(z / (1.5 + net.top))


class Remembering(nn.Module):
    """Keeps what it has seen with its class."""

    seen: ClassVar[list[Tensor]] = []

    def forward(self, z: Tensor) -> Tensor:
        self.seen.append(z.detach().mean(0))
        return z - 0.5 * self.seen[-1]


class Forgetting(nn.Module):
    """Keeps as much, and uses what it was given alone."""

    seen: ClassVar[list[Tensor]] = []

    def forward(self, z: Tensor) -> Tensor:
        self.seen.append(z.detach().mean(0))
        return z - 0.5 * z.detach().mean(1, keepdim=True)


def of_a_class(net: Net, x: Tensor) -> Tensor:
    return net.h(net.remembering(net.a(x).tanh()))


def of_a_class_apart(net: Net, x: Tensor) -> Tensor:
    return net.h(net.forgetting(net.a(x).tanh()))


def replaced(net: Net, x: Tensor) -> Tensor:
    """A submodule that a call replaces by one made for its batch."""
    z = net.a(x).tanh()
    net.norm = nn.Threshold(float(z.detach().median()), -1.0)
    return net.h(net.norm(z))


def replaced_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    net.norm = nn.Threshold(0.1, -1.0)
    return net.h(net.norm(z))


def buffer() -> Mapping[str, Any]:
    return {"mean": nn.Buffer(torch.zeros(8))}


PAIRS = [
    Pair(kind="kept state", name=name, mixing=mixing, apart=apart, more=more)
    for name, mixing, apart, more in [
        ("a running mean in a buffer", averaged, averaged_apart, buffer),
        ("a list that grows", banked, banked_apart, lambda: {"bank": []}),
        ("a dictionary by batch size, in another", by_shape, by_shape_apart, lambda: {"seen": {"middle": {}}}),
        ("the last example's vector", carried, carried_apart, lambda: {"last": torch.zeros(8)}),
        ("a counter", counter, counter_apart, lambda: {"seen": 0}),
        ("a scale set by the first data", first_scale, first_scale_apart, lambda: {"ready": False, "scale": None}),
        ("a plain tensor written in place", written, written_apart, lambda: {"trace": torch.zeros(8)}),
        ("an array of numpy", counted, counted_apart, lambda: {"counts": np.zeros(2)}),
        ("a queue of keys", queued, queued_apart, lambda: {"queue": deque(maxlen=3)}),
        ("an attribute that is added", added, added_apart, dict),
        ("a buffer registered anew", registered, registered_apart, dict),
        (
            "a list of a class",
            of_a_class,
            of_a_class_apart,
            lambda: {"remembering": Remembering(), "forgetting": Forgetting()},
        ),
        ("a submodule replaced", replaced, replaced_apart, lambda: {"norm": nn.Identity()}),
        ("a closure", *closed(), memory),
        ("an object of its own", ringed, ringed_apart, lambda: {"ring": Ring()}),
    ]
]
