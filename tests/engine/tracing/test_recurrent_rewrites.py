"""Recurrent layers and cells against their own recurrence, written out, each example alone in plain autograd."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from engine.collect import collect_or_read
from engine.errors import EngineError
from engine.factors.factor_set import FactorSet
from engine.tracing.function_mode import ParameterUseMode
from engine.tracing.functional_layers import Uses
from tests.oracles import collect, relative_error, summed_loss, workspace

EXACT = 1e-10
LONGEST = 5
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
Steps = dict[str, list[tuple[Tensor, Tensor]]]
"""Of each weight, what entered it and what left it, step by step."""


class Read(nn.Module):
    """A recurrent layer that is read at every step, and at the end."""

    def __init__(self, recurrent: nn.RNNBase, outputs: int) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.every, self.last = nn.Linear(outputs, 3), nn.Linear(outputs // (1 + recurrent.bidirectional), 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        output, state = self.recurrent(x if self.recurrent.batch_first else x.transpose(0, 1))
        state = state[0] if isinstance(state, tuple) else state
        output = output if self.recurrent.batch_first else output.transpose(0, 1)
        return self.every(output) + self.last(torch.tanh(state).sum(0))[:, None]

    def alone(self, x: Tensor, recurrence: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """The same of one example (T, d), its recurrence computed by another."""
        output, state = recurrence(torch.sin(x))
        return self.every(output) + self.last(torch.tanh(state).sum(0))


class Packed(Read):
    """The same over sequences of several lengths, packed, whatever their order, and padded again."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        own = self.recurrent.batch_first
        x = torch.sin(x)
        packed = pack_padded_sequence(
            x if own else x.transpose(0, 1), lengths.cpu(), batch_first=own, enforce_sorted=False
        )
        output, state = self.recurrent(packed)
        padded, _ = pad_packed_sequence(output, batch_first=own, total_length=LONGEST)
        state = state[0] if isinstance(state, tuple) else state
        padded = padded if own else padded.transpose(0, 1)
        return self.every(padded) + self.last(torch.tanh(state).sum(0))[:, None]

    def alone(self, x: Tensor, recurrence: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        output, state = recurrence(torch.sin(x))
        output = torch.cat([output, output.new_zeros(LONGEST - output.shape[0], output.shape[1])])
        return self.every(output) + self.last(torch.tanh(state).sum(0))


def lstm_step(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (u + v).chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_step(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    (r, z, n), (s, y, m) = u.chunk(3), v.chunk(3)
    update = torch.sigmoid(z + y)
    return (1 - update) * torch.tanh(n + torch.sigmoid(r + s) * m) + update * h, c


STEPS: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "LSTM": lstm_step,
    "GRU": gru_step,
    "RNN_TANH": lambda u, v, h, c: (torch.tanh(u + v), c),
    "RNN_RELU": lambda u, v, h, c: (torch.relu(u + v), c),
}


def multiplied(steps: Steps, module: nn.Module, weight: str, bias: str, entered: Tensor) -> Tensor:
    """``W a + b``, noted; the gradient of what leaves is to be asked for."""
    own = dict(module.named_parameters())
    left = own[weight] @ entered + own.get(bias, 0)
    steps.setdefault(weight, []).append((entered, left))
    return left


def recurrence(module: nn.RNNBase, steps: Steps) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The whole of ``module`` for one example (T, d): outputs and last states."""
    step = STEPS[module.mode]

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        ends = []
        for layer in range(module.num_layers):
            sides = []
            for suffix in (f"_l{layer}", f"_l{layer}_reverse")[: 1 + module.bidirectional]:
                h, c = x.new_zeros(module.proj_size or module.hidden_size), x.new_zeros(module.hidden_size)
                left: list[Tensor] = []
                for row in x.flip(0) if suffix.endswith("reverse") else x:
                    u = multiplied(steps, module, f"weight_ih{suffix}", f"bias_ih{suffix}", row)
                    v = multiplied(steps, module, f"weight_hh{suffix}", f"bias_hh{suffix}", h)
                    h, c = step(u, v, h, c)
                    if module.proj_size:
                        h = multiplied(steps, module, f"weight_hr{suffix}", "", h)
                    left.append(h)
                ends.append(h)
                sides.append(torch.stack(left[::-1] if suffix.endswith("reverse") else left))
            x = torch.cat(sides, 1)
        return x, torch.stack(ends)

    return run


class Truth:
    """Sums over examples, each alone: A, G and the exact trace of every weight with its bias."""

    def __init__(self) -> None:
        self.a: dict[str, list[Tensor]] = {}
        self.g: dict[str, list[Tensor]] = {}
        self.squares: dict[str, Tensor] = {}
        self.terms = 0

    def add(self, module: nn.Module, output: Tensor, target: Tensor, steps: Steps) -> None:
        """One example's output, and the steps that led there."""
        loss = summed_loss(output, target, "cross_entropy")
        self.terms += target.numel()
        own = dict(module.named_parameters())
        for weight, pairs in steps.items():
            g = torch.stack(torch.autograd.grad(loss, [left for _, left in pairs], retain_graph=True))
            bias = weight.replace("weight", "bias")
            a = torch.stack([entered for entered, _ in pairs]).detach()
            a = torch.cat([a, a.new_ones(a.shape[0], 1)], 1) if bias in own else a
            self.a.setdefault(weight, []).append(a)
            self.g.setdefault(weight, []).append(g)
            square = (g.T @ a).square().sum()
            self.squares[weight] = self.squares.get(weight, 0) + square

    def compare(self, whole: FactorSet, prefix: str) -> None:
        """Every factor and trace of ``whole`` that is of one of the weights, and no other layer of that module."""
        found = {layer.name.removeprefix(prefix): layer for layer in whole.layers if layer.name.startswith(prefix)}
        assert set(found) == set(self.a)
        for weight, layer in found.items():
            a, g = torch.cat(self.a[weight]), torch.cat(self.g[weight])
            factors = whole.load(layer.ordinal)
            assert relative_error(factors.A, a.T @ a / a.shape[0]) < EXACT
            assert relative_error(factors.G, g.T @ g / self.terms) < EXACT
            assert layer.exact_trace == pytest.approx(float(self.squares[weight]) / self.terms, rel=EXACT)
            assert layer.positions == a.shape[0]


def recurrent(kind: str, options: dict[str, Any]) -> tuple[nn.RNNBase, int]:
    """A layer in float64, and the width of what it puts out."""
    torch.manual_seed(0)
    module: nn.RNNBase = getattr(nn, kind)(3, 4, **options).double()
    width = (options.get("proj_size") or 4) * (1 + module.bidirectional)
    return module, width


LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {"batch_first": True}),
    ("LSTM", {"num_layers": 2, "bidirectional": True}),
    ("LSTM", {"num_layers": 2, "proj_size": 2, "batch_first": True, "dropout": 0.5}),
    ("LSTM", {"proj_size": 3, "bias": False, "bidirectional": True, "batch_first": True}),
    ("GRU", {}),
    ("GRU", {"num_layers": 3, "bidirectional": True, "batch_first": True}),
    ("GRU", {"bias": False}),
    ("RNN", {"batch_first": True, "bidirectional": True}),
    ("RNN", {"nonlinearity": "relu", "num_layers": 2}),
]


