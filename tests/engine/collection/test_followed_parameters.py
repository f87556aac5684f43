"""Parameters that operations show: every pass follows them all, whichever of their layers it collects."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.accumulation.hooks import Collector
from engine.collect import collect_or_read
from engine.collection import ekfac_passes
from engine.errors import ModelRefused
from engine.factors.factor_set import FactorSet
from engine.measurement.piece_storage import store_bases, store_correction
from engine.memory.plan import Chosen
from engine.planning import job_plan
from engine.row_layout.row_order import Operations
from engine.workspace import Workspace
from tests.divided import joining, piece, stored
from tests.oracles import MemoryArtifacts, relative_error, workspace


class LookedUp(nn.Module):
    """Vectors of a table that is no module, multiplied by a matrix that is none either: its rows are the table's."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.w = nn.Parameter(torch.randn(10, 6)), nn.Parameter(torch.randn(8, 6))
        self.h = nn.Linear(8, 5)
        self.scale = 1.0

    def forward(self, ids: Tensor) -> Any:
        return self.h(functional.linear(self.e[ids], self.w).tanh().mean(1)) * self.scale


class Transformed(LookedUp):
    """The same table in an operation that is not understood, so that no layer covers it."""

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids) + torch.fft.rfft(self.e).real.sum() * self.e[ids][:, 0, :1]


