"""Models of every kind of sum, and the jobs that collect them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from catalog.requests.woodbury import Woodbury
from engine.collect import collect_or_read
from engine.errors import NothingToAnalyse
from engine.factors.factor_set import FactorSet
from engine.memory.plan import Chosen
from tests.oracles import workspace

Made = tuple[nn.Module, Tensor, Tensor]


class Apply(nn.Module):
    """Some parts, used as a case says."""

    def __init__(self, use: Callable[[Any, Any], Tensor], **parts: Any) -> None:
        super().__init__()
        self.use = use
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def images(use: Callable[[Any, Any], Tensor] | None = None, *shape: int, **parts: Any) -> Made:
    def flat(net: Any, x: Tensor) -> Tensor:
        return net.h(net.a(x).tanh().flatten(2).mean(2))

    size = shape or (4, 7, 6)
    return Apply(use or flat, **parts), torch.randn(6, *size), torch.randint(3, (6,))


def tied() -> Made:
    table, head = nn.Embedding(11, 4), nn.Linear(4, 11)
    head.weight = table.weight
    net = Apply(lambda s, x: s.head(s.m(s.table(x)).tanh()), table=table, m=nn.Linear(4, 4), head=head)
    return net, torch.randint(11, (6, 5)), torch.randint(11, (6, 5))


def with_mask() -> Made:
    return (
        Apply(lambda s, x: s.h(s.a(s.e(x)).tanh()), e=nn.Embedding(9, 5), a=nn.Linear(5, 7), h=nn.Linear(7, 9)),
        torch.randint(9, (6, 5)),
        torch.randint(9, (6, 5)).masked_fill(torch.rand(6, 5) < 0.3, -100),
    )


def rows(width: int = 6, use: Callable[[Any, Any], Tensor] | None = None, **parts: Any) -> Made:
    parts.setdefault("h", nn.Linear(8, 5))
    return Apply(use or (lambda s, x: s.h(s.a(x).tanh())), **parts), torch.randn(6, width), torch.randint(5, (6,))


def frozen_bias() -> Made:
    made = rows(a=nn.Linear(6, 8))
    made[0].a.bias.requires_grad_(False)
    return made


def frozen_weight() -> Made:
    made = images(a=nn.Conv2d(4, 6, 3), h=nn.Linear(6, 3))
    made[0].a.weight.requires_grad_(False)
    made[0].h.weight.requires_grad_(False)
    return made


def attend(net: Any, x: Tensor) -> Tensor:
    q, k, v = net.q(x), net.k(x), net.v(x)
    return net.h((q @ k.mT).softmax(-1) @ v).mean(1)


def experts(net: Any, x: Tensor) -> Tensor:
    chosen, out = net.r(x).argmax(1), x.new_zeros(len(x), 8)
    for number, each in enumerate(net.e):
        at = (chosen == number).nonzero()[:, 0]
        out = out.index_add(0, at, each(x[at]))
    return net.h(out.tanh())


def tied_modules() -> Made:
    made = rows(8, lambda s, x: s.h(s.b(s.a(x).tanh()).tanh()), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    made[0].b.weight, made[0].b.bias = made[0].a.weight, made[0].a.bias
    return made


KINDS: dict[str, Callable[[], Made]] = {
    "linear": lambda: rows(a=nn.Linear(6, 8)),
    "wider than what is mirrored": lambda: rows(600, a=nn.Linear(600, 8)),
    "without bias": lambda: rows(a=nn.Linear(6, 8, bias=False)),
    "frozen bias": frozen_bias,
    "frozen weight": frozen_weight,
    "positions": lambda: (
        Apply(lambda s, x: s.h(s.a(x).tanh()).mean(1), a=nn.Linear(6, 8), h=nn.Linear(8, 5)),
        torch.randn(6, 3, 6),
        torch.randint(5, (6,)),
    ),
    "shared input": lambda: (
        Apply(attend, q=nn.Linear(6, 8), k=nn.Linear(6, 8), v=nn.Linear(6, 8), h=nn.Linear(8, 5)),
        torch.randn(6, 3, 6),
        torch.randint(5, (6,)),
    ),
    "called twice": lambda: rows(8, lambda s, x: s.h(s.a(s.a(x).tanh()).tanh()), a=nn.Linear(8, 8)),
    "two modules, one weight": tied_modules,
    "convolution": lambda: images(a=nn.Conv2d(4, 6, 3, padding=1), h=nn.Linear(6, 3)),
    "convolution, strided, dilated, reflected": lambda: images(
        a=nn.Conv2d(4, 6, (3, 2), stride=(2, 1), dilation=(1, 2), padding=2, padding_mode="reflect"), h=nn.Linear(6, 3)
    ),
    "convolution, grouped": lambda: images(a=nn.Conv2d(4, 6, 3, groups=2), h=nn.Linear(6, 3)),
    "convolution of one place": lambda: images(a=nn.Conv2d(4, 6, 1, stride=2), h=nn.Linear(6, 3)),
    "convolution, in one dimension": lambda: images(None, 4, 9, a=nn.Conv1d(4, 6, 3), h=nn.Linear(6, 3)),
    "transposed convolution": lambda: images(
        a=nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), h=nn.Linear(6, 3)
    ),
    "norms": lambda: images(
        lambda s, x: s.h(s.g(s.a(x)).tanh().flatten(2).mean(2) * s.n(s.b(x).flatten(2).mean(2))),
        a=nn.Conv2d(4, 6, 3),
        g=nn.GroupNorm(2, 6),
        b=nn.BatchNorm2d(4),
        n=nn.Linear(4, 6),
        h=nn.Linear(6, 3),
    ),
    "norm called twice": lambda: rows(8, lambda s, x: s.h(s.n(s.n(x).tanh())), n=nn.LayerNorm(8)),
    "bare parameters": lambda: rows(
        8, lambda s, x: s.h(x * s.w + s.b), w=nn.Parameter(torch.randn(8)), b=nn.Parameter(torch.randn(8))
    ),
    "matrix used by hand": lambda: rows(use=lambda s, x: s.h((x @ s.w).tanh()), w=nn.Parameter(torch.randn(6, 8))),
    "experts": lambda: rows(use=experts, r=nn.Linear(6, 3), e=nn.ModuleList(nn.Linear(6, 8) for _ in range(3))),
    "recurrent": lambda: (
        Apply(lambda s, x: s.h(s.r(x)[0][:, -1]), r=nn.GRU(6, 5, batch_first=True), h=nn.Linear(5, 5)),
        torch.randn(6, 4, 6),
        torch.randint(5, (6,)),
    ),
    "embedding, ignored targets": with_mask,
    "tied head": tied,
}
COMPLEX = {
    "complex": lambda: rows(use=lambda s, x: s.h(s.a(x.to(torch.cfloat)).abs()), a=nn.Linear(6, 8, dtype=torch.cfloat)),
}


def job(made: Made, policy: Any = "dense", **options: Any) -> Any:
    net, x, y = made
    dtype = torch.float32 if options.get("dtype") == "float32" else torch.float64
    chosen: dict[str, Any] = {key: options.pop(key) for key in ("micro_batch", "parts", "sketched") if key in options}
    options = {"fisher": "empirical", "batch_size": 6} | options
    x = x.to(dtype) if x.is_floating_point() else x
    task = "token_classification" if y.ndim == 2 else "classification"
    space = workspace(
        net if any(each.is_complex() for each in net.parameters()) else net.to(dtype), [(x, y)], task, **options
    )
    space.options.woodbury, space.inputs.examples = Woodbury(policy=policy), len(x)
    if chosen:
        space.resume.chosen = Chosen(**{"parts": (("a", "h"),)} | chosen)
    return space


def measured(kind: str, policy: Any = "dense", **options: Any) -> FactorSet:
    torch.manual_seed(0)
    found = collect_or_read(job((KINDS | COMPLEX)[kind](), policy, **options))
    assert isinstance(found, FactorSet)
    return found


def refused(kind: str, policy: Any = "dense", **options: Any) -> str:
    """Names of the layers whose sums were refused, or everything that was said where nothing is left."""
    try:
        found = measured(kind, policy, **options)
    except NothingToAnalyse as error:
        return str(error) if "sums of the gradient identity" in str(error) else ""
    rows = [row for row in found.declared if "sums of the gradient identity" in row.why]
    assert all(row.reason == "gradient_identity" for row in rows)
    return ", ".join(row.name for row in rows)
