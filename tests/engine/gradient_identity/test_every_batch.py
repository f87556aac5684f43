"""Every batch is looked at: what the data bring on in one batch alone is refused, or called by its name."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.accumulation.hooks import Collector
from engine.collect import collect_or_read
from engine.errors import NothingToAnalyse
from engine.factors.factor_set import FactorSet
from engine.gradient_identity import self_check
from engine.gradient_identity.recorded_rows import ExampleRows, RowRecorder, is_known, sketch
from engine.gradient_identity.schedule import Glances
from engine.gradient_identity.summed_rows import SummedRows, graph_signature
from engine.layers.layer import Use
from engine.layers.linear import LinearLayer
from engine.measurement.representation_record import coverage
from engine.model.batches import Batch
from tests.oracles import workspace

Run = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two linear layers and a matrix, used as a case says."""

    def __init__(self, use: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.h, self.use = nn.Linear(6, 8), nn.Linear(8, 5), use
        self.w = nn.Parameter(torch.randn(8, 8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def data(rare: int | None = 13, examples: int = 28) -> tuple[Tensor, Tensor]:
    """Batches of four, in one of which, the fourth, an example is large."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, 6, dtype=torch.float64, generator=generator).clamp(-3, 3)
    if rare is not None:
        x[rare, 0] = 25.0
    return x, torch.randint(5, (examples,), generator=generator)


def measured(use: Run, *, rare: int | None = 13, **options: Any) -> FactorSet | None:
    made = workspace(Net(use), [data(rare)], "classification", fisher="empirical", batch_size=4, **options)
    try:
        return collect_or_read(made)
    except NothingToAnalyse:
        return None


def standardised(net: Net, x: Tensor) -> Tensor:
    z = net.a(x)
    if float(x.abs().max()) > 20:
        z = (z - z.mean(0)) / (z.std(0, correction=0) + 1)
    return net.h(z.tanh())


def shifted(net: Net, x: Tensor) -> Tensor:
    """The same operations in every batch; in one of them a number is not zero."""
    z = net.a(x)
    much = (x.detach().abs().amax() > 20).to(z.dtype)
    return net.h((z - much * z.mean(0)).tanh())


def each_by_itself(usual: Run, rare: Run) -> Run:
    """Another branch for examples that are large, and for no other one."""

    def use(net: Net, x: Tensor) -> Tensor:
        z = net.a(x)
        rows = [(rare if float(x[n].max()) > 20 else usual)(net, z[n : n + 1]) for n in range(len(x))]
        return net.h(torch.cat(rows))

    return use


another_matrix = each_by_itself(lambda _, z: z.tanh(), lambda net, z: z.tanh() @ net.w)
another_branch = each_by_itself(lambda _, z: z.tanh(), lambda _, z: z.sigmoid().tanh())


@pytest.mark.part(of=16, by=("use",))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("use", [standardised, shifted])
def test_mixing_in_one_batch_is_refused(use: Run, dtype: str) -> None:
    assert measured(use, dtype=dtype) is None
    harmless = measured(use, dtype=dtype, rare=None)
    if use is standardised:
        assert harmless is not None
        assert [row.parameters for row in harmless.declared] == [("w",)]


def test_a_parameter_that_one_batch_uses_is_not_without_gradient() -> None:
    whole = measured(another_matrix)
    assert whole is not None
    assert {row.parameters: row.reason for row in whole.declared} == {("w",): "bare_parameter"}
    never = measured(another_matrix, rare=None)
    assert never is not None
    assert {row.parameters: row.reason for row in never.declared} == {("w",): "no_gradient"}


def test_a_branch_of_one_batch_that_mixes_nothing_is_covered_and_checked() -> None:
    whole, usual = measured(another_branch), measured(another_branch, rare=None)
    assert whole is not None
    assert usual is not None
    x, y = data()
    model = Net(another_branch)
    for layer in whole.layers:
        own = list(model.get_submodule(layer.name).parameters())
        total = 0.0
        for place in range(len(x)):
            loss = functional.cross_entropy(model(x[place : place + 1])[0], y[place])
            total += sum(float(each.square().sum()) for each in torch.autograd.grad(loss, own))
        assert layer.exact_trace == pytest.approx(total / len(x), rel=1e-10)
    assert whole.looked_at is not None
    assert usual.looked_at is not None
    # the batch with the branch, besides 0 (rehearsed), 1, 2 and 4
    assert (whole.looked_at.full, usual.looked_at.full) == (4, 3)


def test_the_record_says_how_many_batches_were_looked_at() -> None:
    whole = measured(another_branch, rare=None)
    assert whole is not None
    looked = coverage(whole).looked_at
    assert looked is not None
    assert looked.signatures == 7
    assert looked.glances >= 1
    assert looked.no_glance is None

    def noisy(net: Net, x: Tensor) -> Tensor:
        return net.h(functional.dropout(net.a(x), 0.5, training=True).tanh())

    drawn = measured(noisy, rare=None)
    assert drawn is not None
    assert drawn.looked_at is not None
    assert (drawn.looked_at.glances, drawn.looked_at.no_glance) == (0, "the model draws random numbers")


def test_a_signature_is_of_types_and_order() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    plain, again = graph_signature(x.tanh().exp()), graph_signature((x * 1).tanh().exp())
    assert plain == graph_signature(torch.randn(7, 4, requires_grad=True).tanh().exp())
    assert len({plain, again, graph_signature(x.exp().tanh()), graph_signature(x.tanh().exp() + x)}) == 4
    assert graph_signature(x.detach())[0] == ""


def test_glances_come_as_seldom_as_their_share_of_a_batch_asks() -> None:
    assert Glances.of(10**9, 10**9, 100, 256) == Glances(every=1)
    assert Glances.of(10**9, 10**9, 100, 4) == Glances(every=5)
    # the benchmark's MLP, whose weights are read for one example: 3.5 of 47 ms
    assert Glances.of(1_860_000, 2_400_000, 6, 256, weights=1_860_000) == Glances(every=4)
    small = Glances.of(1000, 1000, 20, 4)
    assert (small.every, small.first) == (9, 32)
    assert [small.turn(number) for number in (0, 1, 31, 35, 36, 45)] == [0, 1, 31, None, 36, 37]


def test_rows_are_known_again_by_their_numbers_and_places() -> None:
    torch.manual_seed(0)
    entered, arrived = torch.randn(1, 5, 8), torch.randn(1, 5, 3)

    def rows(a: Tensor, g: Tensor) -> ExampleRows:
        use = Use(entered=a, examples=1)
        recorder = RowRecorder(layer=LinearLayer("", nn.Linear(8, 3), weight=True, bias=True), met=[(use, g)])
        return ExampleRows(recorder=recorder, example=0)

    known = sketch(rows(entered, arrived))
    assert is_known(sketch(rows(entered.clone(), arrived.clone())), known, 0.0)
    nudged = arrived.clone()
    # a small number's difference would be lost by rounding, on some processors
    nudged.view(-1)[nudged.abs().argmax()] *= 1 + 1e-4
    for a, g in (
        (entered.flip(1), arrived),
        (entered, arrived.flip(2)),
        (entered, nudged),
        (-entered, arrived),
        (entered[:, :4], arrived[:, :4]),
        (entered, arrived * torch.nan),
    ):
        assert not is_known(sketch(rows(a, g)), known, 0.0)
    assert is_known(sketch(rows(entered, nudged)), known, 1e-3)


def test_rows_are_let_go_before_the_next_batch_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(SummedRows):
        def begin(self, part: Batch, collector: Collector) -> None:
            alive.append(sum(each() is not None for each in begun))
            super().begin(part, collector)
            begun.extend(weakref.ref(each) for group in self.groups for each in group.recorders.values())

    alive: list[int] = []
    begun: list[weakref.ref[RowRecorder]] = []
    monkeypatch.setattr(self_check, "SummedRows", Watched)
    gc.disable()
    try:
        assert measured(lambda net, x: net.h(torch.tanh(net.a(x))), rare=None) is not None
    finally:
        gc.enable()
    assert len(begun) >= 7 * 2
    assert alive == [0] * len(alive)
