"""Split gradients against the undivided loss's autograd in float64, for losses that couple all inputs."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import EmptyData, TrainingRefused, WrongShape
from engine.model.pass_peak import StorageEvents
from engine.training.batch_statistics import freeze_statistics
from engine.training.split_gradients import slices_inputs, split_gradients
from kronoscope import local
from tests.engine.training.nets import LOSSES, NETS, Head, TimeMajor, Written, conv_net, images, make

EXACT = 1e-10
Way = dict[str, Any]
WAYS: dict[str, Way] = {
    "whole": {},
    "whole, checkpointed": {"checkpointing": True},
    "whole, a chunk that is not taken": {"chunk": 4},
    "frozen, all": {"batch_norm": "frozen"},
    "frozen, 6 of 15": {"batch_norm": "frozen", "chunk": 6},
    "frozen, one by one": {"batch_norm": "frozen", "chunk": 1},
    "frozen, 4 of 15, checkpointed": {"batch_norm": "frozen", "chunk": 4, "checkpointing": True},
}


def gradients(*modules: nn.Module) -> dict[str, Tensor]:
    """Gradients by module and name; those that are None are left out."""
    return {
        f"{number}.{name}": parameter.grad.clone()
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def undivided(model: nn.Module, loss: Callable[[Tensor], Any], inputs: Tensor, chunk: int) -> Tensor:
    """Gradients of the loss of all features, which are computed with the masks that chunks draw."""
    left = loss(torch.cat([model(part) for part in inputs.split(chunk)]))
    total: Tensor = left if isinstance(left, Tensor) else sum(left, torch.tensor(0.0))
    total.backward()
    return total.detach()


def largest_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Largest difference, relative to the largest of all gradients: a bias before BatchNorm has gradient zero."""
    assert found.keys() == truth.keys()
    largest = max(gradient.abs().max() for gradient in truth.values())
    assert largest > 1e-3
    return float(max((found[name] - truth[name]).abs().max() for name in truth) / largest)


@pytest.mark.part(of=24, by=("way", "net"))
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", WAYS)
def test_split_gradients_are_those_of_the_undivided_loss(net: str, loss: str, way: str) -> None:
    model, head, x, options = make(net), Head(), images(), WAYS[way]
    sliced = slices_inputs(model, options.get("batch_norm", "whole"))
    assert sliced == (net == "instance" or "frozen" in way)
    twin, twin_head = copy.deepcopy(model), copy.deepcopy(head)
    torch.manual_seed(3)
    with freeze_statistics(twin, wanted="frozen" in way):
        truth = undivided(twin, getattr(twin_head, loss), x, options.get("chunk", 15) if sliced else 15)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    found = split_gradients(model, getattr(head, loss), x, **options)
    assert torch.equal(torch.get_rng_state(), after)
    assert found.shape == ()
    assert not found.requires_grad
    assert abs(found - truth) <= EXACT * abs(truth)
    assert largest_error(gradients(model, head), gradients(twin, twin_head)) <= EXACT
    # running statistics have moved once, or where they are frozen not at all
    for name, buffer in twin.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    assert all(module.training for module in model.modules())


def test_gradients_add_up_over_calls() -> None:
    model, head, x = make("conv"), Head(), images(30)
    parts = []
    for part in x.split(15):
        torch.manual_seed(4)
        model.zero_grad()
        head.zero_grad()
        split_gradients(model, head.covariance, part, chunk=4, batch_norm="frozen")
        parts.append(gradients(model, head))
    model.zero_grad()
    head.zero_grad()
    for part in x.split(15):
        torch.manual_seed(4)
        split_gradients(model, head.covariance, part, chunk=4, batch_norm="frozen")
    sums = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert largest_error(gradients(model, head), sums) <= EXACT


