"""Models that compute a part in a narrower type, beside which small mixing must not hide."""

import torch
from torch import Tensor, nn

from tests.engine.gradient_identity.cases.pair import Net, Pair


def faintly_mixed(z: Tensor) -> Tensor:
    """Three thousandths of the batch's largest numbers, far below the rounding of bfloat16."""
    return z + 3e-3 * z.amax(0)


def faintly(z: Tensor) -> Tensor:
    return z + 3e-3 * z.amax(1, keepdim=True)


def table(net: Net, x: Tensor) -> Tensor:
    """A look-up in a table of half precision."""
    return net.a(x).tanh() + net.table[(x[:, 0] > 0).long()].to(x.dtype)


def softmax(net: Net, x: Tensor) -> Tensor:
    """Shares of the inputs in half precision."""
    return net.a(x * x.half().softmax(1).to(x.dtype)).tanh()


def eight_bits(net: Net, x: Tensor) -> Tensor:
    """Inputs rounded to eight bits of floating point."""
    return net.a(x.to(torch.float8_e4m3fn).to(x.dtype)).tanh()


def autocast(net: Net, x: Tensor) -> Tensor:
    """A gate under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        gate = torch.einsum("ni,i->n", x, net.direction)
    return net.a(x).tanh() * (gate.to(x.dtype) > 0)[:, None] + net.a(x)


def counts(net: Net, x: Tensor) -> Tensor:
    """How many inputs are positive, counted in bfloat16."""
    number = (x > 0).to(torch.bfloat16).sum(1, keepdim=True)
    return net.a(x).tanh() * (1 + number.to(x.dtype) / 6)


def single(net: Net, x: Tensor) -> Tensor:
    """A norm in float32, whatever the model's precision is."""
    z = net.a(x).tanh()
    scale = x.to(torch.float32).square().mean(1, keepdim=True).rsqrt()
    return z * scale.to(z.dtype)


def integers(net: Net, x: Tensor) -> Tensor:
    """Hidden numbers in steps of a 127th of the largest of all, straight through."""
    z = net.a(x).tanh()
    step = z.detach().abs().amax() / 7
    return net.h(z + ((z / step).round().to(torch.int8).to(z.dtype) * step - z).detach())


def integers_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    step = z.detach().abs().amax(1, keepdim=True) / 7
    return net.h(z + ((z / step).round().to(torch.int8).to(z.dtype) * step - z).detach())


def powers(net: Net, x: Tensor) -> Tensor:
    """A common exponent for the whole batch, as block floating point has it."""
    z = net.a(x).tanh()
    exponent = torch.frexp(x.half().abs().amax()).exponent
    return net.h(z * 2.0 ** (exponent.to(z.dtype) - 2))


def powers_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    exponent = torch.frexp(x.half().abs().amax(1, keepdim=True)).exponent
    return net.h(z * 2.0 ** (exponent.to(z.dtype) - 2))


def rounded(net: Net, x: Tensor) -> Tensor:
    """A bias by the batch, in bfloat16, of the size of its rounding."""
    z = net.a(x)
    middle = z.detach().mean(0).to(torch.bfloat16).to(z.dtype)
    return net.h((z + 0.01 * middle).tanh())


def rounded_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x)
    middle = x.mean(1, keepdim=True).to(torch.bfloat16).to(z.dtype)
    return net.h((z + 0.01 * middle).tanh())


PAIRS = [
    Pair(
        kind="narrow type",
        name=name,
        mixing=lambda net, x, part=part: net.h(faintly_mixed(part(net, x))),
        apart=lambda net, x, part=part: net.h(faintly(part(net, x))),
        more=more,
    )
    for name, part, more in [
        ("a table of half precision", table, lambda: {"table": nn.Buffer(torch.randn(2, 8).half())}),
        ("shares in half precision", softmax, dict),
        ("inputs of eight bits", eight_bits, dict),
        ("a gate under autocast", autocast, lambda: {"direction": nn.Buffer(torch.randn(6))}),
        ("counts in bfloat16", counts, dict),
        ("a norm in float32", single, dict),
    ]
] + [
    Pair(kind="narrow type", name=name, mixing=mixing, apart=apart)
    for name, mixing, apart in [
        ("steps of integers", integers, integers_apart),
        ("a common exponent", powers, powers_apart),
        ("a rounded bias", rounded, rounded_apart),
    ]
]
