"""Which plan is taken: against brute force, over sweeps of the budget, and for two ways that differ in one thing."""

import time
from dataclasses import replace
from itertools import count, pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from catalog.requests.memory import Memory
from engine import estimate
from engine.memory import device_speed
from engine.memory.budget import MemoryBudget
from engine.memory.device_speed import DeviceSpeed, fastest_threads, measure_speed, typical_speed
from engine.memory.guard import Guard
from engine.memory.memory_curve import MemoryCurve
from engine.memory.plan import LIBRARY_BYTES, Plan, Term
from engine.planning import probe_model
from engine.planning.collection.seconds import fastest, halved, total_seconds
from engine.planning.job_plan import smallest_budget
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, workspace

MIB = 2**20


def way(size_bytes: int, seconds: float) -> Plan:
    term = Term(name="t", formula="f", size_bytes=size_bytes, place="host", source="exact", stage="collection")
    return Plan(terms=(term,), seconds={"collection": seconds})


def budget(host_bytes: int) -> MemoryBudget:
    return MemoryBudget(device_bytes=2**62, host_bytes=host_bytes)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=8), st.integers(0, 60))
def test_the_fastest_that_fits_is_taken(ways: list[tuple[int, int]], allowed: int) -> None:
    plans = [way(size * MIB, seconds) for size, seconds in ways]
    found = fastest(plans, budget(allowed * MIB))
    fitting = [seconds for size, seconds in ways if size <= allowed]
    if fitting:
        assert total_seconds(found) == min(fitting)
        assert found.peak_bytes("host") <= allowed * MIB
    else:
        assert found.peak_bytes("host") == min(size for size, _ in ways) * MIB
        assert found.why.startswith("nothing fits")
    least = smallest_budget(lambda given: fastest(plans, given), budget(allowed * MIB), "host")
    assert least is not None
    assert least.size_bytes == max(1, min(size for size, _ in ways)) * MIB


@given(st.lists(st.integers(1, 20), min_size=2, max_size=9))
def test_halves_are_as_equal_as_one_cut_makes_them(sizes: list[int]) -> None:
    groups = {(f"l{place}",): size for place, size in enumerate(sizes)}
    left, right = halved(groups)
    assert [*left, *right] == [name for (name,) in groups]
    assert min(len(left), len(right)) > 0
    larger = max(sum(groups[(name,)] for name in side) for side in (left, right))
    assert larger == min(max(sum(sizes[:cut]), sum(sizes[cut:])) for cut in range(1, len(sizes)))


def deep(**options: Any) -> Workspace:
    """Seven layers of very different widths, on the meta device."""
    widths = (8, 300, 40, 700, 16, 500, 90, 3)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    chunk = torch.zeros(64, 8), torch.zeros(64, dtype=torch.int64)
    made = workspace(model, [chunk], "classification", **({"batch_size": 64, "dtype": "float32"} | options))
    made.inputs.examples, made.ports.scratch = 64, MemoryArtifacts()
    return made


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("options", [{}, {"ekfac": True}, {"nested": True, "ekfac": True}])
@pytest.mark.parametrize("decomposition", ["values", "vectors"])
def test_a_larger_budget_is_never_slower_and_never_refused(
    options: dict[str, Any], decomposition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "resident_bytes", lambda: 0)
    taken: list[float] = []
    for mebibytes in range(96, 144, 3):
        made = deep(**options)
        made.options.decomposition, made.machine.budget = decomposition, budget(mebibytes * MIB)
        plan = estimate.plan_job(made)
        if plan.fits(made.machine.budget):
            taken.append(total_seconds(plan))
        else:
            assert not taken, "a smaller budget sufficed"
    assert len(taken) > 5
    assert taken == sorted(taken, reverse=True)


