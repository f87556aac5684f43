"""Networks by hand that mislead recognition: rows out of order, examples that mix, weights that are read otherwise."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from benchmarks.architecture_cases.case import Builder
from benchmarks.architecture_cases.networks import (
    HIDDEN,
    IN,
    T,
    between,
    calling,
    classifying,
    linear_head,
    numbers,
    reading,
)


class Rms(nn.Module):
    """A root-mean-square norm with a forward of its own."""

    def __init__(self, *, clamped: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.norm_eps = 0.1
        self.clamped = clamped

    def forward(self, x: Tensor) -> Tensor:
        """x, scaled."""
        size = x.square().mean(-1, keepdim=True)
        size = size.sqrt().clamp_min(0.8) if self.clamped else (size + self.norm_eps).sqrt()
        return self.weight * (x / size)


class RMSNorm(Rms):
    """The same under the usual name."""


class HandBatchNorm(nn.Module):
    """A batch norm by hand, with the batch's own statistics: examples mix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """x, normalised over the batch."""
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1).sqrt() * self.weight + self.bias


class FrozenBatchNorm(HandBatchNorm):
    """The same with statistics of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """x, scaled and shifted."""
        return (x - 0.2) / 1.3 * self.weight + self.bias


class Straight(torch.autograd.Function):
    """A linear map with a backward of its own."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        """``x Wᵀ``."""
        context.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Its gradients."""
        x, weight = context.saved_tensors  # type: ignore[attr-defined]
        return gradient @ weight, gradient.T @ x


