"""Networks by hand that put torch's own operations together in less usual ways."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.architecture_cases.case import EXAMPLES, Builder, Case, enlivened, normal
from benchmarks.architecture_cases.networks import (
    CLASSES,
    HIDDEN,
    IN,
    Calling,
    T,
    calling,
    classifying,
    linear_head,
    numbers,
    reading,
)


def _square() -> nn.Linear:
    return nn.Linear(HIDDEN, HIDDEN)


def _regressing(run: Callable[..., Tensor], *shape: int, width: int = 2, **parts: Callable[[], nn.Module]) -> Builder:
    """A regression of ``width`` numbers."""

    def build() -> Case:
        own = {name: part() for name, part in parts.items()}
        model = Calling(run, stem=nn.Linear(IN, HIDDEN), head=nn.Linear(HIDDEN, width), **own)
        targets = normal(EXAMPLES, width)
        return Case(model=enlivened(model), inputs=normal(EXAMPLES, *shape), targets=targets, task="regression")

    return build


def _frozen(model: Callable[[], nn.Module], *words: str) -> Callable[[], nn.Module]:
    """``model`` with the parameters frozen whose names hold one of ``words``."""

    def build() -> nn.Module:
        own = model()
        for name, parameter in own.named_parameters():
            parameter.requires_grad_(not any(word in name for word in words))
        return own

    return build


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """The mean over positions."""
        return x.mean(2)


class _Standardised(nn.Conv2d):
    """A convolution with weight standardisation and a gain."""

    def __init__(self) -> None:
        super().__init__(3, HIDDEN, 3, bias=True)
        self.gain = nn.Parameter(torch.ones(HIDDEN, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """The convolution with the standardised weight."""
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        weight = self.gain * (self.weight - mean) / (variance + 1e-5).sqrt()
        return functional.conv2d(x, weight, self.bias)


def _time_major_einsum(model: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.einsum("ntd,dh->tnh", model.stem(x).tanh(), model.weights)
    return model.head(hidden.view(T * len(x), -1).tanh()).view(T, len(x), -1).mean(0)  # type: ignore[no-any-return]


def _from_the_left(model: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.matmul(model.weights, model.stem(x).tanh().transpose(1, 2))
    return model.head(hidden.view(len(x), -1)[:, :HIDDEN].tanh())  # type: ignore[no-any-return]


def _twice(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(model.inner(model.inner(model.stem(x)).tanh()).tanh())  # type: ignore[no-any-return]


def _autoencoder(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x).tanh()
    return model.head(
        hidden + functional.linear(functional.linear(hidden, model.stem.weight.T).tanh(), model.stem.weight)
    )  # type: ignore[no-any-return]


def _listed(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    for scale in model.scales:
        hidden = (hidden * scale).tanh()
    return model.head(hidden)  # type: ignore[no-any-return]


def _named(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    return model.head((hidden @ model.own["in"]).tanh() @ model.own["out"] + model.own["shift"])  # type: ignore[no-any-return]


def _nested_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    def inner(hidden: Tensor) -> Tensor:
        return model.inner(hidden).tanh()  # type: ignore[no-any-return]

    def outer(hidden: Tensor) -> Tensor:
        return checkpoint(inner, model.outer(hidden).tanh(), use_reentrant=False)  # type: ignore[no-any-return]

    return model.head(checkpoint(outer, model.stem(x), use_reentrant=False))  # type: ignore[no-any-return]


def _complex(model: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.fft.rfft(model.stem(x), dim=-1)
    hidden = hidden * torch.view_as_complex(model.filter)
    return model.head(torch.fft.irfft(hidden, n=HIDDEN, dim=-1).tanh())  # type: ignore[no-any-return]


def _masked_attention(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    hide = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return model.head(model.attention(hidden, hidden, hidden, attn_mask=hide)[0].mean(1))  # type: ignore[no-any-return]


def _attention_time_first(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x).transpose(0, 1)
    return model.head(model.attention(hidden, hidden, hidden, need_weights=False)[0].mean(0))  # type: ignore[no-any-return]


def _cross(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    return model.head(model.attention(hidden[:, :2], hidden, hidden, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]


def _grouped_queries(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    shape = (len(x), x.shape[1], -1, 2)
    query, key, value = (part(hidden).view(shape).transpose(1, 2) for part in (model.q, model.k, model.v))
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return model.head(mixed.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(T), 0.1 ** torch.arange(HIDDEN // 2))
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """x, its pairs rotated."""
        even, odd = x[..., ::2], x[..., 1::2]
        rotated = torch.stack([even * self.cosine - odd * self.sine, even * self.sine + odd * self.cosine], -1)
        return rotated.flatten(-2)


def _rotated(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    query, key = model.rope(model.q(hidden)), model.rope(model.k(hidden))
    return model.head(functional.scaled_dot_product_attention(query, key, hidden).mean(1))  # type: ignore[no-any-return]


def _sometimes(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x).tanh()
    chosen = x[:, 0] > 0
    out = hidden.clone()
    if bool(chosen.any()):
        out[chosen] = model.further(hidden[chosen])
    return model.head(out)  # type: ignore[no-any-return]


def _buffer(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(functional.linear(model.stem(x).tanh(), model.norm.running_var.expand(HIDDEN, HIDDEN)))  # type: ignore[no-any-return]


def _unused_call(model: nn.Module, x: Tensor) -> Tensor:
    with_eye = model.inner(torch.eye(HIDDEN, dtype=x.dtype)).norm().detach()
    return model.head(model.inner(model.stem(x).tanh()) / with_eye)  # type: ignore[no-any-return]


def _called_in_vain(model: nn.Module, x: Tensor) -> Tensor:
    size = model.inner(3 * x[:, :1].expand(-1, HIDDEN)).norm(dim=-1, keepdim=True).detach()
    return model.head(model.inner(model.stem(x).tanh()) / size)  # type: ignore[no-any-return]


def _kept_keys(model: nn.Module, x: Tensor) -> Tensor:
    kept, query = [], x
    for step in model.stem(x).tanh().unbind(1):
        query, key = model.q(step), model.k(step)
        kept.append((key, step))
    keys, values = (torch.stack(each, 1) for each in zip(*kept, strict=True))
    return model.head(((keys @ query[..., None]).softmax(1) * values).sum(1))  # type: ignore[no-any-return]


def _distances(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    places = torch.arange(T)
    bias = model.table((places[:, None] - places[None]).clamp(-3, 3) + 3).permute(2, 0, 1)
    scores = hidden.unsqueeze(1) @ hidden.unsqueeze(1).transpose(-1, -2) + bias
    return model.head((scores.softmax(-1) @ hidden.unsqueeze(1)).mean((1, 2)))  # type: ignore[no-any-return]


def _gated(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    return model.head(hidden * model.inner(hidden).sigmoid() + model.scale.exp() * hidden)  # type: ignore[no-any-return]


def _detached(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x).tanh()
    return model.head(hidden + (model.inner(hidden) - hidden).detach() + model.inner(hidden.detach()))  # type: ignore[no-any-return]


def _low_rank(model: nn.Module, x: Tensor) -> Tensor:
    weight = model.up @ model.down
    return model.head(functional.linear(model.stem(x).tanh(), weight))  # type: ignore[no-any-return]


def _multiplied(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(torch.einsum("nd,nd->n", model.stem(x), model.other(x)).unsqueeze(1).expand(-1, HIDDEN).tanh())  # type: ignore[no-any-return]


def _scanned(model: nn.Module, x: Tensor) -> Tensor:
    entered = model.conv(model.stem(x).transpose(1, 2))[..., :T].transpose(1, 2)
    state = entered.new_zeros(len(x), HIDDEN)
    for step in entered.unbind(1):
        state = state * (-model.decay.exp()).exp() + step
    return model.head(state + model.skip * entered[:, -1])  # type: ignore[no-any-return]


def _prompted(model: nn.Module, ids: Tensor) -> Tensor:
    hidden = torch.cat([model.prompt.expand(len(ids), -1, -1), model.table(ids)], 1)
    return model.head(model.inner(hidden).tanh().mean(1))  # type: ignore[no-any-return]


def _tied_both(model: nn.Module, ids: Tensor) -> Tensor:
    hidden = model.inner(model.table(ids).mean(1, keepdim=True)) + model.table(ids.flip(1))
    return functional.linear(model.norm(hidden), model.table.weight)


def _padded(model: nn.Module, ids: Tensor) -> Tensor:
    hidden = model.table(ids.masked_fill(ids % 3 == 0, 0))
    return model.head(model.inner(hidden).tanh().amax(1))  # type: ignore[no-any-return]


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(HIDDEN, 2, 12, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _decoder() -> nn.Module:
    return nn.TransformerDecoderLayer(HIDDEN, 2, 12, 0.0, batch_first=True)


def _decoded(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    return model.head(model.decoder(hidden[:, :3], hidden).mean(1))  # type: ignore[no-any-return]


def _encoded(model: nn.Module, x: Tensor) -> Tensor:
    hide = torch.arange(T) >= 5
    return model.head(model.encoder(model.stem(x), src_key_padding_mask=hide.expand(len(x), -1)).mean(1))  # type: ignore[no-any-return]


def _stacked(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x).tanh()
    outs = torch.stack([expert(hidden) for expert in model.experts], 1)
    return model.head((model.router(hidden).softmax(-1).unsqueeze(-1) * outs).sum(1))  # type: ignore[no-any-return]


def _unrolled(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(model.inner(functional.unfold(x, 2).transpose(1, 2)).tanh().mean(1))  # type: ignore[no-any-return]


def _experts() -> nn.Module:
    return nn.ModuleList(copy.deepcopy(_square()) for _ in range(3))


def _seq(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


def _images(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers), nn.Flatten(2), _Mean(), linear_head())


def _attention(**options: object) -> Callable[[], nn.Module]:
    return partial(nn.MultiheadAttention, HIDDEN, 2, **options)


_scalar = numbers(1)
_pair = {"q": lambda: nn.Linear(HIDDEN, HIDDEN), "k": lambda: nn.Linear(HIDDEN, HIDDEN)}
CASES: dict[str, Builder] = {
    "Einsum to time first, then a view": classifying(calling(_time_major_einsum, weights=numbers(HIDDEN, HIDDEN)), T, IN),
    "Weight from the left, then a view": classifying(calling(_from_the_left, weights=numbers(HIDDEN, HIDDEN)), T, IN),
    "Regression": _regressing(_twice, IN, inner=_square),
    "Regression of one number": _regressing(_twice, IN, width=1, inner=_square),
    "Regression over positions": _regressing(lambda model, x: model.head(model.stem(x).tanh()).mean(1), T, IN),
    "Module called twice": classifying(calling(_twice, inner=_square), IN),
    "Module called twice, bias frozen": classifying(_frozen(calling(_twice, inner=_square), "inner.bias"), IN),
    "Weight frozen, bias trained": classifying(_frozen(calling(_twice, inner=_square), "weight"), IN),
    "Tied autoencoder": classifying(calling(_autoencoder), IN),
    "List of learned scales": classifying(calling(_listed, scales=lambda: nn.ParameterList([nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.ones(1))])), IN),
    "Dictionary of parameters": classifying(calling(_named, own=lambda: nn.ParameterDict({"in": nn.Parameter(torch.zeros(HIDDEN, 4)), "out": nn.Parameter(torch.zeros(4, HIDDEN)), "shift": nn.Parameter(torch.zeros(HIDDEN))})), IN),
    "Nested checkpoints": classifying(calling(_nested_checkpoint, inner=_square, outer=_square), IN),
    "Complex filter": classifying(calling(_complex, filter=numbers(HIDDEN // 2 + 1, 2)), IN),
    "Causal attention": classifying(calling(_masked_attention, attention=_attention(batch_first=True)), T, IN),
    "Attention, time first": classifying(calling(_attention_time_first, attention=_attention()), T, IN),
    "Attention with bias rows": classifying(calling(_cross, attention=_attention(batch_first=True, add_bias_kv=True)), T, IN),
    "Cross attention of other widths": classifying(calling(_cross, attention=_attention(batch_first=True, kdim=HIDDEN, vdim=HIDDEN)), T, IN),
    "Grouped queries": classifying(calling(_grouped_queries, q=_square, k=lambda: nn.Linear(HIDDEN, 4), v=lambda: nn.Linear(HIDDEN, 4)), T, IN),
    "Rotary buffers": classifying(calling(_rotated, rope=_Rotary, **_pair), T, IN),
    "Module of some examples": classifying(calling(_sometimes, further=_square), IN),
    "Buffer as a weight": classifying(calling(_buffer, norm=lambda: nn.BatchNorm1d(HIDDEN)), IN),
    "Call on an identity matrix, detached": classifying(calling(_unused_call, inner=_square), IN),
    "Call on data, detached": classifying(calling(_called_in_vain, inner=_square), IN),
    "Keys kept step by step": classifying(calling(_kept_keys, **_pair), T, IN),
    "Table of distances": classifying(calling(_distances, table=lambda: nn.Embedding(7, 2)), T, IN),
    "Gate and learned scalar": classifying(calling(_gated, inner=_square, scale=_scalar), IN),
    "Detached residual": classifying(calling(_detached, inner=_square), IN),
    "Low-rank weight": classifying(calling(_low_rank, up=numbers(HIDDEN, 2), down=numbers(2, HIDDEN)), IN),
    "Product of two projections": classifying(calling(_multiplied, other=lambda: nn.Linear(IN, HIDDEN)), IN),
    "State space with a depthwise convolution": classifying(calling(_scanned, conv=lambda: nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=HIDDEN), decay=numbers(HIDDEN), skip=numbers(HIDDEN)), T, IN),
    "Prompt vectors before tokens": reading(_prompted, prompt=numbers(1, 2, HIDDEN), inner=_square, head=linear_head),
    "Table read twice and tied": reading(_tied_both, each=True, inner=_square, norm=lambda: nn.LayerNorm(HIDDEN)),
    "Padding index by hand": reading(_padded, inner=_square, head=linear_head),
    "Transformer encoder": classifying(calling(lambda model, x: model.head(model.encoder(model.stem(x)).mean(1)), encoder=_transformer), T, IN),
    "Transformer encoder, padded": classifying(calling(_encoded, encoder=_transformer), T, IN),
    "Transformer decoder": classifying(calling(_decoded, decoder=_decoder), T, IN),
    "Soft mixture": classifying(calling(_stacked, experts=_experts, router=lambda: nn.Linear(HIDDEN, 3)), IN),
    "Patches by unfold": classifying(lambda: Calling(_unrolled, inner=nn.Linear(12, HIDDEN), head=linear_head()), 3, 4, 4),
    "Grouped and dilated convolution": classifying(_images(lambda: nn.Conv2d(4, HIDDEN, 3, groups=2, dilation=2, stride=2), nn.GELU), 4, 9, 9),
    "Convolution in 3-D": classifying(_images(lambda: nn.Conv3d(2, HIDDEN, 2, bias=False), lambda: nn.GroupNorm(4, HIDDEN), nn.Tanh), 2, 3, 4, 4),
    "Transposed convolution, grouped": classifying(_images(lambda: nn.ConvTranspose2d(4, HIDDEN, 3, stride=2, groups=2, output_padding=1), nn.Tanh), 4, 3, 3),
    "Transposed convolution in 1-D": classifying(_images(lambda: nn.ConvTranspose1d(3, HIDDEN, 3, padding=1), nn.Tanh), 3, 6),
    "Reflected padding": classifying(_images(lambda: nn.Conv2d(3, HIDDEN, 3, padding="same", padding_mode="reflect"), nn.Tanh), 3, 5, 5),
    "Layer norm over two dimensions": classifying(_seq(lambda: nn.Linear(IN, HIDDEN), lambda: nn.LayerNorm([T, HIDDEN]), nn.Tanh, nn.Flatten, lambda: nn.Linear(T * HIDDEN, CLASSES)), T, IN),
    "Instance norm and shared PReLU": classifying(_images(lambda: nn.Conv1d(3, HIDDEN, 3), lambda: nn.InstanceNorm1d(HIDDEN, affine=True), nn.PReLU), 3, 9),
    "Instance norm with statistics": classifying(_images(lambda: nn.Conv2d(3, HIDDEN, 2), lambda: nn.InstanceNorm2d(HIDDEN, affine=True, track_running_stats=True), nn.Tanh), 3, 4, 4),
    "Weight standardisation with a gain": classifying(_images(_Standardised, nn.Tanh), 3, 5, 5),
    "Pixel shuffle": classifying(_images(lambda: nn.Conv2d(3, 4 * HIDDEN, 1), lambda: nn.PixelShuffle(2), nn.Tanh), 3, 3, 3),
    "Local response and RMS norm": classifying(_seq(lambda: nn.Linear(IN, HIDDEN), lambda: nn.RMSNorm(HIDDEN), nn.GLU, lambda: nn.Linear(HIDDEN // 2, CLASSES)), IN),
}  # fmt: skip
