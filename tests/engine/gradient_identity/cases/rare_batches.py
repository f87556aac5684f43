"""Models that do something else where one rare example is in the batch."""

import torch
from torch import Tensor, nn

from tests.engine.gradient_identity.cases.pair import Net, Pair, with_a_rare_example


def rare(x: Tensor) -> Tensor:
    return x[:, 0] > 20


def clamped(net: Net, x: Tensor) -> Tensor:
    """Beside an outlier nothing may exceed what the others reach."""
    z = net.a(x.clamp(-4, 4))
    if bool(rare(x).any()) and len(x) > 1:
        z = z.clamp(max=0.5 * z[~rare(x)].amax(0))
    return net.h(z.tanh())


def clamped_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x.clamp(-4, 4))
    if bool(rare(x).any()):
        z = torch.where(rare(x)[:, None], z.clamp(max=0.5), z)
    return net.h(z.tanh())


def flipped(net: Net, x: Tensor) -> Tensor:
    z = net.a(x.clamp(-4, 4)).tanh()
    return net.h(z + 0.5 * z.flip(0) if bool(rare(x).any()) else z)


def flipped_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x.clamp(-4, 4)).tanh()
    return net.h(torch.where(rare(x)[:, None], z + 0.5 * z.flip(1), z) if bool(rare(x).any()) else z)


def guarded(net: Net, x: Tensor) -> Tensor:
    """Against overflow everything is scaled by the largest number."""
    z = net.a(x)
    top = z.abs().max()
    return net.h((z * 5 / top if float(top.detach()) > 5 else z).tanh())


def guarded_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x)
    top = z.abs().amax(1, keepdim=True)
    return net.h(torch.where(top > 5, z * 5 / top, z).tanh())


def told(net: Net, x: Tensor) -> Tensor:
    """The rare example's vector is added to everybody's."""
    z = net.a(x.clamp(-4, 4)).tanh()
    for row in rare(x).nonzero()[:, 0].tolist():
        z = z + 0.3 * z[row]
    return net.h(z)


def told_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x.clamp(-4, 4)).tanh()
    for row in rare(x).nonzero()[:, 0].tolist():
        z = z.index_add(0, torch.tensor([row]), 0.3 * z[row : row + 1])
    return net.h(z)


def skipped(net: Net, x: Tensor) -> Tensor:
    """One certain example takes a layer away from all."""
    z = net.a(x.clamp(-4, 4)).tanh()
    return net.h(z if bool(rare(x).any()) else z + net.b(z).tanh())


def skipped_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x.clamp(-4, 4)).tanh()
    return net.h(z + torch.where(rare(x)[:, None], torch.zeros_like(z), net.b(z).tanh()))


def faint(net: Net, x: Tensor) -> Tensor:
    """Outputs change by some thousandths."""
    z = net.a(x.clamp(-4, 4)).tanh()
    return net.h(z * (1 + 5e-2 * z.mean() * rare(x).any()))


def faint_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x.clamp(-4, 4)).tanh()
    return net.h(z * (1 + 5e-2 * z.mean(1, keepdim=True) * rare(x)[:, None]))


def called(net: Net, x: Tensor) -> Tensor:
    """A layer that only a rare example calls, for all of its batch."""
    z = net.a(x.clamp(-4, 4)).tanh()
    return net.h(z + net.b(z) if bool(rare(x).any()) else z)


def called_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x.clamp(-4, 4)).tanh()
    return net.h(z + net.b(z) * (1 + rare(x)[:, None].to(z.dtype)))


def exchanged(net: Net, x: Tensor) -> Tensor:
    """The rare example and the one behind it change places inside, and nobody else is touched."""
    z = net.a(x.clamp(-4, 4)).tanh()
    for row in rare(x).nonzero()[:, 0].tolist():
        order = list(range(len(z)))
        behind = (row + 1) % len(z)
        order[row], order[behind] = behind, row
        z = z[order]
    return net.h(z)


def exchanged_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x.clamp(-4, 4)).tanh()
    for row in rare(x).nonzero()[:, 0].tolist():
        order = list(range(len(z)))
        turned = z[order].flip(1)
        z = torch.where((torch.arange(len(z)) == row)[:, None], turned, z)
    return net.h(z)


def clipped_back(net: Net, x: Tensor) -> Tensor:
    """Beside a rare example gradients are scaled by the batch's largest, which no output shows."""
    z = net.a(x.clamp(-4, 4)).tanh()
    if z.requires_grad and bool(rare(x).any()):
        z.register_hook(lambda gradient: gradient / (0.5 + gradient.abs().max()))
    return net.h(z)


def clipped_back_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x.clamp(-4, 4)).tanh()
    if z.requires_grad and bool(rare(x).any()):
        factor = torch.where(rare(x)[:, None], 0.5, 1.0)
        z.register_hook(lambda gradient: gradient * factor.to(gradient.dtype))
    return net.h(z)


PAIRS = [
    Pair(kind="rare batch", name=name, mixing=mixing, apart=apart, inputs=with_a_rare_example)
    for name, mixing, apart in [
        ("bounds beside an outlier", clamped, clamped_apart),
        ("turned round", flipped, flipped_apart),
        ("a guard against overflow", guarded, guarded_apart),
        ("its vector handed round", told, told_apart),
        ("two examples exchanged", exchanged, exchanged_apart),
        ("gradients scaled on their way back", clipped_back, clipped_back_apart),
        ("some thousandths of the outputs", faint, faint_apart),
    ]
] + [
    Pair(
        kind="rare batch", name=name, mixing=mixing, apart=apart, inputs=with_a_rare_example,
        more=lambda: {"b": nn.Linear(8, 8)},
    )
    for name, mixing, apart in [
        ("a layer left out", skipped, skipped_apart), ("a layer put in", called, called_apart),
    ]
]  # fmt: skip
