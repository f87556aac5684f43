"""Networks written by hand: what people build besides the packages' models, and what has misled recognition."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, rnn

from benchmarks.architecture_cases.case import EXAMPLES, Builder, Case, enlivened, normal, tokens

IN, HIDDEN, CLASSES, T = 5, 8, 3, 7
LENGTHS = (7, 3, 5, 2, 7, 4)


class Recurrent(nn.Module):
    """A recurrent layer and the classes of its last state."""

    def __init__(
        self, kind: type[nn.RNNBase], *, time_first: bool = False, packed: bool = False, directions: int = 1
    ) -> None:
        super().__init__()
        self.layer = kind(IN, HIDDEN, num_layers=directions, batch_first=not time_first, bidirectional=directions == 2)
        self.head = nn.Linear(HIDDEN * directions, CLASSES)
        self.time_first, self.packed = time_first, packed

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits (N, 3)."""
        if self.time_first:
            x = x.transpose(0, 1)
        if self.packed and lengths is not None:
            whole = rnn.pack_padded_sequence(x, lengths.long().cpu(), batch_first=True, enforce_sorted=False)
            states, _ = rnn.pad_packed_sequence(self.layer(whole)[0], batch_first=True)
            return self.head(states.sum(1) / lengths[:, None])  # type: ignore[no-any-return]
        states = self.layer(x)[0]
        return self.head(states[-1] if self.time_first else states[:, -1])  # type: ignore[no-any-return]


class Cells(nn.Module):
    """A cell that is called once a step."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(IN, HIDDEN)  # type: ignore[call-arg]
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 3)."""
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)  # type: ignore[no-any-return]


class Calling(nn.Module):
    """A network whose forward is a function of its parts: ``run(model, x)``."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *inputs: Tensor) -> Tensor:
        """Whatever ``run`` makes of it."""
        return self.run(self, *inputs)


def linear_head() -> nn.Linear:
    """Classes of a hidden vector."""
    return nn.Linear(HIDDEN, CLASSES)


def _stem() -> nn.Linear:
    return nn.Linear(IN, HIDDEN)


def classifying(
    model: Callable[[], nn.Module], *shape: int, alone: bool = True, random: bool = False, lengths: bool = False
) -> Builder:
    """A classifier of normal inputs of ``shape``."""

    def build() -> Case:
        own = enlivened(model())
        inputs: Tensor | tuple[Tensor, ...] = normal(EXAMPLES, *shape)
        if lengths:
            inputs = inputs, torch.tensor(LENGTHS, dtype=torch.float64)  # type: ignore[assignment]
        return Case(
            model=own,
            inputs=inputs,
            targets=torch.randint(0, CLASSES, (EXAMPLES,)),
            task="classification",
            alone=alone,
            random=random,
        )

    return build


def _query(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    query = model.query.repeat(len(x), 1, 1)
    return model.head(functional.scaled_dot_product_attention(query, hidden, hidden)[:, 0])  # type: ignore[no-any-return]


def _projected(model: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.einsum("ntd,dhk->nthk", model.stem(x).tanh(), model.project)
    return model.head(torch.einsum("nthk,hkd->ntd", hidden.tanh(), model.back).mean(1))  # type: ignore[no-any-return]


def _attending(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    return model.head(model.attention(hidden, hidden, hidden, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]


def _equilibrium(model: nn.Module, x: Tensor) -> Tensor:
    entered = model.stem(x)
    hidden = torch.zeros_like(entered)
    for _ in range(4):
        hidden = (0.3 * model.inner(hidden) + entered).tanh()
    return model.head(hidden)  # type: ignore[no-any-return]


def _conv(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(HIDDEN, CLASSES))


def _bilinear(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.stem(x).tanh()
    return model.head(model.pair(x, hidden).tanh())  # type: ignore[no-any-return]


def bag() -> Case:
    """Bags of words, with a mean over each."""
    model = nn.Sequential(nn.EmbeddingBag(31, HIDDEN), nn.Tanh(), linear_head())
    return Case(
        model=enlivened(model),
        inputs=tokens(EXAMPLES, T),
        targets=torch.randint(0, CLASSES, (EXAMPLES,)),
        task="classification",
    )


def _looked_up(model: nn.Module, ids: Tensor) -> Tensor:
    hidden = model.table(ids) + model.places
    return model.head(hidden.tanh().mean(1))  # type: ignore[no-any-return]


def reading(
    run: Callable[..., Tensor], *, each: bool = False, **parts: Callable[[], nn.Module | nn.Parameter]
) -> Builder:
    """A model of ids; with ``each``, it answers for each position."""

    def build() -> Case:
        model = Calling(run, table=nn.Embedding(31, HIDDEN), **{name: part() for name, part in parts.items()})
        targets = tokens(EXAMPLES, T) if each else torch.randint(0, CLASSES, (EXAMPLES,))
        task = "masked_lm" if each else "classification"
        return Case(model=enlivened(model), inputs=tokens(EXAMPLES, T), targets=targets, task=task)

    return build


def calling(
    run: Callable[..., Tensor | dict[str, Tensor]], **parts: Callable[[], nn.Module | nn.Parameter]
) -> Callable[[], nn.Module]:
    """``run`` between a linear stem and a linear head."""
    return lambda: Calling(run, stem=_stem(), head=linear_head(), **{name: part() for name, part in parts.items()})  # type: ignore[arg-type]


def between(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A layer between two linear ones."""
    return lambda: nn.Sequential(_stem(), kind(), nn.Tanh(), linear_head())


