"""K-FAC equals the generalised Gauss-Newton where theory says so (Eschenhagen et al. 2023)."""

import pytest
import torch
from torch import Tensor, nn

from tests.oracles import collect, ggn_block, kronecker, relative_error, row_vector, stacked

EXACT = 1e-12


class MeanOverPositions(nn.Module):
    """Linear maps at each position, averaged before the loss: the setting of `reduce`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)
        self.outer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x)).mean(1)


class EachPosition(nn.Module):
    """The same maps with a loss term at each position: the setting of `expand`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)
        self.outer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


class ConvolutionMean(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, **options)  # type: ignore[arg-type]
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).mean((2, 3)))


class ConvolutionEach(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, **options)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).transpose(1, 2)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def seeded(make: type[nn.Module], **options: object) -> nn.Module:
    torch.manual_seed(0)
    return make(**options).double()


@pytest.mark.part(of=24, by=("loss",))
@pytest.mark.parametrize("loss", ["mse", "bce", "cross_entropy"])
@pytest.mark.parametrize("layer", ["0", "2"])
def test_one_datum_is_exact_for_any_net(loss: str, layer: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(1, 4, dtype=torch.float64)
    y = torch.randint(0, 3, (1,)) if loss == "cross_entropy" else torch.rand(1, 3, dtype=torch.float64)
    whole = collect(model, [(x, y)], "classification" if loss == "cross_entropy" else "regression", loss)
    names = (f"{layer}.weight", f"{layer}.bias")
    truth = ggn_block(model, x, y, loss, names, row_vector(*names))
    assert relative_error(kronecker(whole, layer), truth) < EXACT


@pytest.mark.parametrize("layer", ["0", "1", "2"])
def test_deep_linear_net_is_exact(layer: str) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4, bias=False), nn.Linear(4, 3)).double()
    x, y = torch.randn(11, 4, dtype=torch.float64), torch.randn(11, 3, dtype=torch.float64)
    whole = collect(model, [(x, y)], "regression")
    bias = None if layer == "1" else f"{layer}.bias"
    names = (f"{layer}.weight",) if bias is None else (f"{layer}.weight", bias)
    truth = ggn_block(model, x, y, "mse", names, row_vector(names[0], bias))
    assert relative_error(kronecker(whole, layer), truth) < EXACT


@pytest.mark.part(of=16, by=("make",))
@pytest.mark.parametrize("layer", ["inner", "outer"])
@pytest.mark.parametrize(
    ("make", "right", "wrong"), [(EachPosition, "expand", "reduce"), (MeanOverPositions, "reduce", "expand")]
)
def test_each_sharing_is_exact_in_its_setting_and_not_in_the_other(
    make: type[nn.Module], right: str, wrong: str, layer: str
) -> None:
    model = seeded(make)
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    y = torch.randn(6, 3, 3, dtype=torch.float64) if right == "expand" else torch.randn(6, 3, dtype=torch.float64)
    names = (f"{layer}.weight", f"{layer}.bias")
    truth = ggn_block(model, x, y, "mse", names, row_vector(*names))
    assert relative_error(kronecker(collect(model, [(x, y)], "regression", sharing=right), layer), truth) < EXACT
    assert relative_error(kronecker(collect(model, [(x, y)], "regression", sharing=wrong), layer), truth) > 0.1


@pytest.mark.part(of=16, by=("sharing",))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 1},
        {"padding": "same", "dilation": 2},
        {"stride": 2, "padding": 2},
        {"padding": 1, "padding_mode": "reflect"},
        {"padding": 1, "padding_mode": "circular", "bias": False},
    ],
)
@pytest.mark.parametrize(("make", "sharing"), [(ConvolutionEach, "expand"), (ConvolutionMean, "reduce")])
def test_convolution_is_exact_with_every_geometry(
    make: type[nn.Module], sharing: str, options: dict[str, object]
) -> None:
    model = seeded(make, **options)
    x = torch.randn(5, 2, 6, 6, dtype=torch.float64)
    y = torch.randn_like(model(x)).detach()
    bias = "conv.bias" if options.get("bias", True) else None
    names = ("conv.weight",) if bias is None else ("conv.weight", bias)
    truth = ggn_block(model, x, y, "mse", names, row_vector("conv.weight", bias))
    assert relative_error(kronecker(collect(model, [(x, y)], "regression", sharing=sharing), "conv"), truth) < EXACT