@pytest.mark.part(of=24, by=("kind",))
@pytest.mark.parametrize(("kind", "options"), LAYERS)
@pytest.mark.parametrize("batch_size", [4, 1])
def test_a_recurrent_layer_is_its_own_recurrence(kind: str, options: dict[str, Any], batch_size: int) -> None:
    module, width = recurrent(kind, options)
    model = Read(module, width).double().eval()
    x, y = torch.randn(6, LONGEST, 3, dtype=torch.float64), torch.randint(0, 3, (6, LONGEST))
    whole = collect(model, [(x, y)], "classification", fisher="empirical", batch_size=batch_size)
    truth = Truth()
    for example, target in zip(x, y, strict=True):
        steps: Steps = {}
        output = model.alone(example, recurrence(module, steps))
        assert relative_error(output.detach(), model(example[None])[0].detach()) < EXACT
        truth.add(module, output, target, steps)
    assert whole.declared == ()
    truth.compare(whole, "recurrent.")


@pytest.mark.part(of=24, by=("kind",))
@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_steps_sum_to_the_gradient_of_the_fused_kernel(kind: str, options: dict[str, Any]) -> None:
    """The oracle itself: Σ_t g aᵀ of the recurrence is `.grad` of torch's kernel, and so is each bias's."""
    module, width = recurrent(kind, options)
    model = Read(module, width).double().eval()
    x, y = 3 * torch.randn(1, LONGEST, 3, dtype=torch.float64), torch.randint(0, 3, (1, LONGEST))
    steps: Steps = {}
    loss = summed_loss(model.alone(x[0], recurrence(module, steps)), y[0], "cross_entropy")
    gradients = {
        weight: torch.autograd.grad(loss, [left for _, left in pairs], retain_graph=True)
        for weight, pairs in steps.items()
    }
    summed_loss(model(x)[0], y[0], "cross_entropy").backward()
    for weight, pairs in steps.items():
        g, a = torch.stack(gradients[weight]), torch.stack([entered.detach() for entered, _ in pairs])
        own: Any = dict(module.named_parameters())
        assert relative_error(g.T @ a, own[weight].grad) < EXACT
        bias = weight.replace("weight", "bias")
        if bias in own:
            assert relative_error(g.sum(0), own[bias].grad) < EXACT


