"""Models whose examples mix behind draws, narrow types, outputs and sizes: what differs from autograd is refused.

The oracle of each case is the trace of the Fisher block by plain autograd, example by example: where the collection
covers a layer, it has that trace; where the examples mix, no such number is the model's.
"""
# ruff: noqa: NPY002 - numpy's default generator is what is drawn from here

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.collect import collect_or_read
from engine.errors import NothingToAnalyse
from engine.factors.dense import digest
from engine.factors.factor_set import FactorSet
from engine.gradient_identity.schedule import different_examples
from engine.model.batches import Batch
from tests.oracles import workspace

Run = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two linear layers, used as a case says."""

    def __init__(self, use: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.h, self.use = nn.Linear(6, 8), nn.Linear(8, 5), use
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def data(examples: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(5, (examples,), generator=generator)


def measured(model: nn.Module, **options: Any) -> FactorSet | None:
    """The collection; None where nothing of the model was left."""
    try:
        return collect_or_read(workspace(model, [data()], "classification", fisher="empirical", **options))
    except NothingToAnalyse:
        return None


def plain_trace(model: Net, layer: nn.Linear) -> float:
    """Mean squared norm of each example's gradient alone, by plain autograd."""
    x, y = data()
    total = 0.0
    for one in range(len(x)):
        loss = functional.cross_entropy(model(x[one : one + 1]), y[one : one + 1])
        total += sum(float(each.square().sum()) for each in torch.autograd.grad(loss, list(layer.parameters())))
    return total / len(x)


def normalised(z: Tensor) -> Tensor:
    return (z - z.mean(0)) / (z.var(0, correction=0) + 0.1).sqrt()


def hidden_statistics(net: Net, x: Tensor) -> Tensor:
    z = net.a(x)
    return net.h(normalised(z + 1e-6 * torch.randn_like(z)).tanh())


def hidden_neighbour(net: Net, x: Tensor) -> Tensor:
    z = functional.dropout(net.a(x), 0.2, training=True)
    return net.h((z + 0.3 * z.roll(-1, 0)).tanh())


def noise(net: Net, x: Tensor) -> Tensor:
    z = net.a(x)
    return net.h((z + 1e-6 * torch.randn_like(z)).tanh())


def noise_of_others(net: Net, x: Tensor) -> Tensor:
    """Noise from Python's generator and from numpy's."""
    z = net.a(x) * random.uniform(0.5, 1.0)
    return net.h((z + 0.1 * torch.from_numpy(np.random.standard_normal(z.shape)).to(z.dtype)).tanh())


def neighbour_of_others(net: Net, x: Tensor) -> Tensor:
    z = net.a(x) * random.uniform(0.5, 1.0)
    return net.h((z + 0.3 * z.roll(-1, 0)).tanh())


_OWN_GENERATOR = np.random.default_rng(3)
_OWN_TORCH = torch.Generator().manual_seed(3)


def noise_of_its_own(net: Net, x: Tensor) -> Tensor:
    return net.h((net.a(x) * float(_OWN_GENERATOR.uniform(0.5, 1.0))).tanh())


def noise_of_its_own_in_torch(net: Net, x: Tensor) -> Tensor:
    return net.h((net.a(x) * torch.rand((), generator=_OWN_TORCH, dtype=x.dtype)).tanh())


def masked_narrowly(net: Net, x: Tensor) -> Tensor:
    return net.a(x) * (x.to(torch.bfloat16) > -9).all(1, keepdim=True)


def default_type(net: Net, x: Tensor) -> Tensor:
    """Ones of the default type, which is float32 whatever the model is measured in."""
    return net.a(x) * torch.ones(8)


def mixed_slightly(run: Run) -> Run:
    def mixed(net: Net, x: Tensor) -> Tensor:
        z = run(net, x)
        return net.h((z + 0.02 * z.mean(0)).tanh())

    return mixed


def apart(run: Run) -> Run:
    return lambda net, x: net.h(run(net, x).tanh())


def outputs_centred(net: Net, x: Tensor) -> Tensor:
    z = net.h(net.a(x).tanh())
    return z - z.detach().mean(0)


