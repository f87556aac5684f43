"""Several analyses over one collection: one that is refused leaves the results of the others."""

import gc
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from catalog import ANALYSES
from engine.errors import BudgetExceeded, EngineError, ModelRefused, NotConverged, UsageError
from kronoscope.local import AnalysisRefused, Measurement, measure

KINDS = ("factors", "capacity", "reconstruction", "natural_gradient", "spectrum")
SENTENCE = "layer `h` cannot be so; give another"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.h = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.h(self.a(x).tanh())
        return out


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 6, generator=generator), torch.randint(5, (16,), generator=generator)


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    return examples()


@pytest.fixture(scope="module")
def undisturbed() -> Measurement:
    return measured(examples())


def measured(data: Any, model: nn.Module | None = None, kinds: tuple[str, ...] = KINDS, **more: Any) -> Measurement:
    collection = {"dtype": "float64", "batch_size": 8, "self_check": "off"}
    return measure(model or Net(), data, task="classification", kinds=kinds, collection=collection, **more)


def refuse(monkeypatch: pytest.MonkeyPatch, kind: str, error: Exception, after: int = 1) -> None:
    """Have an analysis raise once it has given `after` rows of its own."""
    analysis = pkgutil.resolve_name(ANALYSES[kind].implementation)
    whole = analysis.rows

    def partly(self: Any) -> Iterator[Any]:
        for place, row in enumerate(whole(self)):
            if place == after:
                raise error
            yield row
        raise error

    monkeypatch.setattr(analysis, "rows", partly)


@pytest.mark.part(of=16, by=("after",))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 1])
def test_each_kind_can_be_refused_and_the_others_stand(
    monkeypatch: pytest.MonkeyPatch, undisturbed: Measurement, data: Any, kind: str, after: int
) -> None:
    whole = undisturbed
    refuse(monkeypatch, kind, UsageError(SENTENCE, layer="h", pointer="/memory"), after)
    with pytest.warns(AnalysisRefused, match=f"`{kind}` was refused: layer `h` cannot be so"):
        found = measured(data)
    assert set(found.summary) == set(KINDS) - {kind}
    assert repr(found).endswith(f"of 2 layers; 100.0% full block; {kind} refused>")
    assert (found.refused[kind].layer, found.refused[kind].pointer) == ("h", "/memory")
    for other in set(KINDS) - {kind}:
        assert {name: row.metrics for name, row in found.of(other).items()} == {
            name: row.metrics for name, row in whole.of(other).items()
        }
        assert found.summary[other] == whole.summary[other]
    for layer, factors in found.factors.items():
        assert torch.equal(factors.A, whole.factors[layer].A)
    with pytest.raises(ValueError, match=f"`{kind}` was refused: {SENTENCE}"):
        found.of(kind)


def test_a_saturated_layer_costs_the_natural_gradient_alone(data: Any) -> None:
    model = Net()
    with torch.no_grad():
        model.h.weight.zero_()
        model.h.bias[0] = 2e3
    with pytest.warns(AnalysisRefused, match="`h` has no curvature"):
        found = measured(data, model, ("factors", "natural_gradient", "capacity"))
    x = torch.cat([data[0], torch.ones(16, 1)], 1).double()
    torch.testing.assert_close(found.factors["a"].A, x.T @ x / 16)
    assert float(found.factors["h"].G.abs().max()) == 0
    assert set(found.summary) == {"factors", "capacity"}
    with pytest.raises(UsageError, match="`h` has no curvature"):
        measured(data, model, ("natural_gradient",))


def test_all_of_them_refused_is_a_failure_with_the_first(monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    refuse(monkeypatch, "capacity", BudgetExceeded("the first"))
    refuse(monkeypatch, "spectrum", UsageError("the second"))
    with pytest.raises(BudgetExceeded, match="the first"):
        measured(data, kinds=("capacity", "spectrum"))


@pytest.mark.parametrize("error", [NotConverged("no solver"), MemoryError("no memory"), KeyboardInterrupt()])
def test_what_is_no_refusal_ends_the_whole(monkeypatch: pytest.MonkeyPatch, data: Any, error: Any) -> None:
    refuse(monkeypatch, "capacity", error)
    with pytest.raises(type(error)):
        measured(data, kinds=("capacity", "factors"))


def test_a_failed_collection_is_not_tried_again_for_each_analysis(data: Any) -> None:
    calls = 0

    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            raise ValueError("mine")

    for kinds in (("factors",), ("factors", "capacity", "spectrum")):
        calls, before = 0, calls
        with pytest.raises((EngineError, ModelRefused), match="mine"):
            measured(data, Broken(), kinds)
    assert calls == before


def test_nothing_of_a_refused_analysis_is_held(monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    closed = []

    def inner() -> Iterator[int]:
        try:
            yield 1
        finally:
            closed.append(True)

    def refusing(self: Any) -> Iterator[Any]:
        from engine.collect import collect_or_read  # noqa: PLC0415 - as an analysis does

        collect_or_read(self.workspace)
        for _ in inner():
            raise UsageError(SENTENCE)
        yield

    monkeypatch.setattr(pkgutil.resolve_name(ANALYSES["capacity"].implementation), "rows", refusing)
    gc.disable()
    try:
        with pytest.warns(AnalysisRefused):
            measured(data, kinds=("capacity", "factors"))
    finally:
        gc.enable()
    assert closed == [True]


def test_factors_are_kept_whichever_is_refused(monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    refuse(monkeypatch, "natural_gradient", UsageError(SENTENCE), 0)
    with pytest.warns(AnalysisRefused):
        found = measured(data, kinds=("natural_gradient", "capacity"))
    assert set(found.factors) == {"a", "h"}