def test_no_slices_and_passes_that_fit_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of slices is asked for by itself, and the plan that is free to choose takes the best of them."""
    monkeypatch.setattr(estimate, "resident_bytes", lambda: 0)
    for mebibytes, size in product((104, 116), (1, 4, 16, 64)):
        free, bound = deep(), deep()
        bound.options.memory = Memory(micro_batch=size)
        free.machine.budget = bound.machine.budget = budget(mebibytes * MIB)
        asked = estimate.plan_job(bound)
        if asked.fits(bound.machine.budget):
            assert total_seconds(estimate.plan_job(free)) <= total_seconds(asked)


def test_a_rung_that_does_not_fit_is_planned_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "resident_bytes", lambda: 0)
    roomy, tight = deep(), deep()
    roomy.options.decomposition = tight.options.decomposition = "vectors"
    whole = estimate.plan_job(roomy)
    # the largest factor is A of the layer that 700 outputs and a one enter
    assert whole.chosen.rung("3", "A") == "host_float64"
    largest = [term.size_bytes for term in whole.terms if term.stage == "decomposition" and term.layer == "3"]
    assert largest == [pytest.approx(3 * 8 * 701**2, rel=0.01)]
    # 11.3 MiB beside factors that are read back and Gram matrices are too much even where all the others are laid aside
    tight.machine.budget = budget(LIBRARY_BYTES + 12 * MIB)
    lower = estimate.plan_job(tight)
    assert lower.fits(tight.machine.budget)
    assert lower.chosen.rung("3", "A") not in (None, "host_float64")
    # in between, another pass over these few data is sooner than another algorithm
    between = deep()
    between.options.decomposition, between.machine.budget = (
        "vectors",
        budget(whole.stage_bytes("host", "decomposition") - MIB),
    )
    aside = estimate.plan_job(between)
    assert len(whole.chosen.parts) == 1 < len(aside.chosen.parts)
    assert aside.chosen.rungs == whole.chosen.rungs
    again = deep()
    again.options.decomposition, again.resume.chosen = "vectors", lower.chosen
    assert estimate.plan_job(again).chosen == lower.chosen


def test_what_is_usual_is_near_what_is_measured() -> None:
    """Orders of magnitude: a plan's proportions hang on them."""
    measured, usual = measure_speed(torch.device("cpu")), typical_speed(torch.device("cpu"))
    for name in ("operations_per_second", "held_bytes_per_second", "eigen_operations_per_second"):
        assert getattr(usual, name) / 100 < getattr(measured, name) < getattr(usual, name) * 100


def timed_job(speed: DeviceSpeed | None, **options: Any) -> Workspace:
    """A job on a machine that has a speed."""
    made = deep(**options)
    made.inputs.examples = 10**6
    made.machine.measure_speed = lambda _: speed
    return made


def test_seconds_are_by_the_speed_that_is_measured_and_the_choice_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers follow the choice, so that no machine's speed, and no busy moment, may change it."""
    monkeypatch.setattr(estimate, "resident_bytes", lambda: 0)
    # a forward pass is timed as it is, whatever the speed is said to be: here each takes a tenth of a millisecond
    ticks = count()
    monkeypatch.setattr(probe_model, "time", SimpleNamespace(perf_counter=lambda: 1e-4 * next(ticks)))
    usual = typical_speed(torch.device("cpu"))
    # whether slices or further passes are faster is a matter of products against memory
    speeds = [replace(usual, operations_per_second=rate, held_bytes_per_second=1e19 / rate) for rate in (1e7, 1e13)]
    plans = []
    for speed in (None, *speeds, usual, usual.shared(3.0)):
        made = timed_job(speed, batch_size=512)
        made.machine.budget = budget(108 * MIB)
        plans.append(estimate.plan_job(made))
    assert [plan.chosen for plan in plans[1:]] == [plans[0].chosen] * 4
    assert [plan.pace for plan in plans] == ["usual", "measured", "measured", "measured", "shared"]
    assert total_seconds(plans[1]) > 5 * total_seconds(plans[2])
    assert 1.2 < total_seconds(plans[4]) / total_seconds(plans[3]) < 3.2
    again = timed_job(speeds[0], batch_size=512)
    again.resume.chosen = plans[0].chosen
    assert estimate.plan_job(again).chosen == plans[0].chosen


