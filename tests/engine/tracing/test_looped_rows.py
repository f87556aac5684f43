"""Layers that a loop feeds with parts of a batch are covered whole, each row counted at its example.

The truth of each model is plain autograd of every example alone.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.engine.gradient_identity.cases.judge import judge
from tests.engine.gradient_identity.cases.pair import Model, Net, Pair, inputs, tokens
from tests.oracles import collect, relative_error


def hidden(net: Net, x: Tensor) -> Tensor:
    return net.a(x).tanh()


def chunked(net: Net, x: Tensor) -> Tensor:
    return torch.cat([net.h(part) for part in hidden(net, x).tensor_split(3)])


def narrowed(net: Net, x: Tensor) -> Tensor:
    z, half = hidden(net, x), len(x) // 2
    return torch.cat([net.h(z.narrow(0, 0, half)), net.h(z.narrow(0, half, len(x) - half))])


def in_micro_batches(net: Net, x: Tensor) -> Tensor:
    return torch.cat([net.h(net.a(x[start : start + 3]).tanh()) for start in range(0, len(x), 3)])


def from_seven_on(net: Net, x: Tensor) -> Tensor:
    """Only batches that are larger than those of a dry run are cut."""
    z = hidden(net, x)
    return torch.stack([net.h(row) for row in z]) if len(x) > 6 else net.h(z)


def unbound(net: Net, x: Tensor) -> Tensor:
    return torch.stack([net.h(net.a(row).tanh()) for row in x.unbind(0)])


def selected(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return torch.vstack([net.h(z.select(0, place)) for place in range(len(x))])


def weighed_by_itself(net: Net, x: Tensor) -> Tensor:
    """As under ``vmap``: a function of one example, whatever it does to it."""

    def single(row: Tensor) -> Tensor:
        return net.h(net.a(row).tanh() * row.sum() / (1 + row.norm()))

    return torch.stack([single(x[place]) for place in range(len(x))])


def backwards(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    return torch.stack([net.h(z[place]) for place in reversed(range(len(x)))]).flip(0)


def reversed_whole(net: Net, x: Tensor) -> Tensor:
    return net.h(hidden(net, x).flip(0)).flip(0)


def in_couples(net: Net, x: Tensor) -> Tensor:
    rows = hidden(net, x).unbind(0)
    return torch.cat([net.h(torch.stack(rows[start : start + 2])) for start in range(0, len(x), 2)])


def every_other(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x)
    left = z.new_zeros(len(x), 5)
    left[1::2] = net.h(z[1::2])
    left[::2] = net.h(z[::2])
    return left


def written(net: Net, x: Tensor) -> Tensor:
    """Assert that rows which a loop writes into a table keep their examples when they enter a layer."""
    z = hidden(net, x)
    table = z.new_zeros(len(x), 8)
    for place in range(len(x)):
        table[place] = net.a(x[place]).sin()
    return torch.cat([net.h(part) for part in (z + table).split(3)])


def some_alone(net: Net, x: Tensor) -> Tensor:
    """The others pass by."""
    z = hidden(net, x)
    return torch.stack(
        [net.h(row) if chosen else row[:5] for row, chosen in zip(z, (x[:, 0] > 0).tolist(), strict=True)]
    )


def texts(net: Net, x: Tensor) -> Tensor:
    return torch.stack([net.h(text).mean(0) for text in hidden(net, x)])


def means_of_texts(net: Net, x: Tensor) -> Tensor:
    return torch.stack([net.h(net.a(text).tanh().mean(0)) for text in x])


def chosen_tokens(net: Net, x: Tensor) -> Tensor:
    """As many of each text as it says itself."""
    z, counts = hidden(net, x), (1 + (x[:, :2, 0] > 0).sum(1)).tolist()
    left = net.h(torch.cat([text[:count] for text, count in zip(z, counts, strict=True)]))
    return torch.stack([part.mean(0) for part in left.split(counts)])


def columns_of_texts(net: Net, x: Tensor) -> Tensor:
    z = hidden(net, x).transpose(0, 1).contiguous()
    return torch.stack([net.h(z[:, place]).mean(0) for place in range(len(x))])


def picked_columns(net: Net, x: Tensor) -> Tensor:
    """Examples in the second dimension, in another order."""
    order = torch.arange(len(x)).flip(0)
    return net.h(hidden(net, x).transpose(0, 1)[:, order]).mean(0)[order]


OF_ROWS = [
    *(chunked, narrowed, in_micro_batches, from_seven_on, unbound, selected, weighed_by_itself, backwards),
    *(reversed_whole, in_couples, every_other, written, some_alone),
]
OF_TEXTS = [texts, means_of_texts, chosen_tokens, columns_of_texts, picked_columns]


def models() -> Iterator[Model]:
    for runs, data in ((OF_ROWS, inputs), (OF_TEXTS, tokens)):
        for run in runs:
            yield Model(pair=Pair(kind="loop", name=run.__name__, mixing=run, apart=run, inputs=data), is_twin=True)


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("model", list(models()), ids=lambda model: model.pair.name)
def test_what_a_loop_feeds_is_counted_at_its_example(model: Model) -> None:
    verdict = str(judge(model, 8, "float64"))
    assert not verdict


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("run", [chunked, weighed_by_itself, texts])
def test_a_loop_over_one_example_is_no_loop(run: Callable[[Net, Tensor], Tensor]) -> None:
    data = tokens if run is texts else inputs
    pair = Pair(kind="loop", name=run.__name__, mixing=run, apart=run, inputs=data)
    verdict = str(judge(Model(pair=pair, is_twin=True), 1, "float64"))
    assert not verdict


class Others(nn.Module):
    """Layers of other kinds before a linear one, fed by the function that a test gives."""

    def __init__(self, run: Callable[["Others", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.around, self.h = nn.LayerNorm(6), nn.Conv1d(1, 2, 3, padding=1), nn.Linear(6, 5)
        self.scale, self.run = nn.Parameter(torch.randn(6)), run
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.run(self, x))


@pytest.mark.part(of=16, by=("name",))
@pytest.mark.parametrize(("name", "run"), [
    ("norm", lambda net, x: torch.stack([net.norm(row).tanh() for row in x])),
    ("norm", lambda net, x: torch.cat([net.norm(part).tanh() for part in x.split(3)])),
    ("around", lambda net, x: torch.stack([net.around(row[None, None])[0].tanh().sum(0) for row in x])),
    ("around", lambda net, x: torch.cat([net.around(part[:, None]).tanh().sum(1) for part in x.split(3)])),
    ("scale", lambda net, x: torch.stack([(row * net.scale).tanh() for row in x])),
])  # fmt: skip
def test_layers_of_other_kinds_are_followed_in_a_loop(name: str, run: Callable[[Others, Tensor], Tensor]) -> None:
    model, x = Others(run), inputs().double()
    y = torch.randint(5, (len(x),), generator=torch.Generator().manual_seed(3))
    whole = collect(model, [(x, y)], "classification", fisher="empirical", batch_size=8)
    assert {row.reason for row in whole.declared} <= {"no_gradient"}
    parameters = [each for key, each in model.named_parameters() if key.startswith(name)]
    truth = 0.0
    for place in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[place : place + 1]), y[place : place + 1])
        truth += sum(float(each.square().sum()) for each in torch.autograd.grad(loss, parameters)) / len(x)
    traces = [layer.exact_trace for layer in whole.layers if layer.name.startswith(name)]
    assert sum(trace for trace in traces if trace is not None) == pytest.approx(truth, rel=1e-10)


class Padded(nn.Module):
    """A model of padded texts, whose last layer a test feeds."""

    def __init__(self, run: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.h, self.run = nn.Linear(4, 6), nn.Linear(6, 3), run
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        del attention_mask
        return self.run(self.h, self.a(input_ids).tanh())


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("run", [
    lambda layer, z: torch.stack([layer(text) for text in z]),
    lambda layer, z: torch.cat([layer(part) for part in z.split(2)]),
    lambda layer, z: layer(z.flip(0)).flip(0),
    lambda layer, z: layer(z.transpose(0, 1).flip(1)).flip(1).transpose(0, 1),
], ids=["texts", "slices", "reversed", "positions first"])  # fmt: skip
def test_padding_does_not_count_in_a_loop(run: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 7, 4, dtype=torch.float64, generator=generator)
    y, lengths = torch.randint(0, 3, (3, 7), generator=generator), [3, 7, 5]
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    together = [({"input_ids": x, "attention_mask": mask.long()}, y.masked_fill(~mask, -100))]
    whole = collect(Padded(run), together, "masked_lm", fisher="empirical", min_coverage=1.0)
    facts = {layer.name: layer for layer in whole.layers}
    assert facts["h"].positions == sum(lengths)
    model = Padded(lambda layer, z: layer(z))
    with torch.no_grad():
        a = torch.cat([model.a(x).tanh()[mask], torch.ones(sum(lengths), 1, dtype=torch.float64)], 1)
        g = model(x)[mask].softmax(-1) - nn.functional.one_hot(y[mask], 3)
    factors = whole.load(facts["h"].ordinal)
    assert relative_error(factors.A, a.T @ a / len(a)) < 1e-12
    # every position is a loss term
    assert relative_error(factors.G, g.T @ g / len(g)) < 1e-12
