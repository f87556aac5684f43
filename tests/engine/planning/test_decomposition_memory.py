"""Decompositions as a plan foresees them, against what is done and against arithmetic by hand."""

from typing import Any

import pytest
import torch
from torch import nn

from catalog.requests.woodbury import Woodbury
from engine import estimate
from engine.collect import collect_or_read
from engine.measurement.layer_measurement import Measured, measure_layers
from engine.memory.budget import MemoryBudget
from engine.memory.device_speed import typical_speed
from engine.memory.guard import Guard
from engine.memory.plan import LIBRARY_BYTES, Chosen, Plan
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, workspace

MIB = 2**20


def job(device: str = "cpu", *, widths: tuple[int, int, int] = (200, 100, 4), **options: Any) -> Workspace:
    """Two layers and five examples of four classes."""
    torch.manual_seed(0)
    first, second, third = widths
    with torch.device(device):
        model = nn.Sequential(nn.Linear(first, second, bias=False), nn.Tanh(), nn.Linear(second, third, bias=False))
    chunk = torch.randn(5, first), torch.arange(5) % third
    given: dict[str, Any] = {"fisher": "empirical", "batch_size": 5} | options
    made = workspace(model, [chunk], "classification", **given)
    made.inputs.examples, made.ports.scratch, made.options.decomposition = 5, MemoryArtifacts(), "values"
    made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=2**40)
    made.machine.guard = Guard(budget=made.machine.budget, device=torch.device("cpu"), log=made.ports.log)
    made.options.woodbury = Woodbury(policy="dense")
    return made


@pytest.mark.parametrize("counted", [True, False])
def test_few_rows_are_decomposed_by_their_gram_matrix_in_a_planned_job(counted: bool) -> None:
    made = job()
    if not counted:
        # then a plan cannot know how few they are
        made.inputs.examples = None
    layers: list[Measured] = list(measure_layers(made))
    assert made.results.plan is not None
    for layer in layers:
        assert layer.record.rungs_A == ("host_gram",)
        factors = collect_or_read(made).load(layer.facts.ordinal)
        assert layer.A.spectrum is not None
        torch.testing.assert_close(layer.A.spectrum, torch.linalg.eigvalsh(factors.A), rtol=1e-9, atol=1e-12)
        if counted:
            assert made.results.plan.chosen.rung(layer.facts.name, "A") == "host_gram"
            # the copy, and five columns
            (term,) = [each for each in made.results.plan.terms if each.layer == layer.facts.name]
            assert term.size_bytes == 8 * (layer.facts.in_dim**2 + 5 * layer.facts.in_dim)


def planned(made: Workspace, monkeypatch: pytest.MonkeyPatch, host_bytes: int = 2**40) -> Plan:
    monkeypatch.setattr(estimate, "resident_bytes", lambda: 0)
    made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=host_bytes)
    return estimate.plan_job(made)


def test_seconds_are_those_of_the_rungs_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the operations of each algorithm: 9 n³ by divide and conquer, 12 n³ by MRRR, 5 n³ for values alone.

    A rate of 2e10 is that of 256 rows: 0.6 of their time grows with n³, 0.4 with n².
    """

    def seconds(times: int, n: int) -> float:
        return times * 256**3 / 2e10 * (0.6 * (n / 256) ** 3 + 0.4 * (n / 256) ** 2)

    sides = (600, 500, 500, 4)
    cases: tuple[tuple[Any, int, float], ...] = (
        ("vectors", 2**40, sum(seconds(9, n) for n in sides)),
        ("vectors", LIBRARY_BYTES + 11 * MIB, seconds(12, 600) + sum(seconds(9, n) for n in sides[1:])),
        ("values", 2**40, sum(seconds(5, n) for n in sides)),
        ("none", 2**40, 0),
    )
    for need, budget, decomposed in cases:
        made = job("meta", widths=(600, 500, 4), dtype="float32")
        made.options.decomposition = need
        plan = planned(made, monkeypatch, budget)
        assert plan.fits(made.machine.budget)
        assert plan.seconds["decomposition"] == pytest.approx(decomposed, abs=0.015)


def test_gradient_rows_come_back_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where factors are laid aside, what is read back of a G kept as five rows is five rows, and no n²."""
    made = job("meta", widths=(16, 4000, 4), dtype="float32")
    made.options.woodbury, made.options.decomposition = Woodbury(policy="all"), "none"
    made.resume.chosen = Chosen(parts=(("0",), ("2",)))
    plan = planned(made, monkeypatch)
    rows = 5 * 4000 * 4
    back = {term.layer: term.size_bytes for term in plan.terms if term.name == "read back"}
    assert back["0"] == pytest.approx(16 * 16 * 4 + rows, rel=0.3)
    assert back["2"] == pytest.approx(4000 * 4000 * 4, rel=0.01)


