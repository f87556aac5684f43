"""Weighted and smoothed losses against torch's own: the Gauss-Newton of its mean loss, by autodiff in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.nn import functional

from catalog.record import FieldError
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.collect import collect_or_read
from engine.errors import EmptyData, NoLikelihood, WrongShape
from engine.factors.factor_set import FactorSet
from engine.workspace import JobOptions, ModelInputs, Ports, Workspace
from tests.oracles import MemoryArtifacts, relative_error

EXACT = 1e-12
WEIGHTS = (0.5, 3.0, 0.0, 1.25)


def run(model: nn.Module, x: Tensor, y: Tensor | None, task: dict[str, Any], **options: Any) -> FactorSet:
    chosen: dict[str, Any] = {"fisher": "type2", "dtype": "float64", "batch_size": 4} | options
    space = Workspace(
        inputs=ModelInputs(model=model, batches=lambda: iter([(x, y)]), task=Task(**task)),
        options=JobOptions(collection=Collection(**chosen)),
        ports=Ports(artifacts=MemoryArtifacts()),
    )
    return collect_or_read(space)


class Net(nn.Module):
    """Nonlinear, with an exact block in the middle: the law holds for every loss."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, width)
        self.double()
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(torch.tanh(self.inner(x)))))


def truth(model: nn.Module, x: Tensor, names: tuple[str, ...], mean_loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Jᵀ ∇²L J of the mean loss of the whole data, over ``names`` one after the other."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    own = {name: parameters[name] for name in names}

    def outputs(chosen: dict[str, Tensor]) -> Tensor:
        return functional_call(model, {**parameters, **chosen}, (x,)).flatten()

    at = outputs(own)
    shape = model(x).shape
    curvature = hessian(lambda flat: mean_loss(flat.view(shape)))(at)
    jacobian = torch.cat([part.flatten(1) for part in jacrev(outputs)(own).values()], 1)
    return jacobian.T @ curvature @ jacobian


def gradient(model: nn.Module, x: Tensor, names: tuple[str, ...], mean_loss: Callable[[Tensor], Tensor]) -> Tensor:
    own = dict(model.named_parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(mean_loss(model(x)), [own[name] for name in names])])