@pytest.mark.part(of=32, by=("use",))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "use",
    [
        hidden_statistics,
        hidden_neighbour,
        neighbour_of_others,
        mixed_slightly(masked_narrowly),
        mixed_slightly(default_type),
        outputs_centred,
    ],
)
def test_examples_that_mix_are_refused(use: Run, dtype: str) -> None:
    assert measured(Net(use), dtype=dtype) is None


@pytest.mark.parametrize("use", [apart(masked_narrowly), apart(default_type)])
def test_a_narrow_operation_that_mixes_nothing_is_covered(use: Run) -> None:
    model = Net(use)
    whole = measured(model, dtype="float64")
    assert whole is not None
    for layer in whole.layers:
        assert layer.exact_trace == pytest.approx(plain_trace(model, model.get_submodule(layer.name)), rel=1e-6)


@pytest.mark.parametrize("use", [noise, noise_of_others])
def test_a_model_that_draws_and_mixes_nothing_keeps_its_verdict(use: Run) -> None:
    whole = measured(Net(use))
    assert whole is not None
    assert {layer.checked_against for layer in whole.layers} == {"same_forward"}


def test_python_and_numpy_draw_alike_in_each_job_and_go_on_afterwards_as_if_there_had_been_none() -> None:
    digests, following = [], []
    for check in ("growing", "off"):
        random.seed(11)
        np.random.seed(11)
        whole = measured(Net(noise_of_others), self_check=check, batch_size=4)
        assert whole is not None
        digests.append([digest(each) for layer in whole.layers for each in (whole.load(layer.ordinal).G,)])
        following.append((random.random(), float(np.random.random())))
    random.seed(11)
    np.random.seed(11)
    assert digests[0] == digests[1]
    assert following == [(random.random(), float(np.random.random()))] * 2


@pytest.mark.parametrize("use", [noise_of_its_own, noise_of_its_own_in_torch])
def test_a_generator_that_is_never_put_back_is_the_reason_and_not_mixing(use: Run) -> None:
    with pytest.raises(NothingToAnalyse, match=r"not_repeatable .*draws from another generator.*draw from the default"):
        collect_or_read(workspace(Net(use), [data()], "classification", fisher="empirical"))


def test_a_tolerance_that_float64_cannot_have_is_recorded() -> None:
    """Numbers from outside of torch stay narrow: what they were checked by stands with its reason."""

    def outside(net: Net, x: Tensor) -> Tensor:
        # a table that was computed elsewhere, in single precision, and with other sums for one example than for many
        z = net.a(x)
        narrow = torch.from_numpy(x.detach().numpy().astype("float32")) @ torch.full((6, 8), 0.37, dtype=torch.float32)
        return net.h((z + narrow + 1e-7 * len(x)).tanh())

    whole = measured(Net(outside), dtype="float64")
    assert whole is not None
    for layer in whole.layers:
        assert layer.identity_tolerance is not None
        assert 1e-9 < layer.identity_tolerance <= 1e-3
        assert layer.identity_tolerance_reason is not None
        assert "float32" in layer.identity_tolerance_reason


