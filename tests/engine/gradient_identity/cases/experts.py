"""Models with experts, whose routers look at one token, one text or the whole batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.gradient_identity.cases.pair import Net, Pair, tokens

EXPERTS = 3


def experts() -> Mapping[str, Any]:
    return {"r": nn.Linear(8, EXPERTS), "e": nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))}


def routed(net: Net, z: Tensor, kept: Tensor, choice: Tensor) -> Tensor:
    """Each token that is kept goes through its expert, weighed by the router."""
    weight = net.r(z).softmax(-1)
    for number, expert in enumerate(net.e):
        mine = ((choice == number) & kept).to(z.dtype)
        z = z + (mine * weight[..., number])[..., None] * expert(z).tanh()
    return z


def pooled(net: Net, z: Tensor) -> Tensor:
    return net.h(z.mean(1))


def capacity(net: Net, x: Tensor) -> Tensor:
    """Experts take two tokens of the batch each, and leave the rest out."""
    z = net.a(x).tanh()
    choice = net.r(z).argmax(-1)
    flat = torch.nn.functional.one_hot(choice.flatten(), EXPERTS)
    rank = (flat.cumsum(0) * flat).sum(1).view_as(choice)
    return pooled(net, routed(net, z, rank <= 2, choice))


def capacity_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    choice = net.r(z).argmax(-1)
    mine = torch.nn.functional.one_hot(choice, EXPERTS)
    rank = (mine.cumsum(1) * mine).sum(-1)
    return pooled(net, routed(net, z, rank <= 1, choice))


def chosen(net: Net, x: Tensor) -> Tensor:
    """Each expert picks the tokens that it likes best, out of the whole batch."""
    z = net.a(x).tanh()
    flat = z.flatten(0, 1)
    weight, out = net.r(flat).softmax(-1), flat
    for number, expert in enumerate(net.e):
        best = weight[:, number].topk(max(1, len(flat) // 3)).indices
        out = out.index_add(0, best, weight[best, number, None] * expert(flat[best]).tanh())
    return pooled(net, out.view_as(z))


def chosen_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    weight, out = net.r(z).softmax(-1), z
    for number, expert in enumerate(net.e):
        best = weight[..., number].topk(1).indices
        own = z.gather(1, best[..., None].expand(-1, -1, 8))
        scaled = weight[..., number].gather(1, best)[..., None] * expert(own).tanh()
        out = out.scatter_add(1, best[..., None].expand(-1, -1, 8), scaled)
    return pooled(net, out)


def balanced(net: Net, x: Tensor) -> Tensor:
    """Gates over how often the batch has used an expert."""
    z = net.a(x).tanh()
    choice = net.r(z).argmax(-1)
    use = torch.nn.functional.one_hot(choice, EXPERTS).to(z.dtype).mean((0, 1))
    return pooled(net, routed(net, z / (0.3 + use[choice])[..., None], choice >= 0, choice))


def balanced_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    choice = net.r(z).argmax(-1)
    use = torch.nn.functional.one_hot(choice, EXPERTS).to(z.dtype).mean(1)
    return pooled(net, routed(net, z / (0.3 + use.gather(1, choice))[..., None], choice >= 0, choice))


def shared_out(net: Net, x: Tensor) -> Tensor:
    """Gates that add up to one over the tokens of the batch."""
    z = net.a(x).tanh()
    weight = net.r(z).flatten(0, 1).softmax(0).view(*z.shape[:2], EXPERTS)
    return pooled(net, z + sum(weight[..., k, None] * 3 * expert(z).tanh() for k, expert in enumerate(net.e)))


def shared_out_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    weight = net.r(z).softmax(1)
    return pooled(net, z + sum(weight[..., k, None] * 3 * expert(z).tanh() for k, expert in enumerate(net.e)))


def dispatched(net: Net, x: Tensor) -> Tensor:
    """Tokens sorted by expert, and put back by the order itself, where its inverse was meant."""
    return _sorted(net, x, inverse=False)


def dispatched_apart(net: Net, x: Tensor) -> Tensor:
    return _sorted(net, x, inverse=True)


def _sorted(net: Net, x: Tensor, *, inverse: bool) -> Tensor:
    z = net.a(x).tanh()
    flat = z.flatten(0, 1)
    weight = net.r(flat).softmax(-1)
    choice = weight.argmax(-1)
    order = choice.argsort(stable=True)
    parts = flat[order].split(torch.bincount(choice, minlength=EXPERTS).tolist())
    out = torch.cat([expert(part).tanh() for expert, part in zip(net.e, parts, strict=True)])
    back = out[order.argsort()] if inverse else out[order]
    return pooled(net, z + (weight.amax(1, keepdim=True) * back).view_as(z))


def slots(net: Net, x: Tensor) -> Tensor:
    """Experts see slots, each a mean of all tokens, as soft mixtures have them."""
    z = net.a(x).tanh()
    flat = z.flatten(0, 1)
    weight = net.r(flat)
    entered = weight.softmax(0).T @ flat
    left = torch.stack([expert(slot) for expert, slot in zip(net.e, entered, strict=True)])
    return pooled(net, z + (weight.softmax(1) @ left.tanh()).view_as(z))


def slots_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    weight = net.r(z)
    entered = weight.softmax(1).mT @ z
    left = torch.stack([expert(entered[:, k]) for k, expert in enumerate(net.e)], 1)
    return pooled(net, z + weight.softmax(2) @ left.tanh())


def thrifty(net: Net, x: Tensor) -> Tensor:
    """An expert that fewer than four tokens want is not asked."""
    z = net.a(x).tanh()
    choice = net.r(z).argmax(-1)
    wanted = torch.bincount(choice.flatten(), minlength=EXPERTS)
    return pooled(net, routed(net, z, wanted[choice] > 3, choice))


def thrifty_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    choice = net.r(z).argmax(-1)
    wanted = torch.nn.functional.one_hot(choice, EXPERTS).sum(1)
    return pooled(net, routed(net, z, wanted.gather(1, choice) > 1, choice))


def stacked(net: Net, x: Tensor) -> Tensor:
    """All experts in one parameter, chosen by the batch as a whole."""
    z = net.a(x).tanh()
    best = net.r(z).flatten(0, 1).sum(0).argmax()
    return pooled(net, z + (z @ net.w[best]).tanh())


def stacked_apart(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    gate = net.r(z).softmax(-1)
    return pooled(net, z + torch.einsum("nte,ntd,edo->nto", gate, z, net.w).tanh())


def one_by_one(net: Net, x: Tensor) -> Tensor:
    """Each text goes through the expert that the text before it wanted."""
    return _looped(net, x, shift=1)


def one_by_one_apart(net: Net, x: Tensor) -> Tensor:
    return _looped(net, x, shift=0)


def _looped(net: Net, x: Tensor, *, shift: int) -> Tensor:
    z = net.a(x).tanh()
    gate = net.r(z.mean(1))
    choice = gate.argmax(1).roll(shift).tolist()
    rows = [text + net.e[k](text).tanh() * each.softmax(0)[k] for text, k, each in zip(z, choice, gate, strict=True)]
    return pooled(net, torch.stack(rows))


PAIRS = [
    Pair(kind="experts", name=name, mixing=mixing, apart=apart, more=experts, inputs=tokens)
    for name, mixing, apart in [
        ("a capacity", capacity, capacity_apart),
        ("tokens that experts choose", chosen, chosen_apart),
        ("balanced by use", balanced, balanced_apart),
        ("shares of tokens", shared_out, shared_out_apart),
        ("a sorted dispatch", dispatched, dispatched_apart),
        ("texts one by one", one_by_one, one_by_one_apart),
        ("soft slots", slots, slots_apart),
        ("experts that few want", thrifty, thrifty_apart),
    ]
] + [
    Pair(
        kind="experts", name="one parameter for all", mixing=stacked, apart=stacked_apart, inputs=tokens,
        more=lambda: {"r": nn.Linear(8, EXPERTS), "w": nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)},
    )
]  # fmt: skip