def numbers(*shape: int) -> Callable[[], nn.Parameter]:
    """A parameter of this shape."""
    return lambda: nn.Parameter(torch.zeros(*shape))


CASES: dict[str, Builder] = {
    "LSTM": classifying(partial(Recurrent, nn.LSTM), T, IN),
    "LSTM, two directions and layers": classifying(partial(Recurrent, nn.LSTM, directions=2), T, IN),
    "GRU": classifying(partial(Recurrent, nn.GRU), T, IN),
    "GRU, time first": classifying(partial(Recurrent, nn.GRU, time_first=True), T, IN),
    "GRU, packed lengths": classifying(partial(Recurrent, nn.GRU, packed=True), T, IN, lengths=True),
    "RNN": classifying(partial(Recurrent, nn.RNN), T, IN),
    "LSTM cell": classifying(partial(Cells, nn.LSTMCell), T, IN),
    "GRU cell": classifying(partial(Cells, nn.GRUCell), T, IN),
    "Bilinear": classifying(calling(_bilinear, pair=lambda: nn.Bilinear(IN, HIDDEN, HIDDEN)), IN),
    "Embedding bag": bag,
    "Weight norm": classifying(lambda: nn.Sequential(parametrizations.weight_norm(_stem()), nn.Tanh(), linear_head()), IN),
    "Spectral norm": classifying(lambda: nn.Sequential(parametrizations.spectral_norm(_stem()), nn.Tanh(), linear_head()), IN),
    "Spectral norm, older": classifying(lambda: nn.Sequential(nn.utils.spectral_norm(_stem()), nn.Tanh(), linear_head()), IN),
    "Orthogonal": classifying(lambda: nn.Sequential(parametrizations.orthogonal(_stem()), nn.Tanh(), linear_head()), IN),
    "Learned query": classifying(calling(_query, query=numbers(1, 1, HIDDEN)), T, IN),
    "Einsum projections": classifying(calling(_projected, project=numbers(HIDDEN, 2, 3), back=numbers(2, 3, HIDDEN)), T, IN),
    "Multi-head attention": classifying(calling(_attending, attention=lambda: nn.MultiheadAttention(HIDDEN, 2, batch_first=True)), T, IN),
    "Deep equilibrium": classifying(calling(_equilibrium, inner=lambda: nn.Linear(HIDDEN, HIDDEN)), IN),
    "Depthwise and pointwise": classifying(lambda: _conv(nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(), nn.Conv2d(6, HIDDEN, 1), nn.PReLU(HIDDEN)), 3, 6, 6),
    "Transposed convolution": classifying(lambda: _conv(nn.ConvTranspose2d(3, HIDDEN, 3, stride=2), nn.GroupNorm(2, HIDDEN), nn.Tanh()), 3, 4, 4),
    "Circular convolution": classifying(lambda: _conv(nn.Conv2d(3, HIDDEN, 3, padding=1, padding_mode="circular", dilation=2), nn.InstanceNorm2d(HIDDEN, affine=True), nn.Tanh()), 3, 6, 6),
    "Positions added": reading(_looked_up, places=numbers(T, HIDDEN), head=linear_head),
}  # fmt: skip
