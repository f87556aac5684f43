"""Models that look at the whole batch."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.gradient_identity.cases.pair import Net, Pair


def hidden(net: Net, x: Tensor) -> Tensor:
    return net.a(x).tanh()


def quantile(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(z * (4 * (z - z.quantile(0.9, dim=0))).sigmoid())


def quantile_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(z * (4 * (z - z.quantile(0.9, dim=1, keepdim=True))).sigmoid())


def sort(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(z + 0.3 * z.sort(0).values)


def sort_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(z + 0.3 * z.sort(1).values)


def cumulated(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(z + 0.2 * z.cumsum(0))


def cumulated_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(z + 0.2 * z.cumsum(1))


def attention(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(z + (z @ z.T).softmax(1) @ z)


def attention_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x).unflatten(1, (4, 2))
    return net.h((z + (z @ z.mT).softmax(2) @ z).flatten(1))


def direction(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    with torch.no_grad():
        first = torch.linalg.svd(z, full_matrices=False).Vh[0]
    return net.h(z - 0.5 * (z @ first)[:, None] * first)


def direction_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    with torch.no_grad():
        first = torch.linalg.svd(net.a.weight, full_matrices=False).U[:, 0]
    return net.h(z - 0.5 * (z @ first)[:, None] * first)


def frobenius(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(3 * z / z.norm())


def frobenius_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(3 * z / z.norm(dim=1, keepdim=True))


def median(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h((z - 0.5 * z.median(0).values).tanh())


def median_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h((z - 0.5 * z.median(1, keepdim=True).values).tanh())


def ranks(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(z * (1 + x[:, :1].argsort(0).argsort(0).to(z.dtype) / 4))


def ranks_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    edges = torch.tensor([-1.0, 0.0, 1.0], dtype=z.dtype)
    return net.h(z * (1 + torch.bucketize(x[:, :1].contiguous(), edges).to(z.dtype) / 4))


def smoothed(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(functional.avg_pool1d(z.T[None], 3, 1, 1, count_include_pad=False)[0].T)


def smoothed_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(functional.avg_pool1d(z[:, None], 3, 1, 1, count_include_pad=False)[:, 0])


def trimmed(net: Net, x: Tensor) -> Tensor:
    """The mean without the two largest and the two smallest, of which four examples have none."""
    z = hidden(net, x)
    middle = z.sort(0).values[2:-2]
    return net.h(z - 0.5 * middle.mean(0) if len(middle) else z)


def trimmed_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(z - 0.5 * z.sort(1).values[:, 2:-2].mean(1, keepdim=True))


def fifth(net: Net, x: Tensor) -> Tensor:
    """The fifth largest of each number is the scale of all."""
    z = hidden(net, x)
    return net.h(z * (1 + z.kthvalue(len(z) - 4, 0).values) if len(z) > 4 else z)


def fifth_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(z * (1 + z.kthvalue(z.shape[1] - 4, 1, keepdim=True).values))


def prototypes(net: Net, x: Tensor) -> Tensor:
    """Every example leans on the sum of all that come after the fifth."""
    z = hidden(net, x)
    return net.h(z + 0.2 * z[5:].sum(0))


def prototypes_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(z + 0.2 * z[:, 5:].sum(1, keepdim=True))


def crowded(net: Net, x: Tensor) -> Tensor:
    """Numbers that more than five examples share the sign of are halved."""
    z = hidden(net, x)
    return net.h(torch.where((z > 0).sum(0) > 4, 0.5 * z, z))


def crowded_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(torch.where((z > 0).sum(1, keepdim=True) > 4, 0.5 * z, z))


def beside(net: Net, x: Tensor) -> Tensor:
    """A branch past the mixing, whose gradient is that of the same loss."""
    z = hidden(net, x)
    return net.h(z - z.mean(0, keepdim=True).sin()) + net.side(x)


def beside_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return net.h(z - z.mean(1, keepdim=True).sin()) + net.side(x)


def centred_back(net: Net, x: Tensor) -> Tensor:
    """Nothing is seen forwards: gradients lose their mean over the batch on the way back."""
    z = hidden(net, x)
    if z.requires_grad:
        z.register_hook(lambda gradient: gradient - 0.5 * gradient.mean(0))
    return net.h(z)


def centred_back_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    if z.requires_grad:
        z.register_hook(lambda gradient: gradient - 0.5 * gradient.mean(1, keepdim=True))
    return net.h(z)


def zero_forwards(net: Net, x: Tensor) -> Tensor:
    """Zero in value, the mean of all in gradient."""
    z = hidden(net, x)
    middle = z.mean(0)
    return net.h(z + middle - middle.detach())


def zero_forwards_apart(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    middle = z.mean(1, keepdim=True)
    return net.h(z + middle - middle.detach())


PAIRS = [
    Pair(kind="whole batch", name=name, mixing=mixing, apart=apart)
    for name, mixing, apart in [
        ("a gate at the 0.9 quantile", quantile, quantile_apart),
        ("sorted numbers", sort, sort_apart),
        ("a running sum", cumulated, cumulated_apart),
        ("attention over examples", attention, attention_apart),
        ("the first singular direction removed", direction, direction_apart),
        ("one Frobenius norm", frobenius, frobenius_apart),
        ("the median", median, median_apart),
        ("ranks as scales", ranks, ranks_apart),
        ("gradients without their mean", centred_back, centred_back_apart),
        ("a mean that is zero in value", zero_forwards, zero_forwards_apart),
        ("a trimmed mean", trimmed, trimmed_apart),
        ("the fifth largest", fifth, fifth_apart),
        ("the sum of those behind the fifth", prototypes, prototypes_apart),
        ("signs that more than four share", crowded, crowded_apart),
        ("pooled neighbours in the order of the batch", smoothed, smoothed_apart),
    ]
] + [
    Pair(
        kind="whole batch", name="a branch beside", mixing=beside, apart=beside_apart,
        more=lambda: {"side": nn.Linear(6, 5)},
    )
]  # fmt: skip
