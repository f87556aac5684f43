"""The plan of a spectrum: bytes against the profiler's account and the searches' own, choices that are replayed."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from catalog.analyses.spectrum import SpectrumParams
from engine import estimate
from engine.analyses.costs.spectrum import SEARCH_WIDTH, asked_at_once, choose_search
from engine.analyses.spectrum import Spectrum
from engine.linalg.lanczos import PANEL_BYTES
from engine.memory.budget import MemoryBudget
from engine.memory.plan import Chosen, Plan
from engine.operators.extreme_eigenvalues import SearchOptions
from engine.operators.krylov.search_options import search_bytes
from engine.workspace import Machine, Workspace
from tests.memory_profile import peak_bytes_within
from tests.oracles import workspace

SMALL: dict[str, Any] = {"k": 3, "steps": 4, "probes": 3, "trace_products": 8, "most_products": 40}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0, batch_first=True)
        self.head = nn.Linear(64, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.table(x)))


def net(name: str) -> tuple[nn.Module, Tensor, Tensor, str]:
    torch.manual_seed(0)
    if name == "wide":
        model = nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 10))
        return model, torch.randn(64, 300), torch.randint(0, 10, (64,)), "classification"
    if name == "deep":
        layers = [layer for _ in range(6) for layer in (nn.Linear(100, 100), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(100, 10))
        return model, torch.randn(512, 100), torch.randint(0, 10, (512,)), "classification"
    if name == "convolutions":
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
        ).eval()  # fmt: skip
        return model, torch.randn(300, 1, 8, 8), torch.randint(0, 10, (300,)), "classification"
    return Attention(), torch.randint(0, 50, (16, 32)), torch.randint(0, 50, (16, 32)), "masked_lm"


def job(name: str, params: SpectrumParams) -> Workspace:
    model, inputs, targets, task = net(name)
    space = workspace(
        model, [(inputs, targets)], task, fisher="mc", dtype="float32", batch_size=len(inputs), self_check="off"
    )
    space.options.kinds, space.options.params, space.options.keep = ("spectrum",), {"spectrum": params}, ()
    space.options.decomposition, space.inputs.examples = params.decomposition, len(inputs)
    return space


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("of", ["ggn", "hessian"])
@pytest.mark.parametrize("name", ["wide", "deep", "convolutions", "attention"])
def test_the_search_takes_what_the_plan_says(name: str, of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # the most is held long before the search ends
    params = SpectrumParams(of=of, **SMALL | {"most_products": 20})
    space = job(name, params)

    @contextlib.contextmanager
    def operation(machine: Machine, name: str, stage: str | None = None) -> Iterator[None]:
        del machine, stage
        with record_function(name):
            yield

    monkeypatch.setattr(Machine, "operation", operation)
    (peak,) = peak_bytes_within(lambda: list(Spectrum(params, space).rows()), f"spectrum of {of}").values()
    plan = space.results.plan
    assert plan is not None
    foretold = replace(
        plan, terms=tuple(term for term in plan.terms if term.source != "measured" and term.name != "libraries")
    )
    assert 0.8 <= foretold.stage_bytes("host", "spectrum") / peak <= 1.1


def test_the_vectors_that_are_counted_are_those_of_the_searches() -> None:
    params, size = SpectrumParams(of="ggn", **SMALL), 10**6
    chosen = choose_search(params, size, torch.float32, 2**60)
    plan = planned(params, 2**60)
    kept = {term.name: term.formula for term in plan.terms if term.stage == "spectrum"}
    options = SearchOptions(
        count=params.k, end="both", tolerance=1e-3, seed=0, dtype=torch.float32, most_products=40,
        length=chosen["length"],
    )  # fmt: skip
    rows = options.room(size) + 2
    assert kept["basis"] == f"{rows} · P"
    # what the search says that it holds besides: three blocks in float64, three panels, its projected matrices
    beside = 3 * SEARCH_WIDTH * size * 8 + 3 * PANEL_BYTES + 10 * rows * rows * 8
    assert rows * size * 4 == search_bytes(size, options) - beside
    assert kept["quadrature"] == "3 · 4 · P"
    assert asked_at_once(params) == max(1 + 3 + 4, SEARCH_WIDTH)


def planned(params: SpectrumParams, host_bytes: int, chosen: Chosen | None = None) -> Plan:
    space = job("wide", params)
    space.machine.budget = MemoryBudget(device_bytes=2**60, host_bytes=host_bytes)
    space.resume.chosen = chosen
    return estimate.plan_job(space)


def test_with_less_that_is_free_the_basis_is_shorter_and_the_columns_are_fewer() -> None:
    params = SpectrumParams(of="ggn", **SMALL | {"most_products": 300})
    vector = 4 * 124_410
    found = [choose_search(params, 124_410, torch.float32, count * vector) for count in (10**6, 800, 200, 60, 12, 0)]
    lengths, columns = ([each[name] for each in found] for name in ("length", "columns"))
    assert lengths == sorted(lengths, reverse=True)
    assert columns == sorted(columns, reverse=True)
    assert found[0] == {"length": 308, "columns": 8}
    assert found[-1] == {"length": 10, "columns": 1}
    assert len(set(lengths)) > 2
    assert len(set(columns)) > 2
    for each, count in zip(found[:4], (10**6, 800, 200, 60), strict=False):
        # the basis, two vectors around it, the quadrature's three probes of four steps: half of what is free
        assert each["length"] + 2 + 12 <= count / 2 or each["length"] == 10


def test_what_an_earlier_attempt_chose_is_done_again_and_read_back() -> None:
    params = SpectrumParams(of="ggn", **SMALL)
    first = planned(params, 2**60)
    assert first.chosen.search == {"length": 48, "columns": 8}
    stored = first.as_json() | {"search": {"length": 20, "columns": 2}}
    again = planned(params, 2**60, Chosen.read(stored))
    assert again.chosen.search == {"length": 20, "columns": 2}
    assert Chosen.read({}).search == {}


def test_of_factors_alone_nothing_is_searched() -> None:
    plan = planned(SpectrumParams(of="kfac"), 2**60)
    assert plan.chosen.search == {}
    assert {term.name for term in plan.terms if term.stage == "spectrum"} == {"factors", "spectra", "products"}
    seconds = plan.seconds["spectrum"]
    assert planned(SpectrumParams(of="ggn", **SMALL), 2**60).seconds["spectrum"] > seconds