def _siamese(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(torch.cat([x[:, 0], x[:, 1]])).tanh()  # both sides of all pairs, one after the other
    left, right = hidden.chunk(2)
    return model.head((left - right).abs())  # type: ignore[no-any-return]


def _flipped(model: nn.Module, x: Tensor) -> Tensor:
    both = model.head(model.stem(torch.cat([x, x.flip(1)])).tanh())
    return both[: len(x)] + both[len(x) :]


def _repeated(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x.repeat_interleave(3, 0) * torch.arange(1, 4).repeat(len(x))[:, None]).tanh()
    return model.head(hidden).view(len(x), 3, -1).sum(1)


def _tiled(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x.repeat(3, 1) * torch.arange(1, 4).repeat_interleave(len(x))[:, None]).tanh()
    return model.head(hidden).view(3, len(x), -1).sum(0)


def _time_first(model: nn.Module, x: Tensor) -> Tensor:
    rows = x.transpose(0, 1).reshape(-1, IN)
    return model.head(model.stem(rows).tanh()).view(T, len(x), -1).logsumexp(0)


def _routed(model: nn.Module, x: Tensor) -> Tensor:
    flat = x.reshape(-1, IN)
    hidden = model.stem(flat).tanh()
    scores = model.router(hidden).softmax(-1)
    out = torch.zeros_like(hidden)
    for place, expert in enumerate(model.experts):
        weight, chosen = scores[:, place].topk(len(flat) // 2)  # experts choose among the tokens of all examples
        out = out.index_add(0, chosen, weight[:, None] * expert(hidden[chosen]))
    return model.head((hidden + out).view(len(x), T, -1).mean(1))  # type: ignore[no-any-return]


def _across(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    return model.head((hidden @ hidden.T).softmax(-1) @ hidden)  # type: ignore[no-any-return]


def _dropped(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(functional.dropout(model.stem(x).tanh(), 0.3, training=True))  # type: ignore[no-any-return]


def _gumbel(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(functional.gumbel_softmax(model.stem(x)))  # type: ignore[no-any-return]


def _cosine(model: nn.Module, x: Tensor) -> Tensor:
    hidden = functional.normalize(model.stem(x).tanh(), dim=-1)
    return 4 * functional.linear(hidden, functional.normalize(model.head.weight, dim=-1))


def _scaled(model: nn.Module, x: Tensor) -> Tensor:
    own = {name: 2 * each for name, each in model.stem.named_parameters()}
    return model.head(functional_call(model.stem, own, (x,)).tanh())  # type: ignore[no-any-return]


def _generated(model: nn.Module, x: Tensor) -> Tensor:
    weight = model.hyper(model.code).view(HIDDEN, IN)
    return model.head(functional_call(model.stem, {"weight": weight}, (x,)).tanh())  # type: ignore[no-any-return]


def _cleaned(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(model.stem(x).tanh() + functional.linear(x, model.stem.weight.nan_to_num()))  # type: ignore[no-any-return]


def _chosen(model: nn.Module, x: Tensor) -> Tensor:
    weight = torch.where(model.stem.weight.abs() > 0.3, model.stem.weight, 0.0)
    return model.head(model.stem(x).tanh() + functional.linear(x, weight))  # type: ignore[no-any-return]


def _quantised(model: nn.Module, x: Tensor) -> Tensor:
    weight = model.stem.weight
    scale = weight.detach().abs().max() / 127
    rounded = (weight / scale).round().to(torch.int8).to(weight.dtype) * scale
    return model.head(functional.linear(x, weight + (rounded - weight).detach(), model.stem.bias).tanh())  # type: ignore[no-any-return]


def _branching(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x).tanh()
    extra = functional.linear(x, model.stem.weight) * (x[:, :1] > 1.2)
    if bool((x[:, 0] > 1.2).any()):
        hidden = hidden + extra
    return model.head(hidden)  # type: ignore[no-any-return]


def _own(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(Straight.apply(x, model.stem.weight).tanh())  # type: ignore[no-any-return, no-untyped-call]


def _ensemble(model: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.bmm(x.expand(model.weights.shape[0], -1, -1), model.weights).tanh()
    return model.head(hidden).mean(0)  # type: ignore[no-any-return]


def _narrowed(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(model.stem(x).to(torch.float32).tanh().to(x.dtype))  # type: ignore[no-any-return]


def _named(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return {"scores": model.head(model.stem(x).tanh())}


def _transposed(model: nn.Module, ids: Tensor) -> Tensor:
    hidden = model.table(ids.T) + model.places[:, None]
    return model.head(hidden.tanh().mean(0))  # type: ignore[no-any-return]


def _scaled_table(model: nn.Module, ids: Tensor) -> Tensor:
    hidden = model.table(ids) * HIDDEN**0.5
    return functional.linear(model.stem(hidden).tanh(), model.table.weight)


def _experts() -> nn.Module:
    return nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))


CASES: dict[str, Builder] = {
    "Siamese": classifying(calling(_siamese), 2, IN),
    "Flipped copies": classifying(calling(_flipped), IN),
    "Repeated rows": classifying(calling(_repeated), IN),
    "Tiled rows": classifying(calling(_tiled), IN),
    "Time first in two dimensions": classifying(calling(_time_first), T, IN),
    "Experts that choose tokens": classifying(calling(_routed, router=lambda: nn.Linear(HIDDEN, 2), experts=_experts), T, IN),
    "Attention across examples": classifying(calling(_across), IN, alone=False),
    "Batch norm by hand": classifying(between(HandBatchNorm), IN, alone=False),
    "Batch norm by hand, own statistics": classifying(between(FrozenBatchNorm), IN),
    "Batch norm without statistics": classifying(between(lambda: nn.BatchNorm1d(HIDDEN, track_running_stats=False)), IN, alone=False),
    "Batch norm": classifying(between(lambda: nn.BatchNorm1d(HIDDEN)), IN),
    "RMS norm, epsilon of another name": classifying(between(lambda: RMSNorm(clamped=False)), IN),
    "RMS norm, clamped": classifying(between(lambda: RMSNorm(clamped=True)), IN),
    "MC dropout": classifying(calling(_dropped), IN, random=True),
    "Gumbel": classifying(calling(_gumbel), IN, random=True),
    "Cosine classifier": classifying(calling(_cosine), IN),
    "Scaled by functional_call": classifying(calling(_scaled), IN),
    "Generated weights": classifying(calling(_generated, hyper=lambda: nn.Linear(4, HIDDEN * IN), code=numbers(4)), IN),
    "Weight read through nan_to_num": classifying(calling(_cleaned), IN),
    "Weight read through where": classifying(calling(_chosen), IN),
    "Straight-through int8": classifying(calling(_quantised), IN),
    "Weight read on a later branch": classifying(calling(_branching), IN),
    "Custom autograd function": classifying(calling(_own), IN),
    "Ensemble of one bmm": classifying(calling(_ensemble, weights=numbers(3, IN, HIDDEN)), IN),
    "Cast to float32 inside": classifying(calling(_narrowed), IN),
    "Dictionary without logits": classifying(calling(_named), IN),
    "Parameter of no size": classifying(calling(lambda model, x: model.head(model.stem(x) + model.none.sum()), none=numbers(0)), IN),
    "Transposed ids": reading(_transposed, places=numbers(T, HIDDEN), head=linear_head),
    "Scaled tied embedding": reading(_scaled_table, each=True, stem=lambda: nn.Linear(HIDDEN, HIDDEN)),
}  # fmt: skip
