"""The cases of the conformance table: what a library is given, and what it should have found.

Labels are given (the empirical Fisher), since then every library can be asked for the same exact
numbers. Names refer to failures that libraries have shown in practice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from benchmarks.conformance.oracle import blocks, example_block, patches
from benchmarks.conformance.problem import Problem

Batch = tuple[Any, Tensor]
CLASSES = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    problem: Problem
    batch: Batch
    parameter: str
    """The parameter whose layer is judged."""
    expected: list[tuple[Tensor, Tensor]]
    """A and G; of each group or slice in turn, where there are several. An exact block stands in G beside A = 1."""
    question: Literal["factors", "coverage", "names_layer", "order"] = "factors"


class Positions(nn.Module):
    """``layer`` over (N, C, …) or (N, T, d), a nonlinearity, and a mean over the positions."""

    def __init__(self, layer: nn.Module, *, channels_first: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.channels_first = channels_first
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Class logits (N, C)."""
        hidden = self.layer(x)
        hidden = hidden.flatten(2).transpose(1, 2) if self.channels_first else hidden
        return hidden.tanh().mean(1)[:, :CLASSES] * 3


class Gathered(nn.Module):
    """The same through linear maps of gathered patches, one for each group of channels."""

    def __init__(self, linears: list[nn.Linear], gather: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)
        self.gather = gather
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Class logits (N, C)."""
        parts = [linear(rows) for linear, rows in zip(self.linears, self.gather(x), strict=True)]
        return torch.cat(parts, -1).tanh().mean(1)[:, :CLASSES] * 3


def _problem(name: str, model: nn.Module, layer: str, **options: Any) -> Problem:  # noqa: ANN401 - the record's own
    model.eval().requires_grad_(requires_grad=False)
    if layer:
        model.get_submodule(layer).requires_grad_(requires_grad=True)
    chosen = {"task": "classification", "examples": 6, "terms": 1, "layers": (), "fisher": "empirical"} | options
    return Problem(name=name, model=model, **chosen)


def _labels(count: int = 6) -> Tensor:
    return torch.randint(0, CLASSES, (count,))


def linear() -> Case:
    """A linear layer over (N, d)."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    problem = _problem("linear", model, "0")
    batch = torch.randn(6, 4, dtype=torch.float64), _labels()
    return Case(problem=problem, batch=batch, parameter="0.weight", expected=blocks(problem, model, ("0",), batch))


def linear_over_positions() -> Case:
    """A linear layer over (N, T, d)."""
    model = Positions(nn.Linear(4, 5))
    problem = _problem("linear over positions", model, "layer")
    batch = torch.randn(6, 7, 4, dtype=torch.float64), _labels()
    expected = blocks(problem, model, ("layer",), batch)
    return Case(problem=problem, batch=batch, parameter="layer.weight", expected=expected)


def transposed_linear() -> Case:
    """GPT-2's Conv1D, a linear layer that stores Wᵀ."""
    layer = Conv1D(5, 4)
    model = Positions(layer)
    plain = Positions(_as_linear(layer.weight.data.T, layer.bias.data))
    problem = _problem("HF Conv1D", model, "layer")
    batch = torch.randn(6, 7, 4, dtype=torch.float64), _labels()
    expected = blocks(problem, plain, ("layer",), batch)
    return Case(problem=problem, batch=batch, parameter="layer.weight", expected=expected)


def convolution(name: str, axes: int = 2, mode: str = "zeros", **options: int) -> Case:
    """A convolution with these options, against linear maps of patches gathered by hand."""
    kernel, padding = (3,) * axes, 2 if mode != "zeros" else 1
    chosen = {"stride": 1, "dilation": 1, "groups": 1} | options
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    entering, leaving, groups = 4, 4, chosen["groups"]
    layer = kind(entering, leaving, 3, padding=padding, padding_mode=mode, **chosen)
    weights = layer.weight.data.flatten(1).chunk(groups)
    linears = [_as_linear(weight, bias) for weight, bias in zip(weights, layer.bias.data.chunk(groups), strict=True)]

    def gather(x: Tensor) -> list[Tensor]:
        padded = functional.pad(x, [padding] * (2 * axes), mode="constant" if mode == "zeros" else mode)
        parts = padded.chunk(groups, 1)
        return [patches(part, kernel, chosen["stride"], chosen["dilation"]) for part in parts]

    plain = Gathered(linears, gather)
    model = Positions(layer, channels_first=True)
    problem = _problem(name, model, "layer")
    batch = torch.randn(6, entering, *(6 - axes,) * axes, dtype=torch.float64), _labels()
    names = tuple(f"linears.{group}" for group in range(groups))
    expected = blocks(problem, plain, names, batch)
    return Case(problem=problem, batch=batch, parameter="layer.weight", expected=expected)


