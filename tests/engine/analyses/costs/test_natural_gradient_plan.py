"""The plan of a natural gradient against the profiler's account of every allocation."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from catalog.analyses.natural_gradient import NaturalGradientParams
from catalog.requests.woodbury import Woodbury
from engine.analyses.natural_gradient import NaturalGradient
from engine.memory.plan import Plan
from engine.workspace import Machine, Workspace
from tests.memory_profile import peak_bytes_within
from tests.oracles import MemoryArtifacts, workspace


def _profiled(monkeypatch: pytest.MonkeyPatch, params: NaturalGradientParams, made: Workspace) -> int:
    """Most bytes that were held at once beyond what was held before the job, within the stage."""

    @contextlib.contextmanager
    def operation(machine: Machine, name: str, stage: str | None = None) -> Iterator[None]:
        del machine, name
        with torch.profiler.record_function(f"stage {stage}"):
            yield

    monkeypatch.setattr(Machine, "operation", operation)
    (peak,) = peak_bytes_within(lambda: list(NaturalGradient(params, made).rows()), "stage natural_gradient").values()
    return peak


def _bare(plan: Plan) -> Plan:
    return replace(
        plan, terms=tuple(term for term in plan.terms if term.source != "measured" and term.name != "libraries")
    )


def _job(params: NaturalGradientParams, widths: tuple[int, int, int], **options: Any) -> Workspace:
    torch.manual_seed(0)
    first, second, third = widths
    model = nn.Sequential(nn.Linear(first, second), nn.Tanh(), nn.Linear(second, third))
    batch = options.pop("batch", 16)
    data = [(torch.randn(batch, first), torch.randint(0, third, (batch,)))]
    made = workspace(model, data, "classification", **{"fisher": "mc", "dtype": "float32", "batch_size": 64} | options)
    made.options.kinds, made.options.params = ("natural_gradient",), {"natural_gradient": params}
    made.options.decomposition, made.inputs.examples = params.decomposition, batch
    made.options.keep = ("directions",)
    return made


CASES: dict[str, tuple[NaturalGradientParams, tuple[int, int, int], dict[str, Any]]] = {
    "eigenvectors": (NaturalGradientParams(power=(1.0, 0.5)), (900, 700, 10), {}),
    "five powers": (NaturalGradientParams(power=(1.0, 0.5, 0.25, 0.75, 2.0)), (500, 900, 10), {}),
    "solves": (NaturalGradientParams(damping="factored"), (900, 800, 10), {}),
    "float64": (NaturalGradientParams(), (800, 600, 10), {"dtype": "float64"}),
    "the pass": (NaturalGradientParams(damping="factored"), (40, 600, 10), {"batch": 8192, "batch_size": 8192}),
    "scratch": (NaturalGradientParams(), (900, 700, 10), {"scratch": True}),
    "rows": (NaturalGradientParams(), (150, 8, 4000), {"fisher": "empirical", "woodbury": True, "batch": 500}),
}


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("case", CASES)
def test_a_natural_gradient_takes_what_the_plan_says(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params, widths, options = CASES[case]
    options = dict(options)
    scratch, rows = options.pop("scratch", False), options.pop("woodbury", False)
    made = _job(params, widths, **options)
    if scratch:
        made.ports.scratch = MemoryArtifacts()
    made.options.woodbury = Woodbury(policy="all" if rows else "dense", dtype="fp32")
    peak = _profiled(monkeypatch, params, made)
    assert peak > 0, "the profiler recorded nothing of the stage"
    assert made.results.plan is not None
    planned = _bare(made.results.plan).stage_bytes("host", "natural_gradient")
    assert 0.8 <= planned / peak <= 1.1