def test_several_threads_beside_other_programs_have_no_measured_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty jobs of one thread were foreseen there, and five of two took 0.02 to 4 times what was."""
    busy = typical_speed(torch.device("cpu")).shared(3.0)
    for threads, pace in ((1, "shared"), (2, "usual")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert estimate.plan_job(timed_job(busy)).pace == pace


def test_a_job_without_room_measures_nothing() -> None:
    asked: list[bool] = []

    def measure(disk: bool) -> DeviceSpeed:
        asked.append(disk)
        return typical_speed(torch.device("cpu"))

    for bytes_left, measured in ((1, []), (2**40, [False])):
        made = timed_job(None)
        made.machine.measure_speed = measure
        made.machine.guard = Guard(budget=budget(bytes_left), device=torch.device("cpu"), log=lambda *_: None)
        assert estimate.plan_job(made).pace == ("measured" if measured else "usual")
        assert asked == measured


def begun_before(seconds: float) -> Workspace:
    """A job whose process began so many seconds ago."""
    clock = iter([100.0, *[100.0 + seconds] * 99])
    made = timed_job(typical_speed(torch.device("cpu")))
    made.machine.curve = MemoryCurve(clock=lambda: next(clock))
    made.machine.curve.elapsed_seconds()
    return made


def test_an_estimate_foresees_a_jobs_start_by_its_own() -> None:
    said = estimate.estimate(begun_before(12.0))
    assert said["start_seconds"] == 12.0
    assert said["seconds_range"] == pytest.approx((said["seconds"] / 2, said["seconds"] * 2))


def test_what_the_start_took_is_known_and_has_no_bounds() -> None:
    said = estimate.plan_job(begun_before(12.0)).as_json()
    rest = sum(stage["seconds"] for stage in said["stages"].values())
    assert said["start_seconds"] == 12.0
    assert said["seconds"] == pytest.approx(12.0 + rest)
    assert said["seconds_range"] == pytest.approx((12.0 + rest / 2, 12.0 + rest * 2))


def test_a_decomposition_of_few_rows_has_a_lower_rate() -> None:
    """The share that grows with n² alone is what LAPACK showed between 64 and 1,024 rows."""
    speed = typical_speed(torch.device("cpu"))
    took = {rows: speed.eigen_seconds(9 * rows**3, rows) for rows in (64, 256, 2048)}
    assert took[256] == pytest.approx(9 * 256**3 / speed.eigen_operations_per_second)
    assert took[64] == pytest.approx(took[256] * (0.6 / 64 + 0.4 / 16))
    assert took[2048] == pytest.approx(took[256] * (0.6 * 512 + 0.4 * 64))


def test_measuring_takes_little_and_is_of_this_moment() -> None:
    begun = time.process_time()
    alone = measure_speed(torch.device("cpu"))
    assert time.process_time() - begun < 3
    assert alone.contention >= 1
    beside = alone.shared(2.0)
    assert beside.busy
    assert beside.operations_per_second == alone.operations_per_second / 2
    assert beside.seconds_an_operation == 2 * alone.seconds_an_operation
    assert beside.disk_bytes_per_second == alone.disk_bytes_per_second


def test_the_threads_of_the_fastest_products_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose second core another program holds, one thread is faster than two or four."""
    before = torch.get_num_threads()
    monkeypatch.setattr(device_speed, "parallel_products", lambda: (1e9 / torch.get_num_threads(), 1.0))
    try:
        assert fastest_threads(4) == (1, {4: 2.5e8, 2: 5e8, 1: 1e9})
        assert torch.get_num_threads() == 1
        monkeypatch.setattr(device_speed, "parallel_products", lambda: (1e9 * torch.get_num_threads(), 1.0))
        assert fastest_threads(4)[0] == torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