def test_rounding_is_judged_beside_the_largest_gradient_of_the_model() -> None:
    """The gradient of a normalisation before another cancels all but for rounding; nothing of it is wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(3, 6, 3),
        nn.GroupNorm(1, 6),
        nn.ReLU(),
        nn.LayerNorm((6, 8)),
        nn.InstanceNorm1d(6, affine=True),
        nn.GroupNorm(6, 6),
        nn.Flatten(),
        nn.Linear(48, 5),
    )
    inputs, targets = torch.randn(12, 3, 10), torch.randint(0, 5, (12,))
    whole = collect_or_read(workspace(model, [(inputs, targets)], "classification", dtype="float32"))
    assert whole.declared == ()


def smoothed(net: Net, x: Tensor) -> Tensor:
    """Neighbours, where there are six examples or more."""
    z = net.a(x).tanh()
    if len(x) > 5:
        z = 0.5 * z + 0.5 * z[torch.cdist(x, x).topk(5, largest=False)[1]].mean(1)
    return net.h(z)


def rolled(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    return net.h(z + 0.3 * z.roll(3, 0) if len(x) > 4 else z)


def counted(net: Net, x: Tensor) -> Tensor:
    """The number of examples decides the way, and no number of any of them."""
    z = net.a(x).tanh()
    return net.h(torch.cat([part * 1.0 for part in z.split(2)]) if len(x) > 5 else z)


@pytest.mark.part(of=16, by=("use",))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("use", [smoothed, rolled])
def test_what_the_size_of_the_batch_decides_is_seen(use: Run, dtype: str) -> None:
    assert measured(Net(use), dtype=dtype, batch_size=8) is None


@pytest.mark.parametrize("use", [smoothed, rolled])
def test_groups_that_are_too_small_to_mix_are_covered(use: Run) -> None:
    model = Net(use)
    whole = measured(model, batch_size=4)
    assert whole is not None
    for layer in whole.layers:
        assert layer.exact_trace == pytest.approx(plain_trace(model, model.get_submodule(layer.name)), rel=1e-10)


def test_a_size_that_decides_nothing_is_covered() -> None:
    model = Net(counted)
    whole = measured(model, batch_size=8)
    assert whole is not None
    assert whole.declared == ()
    for layer in whole.layers:
        assert layer.exact_trace == pytest.approx(plain_trace(model, model.get_submodule(layer.name)), rel=1e-10)


class Difference(nn.Module):
    """Of two equal halves: exactly zero of an example alone, and perhaps rounding in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.a(x[:, 0]) - self.a(x[:, 1]))


def test_inputs_that_are_rounding_beside_the_others_decide_nothing() -> None:
    for seed in range(12):
        torch.manual_seed(seed)
        x, y = torch.randn(13, 5), torch.randint(3, (13,))
        model = Difference().double()
        pairs = x[:, None].expand(-1, 2, -1).contiguous().double()
        assert collect_or_read(workspace(model, [(pairs, y)], "classification", batch_size=13)).declared == ()


def clipped(net: Net, x: Tensor) -> Tensor:
    """The largest example of a batch is scaled down to the second largest, and no other is touched."""
    sizes = x[:, :3].norm(dim=1, keepdim=True)
    second = sizes.flatten().topk(min(2, len(x))).values[-1]
    return net.h(net.a(x * (second / sizes).clamp(max=1)).tanh())


def clipped_to_a_bound(net: Net, x: Tensor) -> Tensor:
    return net.h(net.a(x * (2.5 / x.norm(dim=1, keepdim=True)).clamp(max=1)).tanh())


def one_pair(net: Net, x: Tensor) -> Tensor:
    """The tenth example takes in the thirteenth: one half of the batch holds both, at other places."""
    z = net.a(x).tanh()
    if len(x) > 12:
        z = z.index_add(0, torch.tensor([9]), 0.3 * z[12:13])
    return net.h(z)


def queued(net: Net, x: Tensor) -> Tensor:
    """The examples of one kind after the fifth of a batch are dropped, as by an expert with a capacity."""
    z = net.a(x).tanh()
    kind = x[:, :1] > 0
    return net.h(torch.where(kind & (kind.cumsum(0) > 5), 0 * z, z))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("use", [clipped, one_pair, queued])
def test_mixing_that_reaches_none_of_the_picked_examples_is_seen(use: Run, dtype: str) -> None:
    x, _ = data()
    net, few = Net(use), torch.tensor(different_examples(Batch(inputs=x, targets=None, index=torch.arange(16)), 4))
    together = net(x)
    assert torch.allclose(together[few], torch.cat([net(x[place : place + 1]) for place in few])), "what it is about"
    assert not torch.allclose(together, torch.cat([net(each[None]) for each in x]))
    assert measured(net, dtype=dtype, batch_size=16) is None


def dropped_pair(net: Net, x: Tensor) -> Tensor:
    """The sixth example takes in the seventh, behind a draw for each example."""
    z = functional.dropout(net.a(x).tanh(), 0.1, training=True)
    if len(z) > 7:
        z = z.index_add(0, torch.tensor([5]), 0.2 * z[6:7])
    return net.h(z)