def test_bases_that_stay_in_memory_leave_less_to_the_decompositions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a place to lay them aside, the rung is one that fits beside the bases."""
    made = job("meta", widths=(600, 500, 4), dtype="float32")
    made.options.decomposition, made.ports.scratch = "vectors", None
    whole = planned(made, monkeypatch)
    made = job("meta", widths=(600, 500, 4), dtype="float32")
    made.options.decomposition, made.ports.scratch = "vectors", None
    plan = planned(made, monkeypatch, whole.peak_bytes("host") - MIB)
    assert whole.chosen.rung("0", "A") == "host_float64"
    assert plan.chosen.rung("0", "A") == "host_syevr"
    assert plan.fits(made.machine.budget)


@pytest.mark.parametrize(("device_bytes", "rung"), [(2**38, "device_float64"), (2**35, None)])
def test_a_factor_beyond_lapack_is_decomposed_where_the_device_has_the_memory(
    device_bytes: int, rung: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "resident_bytes", lambda: 0)
    made = job("meta", widths=(50_000, 8, 4), dtype="float32")
    made.machine.device = torch.device("cuda")
    made.machine.budget = MemoryBudget(device_bytes=device_bytes, host_bytes=2**40)
    plan = estimate.plan_job(made)
    assert plan.fits(made.machine.budget)
    assert plan.chosen.rung("0", "A") == rung
    assert ("so the eigenvalues of A of `0` (50000 rows) stay unknown" in plan.why) == (rung is None)


def test_gradient_rows_are_decomposed_where_the_job_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "resident_bytes", lambda: 0)
    rows, classes = 400, 2000
    plans = {}
    for device in ("cpu", "cuda"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, classes, bias=False))
        made = workspace(
            model, [(torch.zeros(rows, 8), torch.zeros(rows, dtype=torch.int64))], "classification",
            fisher="empirical", dtype="float32", batch_size=rows,
        )  # fmt: skip
        made.inputs.examples, made.options.decomposition, made.ports.scratch = rows, "values", MemoryArtifacts()
        made.options.woodbury = Woodbury(policy="all")
        made.machine.device = torch.device(device)
        made.machine.budget = MemoryBudget(device_bytes=2**36, host_bytes=2**40)
        plans[device] = estimate.plan_job(made)
    gram = {name: next(term for term in plan.terms if term.name == "Gram matrix") for name, plan in plans.items()}
    assert (gram["cpu"].place, gram["cuda"].place) == ("host", "device")
    # cuSOLVER takes five matrices beside the one that it decomposes, LAPACK with a copy three
    assert gram["cuda"].size_bytes - gram["cpu"].size_bytes == 2 * 8 * rows**2
    usual = {device: typical_speed(torch.device(device)) for device in plans}
    taken = [
        4 * classes * rows**2 / usual[device].operations_per_second
        + 5 * rows**3 / usual[device].eigen_operations_per_second * (0.6 + 0.4 * 256 / rows)
        for device in plans
    ]
    # what each layer takes beside is counted in starts of operations
    taken = [each + 1000 * usual[device].seconds_an_operation for each, device in zip(taken, plans, strict=True)]
    # A of 8 rows takes nothing, and on a GPU is decomposed on it or the host
    apart = plans["cpu"].seconds["decomposition"] - plans["cuda"].seconds["decomposition"]
    assert apart == pytest.approx(taken[0] - taken[1], rel=0.02)