def test_a_ragged_last_chunk_weighs_its_own_inputs_alone() -> None:
    """No mean of means: 7 inputs in chunks of 3 have the gradient of one mean over 7."""
    model = nn.Linear(4, 3, dtype=torch.float64)
    x, labels = torch.randn(7, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    split_gradients(model, lambda z: functional.cross_entropy(z, labels), x, chunk=3)
    probabilities = model(x).softmax(1) - functional.one_hot(labels, 3)
    assert torch.allclose(model.weight.grad, probabilities.T @ x / 7, rtol=0, atol=1e-15)


def test_a_frozen_backbone_trains_its_head_alone() -> None:
    model, head = make("conv").requires_grad_(False), Head()
    model.register_parameter("unused", nn.Parameter(torch.zeros(())))
    split_gradients(model, head.mean_cross_entropy, images(), chunk=4, batch_norm="frozen")
    assert not gradients(model)
    assert gradients(head).keys() == {"0.classify.weight", "0.classify.bias"}


class Tokens(nn.Module):
    """Positions of a normalised map as tokens, through a map that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6)
        self.mixed = nn.Linear(6, 10).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.norm(self.convolution(x)).flatten(2).transpose(1, 2)).tanh().sum(1)


@pytest.mark.parametrize("chunk", [1, 7])
def test_batch_norm_reads_the_gradient_of_a_chunk_of_one_right(chunk: int) -> None:
    """A chunk of one leaves the memory order of its gradient open, which torch misreads."""
    torch.manual_seed(0)
    model, head = Tokens().double(), Head()
    split_gradients(model, head.contrastive, images(), batch_norm="frozen")
    truth = gradients(model)
    model.zero_grad()
    split_gradients(model, head.contrastive, images(), batch_norm="frozen", chunk=chunk)
    assert largest_error(gradients(model), truth) <= EXACT


def test_inputs_that_need_a_gradient_get_theirs() -> None:
    model, x, y = conv_net().double().eval(), images().requires_grad_(), images().requires_grad_()
    head = Head().eval()
    split_gradients(model, head.contrastive, x, chunk=4)
    head.contrastive(model(y)).backward()
    assert largest_error({"x": x.grad}, {"x": y.grad}) <= EXACT


def peak(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Any] = torch.sum, **options: Any) -> int:
    """Most bytes that a call holds beyond what was held before, by the events of all storages."""
    split_gradients(model, loss, x, **options)  # gradients are there before the events are noted
    events = StorageEvents()
    with events.noted():
        split_gradients(model, loss, x, **options)
    return max(events.held)


def test_the_graph_of_one_term_alone_is_held() -> None:
    model, x = nn.Linear(4, 4), torch.randn(64, 4)

    def by_rows(z: Tensor) -> Iterator[Tensor]:
        for rows in z.split(4):
            yield rows.repeat(1, 1000).exp().square().sum()

    terms, scalar = peak(model, x, by_rows), peak(model, x, lambda z: z.repeat(1, 1000).exp().square().sum())
    assert terms <= scalar / 15


def test_half_and_quarter_chunks_hold_half_and_a_quarter_of_the_activations() -> None:
    torch.manual_seed(0)
    model, x = conv_net(), torch.randn(48, 2, 8, 8)
    whole = peak(model, x, batch_norm="frozen")
    assert peak(model, x, batch_norm="frozen", chunk=24) <= 0.55 * whole
    assert peak(model, x, batch_norm="frozen", chunk=12) <= 0.35 * whole


def test_checkpointing_holds_fewer_activations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
                                            for _ in range(3))) for _ in range(6)), nn.Flatten())  # fmt: skip
    x = torch.randn(32, 4, 8, 8)
    assert peak(model, x, checkpointing=True) <= 0.5 * peak(model, x)


@pytest.mark.parametrize("batch_norm", ["per_chunk", "batch"])
def test_statistics_of_chunks_are_refused(batch_norm: Any) -> None:
    with pytest.raises(ValueError, match=rf"batch_norm must be whole or frozen \(got '{batch_norm}'\)"):
        split_gradients(make("conv"), Head().covariance, images(), chunk=4, batch_norm=batch_norm)


def test_batch_norm_without_running_statistics_is_never_sliced_and_not_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    x = torch.randn(9, 4)
    assert not slices_inputs(model, "whole")
    with pytest.raises(ValueError, match="needs running statistics, and 1 has none"):
        split_gradients(model, torch.sum, x, chunk=4, batch_norm="frozen")
    split_gradients(model, lambda z: (z**3).sum(), x, chunk=4)
    found = gradients(model)
    model.zero_grad()
    (model(x) ** 3).sum().backward()
    assert all(torch.equal(found[name], truth) for name, truth in gradients(model).items())


class Drawing(nn.Module):
    """A model that draws by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * torch.rand(len(x), 4, generator=self.generator)


@pytest.mark.parametrize(
    ("model", "loss", "error", "sentence"),
    [
        (nn.Linear(4, 2), lambda z: iter(()), EmptyData, "a loss must have a term at least"),
        (nn.Linear(4, 2), lambda z: z.sum(1), WrongShape, r"a loss must return a scalar, .* \(got shape \(9,\)\)"),
        (nn.Linear(4, 2), lambda z: None, WrongShape, r"a loss must return a scalar, .* \(got None\)"),
        (nn.Linear(4, 2), lambda z: z.sum().item(), WrongShape, r"a loss must return a scalar, .* \(got -?\d"),
        (nn.Linear(4, 2), lambda z: [z.sum(), 1.0], WrongShape, r"a loss must return a scalar, .* \(got 1\.0\)"),
        (nn.Flatten(0), torch.sum, WrongShape, r"a row of features for each of 4 inputs \(got shape \(16,\)\)"),
        (nn.LSTM(4, 2), torch.sum, WrongShape, r"got tuple"),
        # torch's own backward raises of these, too
        (nn.Linear(4, 2), lambda z: z.detach().sum(), ValueError, "a loss must have a graph, by which it is"),
        (nn.Linear(4, 2).requires_grad_(False), torch.sum, ValueError, "a loss must have a graph, by which it is"),
        (Drawing(), torch.sum, ValueError, "the second time the features differ by"),
        (nn.ReLU(inplace=True), torch.sum, ValueError, "ReLU writes into its inputs"),
        (nn.InstanceNorm1d(1, affine=True, track_running_stats=True), torch.sum, ValueError, "moves its 'running_"),
        (nn.Linear(4, 2), lambda z: [z.sum().exp()] * 2, ValueError, "each term of a loss must have a graph of its"),
    ],
)  # fmt: skip
def test_what_would_be_another_gradient_is_refused(
    model: nn.Module, loss: Any, error: type[Exception], sentence: str
) -> None:
    x = torch.randn(9, 1, 4) if isinstance(model, nn.InstanceNorm1d) else torch.randn(9, 4)
    before = [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(error, match=sentence):
        split_gradients(model, loss, x, chunk=4)
    assert all(map(torch.equal, model.buffers(), before))


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_holds_an_input_at_least(chunk: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"chunk must be at least 1 (got {chunk})")):
        split_gradients(nn.Linear(4, 2), torch.sum, torch.randn(9, 4), chunk=chunk)


def test_no_inputs_are_refused() -> None:
    with pytest.raises(EmptyData, match="an input at least"):
        split_gradients(nn.Linear(4, 2), torch.sum, torch.randn(0, 4))


def clipped(net: Any, x: Tensor) -> Tensor:
    lengths = x.norm(dim=1, keepdim=True)
    return net.a(x) * (lengths.sort(0).values[-2:-1] / lengths).clamp(max=1)


COUPLED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cumulative": lambda net, x: net.a(x).tanh().cumsum(0),
    "the first": lambda net, x: net.a(x) + 0.5 * net.a(x)[:1],
    "the one before": lambda net, x: torch.cat([net.a(x)[:1], net.a(x)[1:] + net.a(x)[:-1]]),
    "centred beyond 5": lambda net, x: net.a(x) - net.a(x).mean(0) if len(x) > 5 else net.a(x),
}


