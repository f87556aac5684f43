"""Models that draw random numbers, the default generator's or their own."""

import random

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.engine.gradient_identity.cases.pair import Net, Pair


def dropped(net: Net, x: Tensor) -> Tensor:
    """Inverted dropout whose mask all examples share, before an attention over examples."""
    z = net.a(x).tanh() * torch.bernoulli(torch.full((8,), 0.7)).to(x.dtype) / 0.7
    return net.h(z + (z @ z.T / 3).softmax(1) @ z)


def dropped_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh() * torch.bernoulli(torch.full((8,), 0.7)).to(x.dtype) / 0.7
    z = z.unflatten(1, (4, 2))
    return net.h((z + (z @ z.mT / 3).softmax(2) @ z).flatten(1))


def seeded(net: Net, x: Tensor) -> Tensor:
    """Noise whose seed the whole batch decides."""
    generator = torch.Generator().manual_seed(int(x.double().abs().sum() * 1e3))
    return net.h(net.a(x).tanh() + 0.3 * torch.randn(len(x), 8, generator=generator).to(x.dtype))


def seeded_apart(net: Net, x: Tensor) -> Tensor:
    noise = [torch.randn(8, generator=torch.Generator().manual_seed(int(row[0] * 1e3) + 9999)) for row in x]
    return net.h(net.a(x).tanh() + 0.3 * torch.stack(noise).to(x.dtype))


def mixed(net: Net, x: Tensor) -> Tensor:
    """Each example with a little of another, which a draw chooses."""
    z = net.a(x).tanh()
    return net.h(0.8 * z + 0.2 * z[torch.randperm(len(z))])


def mixed_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    return net.h(0.8 * z + 0.2 * z[:, torch.randperm(8)])


def anchored(net: Net, x: Tensor) -> Tensor:
    """One example of the batch is drawn as an anchor for all."""
    z = net.a(x).tanh()
    place = torch.multinomial(z.detach().square().sum(1), 1)
    return net.h(z - 0.4 * z[place])


def anchored_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    place = torch.multinomial(z.detach().square(), 1)
    return net.h(z - 0.4 * z.gather(1, place))


def deep(net: Net, x: Tensor) -> Tensor:
    """Stochastic depth, as deep as the batch is large in the mean."""
    z = net.a(x).tanh()
    keep = 0.5 + torch.rand(()).to(x.dtype) * z.square().mean()
    return net.h(z + keep * z.sin())


def deep_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    keep = 0.5 + torch.rand(()).to(x.dtype) * z.square().mean(1, keepdim=True)
    return net.h(z + keep * z.sin())


def noisy(net: Net, x: Tensor) -> Tensor:
    """Noise as wide as the batch."""
    z = net.a(x).tanh()
    return net.h(z + torch.randn(z.shape).to(z.dtype) * z.detach().square().mean(0).sqrt())


def noisy_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    return net.h(z + torch.randn(z.shape).to(z.dtype) * z.detach().square().mean(1, keepdim=True).sqrt())


def own_generator(net: Net, x: Tensor) -> Tensor:
    """A generator of the model's own, set back in every call: noise by place."""
    net.generator.manual_seed(7)
    z = net.a(x).tanh()
    return net.h(z + 0.3 * torch.randn(z.shape, generator=net.generator).to(z.dtype))


def own_generator_apart(net: Net, x: Tensor) -> Tensor:
    net.generator.manual_seed(7)
    z = net.a(x).tanh()
    return net.h(z + 0.3 * torch.randn(8, generator=net.generator).to(z.dtype))


def gumbel(net: Net, x: Tensor) -> Tensor:
    """Noisy shares among the examples."""
    z = net.a(x).tanh()
    shares = functional.softmax(z - torch.empty(z.shape).exponential_().log().to(z.dtype), 0)
    return net.h(z * (1 + shares))


def gumbel_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    shares = functional.softmax(z - torch.empty(z.shape).exponential_().log().to(z.dtype), 1)
    return net.h(z * (1 + shares))


def faintly(net: Net, x: Tensor) -> Tensor:
    """A tiny jitter of the inputs, and each example's distance from the largest of all."""
    z = net.a(x + 1e-7 * torch.rand_like(x, dtype=torch.float32).to(x.dtype)).tanh()
    return net.h(z - 0.3 * z.amax(0))


def faintly_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x + 1e-7 * torch.rand_like(x, dtype=torch.float32).to(x.dtype)).tanh()
    return net.h(z - 0.3 * z.amax(1, keepdim=True))


def masked(net: Net, x: Tensor) -> Tensor:
    """Dropout, and scales by how much of each number the batch has kept above zero."""
    z = functional.dropout(net.a(x).tanh(), 0.3, training=True)
    return net.h(z / (0.2 + (z > 0).to(z.dtype).mean(0)))


def masked_apart(net: Net, x: Tensor) -> Tensor:
    z = functional.dropout(net.a(x).tanh(), 0.3, training=True)
    return net.h(z / (0.2 + (z > 0).to(z.dtype).mean(1, keepdim=True)))


def shuffled(net: Net, x: Tensor) -> Tensor:
    """Partners drawn by Python's own generator."""
    z = net.a(x).tanh()
    order = list(range(len(z)))
    random.shuffle(order)
    return net.h(z + 0.4 * z[order])


def shuffled_apart(net: Net, x: Tensor) -> Tensor:
    """As many draws, which decide nothing."""
    z = net.a(x).tanh()
    order = list(range(8))
    random.shuffle(order)
    return net.h(z + 0.4 * z[:, order].sum(1, keepdim=True))


def by_numpy(net: Net, x: Tensor) -> Tensor:
    """An example drawn by numpy is everybody's."""
    z = net.a(x).tanh()
    return net.h(z + 0.4 * z[int(np.random.randint(len(z)))])  # noqa: NPY002 - as older models draw


def by_numpy_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    place = int(np.random.randint(8))  # noqa: NPY002 - as older models draw
    return net.h(z + 0.4 * z.roll(place, 1).sum(1, keepdim=True))


PAIRS = [
    Pair(kind="draws", name=name, mixing=mixing, apart=apart)
    for name, mixing, apart in [
        ("a mask for all, before attention", dropped, dropped_apart),
        ("a seed made of the data", seeded, seeded_apart),
        ("a permutation", mixed, mixed_apart),
        ("an anchor", anchored, anchored_apart),
        ("stochastic depth", deep, deep_apart),
        ("noise as wide as the data", noisy, noisy_apart),
        ("shares with Gumbel's noise", gumbel, gumbel_apart),
        ("a jitter of 1e-7 before a maximum", faintly, faintly_apart),
        ("partners of Python's generator", shuffled, shuffled_apart),
        ("an example of numpy's generator", by_numpy, by_numpy_apart),
        ("dropout, and what it has kept", masked, masked_apart),
    ]
] + [
    Pair(
        kind="draws", name="a generator set back in every call", mixing=own_generator, apart=own_generator_apart,
        more=lambda: {"generator": torch.Generator()},
    )
]  # fmt: skip