def transposed_convolution() -> Case:
    """A transposed convolution of stride 2: a convolution of the input spread out with zeros."""
    layer = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1)
    # stored (in, out, k, k); as a convolution the kernel is reversed, as a layer it is not
    weight = layer.weight.data.transpose(0, 1).flatten(1)

    def gather(x: Tensor) -> list[Tensor]:
        spread = x.new_zeros(*x.shape[:2], *(2 * size - 1 for size in x.shape[2:]))
        spread[:, :, ::2, ::2] = x
        rows = patches(functional.pad(spread, [1] * 4), (3, 3), 1, 1)
        return [rows.unflatten(-1, (3, 3, 3)).flip(-1, -2).flatten(-3)]

    plain = Gathered([_as_linear(weight, layer.bias.data)], gather)
    problem = _problem("transposed convolution", Positions(layer, channels_first=True), "layer")
    batch = torch.randn(6, 3, 4, 4, dtype=torch.float64), _labels()
    expected = blocks(problem, plain, ("linears.0",), batch)
    return Case(problem=problem, batch=batch, parameter="layer.weight", expected=expected)


class Twice(nn.Module):
    """One linear map, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Class logits."""
        return self.layer(self.layer(x).tanh()).tanh()[:, :CLASSES] * 3


def used_twice() -> Case:
    """A module that is called twice: its contributions are summed."""
    model = Twice()
    problem = _problem("module used twice", model, "layer")
    batch = torch.randn(6, 4, dtype=torch.float64), _labels()
    expected = blocks(problem, model, ("layer",), batch)
    return Case(problem=problem, batch=batch, parameter="layer.weight", expected=expected)


def tied() -> Case:
    """Two modules that share their parameters: one layer, called twice."""
    plain = Twice()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
    model[2].weight, model[2].bias = model[0].weight, model[0].bias

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.inner(x)[:, :CLASSES] * 3
            return logits

    plain.layer.load_state_dict(model[0].state_dict())
    problem = _problem("tied weights", Scaled(), "inner.0")
    batch = torch.randn(6, 4, dtype=torch.float64), _labels()
    expected = blocks(problem, plain, ("layer",), batch)
    return Case(problem=problem, batch=batch, parameter="inner.0.weight", expected=expected)


class Language(nn.Module):
    """Tokens, a linear map, a causal mean, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.layer = nn.Linear(4, 5)
        self.head = nn.Linear(5, 11)
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (N, T, 11)."""
        kept = attention_mask.unsqueeze(-1).double()
        hidden = (self.layer(self.table(input_ids)).tanh() * kept).cumsum(1) / kept.cumsum(1).clamp_min(1)
        logits: Tensor = self.head(hidden)
        return logits


def padding() -> Case:
    """Padded sequences, whose padding is neither data nor a loss term."""
    model = Language()
    mask = torch.ones(6, 7, dtype=torch.int64)
    for row, length in enumerate((7, 3, 5, 2, 7, 4)):
        mask[row, length:] = 0
    ids = torch.randint(0, 11, (6, 7))
    targets = torch.where(mask.bool(), ids, -100)
    problem = _problem("padding", model, "layer", task="causal_lm", terms=6)
    batch = {"input_ids": ids, "attention_mask": mask}, targets
    expected = blocks(problem, model, ("layer",), batch, mask.bool())
    return Case(problem=problem, batch=batch, parameter="layer.weight", expected=expected)


def ignored() -> Case:
    """A prompt whose targets are ignored: its positions are data, and no loss terms."""
    model = Language()
    ids = torch.randint(0, 11, (6, 7))
    mask = torch.ones_like(ids)
    targets = ids.clone()
    targets[:, :3] = -100
    problem = _problem("ignored targets", model, "layer", task="causal_lm", terms=6)
    batch = {"input_ids": ids, "attention_mask": mask}, targets
    expected = blocks(problem, model, ("layer",), batch)
    return Case(problem=problem, batch=batch, parameter="layer.weight", expected=expected)


class Attending(nn.Module):
    """``nn.MultiheadAttention`` over itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Class logits."""
        return self.attention(x, x, x, need_weights=False)[0].tanh().mean(1)[:, :CLASSES] * 3