@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("chunk", [8, 7, 6])
@pytest.mark.parametrize("coupling", COUPLED)
def test_coupled_examples_are_refused(coupling: str, chunk: int, drop: float) -> None:
    torch.manual_seed(0)
    with pytest.raises(TrainingRefused, match=r"chunks need .* change by \d.* leave chunk out"):
        local.split_gradients(Written(COUPLED[coupling], drop), torch.sum, torch.randn(32, 6), chunk=chunk)


@pytest.mark.parametrize("coupling", [*list(COUPLED)[:3]])
@pytest.mark.parametrize("count", [2, 3, 9])
def test_coupled_examples_are_refused_in_chunks_of_one(coupling: str, count: int) -> None:
    torch.manual_seed(0)
    with pytest.raises(TrainingRefused, match="change by"):
        local.split_gradients(Written(COUPLED[coupling]), torch.sum, torch.randn(count, 6), chunk=1)


@pytest.mark.parametrize("count", [4, 10, 40])
def test_a_recurrence_over_the_examples_is_refused(count: int) -> None:
    torch.manual_seed(0)
    with pytest.raises(TrainingRefused, match="those of TimeMajor change by"):
        local.split_gradients(TimeMajor(), torch.sum, torch.randn(count, 2, 6), chunk=3)


def test_outliers_clipped_by_others_are_refused() -> None:
    """The largest of the first two of four examples is not always the one that is clipped; of the chunk it is."""
    x = torch.ones(32, 6) * torch.tensor([1.0, 1, 2, 2, 1, 1, 1, 9]).repeat(4)[:, None]
    with pytest.raises(TrainingRefused, match="change by"):
        local.split_gradients(Written(clipped), torch.sum, x, chunk=8)