def test_embedding_is_exact_at_each_position() -> None:
    model = seeded(Embedded)
    ids = torch.randint(0, 6, (5, 4))
    y = torch.randn(5, 4, 3, dtype=torch.float64)
    whole = collect(model, [(ids, y)], "regression")
    # the table is stored (vocabulary, d): the convention's transpose
    truth = ggn_block(model, ids, y, "mse", ("table.weight",), lambda j: j["table.weight"].transpose(1, 2).flatten(1))
    assert whole.layers[0].form == "diagonal"
    assert relative_error(kronecker(whole, "table"), truth) < EXACT


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_layer_norm_block_is_exact_in_a_nonlinear_net(loss: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    nn.init.normal_(model[2].weight)
    x = torch.randn(7, 4, dtype=torch.float64)
    y = torch.randint(0, 3, (7,)) if loss == "cross_entropy" else torch.randn(7, 3, dtype=torch.float64)
    whole = collect(model, [(x, y)], "classification" if loss == "cross_entropy" else "regression", loss)
    truth = ggn_block(model, x, y, loss, ("2.weight", "2.bias"), stacked("2.weight", "2.bias"))
    assert relative_error(kronecker(whole, "2"), truth) < EXACT


def test_batch_norm_block_is_exact_over_positions() -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    model(torch.randn(9, 1, 4, 4, dtype=torch.float64))  # running statistics that are not trivial
    model.eval()
    x, y = torch.randn(6, 1, 4, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    whole = collect(model, [(x, y)], "classification")
    truth = ggn_block(model, x, y, "cross_entropy", ("1.weight", "1.bias"), stacked("1.weight", "1.bias"))
    assert relative_error(kronecker(whole, "1"), truth) < EXACT


def test_block_of_a_norm_called_twice_is_exact() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(torch.tanh(self.norm(x))))

    model = seeded(Twice)
    nn.init.normal_(model.norm.weight)
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,))
    whole = collect(model, [(x, y)], "classification")
    truth = ggn_block(model, x, y, "cross_entropy", ("norm.weight", "norm.bias"), stacked("norm.weight", "norm.bias"))
    # an example's gradient is the sum over both calls, squared only then
    assert relative_error(kronecker(whole, "norm"), truth) < EXACT


def test_frozen_weight_leaves_the_bias_alone() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model[0].weight.requires_grad_(False)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 3, (8,))
    whole = collect(model, [(x, y)], "classification")
    truth = ggn_block(model, x, y, "cross_entropy", ("0.bias",), stacked("0.bias"))
    assert whole.layers[0].parameters == ("0.bias",)
    assert whole.trainable_parameters == 5 + 18
    # A is 1, so the bias block is exact for every net
    assert relative_error(kronecker(whole, "0"), truth) < EXACT


def test_frozen_bias_has_no_column_of_ones() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    model[0].bias.requires_grad_(False)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    whole = collect(model, [(x, y)], "regression")
    assert tuple(whole.load(0).A.shape) == (4, 4)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce"])
def test_sampled_fisher_converges_to_the_exact_one(loss: str) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(512, 4, dtype=torch.float64)
    y = torch.randint(0, 3, (512,)) if loss == "cross_entropy" else torch.rand(512, 3, dtype=torch.float64)
    task = "classification" if loss == "cross_entropy" else "regression"
    exact = collect(model, [(x, y)], task, loss, batch_size=512).load(0).G
    few = collect(model, [(x, y)], task, loss, fisher="mc", samples=2, batch_size=512).load(0).G
    many = collect(model, [(x, y)], task, loss, fisher="mc", samples=128, batch_size=512).load(0).G
    assert relative_error(many, exact) < 0.03
    # eight times less noise is expected; a biased sampler would level off
    assert relative_error(many, exact) < relative_error(few, exact)


def test_empirical_fisher_is_the_outer_product_of_the_gradients() -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    x, y = torch.randn(1, 4, dtype=torch.float64), torch.randint(0, 3, (1,))
    nn.functional.cross_entropy(model(x), y).backward()
    gradient = torch.cat([model[0].weight.grad, model[0].bias.grad[:, None]], 1).flatten()
    whole = collect(model, [(x, y)], "classification", fisher="empirical")
    assert relative_error(kronecker(whole, "0"), torch.outer(gradient, gradient)) < EXACT


def test_module_called_twice_sums_its_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(torch.tanh(self.shared(x)))

    model = seeded(Twice)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    whole = collect(model, [(x, y)], "regression")
    inner = torch.tanh(model.shared(x)).detach()
    entered = torch.cat([torch.cat([x, inner]), torch.ones(10, 1, dtype=torch.float64)], 1)
    assert whole.layers[0].calls == 2
    assert whole.layers[0].positions == 10
    assert relative_error(whole.load(0).A, entered.T @ entered / 10) < EXACT
    # gradients at both calls: (1 − h²) W upstream of the second, 2/3 · I at it
    at_second = torch.eye(3, dtype=torch.float64) * 2 / 3
    jacobians = (1 - inner.square())[:, :, None] * model.shared.weight.detach().T[None]
    at_first = torch.einsum("nij,nkj->ik", jacobians, jacobians) * (2 / 3) / 5
    assert relative_error(whole.load(0).G, at_second + at_first) < EXACT