@pytest.mark.part(of=24, by=("kind",))
@pytest.mark.parametrize(("kind", "options"), LAYERS)
@pytest.mark.parametrize("batch_size", [4, 1])
def test_packed_sequences_of_several_lengths(kind: str, options: dict[str, Any], batch_size: int) -> None:
    module, width = recurrent(kind, options)
    model = Packed(module, width).double().eval()
    x, y = torch.randn(6, LONGEST, 3, dtype=torch.float64), torch.randint(0, 3, (6, LONGEST))
    lengths = torch.tensor([3, 5, 1, 4, 4, 2])
    chunk = {"x": x, "lengths": lengths}
    whole = collect(model, [(chunk, y)], "classification", fisher="empirical", batch_size=batch_size)
    truth = Truth()
    for example, target, length in zip(x, y, lengths.tolist(), strict=True):
        steps: Steps = {}
        truth.add(module, model.alone(example[:length], recurrence(module, steps)), target, steps)
    assert whole.declared == ()
    truth.compare(whole, "recurrent.")


@pytest.mark.part(of=24, by=("kind",))
@pytest.mark.parametrize(("kind", "options"), LAYERS)
@pytest.mark.parametrize("packed", [False, True])
def test_what_stands_for_a_kernel_computes_what_it_computes(kind: str, options: dict[str, Any], packed: bool) -> None:
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        module, width = recurrent(kind, options)
        model = (Packed if packed else Read)(module, width).eval().to(dtype)
        given = (torch.randn(4, LONGEST, 3, dtype=dtype), *([torch.tensor([2, 5, 3, 1])] if packed else []))
        plain = model(*given)
        watched = ParameterUseMode(dict(model.named_parameters()), Uses())
        watched.begin(given, 4)
        with watched:
            seen = model(*given)
        assert relative_error(seen.detach(), plain.detach()) < tolerance


class Looped(nn.Module):
    """A cell called step by step, its first state the layer's own zeros."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        left = []
        for row in torch.sin(x).unbind(1):
            state = self.cell(row, state)
            left.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(left, 1)


@pytest.mark.part(of=24, by=("mode",))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "options", "mode"),
    [
        ("LSTMCell", {}, "LSTM"),
        ("GRUCell", {}, "GRU"),
        ("RNNCell", {}, "RNN_TANH"),
        ("RNNCell", {"nonlinearity": "relu"}, "RNN_RELU"),
    ],
)
def test_a_cell_is_its_own_recurrence(kind: str, options: dict[str, Any], mode: str, bias: bool) -> None:
    torch.manual_seed(0)
    cell = getattr(nn, kind)(3, 4, bias=bias, **options)
    model = Looped(cell).double()
    x, y = torch.randn(6, LONGEST, 3, dtype=torch.float64), torch.randint(0, 3, (6, LONGEST))
    whole = collect(model, [(x, y)], "classification", fisher="empirical")
    truth = Truth()
    for example, target in zip(x, y, strict=True):
        steps: Steps = {}
        h, c, left = example.new_zeros(4), example.new_zeros(4), []
        for row in torch.sin(example):
            u = multiplied(steps, cell, "weight_ih", "bias_ih", row)
            v = multiplied(steps, cell, "weight_hh", "bias_hh", h)
            h, c = STEPS[mode](u, v, h, c)
            left.append(model.head(h))
        output = torch.stack(left)
        assert relative_error(output.detach(), model(example[None])[0].detach()) < EXACT
        truth.add(cell, output, target, steps)
    assert whole.declared == ()
    truth.compare(whole, "cell.")


def example_squares(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Squared norms of each parameter's gradient, each example alone, summed; per loss term."""
    total: dict[str, float] = {}
    for example, target in zip(x, y, strict=True):
        loss = summed_loss(model(example[None])[0], target, "cross_entropy")
        names, parameters = zip(*model.named_parameters(), strict=True)
        for name, gradient in zip(names, torch.autograd.grad(loss, parameters), strict=True):
            total[name] = total.get(name, 0.0) + float(gradient.square().sum())
    return {name: square / y.numel() for name, square in total.items()}


