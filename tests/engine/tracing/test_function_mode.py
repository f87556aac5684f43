"""A function mode for parameters: it changes nothing that the model computes, and its own failures stay its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.tracing import function_mode, tensor_marks
from tests.oracles import collect, curvature_traces

EXACT = 1e-10


class Queried(nn.Module):
    """A net whose parameter ``p`` enters as a test says, between two linear layers."""

    def __init__(self, use: Callable[["Queried", Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.p = nn.Parameter(torch.randn(shape))
        self.use = use
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self, torch.tanh(self.first(x))).mean(1))


def data(examples: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, 5, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (examples,), generator=generator)


def traces_by_layer(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> tuple[dict[str, float], dict[str, str]]:
    """Each covered layer's error of its exact trace against autodiff, and each declared parameter's reason."""
    whole = collect(model, [(x, y)], "classification", exact_trace=True, **options)
    truth = curvature_traces(model, x, y, "cross_entropy")
    errors = {}
    for layer in whole.layers:
        own = sum(float(truth[name].sum()) for name in layer.parameters) / x.shape[0]
        assert layer.exact_trace is not None
        errors[layer.name] = abs(layer.exact_trace - own) / own
    return errors, {name: row.reason for row in whole.declared for name in row.parameters}


def detection_queries(model: Queried, h: Tensor) -> Tensor:
    """Queries as DETR makes them: repeated, and seen as if they were one long list."""
    n = h.shape[0]
    queries = model.p.unsqueeze(0).repeat(n, 1, 1).view(n * 2, 3, 4)
    attended = torch.softmax(queries.reshape(n, 6, 4) @ h.transpose(1, 2), -1) @ h
    return attended + queries.view(n, 6, 4)


def gated_positions(model: Queried, h: Tensor) -> Tensor:
    """A bias of attention as WavLM makes it: repeated, then joined with the heads."""
    n = h.shape[0]
    index = (torch.arange(5)[:, None] - torch.arange(5)) + 4
    bias = model.p[index].permute(2, 0, 1).unsqueeze(0).repeat(n, 1, 1, 1).view(n * 2, 5, 5)
    gate = torch.sigmoid(h.sum(-1))[:, None, :, None].expand(n, 2, 5, 1).reshape(n * 2, 5, 1)
    heads = h.view(n, 5, 2, 2).transpose(1, 2).reshape(n * 2, 5, 2)
    weights = torch.softmax(heads @ heads.transpose(1, 2) + (gate * bias).view(-1, 5, 5), -1)
    return (weights @ heads).view(n, 2, 5, 2).transpose(1, 2).reshape(n, 5, 4)


def time_first(model: Queried, h: Tensor) -> Tensor:
    n = h.shape[0]
    repeated = model.p.repeat(1, n, 1).view(5 * n, 4)
    return (h.transpose(0, 1).reshape(5 * n, 4) * repeated).view(5, n, 4).transpose(0, 1)


def several_views(model: Queried, h: Tensor) -> Tensor:
    scale, shift = model.p.repeat(h.shape[0], 1, 1).chunk(2, dim=1)
    return h * scale.transpose(0, 1).transpose(0, 1) + shift.contiguous().view(h.shape[0], 1, 4)


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize(
    ("use", "shape"),
    [(detection_queries, (6, 4)), (gated_positions, (9, 2)), (time_first, (5, 1, 4)), (several_views, (1, 2, 4))],
)
@pytest.mark.parametrize("batch_size", [4, 5])
def test_repeated_parameters_are_covered_however_the_model_views_them(
    use: Callable[[Queried, Tensor], Tensor], shape: tuple[int, ...], batch_size: int
) -> None:
    errors, reasons = traces_by_layer(Queried(use, *shape), *data(), batch_size=batch_size)
    assert reasons == {}
    assert set(errors) == {"first", "head", "p"}
    assert max(errors.values()) < EXACT


@pytest.mark.parametrize("through_a_view", [False, True])
def test_a_repetition_that_is_written_to_holds_what_the_model_wrote(*, through_a_view: bool) -> None:
    def use(model: Queried, h: Tensor) -> Tensor:
        queries = model.p.repeat(h.shape[0], 1, 1)
        written = queries[:, 0] if through_a_view else queries
        written.mul_(3.0)
        return h * queries

    errors, reasons = traces_by_layer(Queried(use, 5, 4), *data())
    assert reasons == {}
    assert set(errors) == {"first", "head", "p"}
    assert max(errors.values()) < EXACT


@pytest.mark.parametrize("failing", ["rewrite", "follow_rows", "with_one"])
def test_an_error_in_the_following_declares_the_parameter_and_blames_nobody(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an error of our own")

    if failing == "rewrite":
        monkeypatch.setattr(function_mode, "REWRITES", dict(function_mode.REWRITES, layer_norm=fail))
    else:
        monkeypatch.setattr(tensor_marks, failing, fail)
    model = Queried(lambda own, h: functional.layer_norm(torch.sin(h), (4,), own.p), 4)
    errors, reasons = traces_by_layer(model, *data())
    assert reasons == {"p": "unknown_operation"}
    assert set(errors) == {"first", "head"}
    assert max(errors.values()) < EXACT


def test_an_error_of_the_models_own_is_still_its_own() -> None:
    def use(model: Queried, h: Tensor) -> Tensor:
        try:
            return h @ model.p
        except RuntimeError:
            return h * model.p[0]

    errors, _ = traces_by_layer(Queried(use, 3, 4), *data())
    assert max(errors.values()) < EXACT


class Ensemble(nn.Module):
    """Three nets side by side, their weights stacked, whose means are the outputs."""

    def __init__(self, multiply: Callable[["Ensemble", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.w, self.b = nn.Parameter(torch.randn(3, 4, 4)), nn.Parameter(torch.randn(3, 1, 4))
        self.multiply = multiply
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.multiply(self, torch.tanh(self.first(x)).mean(1))).mean(0))


MULTIPLIED: list[Callable[[Ensemble, Tensor], Tensor]] = [
    lambda model, h: torch.bmm(h.unsqueeze(0).expand(3, -1, -1), model.w) + model.b,
    lambda model, h: torch.baddbmm(model.b, h.unsqueeze(0).repeat(3, 1, 1), model.w),
    lambda model, h: h.unsqueeze(1).expand(-1, 3, -1).transpose(0, 1) @ model.w + model.b,
]


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("multiply", MULTIPLIED)
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_stacked_weights_are_layers_of_their_own_at_every_batch_size(
    multiply: Callable[[Ensemble, Tensor], Tensor], batch_size: int
) -> None:
    model, (x, y) = Ensemble(multiply), data()
    whole = collect(model, [(x, y)], "classification", exact_trace=True, batch_size=batch_size, min_coverage=1.0)
    truth = curvature_traces(model, x, y, "cross_entropy")
    hidden = torch.tanh(model.first(x)).mean(1).detach()
    for parameter in ("w", "b"):
        layers = [layer for layer in whole.layers if layer.parameters[0].partition("[")[0] == parameter]
        own = float(truth[parameter].sum()) / x.shape[0]
        assert abs(sum(layer.exact_trace or 0.0 for layer in layers) - own) < EXACT * own
        assert len(layers) == (3 if parameter == "w" else 1)
    for layer in whole.layers:
        if layer.name.startswith("w"):
            assert torch.allclose(whole.load(layer.ordinal).A, hidden.T @ hidden / 7, rtol=EXACT, atol=0)


class Squared(torch.autograd.Function):
    """A function of a parameter alone, with a backward pass of its own."""

    @staticmethod
    def forward(context: Any, parameter: Tensor) -> Tensor:
        context.save_for_backward(parameter)
        return parameter * parameter

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override] # one argument, as torch calls it
        (parameter,) = context.saved_tensors
        return 2 * gradient * parameter


def switched_off(parameter: Tensor) -> Tensor:
    with torch.no_grad():
        return parameter * parameter


MADE: list[Callable[[Tensor], Tensor]] = [Squared.apply, switched_off]  # type: ignore[list-item]


@pytest.mark.part(of=32, by=("make", "product"))
@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("product", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_what_is_made_without_a_graph_ends_no_job_and_spoils_no_other_layer(
    make: Callable[[Tensor], Tensor], batch_size: int, *, product: bool
) -> None:
    def used(weight: Tensor, h: Tensor) -> Tensor:
        return functional.linear(h, weight) if product else h * weight[0]

    model = Queried(lambda own, h: used(make(own.p), h), 4, 4)
    twin = Queried(lambda own, h: used(own.p * own.p, h), 4, 4)
    x, y = data()
    whole = collect(model, [(x, y)], "classification", exact_trace=True, batch_size=batch_size)
    truth = curvature_traces(twin, x, y, "cross_entropy")
    for layer in whole.layers:
        own = sum(float(truth[name].sum()) for name in layer.parameters) / 7
        assert layer.exact_trace == pytest.approx(own, rel=EXACT)
    assert {"first", "head"} <= {layer.name for layer in whole.layers}


def normalised_weight(model: Queried, h: Tensor) -> Tensor:
    """A product with what is made of the parameter, and the parameter's own product beside it."""
    return functional.linear(h, model.p / torch.linalg.norm(model.p @ model.p.T, dim=1, keepdim=True))