def dropped_by_capacity(net: Net, x: Tensor) -> Tensor:
    return queued(net, functional.dropout(x, 0.1, training=True))


@pytest.mark.parametrize("use", [dropped_pair, dropped_by_capacity])
def test_mixing_behind_draws_that_reaches_none_of_the_picked_examples_is_seen(use: Run) -> None:
    assert measured(Net(use), batch_size=16) is None


class Smallest(torch.autograd.Function):
    """The example with the smallest gradient of a batch gets none."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        norms = gradient.norm(dim=1, keepdim=True)
        return gradient * (norms > norms.min()) if len(norms) > 1 else gradient


def dropped_on_the_way_back(net: Net, x: Tensor) -> Tensor:
    return net.h(Smallest.apply(net.a(x)).tanh())


def straight_through(net: Net, x: Tensor) -> Tensor:
    """What the sixth example takes in of the third is its value's gradient alone."""
    z = net.a(x).tanh()
    if len(z) > 7:
        more = torch.zeros_like(z).index_add(0, torch.tensor([5]), 0.5 * z[2:3])
        z = z + more - more.detach()
    return net.h(z)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("use", [dropped_on_the_way_back, straight_through])
def test_mixing_on_the_way_back_alone_is_seen_in_all_examples(use: Run, dtype: str) -> None:
    model = Net(use)
    whole = measured(model, dtype=dtype, batch_size=16)
    assert whole is not None, "the layer behind is right"
    assert [layer.name for layer in whole.layers] == ["h"]
    assert whole.layers[0].exact_trace == pytest.approx(plain_trace(model, model.h), rel=1e-5)


def scaled_after(net: Net, x: Tensor) -> Tensor:
    z = net.a(x).tanh()
    return net.h(z + 2 * z.detach().mean(0))


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_curvature_at_outputs_that_mix_reaches_the_layers_before(loss: str) -> None:
    """The second derivative of the cross-entropy hangs on the outputs; that of a squared error is constant."""
    x, y = data()
    targets, kind = (y, "classification") if loss == "cross_entropy" else (torch.randn(16, 5).double(), "regression")
    with pytest.raises(NothingToAnalyse) if loss == "cross_entropy" else contextlib.nullcontext():
        whole = collect_or_read(workspace(Net(scaled_after), [(x, targets)], kind, fisher="type2"))
        assert [layer.name for layer in whole.layers] == ["a"]


def test_inputs_that_mix_at_few_examples_are_seen_without_gradients() -> None:
    x, y = data()
    whole = collect_or_read(workspace(Net(queued), [(x, y)], "classification", fisher="forward_only", batch_size=16))
    assert {row.reason for row in whole.declared} == {"examples_mix"}
    (layer,) = whole.layers
    assert torch.allclose(whole.load(layer.ordinal).A[:6, :6], x.T @ x / 16)


def outputs_shifted(net: Net, x: Tensor) -> Tensor:
    z = net.h(net.a(x).tanh())
    return z + 0.5 * z.detach().mean(0)


def test_what_outputs_alone_show_is_said_with_its_number() -> None:
    with pytest.raises(NothingToAnalyse, match=r"depends on the others, by 0\.\d+, and with it what is pulled back"):
        collect_or_read(workspace(Net(outputs_shifted), [data()], "classification", fisher="empirical"))


def test_a_batch_without_loss_terms_is_checked_by_its_inputs_under_ekfac() -> None:
    x, y = torch.randn(8, 4, 6).double(), torch.randint(5, (8, 4))
    y[4:] = -100
    job = workspace(Net(apart(lambda net, z: net.a(z))), [(x, y)], "token_classification", ekfac=True, batch_size=4)
    assert collect_or_read(job).declared == ()


def test_what_depends_on_no_other_example_is_covered_in_a_large_batch() -> None:
    model = Net(clipped_to_a_bound)
    whole = measured(model, batch_size=16)
    assert whole is not None
    for layer in whole.layers:
        assert layer.exact_trace == pytest.approx(plain_trace(model, model.get_submodule(layer.name)), rel=1e-10)