def data(examples: int = 9, positions: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (examples,) if positions is None else (examples, positions)
    x = torch.randn(*shape, 3, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 4, shape, generator=generator)


NORM = ("norm.weight", "norm.bias")
CLASSES = [
    {"label_smoothing": 0.2},
    {"class_weights": WEIGHTS},
    {"class_weights": WEIGHTS, "label_smoothing": 0.3},
]


def torch_loss(options: dict[str, Any], y: Tensor) -> Callable[[Tensor], Tensor]:
    weight = options.get("class_weights")
    return lambda f: functional.cross_entropy(
        f.movedim(-1, 1),
        y,
        weight=None if weight is None else torch.tensor(weight, dtype=f.dtype),
        label_smoothing=options.get("label_smoothing", 0.0),
    )


@pytest.mark.part(of=32, by=("options",))
@pytest.mark.parametrize("options", CLASSES)
@pytest.mark.parametrize("positions", [None, 3])
def test_exact_block_is_the_gauss_newton_of_torchs_mean_loss(options: dict[str, Any], positions: int | None) -> None:
    model = Net()
    x, y = data(9, positions)
    y[0] = -100
    if positions:
        y[1, 1] = -100
    whole = run(model, x, y, {"type": "classification"} | options)
    exact = truth(model, x, NORM, torch_loss(options, y))
    assert whole.layers[1].terms == int((y != -100).sum())
    assert relative_error(whole.load(1).G, exact) < EXACT
    # the setting can tell: without the options it is another matrix
    plain = truth(model, x, NORM, torch_loss({}, y))
    assert ("class_weights" in options) == (relative_error(plain, exact) > 1e-3)


@pytest.mark.parametrize("options", CLASSES)
def test_layers_fed_one_input_are_exact(options: dict[str, Any]) -> None:
    """The same input for all examples makes K-FAC exact in any net, whatever their labels weigh."""
    model = Net()
    x, y = data(9)
    x = x[:1].expand(9, 3).contiguous()
    whole = run(model, x, y, {"type": "classification"} | options)
    factors = whole.load(0)
    block = truth(model, x, ("inner.weight", "inner.bias"), torch_loss(options, y))
    # (weight, bias) one after the other, into (d_out, d_in + 1) row by row
    order = torch.cat([torch.arange(15).view(5, 3), torch.arange(15, 20).view(5, 1)], 1).flatten()
    assert relative_error(torch.kron(factors.G, factors.A), block[order][:, order]) < EXACT


@pytest.mark.parametrize("positive", [None, (2.5,), (0.0, 1.0, 4.0, 0.5)])
def test_positive_weights_are_torchs(positive: tuple[float, ...] | None) -> None:
    model = Net()
    x, _ = data(7)
    y = torch.rand(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    y[:3] = y[:3].round()
    given = None if positive is None else torch.tensor(positive, dtype=torch.float64)
    whole = run(model, x, y, {"type": "regression", "loss": "bce", "positive_weights": positive})
    exact = truth(model, x, NORM, lambda f: functional.binary_cross_entropy_with_logits(f, y, pos_weight=given))
    assert relative_error(whole.load(1).G, exact) < EXACT


@pytest.mark.parametrize("options", CLASSES)
def test_one_example_gives_the_outer_product_of_torchs_gradient(options: dict[str, Any]) -> None:
    model = Net()
    x, y = data(1)
    own = gradient(model, x, NORM, torch_loss(options, y))
    whole = run(model, x, y, {"type": "classification"} | options, fisher="empirical")
    scale = 1.0
    if "label_smoothing" in options and "class_weights" in options:
        # torch divides by the label's weight alone, the term weighs its smoothed part too
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
        scale = float(weights[y[0]] / torch.lerp(weights[y[0]], weights.mean(), options["label_smoothing"]))
    assert relative_error(whole.load(1).G, scale * torch.outer(own, own)) < EXACT


def test_one_example_with_positive_weights_gives_torchs_gradient() -> None:
    model = Net(1)
    x, _ = data(1)
    for label in (1.0, 0.0, 0.25):
        y = torch.tensor([[label]], dtype=torch.float64)
        own = gradient(
            model,
            x,
            NORM,
            lambda f, y=y: functional.binary_cross_entropy_with_logits(f, y, pos_weight=f.new_tensor([3.0])),
        )
        weight = 1 + 2 * label
        task = {"type": "regression", "loss": "bce", "positive_weights": (3.0,)}
        whole = run(model, x, y, task, fisher="empirical")
        # an example that weighs w is w examples of one w-th of its gradient
        assert relative_error(whole.load(1).G, torch.outer(own, own) / weight) < EXACT


@pytest.mark.part(of=24, by=("fisher",))
@pytest.mark.parametrize("fisher", ["type2", "empirical"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_a_weight_is_a_count(fisher: str, smoothing: float) -> None:
    """An example whose label weighs 3 is three examples; and only ratios of weights count."""
    model = Net()
    x, y = data(9)
    weights = (1.0, 3.0, 2.0, 0.0)
    task = {"type": "classification", "label_smoothing": smoothing}
    weighted = run(model, x, y, task | {"class_weights": weights}, fisher=fisher)
    scaled = run(model, x, y, task | {"class_weights": tuple(7 * w for w in weights)}, fisher=fisher)
    for ordinal in range(3):
        assert relative_error(scaled.load(ordinal).G, weighted.load(ordinal).G) < EXACT
    if smoothing == 0:
        times = torch.tensor(weights)[y].long()
        repeated = run(model, x.repeat_interleave(times, 0), y.repeat_interleave(times, 0), task, fisher=fisher)
        for ordinal in range(3):
            assert relative_error(weighted.load(ordinal).G, repeated.load(ordinal).G) < EXACT


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize(
    "task",
    [
        {"type": "classification", "class_weights": (0.5, 3.0, 0.0, 1.25), "label_smoothing": 0.3},
        {"type": "regression", "loss": "bce", "positive_weights": (0.0, 1.0, 4.0, 0.5)},
    ],
)
def test_sampled_fisher_of_a_weighted_loss_converges_to_the_exact_one(task: dict[str, Any]) -> None:
    model = Net()
    x, y = data(512)
    if task["type"] == "regression":
        y = functional.one_hot(y, 4).double()
    exact, few, many = (
        run(model, x, y, task, batch_size=512, **options)
        for options in ({}, {"fisher": "mc", "samples": 2}, {"fisher": "mc", "samples": 128})
    )
    for ordinal in range(3):
        error = relative_error(many.load(ordinal).G, exact.load(ordinal).G)
        assert error < 0.04
        assert error < relative_error(few.load(ordinal).G, exact.load(ordinal).G)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("fisher", ["mc", "type2", "empirical"])
def test_batch_size_does_not_matter_under_weights(fisher: str) -> None:
    model = Net()
    x, y = data(9)
    task = {"type": "classification", "class_weights": WEIGHTS, "label_smoothing": 0.1}
    whole, cut = (run(model, x, y, task, fisher=fisher, batch_size=size) for size in (9, 2))
    for ordinal in range(3):
        assert relative_error(cut.load(ordinal).G, whole.load(ordinal).G) < EXACT


def test_fields_that_mean_nothing_are_refused_by_name() -> None:
    for field, options, said in [
        ("class_weights", {"class_weights": (1.0, -2.0)}, r"holds -2\.0 at place 1"),
        ("class_weights", {"class_weights": (1.0, float("nan"))}, "holds nan at place 1"),
        ("class_weights", {"class_weights": ()}, "no weight above 0"),
        ("class_weights", {"class_weights": (0.0, 0.0)}, "no weight above 0"),
        ("label_smoothing", {"label_smoothing": 1.0}, "from 0 to below 1"),
        ("label_smoothing", {"label_smoothing": -0.1}, "from 0 to below 1"),
        ("positive_weights", {"positive_weights": (1.0,)}, "belongs to `bce`"),
        ("class_weights", {"loss": "bce", "class_weights": (1.0,)}, "belongs to `cross_entropy`"),
        ("label_smoothing", {"loss": "model", "label_smoothing": 0.1}, "the model weighs its own loss"),
        ("ignore_index", {"ignore_index": 2**63}, r"is 9,223,372,036,854,775,808; take -2\^63 to 2\^63-1"),
        ("ignore_index", {"ignore_index": -(10**5000)}, "is a number of thousands of digits; take -2"),
    ]:
        with pytest.raises(FieldError, match=said) as caught:
            Task(type="classification", **options)  # type: ignore[arg-type]
        assert caught.value.field == field
    for extreme in (-(2**63), 2**63 - 1):
        x, y = data()
        assert run(Net(), x, y, {"type": "classification", "ignore_index": extreme})


def test_weights_that_do_not_fit_the_model_or_the_data_are_refused() -> None:
    model, (x, y) = Net(), data()
    with pytest.raises(WrongShape, match="holds 3 numbers, but the model has 4 outputs") as caught:
        run(model, x, y, {"type": "classification", "class_weights": (1.0, 2.0, 3.0)})
    assert caught.value.pointer == "/task/class_weights"
    with pytest.raises(WrongShape, match="has no targets") as caught:
        run(model, x, None, {"type": "classification", "class_weights": WEIGHTS})
    assert caught.value.pointer == "/task/class_weights"
    bce = {"type": "regression", "loss": "bce"}
    targets = functional.one_hot(y, 4).double()
    with pytest.raises(WrongShape, match="holds 2 numbers, but the model has 4 outputs") as caught:
        run(model, x, targets, bce | {"positive_weights": (1.0, 2.0)})
    assert caught.value.pointer == "/task/positive_weights"
    with pytest.raises(WrongShape, match="targets between 0 and 1; they reach from 0 to 2"):
        run(model, x, targets * 2, bce)
    with pytest.raises(EmptyData, match="weigh 0"):
        run(model, x, torch.full_like(y, 2), {"type": "classification", "class_weights": WEIGHTS})


def test_a_models_own_loss_has_no_likelihood_to_sample_from() -> None:
    class Own(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            f = super().forward(x)
            return (functional.cross_entropy(f, labels), f)

    x, y = data()
    for fisher in ("mc", "type2"):
        with pytest.raises(NoLikelihood, match=f"`fisher: {fisher}`") as caught:
            run(Own(), x, y, {"type": "classification", "loss": "model"}, fisher=fisher)
        assert caught.value.pointer == "/collection/fisher"
    assert len(run(Own(), x, y, {"type": "classification", "loss": "model"}, fisher="empirical").layers) == 3


@pytest.mark.part(of=32, by=("options",))
@pytest.mark.parametrize("options", CLASSES)
@pytest.mark.parametrize("layer", [0, 2])
def test_exact_traces_and_corrected_eigenvalues_are_those_of_torchs_mean_loss(
    options: dict[str, Any], layer: int
) -> None:
    model = Net()
    x, y = data(9)
    y[0] = -100
    whole = run(model, x, y, {"type": "classification"} | options, ekfac=True)
    name = whole.layers[layer].name
    exact = float(truth(model, x, (f"{name}.weight", f"{name}.bias"), torch_loss(options, y)).trace())
    assert whole.layers[layer].exact_trace == pytest.approx(exact, rel=EXACT)
    assert whole.load_corrected is not None
    assert float(whole.load_corrected(layer).eigenvalues.sum()) == pytest.approx(exact, rel=EXACT)