class Asked(nn.Module):
    """Learned queries, expanded over the examples, into an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.a = nn.Parameter(torch.randn(3, 8)), nn.Linear(6, 8)
        self.m, self.h = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        keys = self.a(x)
        return self.h(self.m(self.q.expand(len(x), -1, -1), keys, keys)[0].mean(1))


class Detecting(nn.Module):
    """Learned queries into a decoder, as DETR has them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.a = nn.Parameter(torch.randn(3, 8)), nn.Linear(6, 8)
        self.d, self.h = nn.TransformerDecoderLayer(8, 2, 12, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.h(self.d(self.q.expand(len(x), -1, -1), self.a(x)).mean(1))


class Products(nn.Module):
    """A table of vectors through two einsum products in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.Parameter(torch.randn(10, 6)), nn.Linear(4, 5)
        self.v, self.w = nn.Parameter(torch.randn(7, 6)), nn.Parameter(torch.randn(7, 4))

    def forward(self, ids: Tensor) -> Any:
        first = torch.einsum("btd,kd->btk", self.e[ids], self.v).tanh()
        return self.h(torch.einsum("btk,ko->bto", first, self.w).tanh().mean(1))


def data(examples: int = 14) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(10, (examples, 3), generator=generator), torch.randint(5, (examples,), generator=generator)


def job(make: Callable[[], nn.Module] = LookedUp, **options: Any) -> Workspace:
    torch.manual_seed(0)
    model, (ids, y) = make().double(), data()
    x = torch.randn(14, 4, 6, dtype=torch.float64) if make in (Asked, Detecting) else ids
    usual: dict[str, Any] = {"fisher": "empirical", "batch_size": 4, "self_check": "growing"}
    made = workspace(model, [(x, y)], "classification", **usual | options)
    made.inputs.examples = len(y)
    return made


def traces(space: Workspace) -> dict[str, float]:
    """Mean squared norm of each example's gradient by parameter, by autograd in float64."""
    assert space.inputs.model is not None
    assert space.inputs.batches is not None
    model, total = space.inputs.model.eval(), dict[str, float]()
    ((x, y),) = space.inputs.batches()
    for example, target in zip(x, y, strict=True):
        loss = functional.cross_entropy(model(example[None]), target[None])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
            total[name] = total.get(name, 0.0) + float(gradient.square().sum()) / len(y)
    return total


def sums(whole: FactorSet) -> dict[str, float]:
    assert whole.load_corrected is not None
    return {layer.name: float(whole.load_corrected(layer.ordinal).eigenvalues.sum()) for layer in whole.layers}


def reasons(whole: FactorSet) -> dict[str, str]:
    return {row.name: row.reason for row in whole.declared}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("make", [LookedUp, Asked, Detecting, Products])
@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_corrected_eigenvalues_have_the_rows_that_another_parameter_brings(make: Any, fisher: str) -> None:
    space = job(make, ekfac=True, fisher=fisher)
    truth, whole = traces(space), collect_or_read(space)
    assert not whole.declared
    found = sums(whole)
    for layer in whole.layers:
        assert found[layer.name] == pytest.approx(layer.exact_trace, rel=1e-10), layer.name
    if fisher == "empirical":
        assert sum(found.values()) == pytest.approx(sum(truth.values()), rel=1e-10)


@pytest.mark.parametrize("make", [LookedUp, Detecting])
def test_a_layer_in_a_pass_of_its_own_has_the_same_factors(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_plan, "resident_bytes", lambda: 0)
    together, apart = collect_or_read(job(make)), job(make, ekfac=True)
    names = tuple((layer.name,) for layer in together.layers if layer.shared_A_with is None)
    followers = [layer for layer in together.layers if layer.shared_A_with is not None]
    assert not followers
    apart.ports.scratch = MemoryArtifacts()
    apart.resume.chosen = Chosen(parts=names, corrections=names)
    found = collect_or_read(apart)
    assert not found.declared
    assert [layer.name for layer in found.layers] == [layer.name for layer in together.layers]
    for layer in found.layers:
        one, other = found.load(layer.ordinal), together.load(layer.ordinal)
        assert torch.equal(one.A, other.A)
        assert torch.equal(one.dense_G, other.dense_G)
    assert sums(found) == pytest.approx({layer.name: layer.exact_trace for layer in together.layers}, rel=1e-10)


def test_a_layer_is_covered_whose_rows_come_from_a_parameter_that_is_not() -> None:
    usual, halved = collect_or_read(job()), job()
    assert isinstance(halved.inputs.model, LookedUp)
    halved.inputs.model.e.register_hook(lambda gradient: gradient / 2)  # type: ignore[no-untyped-call]
    found = collect_or_read(halved)
    assert reasons(found) == {"e": "gradient_identity"}
    transformed = collect_or_read(job(Transformed))
    assert reasons(transformed) == {"(model)": "unknown_operation"}
    truth = traces(job(Transformed))
    for whole in (found, transformed):
        assert [layer.name for layer in whole.layers] == ["w", "h"]
    for place in (0, 1):
        own, other = found.load(place), usual.load(place + 1)
        assert relative_error(own.A, other.A) == relative_error(own.dense_G, other.dense_G) == 0
    assert transformed.layers[0].exact_trace == pytest.approx(truth["w"], rel=1e-12)


def unfollowed(**options: Any) -> Collector:
    return Collector(**{**options, "layout": replace(options["layout"], operations=Operations())})


def test_a_layer_whose_rows_a_pass_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that follows less than the passes before stands for any such fault."""
    made, lines = job(ekfac=True), list[str]()
    made.ports.log = lambda _, line: lines.append(line)
    pieces = [stored(lambda: job(ekfac=True), 0, 14)]
    bases = joining(lambda: job(ekfac=True), pieces)
    store_bases(bases)
    own = piece(lambda: job(ekfac=True), 0, 14)
    own.inputs.bases = bases.ports.artifacts
    monkeypatch.setattr(ekfac_passes, "Collector", unfollowed)
    found = collect_or_read(made)
    assert reasons(found) == {"w": "unforeseen_use"}
    assert "layer `w`: EK-FAC's pass does not see its rows (unforeseen_use); it is not covered" in lines
    assert sums(found) == pytest.approx({layer.name: layer.exact_trace for layer in found.layers}, rel=1e-10)
    with pytest.raises(ModelRefused, match="layer `w` was collected, and its rows are not seen now"):
        store_correction(own)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_layer_whose_eigenvalues_are_not_its_trace_is_refused(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(factor: float, **options: Any) -> FactorSet:
        made, real = job(ekfac=True, dtype=dtype, **options), ekfac_passes._run

        def changed(*arguments: Any) -> Any:
            assert isinstance(made.inputs.model, LookedUp)
            made.inputs.model.scale = factor
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(ekfac_passes, "_run", changed)
            made.ports.log = lambda _, line: lines.append(line)
            return collect_or_read(made)

    lines: list[str] = []
    assert run(1.0).declared == ()
    assert not any("add up to" in line for line in lines)
    found = run(1.1)
    assert reasons(found) == {"w": "correction_differs", "h": "correction_differs"}
    assert sum("its corrected eigenvalues add up to" in line for line in lines) == 2
    # without a trace there is nothing to compare
    assert run(1.1, exact_trace=False).declared == ()
