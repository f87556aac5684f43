"""Every family of layers against the autodiff Gauss-Newton, and against the family it is a case of."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.factors.factor_set import FactorSet
from engine.layers.coverage import survey
from tests.oracles import collect, ggn_block, kronecker, relative_error, require_traces, row_vector, stacked

EXACT = 1e-12


class Averaged(nn.Module):
    """A convolution averaged over its positions: where `reduce` is exact."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).mean(2)


class Everywhere(Averaged):
    """A loss term at every position: where `expand` is exact."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).transpose(1, 2)


CONVOLUTIONS = [
    (nn.Conv1d, {}, (7,)),
    (nn.Conv1d, {"padding": "same", "dilation": 2, "bias": False}, (7,)),
    (nn.Conv1d, {"padding": 2, "padding_mode": "replicate", "stride": 2}, (7,)),
    (nn.Conv3d, {"padding": 1, "stride": (1, 2, 1)}, (3, 4, 3)),
    (nn.Conv3d, {"padding": 1, "padding_mode": "circular"}, (3, 3, 3)),
    (nn.ConvTranspose1d, {}, (5,)),
    (nn.ConvTranspose1d, {"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2}, (5,)),
    (nn.ConvTranspose2d, {"stride": 2, "padding": 3}, (5, 4)),
    (nn.ConvTranspose2d, {"stride": (1, 3), "padding": (1, 0), "bias": False}, (3, 4)),
    (nn.ConvTranspose3d, {"stride": 2, "padding": 1, "output_padding": 1}, (2, 3, 2)),
]


@pytest.mark.part(of=24, by=("kind",))
@pytest.mark.parametrize(("around", "sharing"), [(Everywhere, "expand"), (Averaged, "reduce")])
@pytest.mark.parametrize(("kind", "options", "extent"), CONVOLUTIONS)
def test_convolutions_are_exact(
    kind: type[nn.Module], options: dict[str, object], extent: tuple[int, ...], around: type[Averaged], sharing: str
) -> None:
    torch.manual_seed(0)
    model = around(kind(2, 3, 3, **options)).double()
    x = torch.randn(4, 2, *extent, dtype=torch.float64)
    y = torch.randn_like(model(x)).detach()
    bias = "conv.bias" if options.get("bias", True) else None
    names = ("conv.weight",) if bias is None else ("conv.weight", bias)
    arrange = row_vector("conv.weight", bias)
    if "Transpose" in kind.__name__:
        # stored (in, out, kernel): the convention's transpose
        def arrange(jacobian: dict[str, Tensor], inner: object = arrange) -> Tensor:
            return inner({**jacobian, "conv.weight": jacobian["conv.weight"].transpose(1, 2)})  # type: ignore[operator]

    truth = ggn_block(model, x, y, "mse", names, arrange)
    whole = collect(model, [(x, y)], "regression", sharing=sharing)
    assert whole.declared == ()
    assert relative_error(kronecker(whole, "conv"), truth) < EXACT


GROUPED = [
    (nn.Conv1d, 4, 6, {"groups": 2}, (7,)),
    (nn.Conv2d, 3, 3, {"groups": 3, "padding": 1, "padding_mode": "reflect"}, (4, 3)),
    (nn.Conv2d, 3, 6, {"groups": 3, "stride": 2, "padding": 1, "bias": False}, (5, 4)),
    (nn.Conv3d, 2, 2, {"groups": 2, "dilation": (1, 2, 1), "padding": "same"}, (2, 3, 2)),
    (nn.ConvTranspose1d, 4, 6, {"groups": 2, "stride": 2, "padding": 1}, (5,)),
    (nn.ConvTranspose2d, 3, 3, {"groups": 3, "output_padding": 1, "stride": 2}, (3, 2)),
]


@pytest.mark.part(of=24, by=("kind",))
@pytest.mark.parametrize(("around", "sharing"), [(Everywhere, "expand"), (Averaged, "reduce")])
@pytest.mark.parametrize(("kind", "inputs", "outputs", "options", "extent"), GROUPED)
def test_each_group_of_a_convolution_is_exact(
    kind: type[nn.Module],
    inputs: int,
    outputs: int,
    options: dict[str, object],
    extent: tuple[int, ...],
    around: type[Averaged],
    sharing: str,
) -> None:
    torch.manual_seed(0)
    model = around(kind(inputs, outputs, 3, **options)).double()
    x = torch.randn(4, inputs, *extent, dtype=torch.float64)
    y = torch.randn_like(model(x)).detach()
    whole = collect(model, [(x, y)], "regression", sharing=sharing)
    groups = model.conv.groups
    bias = "conv.bias" if options.get("bias", True) else None
    names = ("conv.weight",) if bias is None else ("conv.weight", bias)
    assert whole.declared == ()
    assert [layer.name for layer in whole.layers] == [f"conv[{group}]" for group in range(groups)]
    assert sum(layer.parameter_count for layer in whole.layers) == sum(p.numel() for p in model.parameters())
    for group in range(groups):
        assert whole.layers[group].parameters == tuple(f"{name}[{group}]" for name in names)

        def arrange(jacobian: dict[str, Tensor], group: int = group) -> Tensor:
            # the first dimension of every parameter is cut into the groups
            own = {name: part.tensor_split(groups, 1)[group] for name, part in jacobian.items()}
            if "Transpose" in kind.__name__:
                own["conv.weight"] = own["conv.weight"].transpose(1, 2)
            return row_vector("conv.weight", bias)(own)

        truth = ggn_block(model, x, y, "mse", names, arrange)
        assert relative_error(kronecker(whole, f"conv[{group}]"), truth) < EXACT


@pytest.mark.parametrize(("groups", "fisher"), [(2, "mc"), (8, "mc"), (2, "forward_only")])
def test_a_grouped_convolution_is_separate_convolutions(groups: int, fisher: str) -> None:
    class Separate(nn.Module):
        def __init__(self, grouped: nn.Conv2d) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(8 // groups, 8 // groups, 3, padding=1) for _ in range(groups))
            for group, conv in enumerate(self.convs):
                conv.weight.data = grouped.weight.data.chunk(groups)[group].clone()
                conv.bias.data = grouped.bias.data.chunk(groups)[group].clone()

        def forward(self, x: Tensor) -> Tensor:
            parts = zip(self.convs, x.chunk(groups, 1), strict=True)
            return torch.cat([conv(part) for conv, part in parts], 1)

    torch.manual_seed(0)
    grouped = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
    x, y = torch.randn(5, 8, 4, 5, dtype=torch.float64), torch.randint(0, 8, (5,))
    tail = (nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    left, right = (
        collect(nn.Sequential(first, *tail).double(), [(x, y)], "classification", fisher=fisher)
        for first in (grouped, Separate(grouped))
    )
    assert len(left.layers) == len(right.layers) == groups
    for ordinal in range(groups):
        assert relative_error(left.load(ordinal).A, right.load(ordinal).A) < EXACT
        assert relative_error(left.load(ordinal).G, right.load(ordinal).G) < EXACT
        assert left.layers[ordinal].positions == right.layers[ordinal].positions


NORMS = [
    (nn.RMSNorm, (6,), (5, 6)),
    (nn.RMSNorm, ((5, 6),), (5, 6)),
    (LlamaRMSNorm, (6,), (5, 6)),
    (GemmaRMSNorm, (6,), (5, 6)),
    (nn.GroupNorm, (2, 6), (6, 5)),
    (nn.GroupNorm, (3, 6), (6, 2, 3)),
]


@pytest.mark.part(of=12, by=("kind",))
@pytest.mark.parametrize(("kind", "arguments", "shape"), NORMS)
def test_norm_blocks_are_exact_in_a_nonlinear_net(
    kind: type[nn.Module], arguments: tuple[object, ...], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = kind(*arguments)
            self.head = nn.Linear(shape[0] * shape[1] * (shape[2] if len(shape) > 2 else 1), 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.norm(torch.sin(x)).to(x.dtype)).flatten(1))

    model = Net().double()
    for parameter in model.norm.parameters():
        nn.init.normal_(parameter)
    x, y = torch.randn(6, *shape, dtype=torch.float64), torch.randint(0, 3, (6,))
    names = tuple(f"norm.{name}" for name, _ in model.norm.named_parameters())
    truth = ggn_block(model, x, y, "cross_entropy", names, stacked(*names))
    whole = collect(model, [(x, y)], "classification")
    # the model libraries' own compute in float32 inside
    tolerance = 1e-6 if kind.__module__.startswith("transformers") else EXACT
    assert whole.declared == ()
    assert relative_error(kronecker(whole, "norm"), truth) < tolerance


def test_instance_norm_is_a_group_norm_of_single_channels() -> None:
    torch.manual_seed(0)
    instance, group = nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(4, 4)
    x, y = torch.randn(5, 4, 3, 3, dtype=torch.float64), torch.randint(0, 4, (5,))
    blocks = []
    for norm in (instance, group):
        model = nn.Sequential(norm, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
        blocks.append(collect(model, [(x, y)], "classification").load(0).G)
    assert relative_error(blocks[0], blocks[1]) < EXACT


def test_what_only_looks_like_an_rms_norm_is_declared() -> None:
    class DoubledRMSNorm(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    class OtherRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.shift = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight + self.shift

    found = survey(nn.Sequential(DoubledRMSNorm(4), OtherRMSNorm(), nn.RMSNorm(4)))
    assert [layer.name for layer in found.treated] == ["2"]
    assert [layer.reason for layer in found.declared] == ["unsupported_layer", "unsupported_layer"]


def test_running_statistics_of_an_instance_norm_are_declared() -> None:
    found = survey(nn.Sequential(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)))
    assert [layer.reason for layer in found.declared] == ["unsupported_layer"]


class Sized(nn.Module):
    """A transposed convolution whose calls fix the sizes of their outputs."""

    def __init__(self, conv: nn.Module, *sizes: list[int] | None, pool: bool) -> None:
        super().__init__()
        self.conv, self.sizes, self.pool = conv, sizes, pool

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.cat([self.conv(output_size=each, input=x).flatten(2) for each in self.sizes], 2)
        return parts.mean(2) if self.pool else parts.transpose(1, 2)


SIZED = [
    (nn.ConvTranspose1d, {"stride": 3}, (5,), [16]),
    (nn.ConvTranspose1d, {"stride": 3, "padding": 1, "output_padding": 2}, (5,), None),
    (nn.ConvTranspose1d, {"stride": 3, "padding": 4, "output_padding": 2}, (5,), [8]),
    (nn.ConvTranspose2d, {"stride": (2, 3), "padding": 1, "dilation": (2, 1), "bias": False}, (3, 4), [8, 11]),
    (nn.ConvTranspose3d, {"stride": 2, "padding": 1}, (2, 3, 2), [4, 5, 3]),
]


@pytest.mark.part(of=20, by=("kind",))
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("kind", "options", "extent", "size"), SIZED)
def test_a_call_of_a_transposed_convolution_may_fix_its_output_size(
    kind: type[nn.Module], options: dict[str, object], extent: tuple[int, ...], size: list[int] | None, sharing: str
) -> None:
    torch.manual_seed(0)
    model = Sized(kind(2, 3, 3, **options), size, pool=sharing == "reduce").double()
    x = torch.randn(4, 2, *extent, dtype=torch.float64)
    y = torch.randn_like(model(x)).detach()
    bias = "conv.bias" if options.get("bias", True) else None
    arrange = row_vector("conv.weight", bias)

    def transposed(jacobian: dict[str, Tensor]) -> Tensor:
        return arrange({**jacobian, "conv.weight": jacobian["conv.weight"].transpose(1, 2)})

    truth = ggn_block(model, x, y, "mse", ("conv.weight",) if bias is None else ("conv.weight", bias), transposed)
    whole = collect(model, [(x, y)], "regression", sharing=sharing)
    assert whole.declared == ()
    assert relative_error(kronecker(whole, "conv"), truth) < EXACT


def test_calls_of_a_transposed_convolution_have_output_sizes_of_their_own() -> None:
    torch.manual_seed(0)
    conv, sizes = nn.ConvTranspose1d(4, 6, 3, stride=3).double(), ([15], None, [17])
    x = torch.randn(4, 4, 5, dtype=torch.float64)

    def run(*sizes: list[int] | None) -> FactorSet:
        model = nn.Sequential(Sized(conv, *sizes, pool=False), nn.Tanh(), nn.Linear(6, 2).double())
        y = torch.randn_like(model(x)).detach()
        found = collect(model, [(x, y)], "regression", fisher="empirical", batch_size=3)
        losses = ((model(x[n : n + 1]) - y[n : n + 1]).square().mean(2).sum() for n in range(4))
        require_traces(model, found, losses, y[..., 0].numel())
        return found

    both, apart = run(*sizes), [run(size).load(0) for size in sizes]
    mean = sum(count * each.A for count, each in zip((15, 15, 17), apart, strict=True)) / 47
    assert relative_error(both.load(0).A, mean) < EXACT