def encoded_prompt(model: Queried, h: Tensor) -> Tensor:
    """Vectors that are looked up for every example, and mixed by the same parameter."""
    places = torch.arange(3, device=h.device).unsqueeze(0).expand(h.shape[0], -1)
    prompt = functional.linear(torch.tanh(functional.embedding(places, model.p)), model.p)
    return torch.cat([prompt, h], 1).cumsum(1)


@pytest.mark.part(of=16, by=("use",))
@pytest.mark.parametrize("use", [normalised_weight, encoded_prompt])
@pytest.mark.parametrize("batch_size", [2, 3, 6, 7])
def test_a_last_batch_of_one_example_is_judged_as_several_were(
    use: Callable[[Queried, Tensor], Tensor], batch_size: int
) -> None:
    errors, reasons = traces_by_layer(Queried(use, 4, 4), *data(), batch_size=batch_size)
    assert reasons == {}
    assert set(errors) == {"first", "head", "p"}
    assert max(errors.values()) < EXACT


TRANSFORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mapped over": lambda x, w: torch.func.vmap(lambda own: functional.linear(x, own))(w).mean(0),
    "derived": lambda x, w: torch.func.vmap(lambda own: functional.linear(x, own))(2 * w).mean(0),
    "made within": lambda x, w: functional.linear(x, torch.func.vmap(lambda own: own.square())(w)[0]),
    "in two transforms": lambda x, w: functional.linear(
        x, torch.func.vmap(torch.func.grad(lambda own: (own**3).sum()))(w)[0]
    ),
    "beside what is mapped": lambda x, w: torch.func.vmap(lambda own: functional.linear(own, w[0]))(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_parameter_in_a_transform_is_declared_as_such(name: str) -> None:
    class Transformed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.h = nn.Parameter(torch.randn(3, 5, 4)), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Any:
            return self.h(TRANSFORMS[name](x, self.w).tanh())

    torch.manual_seed(0)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    whole = collect(Transformed().double(), [(x, y)], "classification")
    assert {row.parameters: row.reason for row in whole.declared} == {("w",): "transformed"}
    assert [layer.name for layer in whole.layers] == ["h"]