class Learned(nn.Module):
    """A recurrent layer whose first state is learned too."""

    def __init__(self, kind: str, *, copied: bool) -> None:
        super().__init__()
        self.recurrent = getattr(nn, kind)(3, 4, num_layers=2, batch_first=True)
        self.first = nn.ParameterList(nn.Parameter(torch.randn(2, 1, 4)) for _ in range(1 + (kind == "LSTM")))
        self.head, self.copied = nn.Linear(4, 3), copied

    def forward(self, x: Tensor) -> Tensor:
        states = [each.expand(-1, x.shape[0], -1) for each in self.first]
        states = [each.contiguous() if self.copied else each for each in states]
        output, _ = self.recurrent(x, tuple(states) if len(states) > 1 else states[0])
        return self.head(output)


@pytest.mark.part(of=32, by=("kind",))
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("batch_size", [4, 1])
def test_a_learned_first_state_is_covered_too(kind: str, copied: bool, batch_size: int) -> None:
    torch.manual_seed(0)
    model = Learned(kind, copied=copied).double()
    x, y = torch.randn(6, LONGEST, 3, dtype=torch.float64), torch.randint(0, 3, (6, LONGEST))
    whole = collect(model, [(x, y)], "classification", fisher="empirical", batch_size=batch_size)
    truth = example_squares(model, x, y)
    assert whole.declared == ()
    assert sum(layer.parameter_count for layer in whole.layers) == whole.trainable_parameters
    for layer in whole.layers:
        expected = sum(truth[name] for name in layer.parameters)
        assert layer.exact_trace == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_examples_in_the_place_of_time_are_refused(kind: str) -> None:
    """One example's state goes into the next one's: no gradient is an example's own."""
    torch.manual_seed(0)

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.head = getattr(nn, kind)(3, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.recurrent(x.transpose(0, 1))[0].transpose(0, 1))

    x, y = torch.randn(6, LONGEST, 3, dtype=torch.float64), torch.randint(0, 3, (6, LONGEST))
    try:
        whole = collect(Mixing().double(), [(x, y)], "classification", fisher="empirical")
    except EngineError:
        return
    assert {layer.name for layer in whole.layers} <= {"head"}
    assert {layer.reason for layer in whole.declared} == {"unknown_operation"}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"])
def test_part_of_a_recurrent_layer_may_be_frozen(frozen: str) -> None:
    module, width = recurrent("GRU", {"batch_first": True})
    model = Read(module, width).double()
    x, y = torch.randn(6, LONGEST, 3, dtype=torch.float64), torch.randint(0, 3, (6, LONGEST))
    truth = example_squares(model, x, y)
    module.get_parameter(frozen).requires_grad_(requires_grad=False)
    whole = collect(model, [(x, y)], "classification", fisher="empirical")
    assert whole.declared == ()
    for layer in whole.layers:
        assert layer.exact_trace == pytest.approx(sum(truth[name] for name in layer.parameters), rel=EXACT)


def test_the_plan_counts_what_is_saved_of_each_step() -> None:
    """An LSTM's four gates and two states, at every step; of its kernel alone nothing would be saved here."""
    torch.manual_seed(0)
    model = Read(nn.LSTM(3, 16, batch_first=True), 16).double()
    x, y = torch.randn(8, 40, 3, dtype=torch.float64), torch.randint(0, 3, (8, 40))
    space = workspace(model, [(x, y)], "classification", fisher="empirical", batch_size=8)
    collect_or_read(space)
    assert space.results.plan is not None
    (activations,) = [term.size_bytes for term in space.results.plan.terms if term.name == "activations"]
    assert activations >= 6 * 16 * 40 * 8 * 8