class AttendingByHand(nn.Module):
    """The same, with its packed projection as a linear map."""

    def __init__(self, like: nn.MultiheadAttention) -> None:
        super().__init__()
        self.project = _as_linear(like.in_proj_weight.data, like.in_proj_bias.data)
        self.out = _as_linear(like.out_proj.weight.data, like.out_proj.bias.data)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Class logits."""
        heads = self.project(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).flatten(2)
        return self.out(mixed).tanh().mean(1)[:, :CLASSES] * 3


def attention(part: str) -> Case:
    """``nn.MultiheadAttention``: its packed in-projection, or its out-projection."""
    model = Attending()
    plain = AttendingByHand(model.attention)
    problem = _problem(f"MultiheadAttention {part}", model, "attention")
    batch = torch.randn(6, 5, 4, dtype=torch.float64), _labels()
    name, parameter = {
        "in_proj": ("project", "attention.in_proj_weight"),
        "out_proj": ("out", "attention.out_proj.weight"),
    }[part]
    return Case(problem=problem, batch=batch, parameter=parameter, expected=blocks(problem, plain, (name,), batch))


def embedding() -> Case:
    """A table: a linear map of one-hot tokens, so A is diagonal."""
    table = nn.Embedding(5, 4)
    model = Positions(table)

    class OneHot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(5, 4, bias=False).double()
            self.map.weight.data = table.weight.data.T.double()

        def forward(self, ids: Tensor) -> Tensor:
            return self.map(functional.one_hot(ids, 5).double()).tanh().mean(1)[:, :CLASSES] * 3

    problem = _problem("embedding", model, "layer")
    batch = torch.randint(0, 5, (6, 7)), _labels()
    expected = blocks(problem, OneHot(), ("map",), batch)
    return Case(problem=problem, batch=batch, parameter="layer.weight", expected=expected)


def norm(name: str, layer: nn.Module, shape: tuple[int, ...]) -> Case:
    """A scale and a shift: an exact block."""
    model = Positions(layer, channels_first=len(shape) > 3 or isinstance(layer, nn.BatchNorm1d))
    problem = _problem(name, model, "layer")
    batch = torch.randn(*shape, dtype=torch.float64), _labels()
    names = tuple(f"layer.{own}" for own, _ in layer.named_parameters())
    block = example_block(problem, model, names, batch)
    expected = [(torch.ones(1, 1, dtype=torch.float64), block)]
    return Case(problem=problem, batch=batch, parameter="layer.weight", expected=expected)


def coverage() -> Case:
    """Share of GPT-2's trainable numbers that are covered, or declared with a reason."""
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=12, vocab_size=32, use_cache=False)
    model = GPT2LMHeadModel(config).double()
    problem = _problem("coverage of GPT-2", model, "", task="causal_lm", terms=11)
    model.requires_grad_(requires_grad=True)
    ids = torch.randint(0, 32, (6, 12))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids
    return Case(problem=problem, batch=batch, parameter="", expected=[], question="coverage")


def not_a_number() -> Case:
    """A NaN in one activation: an error that names the module it comes from."""

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(torch.arange(x.shape[1]) == 2, torch.full_like(x, torch.nan), x)

    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Broken(), nn.Linear(5, CLASSES)).double()
    problem = _problem("NaN in one activation", model, "3")
    batch = torch.randn(6, 4, dtype=torch.float64), _labels()
    return Case(problem=problem, batch=batch, parameter="3.weight", expected=[], question="names_layer")


def order() -> Case:
    """Sampled labels: the same for an example whatever batch it comes in, and whenever."""
    model = Positions(nn.Linear(4, 5))
    problem = _problem("sampled labels, other order", model, "layer", fisher="mc")
    batch = torch.randn(6, 7, 4, dtype=torch.float64), _labels()
    return Case(problem=problem, batch=batch, parameter="layer.weight", expected=[], question="order")


def _as_linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight.data, linear.bias.data = weight.clone(), bias.clone()
    return linear


CASES: dict[str, Callable[[], Case]] = {
    "linear": linear,
    "linear over positions": linear_over_positions,
    "HF Conv1D": transposed_linear,
    "conv1d": lambda: convolution("conv1d", 1),
    "conv2d": lambda: convolution("conv2d"),
    "conv3d": lambda: convolution("conv3d", 3),
    "conv2d, stride 2": lambda: convolution("conv2d, stride 2", stride=2),
    "conv2d, dilation 2": lambda: convolution("conv2d, dilation 2", dilation=2),
    "conv2d, reflect": lambda: convolution("conv2d, reflect", mode="reflect"),
    "conv2d, circular": lambda: convolution("conv2d, circular", mode="circular"),
    "conv2d, 2 groups": lambda: convolution("conv2d, 2 groups", groups=2),
    "conv2d, depthwise": lambda: convolution("conv2d, depthwise", groups=4),
    "transposed convolution": transposed_convolution,
    "module used twice": used_twice,
    "tied weights": tied,
    "padding": padding,
    "ignored targets": ignored,
    "MultiheadAttention in_proj": lambda: attention("in_proj"),
    "MultiheadAttention out_proj": lambda: attention("out_proj"),
    "embedding": embedding,
    "LayerNorm": lambda: norm("LayerNorm", nn.LayerNorm(4), (6, 5, 4)),
    "GroupNorm": lambda: norm("GroupNorm", nn.GroupNorm(2, 4), (6, 4, 5, 5)),
    "BatchNorm": lambda: norm("BatchNorm", nn.BatchNorm2d(4), (6, 4, 5, 5)),
    "coverage of GPT-2": coverage,
    "NaN in one activation": not_a_number,
    "sampled labels, other order": order,
}


def built(name: str) -> Case:
    """The case of that name, the same numbers in every process."""
    torch.manual_seed(0)
    return CASES[name]()
