"""Models that look at the number of examples, or at their places."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.gradient_identity.cases.pair import Net, Pair


def temperature(net: Net, x: Tensor) -> Tensor:
    return net.h(net.a(x).tanh()) * (1 + len(x) / 8)


def temperature_apart(net: Net, x: Tensor) -> Tensor:
    return net.h(net.a(x).tanh()) * (1 + x.shape[1] / 8)


def large(net: Net, x: Tensor) -> Tensor:
    """From seven examples on, each sees the middle of all."""
    z = net.a(x).tanh()
    if len(x) > 6:
        z = z - 0.5 * z.detach().amax(0) - 0.2 * z.amin(0)
    return net.h(z)


def large_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    if len(x) > 6:
        return torch.cat([net.h(z[:5]), net.h(z[5:])])
    return net.h(z)


def ghosts(net: Net, x: Tensor) -> Tensor:
    """Halves of the batch with their own spread."""
    z = net.a(x).tanh()
    if len(x) % 4 == 0:
        z = torch.cat([part / (part.norm(dim=0) + 0.5) for part in z.chunk(2)])
    return net.h(z)


def ghosts_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    return net.h(torch.cat([part / (part.norm(dim=1, keepdim=True) + 0.5) for part in z.chunk(2)]))


def couples(net: Net, x: Tensor) -> Tensor:
    """Examples of an even batch come as couples."""
    z = net.a(x).tanh()
    if len(x) % 2 == 0:
        two = z.view(-1, 2, 8)
        z = (two + 0.3 * two.flip(1)).view(-1, 8)
    return net.h(z)


def couples_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    if len(x) % 2 == 0:
        two = z.view(-1, 2, 8)
        z = (two + 0.3 * two.flip(2)).view(-1, 8)
    else:
        z = z + 0.3 * z.flip(1)
    return net.h(z)


def places(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    return net.h(z * (1 + 0.2 * torch.arange(len(x), dtype=z.dtype))[:, None])


def places_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    return net.h(z * (1 + 0.2 * torch.arange(z.shape[1], dtype=z.dtype)))


def slope(net: Net, x: Tensor) -> Tensor:
    return net.h(functional.leaky_relu(net.a(x), 1 / len(x)))


def slope_apart(net: Net, x: Tensor) -> Tensor:
    return net.h(functional.leaky_relu(net.a(x), 1 / x.shape[1]))


def padded(net: Net, x: Tensor) -> Tensor:
    """Filled up to a multiple of three, and pooled with what was filled in."""
    z = net.a(x).tanh()
    filled = functional.pad(z, (0, 0, 0, -len(z) % 3), value=1.0)
    return net.h(z - 0.3 * filled.prod(0))


def padded_apart(net: Net, x: Tensor) -> Tensor:
    filled = functional.pad(x, (0, 0, 0, -len(x) % 3), value=1.0)
    return net.h((net.a(x) - 0.3 * filled.view(-1, 3, 6).flatten(0, 1)[: len(x)].prod(1, keepdim=True)).tanh())


def another(net: Net, x: Tensor) -> Tensor:
    """Batches of more than two examples go through another layer."""
    return net.h((net.b if len(x) > 2 else net.a)(x).tanh())


def another_apart(net: Net, x: Tensor) -> Tensor:
    return net.h((net.b if x.shape[1] > 2 else net.a)(x).tanh() + net.a(x))


PAIRS = [
    Pair(kind="batch size", name=name, mixing=mixing, apart=apart)
    for name, mixing, apart in [
        ("a temperature", temperature, temperature_apart),
        ("a bound of six examples", large, large_apart),
        ("halves of the batch", ghosts, ghosts_apart),
        ("couples", couples, couples_apart),
        ("a scale by place", places, places_apart),
        ("the slope of an activation", slope, slope_apart),
        ("filled to a multiple of three", padded, padded_apart),
    ]
] + [
    Pair(
        kind="batch size", name="another layer", mixing=another, apart=another_apart,
        more=lambda: {"b": nn.Linear(6, 8)},
    )
]  # fmt: skip
