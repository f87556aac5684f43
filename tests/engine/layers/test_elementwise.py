"""Bare parameters: the diagonal that is kept is the diagonal of the autodiff Gauss-Newton block."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import NothingToAnalyse
from engine.factors.factor_set import FactorSet
from tests.oracles import collect, ggn_block, relative_error, stacked

EXACT = 1e-10


class Used(nn.Module):
    """A net in which the parameters ``p`` and ``q`` are used as a test says, between others."""

    def __init__(self, use: Callable[["Used", Tensor], Tensor], p: tuple[int, ...], q: tuple[int, ...] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.p = nn.Parameter(torch.randn(p))
        if q is not None:
            self.q = nn.Parameter(torch.randn(q))
        self.register_buffer("index", torch.tensor([[0, 1, 2, 1, 0], [1, 1, 0, 2, 2]]))
        self.use = use
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.use(self, torch.tanh(self.first(x)))).mean(1))


def data(examples: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(examples, 5, 4, dtype=torch.float64, generator=generator),
        torch.randint(0, 3, (examples,), generator=generator),
    )


def require_exact(model: nn.Module, x: Tensor, y: Tensor, whole: FactorSet, names: list[str]) -> None:
    """Each of the parameters ``names`` has the diagonal of its own dense block."""
    assert sorted(layer.parameters[0] for layer in whole.layers if layer.form == "diagonal_block") == sorted(names)
    for layer in whole.layers:
        if layer.form != "diagonal_block":
            continue
        (name,) = layer.parameters
        truth = ggn_block(model, x, y, "cross_entropy", (name,), stacked(name)).diagonal()
        factors = whole.load(layer.ordinal)
        assert torch.equal(factors.A, torch.ones(1, 1, dtype=torch.float64))
        assert factors.G.shape == truth.shape == (layer.parameter_count,)
        assert relative_error(factors.G, truth) < EXACT


def twice(model: Used, x: Tensor) -> Tensor:
    return (x * model.p + torch.sin(x) * model.p) - model.p


def in_place(model: Used, x: Tensor) -> Tensor:
    y = x * 2
    y += model.p
    y.mul_(model.p)
    return y


def home_made_norm(model: Used, x: Tensor) -> Tensor:
    return model.p * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def class_token(model: Used, x: Tensor) -> Tensor:
    return torch.cat([model.p.expand(x.shape[0], -1, -1), x], dim=1) + model.q


def repeated_token(model: Used, x: Tensor) -> Tensor:
    return torch.cat((model.p.repeat(x.shape[0], 2, 1), x), 1)


def learned_queries(model: Used, x: Tensor) -> Tensor:
    queries = functional.layer_norm(model.p.unsqueeze(0).expand(x.shape[0], -1, -1), (4,))
    return torch.softmax(queries @ x.transpose(1, 2), -1) @ x


def bias_of_attention(model: Used, x: Tensor) -> Tensor:
    table = model.p[model.index.flatten()].view(2, 5, 1).permute(2, 0, 1)
    scores = x[:, None, :2] @ x[:, None].transpose(-1, -2) + table.unsqueeze(0)
    return (torch.softmax(scores, -1) @ x[:, None])[:, 0]


def time_first(model: Used, x: Tensor) -> Tensor:
    return (x.transpose(0, 1) * model.p).transpose(0, 1)


def flattened(model: Used, x: Tensor) -> Tensor:
    return (x.reshape(-1, 4) * model.p + model.q).view_as(x)


def picked(model: Used, x: Tensor) -> Tensor:
    # five tokens of each example, the last example's first
    token = (torch.tensor([3, 1, 1, 0, 4]) + 5 * torch.arange(x.shape[0]).flip(0)[:, None]).flatten()
    return x.flatten(0, 1).index_add(0, token, x.flatten(0, 1)[token] * model.p).view_as(x)


def masked(model: Used, x: Tensor) -> Tensor:
    return torch.where(x[..., :1] > 0, x, model.p.expand(x.shape[0], 5, -1))


def transposed_and_changed(model: Used, x: Tensor) -> Tensor:
    return (x.transpose(0, 1).flatten(0, 1) @ model.p.exp()).unflatten(0, (5, -1)).transpose(0, 1)


def picked_and_changed(model: Used, x: Tensor) -> Tensor:
    token = (torch.tensor([3, 1, 1, 0, 4]) + 5 * torch.arange(x.shape[0]).flip(0)[:, None]).flatten()
    return x.flatten(0, 1).index_add(0, token, x.flatten(0, 1)[token] @ model.p.exp()).view_as(x)


def repeated_keys(model: Used, x: Tensor) -> Tensor:
    """A table of two heads, copied for each example, beside its heads."""
    heads = x[:, :, None].expand(-1, -1, 2, -1).transpose(1, 2).flatten(0, 1)
    scores = torch.bmm(heads, (model.p * 2).repeat(x.shape[0], 1, 1).mT).unflatten(0, (-1, 2))
    return x * scores.sum((1, 3))[..., None]


def attended(model: Used, x: Tensor) -> Tensor:
    """One matrix for what comes of the data, and for another parameter."""
    keys, queries = model.q @ model.p, x @ model.p
    return torch.softmax(queries @ keys.T, -1) @ keys


def written(model: Used, x: Tensor) -> Tensor:
    """A matrix that the parameter is written into, a scale written to in place."""
    upper = torch.zeros(4, 4, dtype=torch.float64)
    upper[torch.tensor([0, 0, 1]), torch.tensor([1, 2, 3])] = model.p
    scale = model.q * 2
    scale.relu_()
    return x @ (upper - upper.T) + x * scale


def written_to_afterwards(model: Used, x: Tensor) -> Tensor:
    both = torch.einsum("btd,hde->bhte", x, model.p.exp())
    both[:, 0].mul_(3)
    return both.sum(1)


def typed_by_the_data(model: Used, x: Tensor) -> Tensor:
    return x @ (model.p.exp() @ torch.eye(4).to(x)).exp()


USES: list[tuple[Callable[[Used, Tensor], Tensor], tuple[int, ...], tuple[int, ...] | None]] = [
    (lambda model, x: x + model.p, (4,), None),
    (lambda model, x: model.p - x, (1, 5, 4), None),
    (lambda model, x: 1 / (3 + model.p.exp()) * x, (4,), None),
    (lambda model, x: x * (1.0 + model.p.double().to(x.dtype)), (4,), None),
    (lambda model, x: x / model.p.unsqueeze(0).to(x), (5, 1), None),
    (lambda model, x: x + model.p[:, 1:6], (1, 8, 4), None),
    (lambda model, x: x + model.p[0] * model.q, (2, 4), (4,)),
    (lambda model, x: x + (model.p @ model.q), (5, 2), (2, 4)),
    (lambda model, x: functional.layer_norm(x, (4,), model.p, model.q), (4,), (4,)),
    (lambda model, x: functional.rms_norm(x, (4,), model.p), (4,), None),
    (lambda model, x: functional.group_norm(x, 5, model.p, model.q), (5,), (5,)),
    (lambda model, x: functional.prelu(x, model.p), (5,), None),
    (twice, (4,), None),
    (in_place, (4,), None),
    (home_made_norm, (4,), None),
    (class_token, (1, 1, 4), (1, 6, 4)),
    (repeated_token, (1, 1, 4), None),
    (learned_queries, (3, 4), None),
    (bias_of_attention, (3, 1), None),
    (time_first, (4,), None),
    (flattened, (4,), (4,)),
    (picked, (4,), None),
    (masked, (1, 1, 4), None),
    (lambda model, x: x @ model.p + torch.tanh(x) @ model.p.T, (4, 4), None),
    (lambda model, x: x @ model.p + model.p[0], (4, 4), None),
    (lambda model, x: functional.linear(x, model.p, model.q) + model.q, (4, 4), (4,)),
    (lambda model, x: functional.conv1d(x.mT, model.p).mT, (4, 4, 1), None),
    (lambda model, x: functional.conv1d(x.mT, model.p.unsqueeze(1), model.q, groups=4, padding=1).mT, (4, 3), (4,)),
    (lambda model, x: x @ model.p.exp(), (4, 4), None),
    (lambda model, x: x @ (torch.eye(4).double() + model.p @ model.q).exp(), (4, 2), (2, 4)),
    (lambda model, x: x @ torch.cat([model.p.T.exp(), model.q.exp()], 0), (4, 3), (1, 4)),
    (lambda model, x: functional.linear(x, functional.normalize(model.p)) * model.q, (4, 4), (1,)),
    (lambda model, x: functional.linear(x, model.q * model.p / model.p.norm(dim=1, keepdim=True)), (4, 4), (4, 1)),
    (lambda model, x: model.p[(x > 0).long().sum(-1)] + x, (5, 4), None),
    (lambda model, x: functional.embedding((x > 0).long().sum(-1), model.p * 3) + x, (5, 4), None),
    (transposed_and_changed, (4, 4), None),
    (picked_and_changed, (4, 4), None),
    (repeated_keys, (2, 3, 4), None),
    (attended, (4, 4), (4, 4)),
    (written, (3,), (4,)),
    (written_to_afterwards, (2, 4, 4), None),
    (typed_by_the_data, (4, 4), None),
]


@pytest.mark.part(of=32, by=("batch_size",))
@pytest.mark.parametrize(("use", "p", "q"), USES)
@pytest.mark.parametrize("batch_size", [1, 4, 5])
def test_the_diagonal_is_that_of_the_block(
    use: Callable[[Used, Tensor], Tensor], p: tuple[int, ...], q: tuple[int, ...] | None, batch_size: int
) -> None:
    model = Used(use, p, q)
    x, y = data()
    whole = collect(model, [(x, y)], "classification", batch_size=batch_size, min_coverage=1.0)
    require_exact(model, x, y, whole, ["p"] if q is None else ["p", "q"])


def overwriting(model: Used, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = model.p
    return y


def across_examples(model: Used, x: Tensor) -> Tensor:
    """The parameter's rows are the examples' neighbours, whoever they are."""
    return x.flatten(0, 1).cumsum(0).view_as(x) + torch.cat([model.p, x], 0)[: x.shape[0]]


STRANGE: list[tuple[Callable[[Used, Tensor], Tensor], tuple[int, ...], str, str]] = [
    (lambda _, x: x, (4, 4), "no_gradient", "no batch"),
    (overwriting, (4,), "unknown_operation", "setitem"),
]


@pytest.mark.part(of=12, by=("reason",))
@pytest.mark.parametrize(("use", "p", "reason", "why"), STRANGE)
def test_what_is_not_understood_is_declared_and_the_operation_named(
    use: Callable[[Used, Tensor], Tensor], p: tuple[int, ...], reason: str, why: str
) -> None:
    x, y = data()
    whole = collect(Used(use, p, None), [(x, y)], "classification", self_check="growing")
    (row,) = whole.declared
    assert (row.name, row.reason, row.parameters) == ("(model)", reason, ("p",))
    assert why in row.why
    assert [layer.name for layer in whole.layers] == ["first", "head"]


def test_a_parameter_that_carries_examples_into_each_other_leaves_nothing_to_measure() -> None:
    x, y = data()
    with pytest.raises(NothingToAnalyse, match="examples_mix"):
        collect(Used(across_examples, (1, 5, 4), None), [(x, y)], "classification", self_check="growing")


def test_a_use_that_the_first_example_does_not_show_is_declared() -> None:
    def fickle(model: Used, x: Tensor) -> Tensor:
        return x @ model.p if x.shape[0] < 4 else functional.conv1d(x.mT, model.p[..., None]).mT

    x, y = data()
    model = Used(fickle, (4, 4), None)
    assert collect(model, [(x, y)], "classification", batch_size=3, self_check="growing").declared == ()
    unchecked = collect(model, [(x, y)], "classification", self_check="off")
    assert [row.reason for row in unchecked.declared] == ["unforeseen_use"]
    # what it computes of an example depends on how many there are
    with pytest.raises(NothingToAnalyse, match="examples_mix"):
        collect(model, [(x, y)], "classification", self_check="growing")


def test_the_batch_size_changes_nothing_and_the_model_stays_as_it_was() -> None:
    x, y = data()
    model = Used(class_token, (1, 1, 4), (1, 6, 4))
    truth = collect(model, [(x, y)], "classification", fisher="mc")
    apart = collect(model, [(x, y)], "classification", fisher="mc", batch_size=2)
    for layer in truth.layers:
        assert relative_error(apart.load(layer.ordinal).G, truth.load(layer.ordinal).G) < 1e-12
    assert [parameter.grad for parameter in model.parameters()] == [None] * 6
    assert all(parameter.requires_grad for parameter in model.parameters())
    reasons = [row.reason for row in collect(model, [(x, y)], "classification", fisher="forward_only").declared]
    assert reasons == ["needs_gradients", "needs_gradients"]


def test_an_input_of_a_bare_product_that_is_written_to_afterwards() -> None:
    class Writing(nn.Module):
        def __init__(self, *, writes: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.w, self.writes = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4)), writes

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x) * 1
            y = nn.functional.linear(h, self.w)
            return y + (h.mul_(2) if self.writes else h * 2)

    chunk = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 4, (6,))
    found, truth = (collect(Writing(writes=writes).double(), [chunk], "classification") for writes in (True, False))
    assert [layer.name for layer in found.layers] == [layer.name for layer in truth.layers] == ["w", "first"]
    for left, right in zip(found.layers, truth.layers, strict=True):
        assert left.exact_trace == pytest.approx(right.exact_trace, rel=1e-10)
        assert relative_error(found.load(left.ordinal).A, truth.load(right.ordinal).A) < 1e-10
