"""Several passes over the data where the factors do not fit together: the same numbers, within the budget."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from catalog.requests.memory import Memory
from engine.analyses.factors import KeptFactors
from engine.collect import collect_or_read
from engine.errors import BudgetExceeded
from engine.memory.budget import MemoryBudget, resident_bytes
from engine.memory.plan import LIBRARY_BYTES, Chosen
from engine.planning import job_plan
from engine.planning.collection.seconds import partition
from engine.workspace import Workspace
from tests.machine.parts import ALL, chosen_part, first_of
from tests.oracles import MemoryArtifacts, workspace


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(1, 40))
def test_partition_is_the_shortest_that_keeps_the_order(sizes: list[int], allowed: int) -> None:
    groups = {(f"l{place}",): size for place, size in enumerate(sizes)}
    found = partition(groups, allowed)
    if max(sizes) > allowed:
        assert found is None
        return
    assert found is not None
    assert [name for part in found for name in part] == [name for names in groups for name in names]
    assert all(sum(groups[(name,)] for name in part) <= allowed for part in found)
    # brute force: no cut into fewer runs fits
    for cuts in combinations(range(1, len(sizes)), len(found) - 2) if len(found) > 1 else ():
        edges = [0, *cuts, len(sizes)]
        assert any(sum(sizes[a:b]) > allowed for a, b in pairwise(edges))


class Wide(nn.Module):
    """Shared inputs, a norm, a table and a layer that is never reached, in layers of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 96)
        self.q, self.k = nn.Linear(96, 96), nn.Linear(96, 80)
        self.norm = nn.LayerNorm(96)
        self.unused = nn.Linear(96, 4)
        self.grouped = nn.Conv1d(96, 96, 1, groups=4)
        self.deep = nn.ModuleList(nn.Linear(96, 96) for _ in range(40))
        self.head = nn.Linear(96, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        x = torch.tanh(self.q(x)[..., :80] * self.k(x))
        x = self.grouped(nn.functional.pad(x, (0, 16)).mT).mT
        for layer in self.deep:
            x = torch.tanh(layer(x))
        return self.head(x).mean(1)


def space(host_bytes: int | None, dtype: str = "float32") -> Workspace:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    ids, y = torch.randint(0, 50, (20, 6), generator=generator), torch.randint(0, 3, (20,), generator=generator)
    made = workspace(Wide(), [(ids, y)], "classification", fisher="mc", dtype=dtype)
    made.options.kinds = ("factors",)
    if host_bytes is not None:
        made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=host_bytes)
        made.ports.scratch = MemoryArtifacts()
        # another number of slices would change the order of the additions, hence the digests
        made.options.memory = Memory(micro_batch=4)
    return made


def digests(made: Workspace) -> list[tuple[object, ...]]:
    return [
        (row.layer, row.reason, row.record.digest_A, row.record.digest_G, row.record.positions, row.record.terms)
        for row in KeptFactors(None, made).rows()
    ]


def passes_within(extra_bytes: int) -> tuple[list[tuple[object, ...]], int, list[tuple[int, int]]]:
    made = space(LIBRARY_BYTES + extra_bytes)
    reported: list[tuple[int, int]] = []
    made.ports.report = lambda stage, done, total, _: (
        reported.append((done, total or 0)) if stage == "collection" else None
    )
    plans: list[Mapping[str, Any]] = []
    made.ports.announce_plan = plans.append
    made.inputs.examples = 20
    return digests(made), len(plans[-1]["parts"]), reported


@pytest.mark.part(of=2, law="several passes are one")
def test_passes_change_no_digest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    step = 2**19 if chosen_part(request.config) == ALL else 2**21
    # what the process holds moves by more than these small factors
    monkeypatch.setattr(job_plan, "resident_bytes", lambda: 0)
    whole = space(None)
    # how many there are decides how G is kept
    whole.inputs.examples = 20
    truth = digests(whole)
    assert collect_or_read(whole).passes == 1
    assert {row[1] for row in truth} == {None, "no_gradient"}
    seen = set()
    for extra in range(6 * 2**20, 2**20, -step):
        try:
            found, passes, reported = passes_within(extra)
        except BudgetExceeded:
            continue
        seen.add(passes)
        assert found == truth
        assert reported[-1] == (passes * 5, passes * 5)
    assert max(seen) >= 3


def test_without_a_scratch_place_it_is_refused() -> None:
    made = space(resident_bytes() + 2**20)
    made.ports.scratch = None
    with pytest.raises(BudgetExceeded, match="accumulators"):
        collect_or_read(made)


class Planned(Exception):
    """Ends a collection once its plan stands."""


def planned(budget: int) -> dict[str, Any]:
    plans: list[Mapping[str, Any]] = []

    def stop(plan: Mapping[str, Any]) -> None:
        plans.append(plan)
        raise Planned

    made = space(budget)
    made.inputs.examples, made.ports.announce_plan, made.options.memory = 20, stop, Memory()
    # a check needs two examples beside the sums, however small a slice is
    made.options.collection = replace(made.options.collection, batch_size=20, self_check="off")
    # long texts, so that every example weighs
    ids = torch.randint(0, 50, (20, 60))
    made.inputs.batches = lambda: iter([(ids, torch.zeros(20, dtype=torch.int64))])
    with pytest.raises(Planned):
        collect_or_read(made)
    return dict(plans[0])


def test_less_memory_is_never_faster_and_never_enough_again(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = chosen_part(request.config)
    # a landing takes every other budget of those that are short, and two that are not
    halves = range(60, 0, -1) if part == ALL else [60, 44, *range(28 - first_of(part, 2), 0, -2)]
    monkeypatch.setattr(job_plan, "resident_bytes", lambda: 0)
    seen: list[tuple[int, int]] = []
    seconds: list[float | None] = []
    for extra in (each * 2**19 for each in halves):
        plan = planned(LIBRARY_BYTES + extra)
        fits = plan["host_peak_bytes"] <= LIBRARY_BYTES + extra
        seconds.append(sum(stage["seconds"] or 0 for stage in plan["stages"].values()) if fits else None)
        if fits:
            seen.append((len(plan["parts"]), plan["micro_batch"]))
    enough = [each for each in seconds if each is not None]
    assert seconds == enough + [None] * (len(seconds) - len(enough))
    assert len(enough) < len(seconds)
    assert enough == sorted(enough)
    # all of the data at once where there is room, and both ways to do with less where there is not
    assert seen[0] == (1, 20)
    assert any(passes == 1 and size < 20 for passes, size in seen)
    assert max(passes for passes, _ in seen) > 1
    assert all(size in {-(-20 // slices) for slices in range(1, 21)} for _, size in seen)


@pytest.mark.part(of=2, law="several passes are one")
def test_passes_of_an_earlier_plan_are_made_again() -> None:
    made = space(2**40)
    deep = tuple(f"deep.{place}" for place in range(40))
    made.resume.chosen = Chosen(
        parts=(("table", "norm"), ("q", "k", "unused", "grouped"), (*deep, "head")), micro_batch=4
    )
    assert digests(made) == digests(space(None))
    assert collect_or_read(made).passes == 3
    made = space(2**40)
    made.resume.chosen = Chosen(parts=(("another",), ("model",)))
    assert collect_or_read(made).passes == 1


_PROGRAM = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.planning.collection.seconds import partition
from engine.collect import collect_or_read
from engine.memory.budget import MemoryBudget, peak_bytes
from engine.memory.plan import LIBRARY_BYTES
from engine.workspace import JobOptions, Machine, ModelInputs, Ports, Workspace
from worker.execution.files.artifact_files import ArtifactFiles

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(2000, 2) for _ in range(int(sys.argv[3])))
    def forward(self, x):
        return sum(branch(x * (1 + place)) for place, branch in enumerate(self.branches))

torch.manual_seed(0)
model = Branches()
x, y = torch.randn(8, 2000), torch.randn(8, 2)
budget = int(sys.argv[1])
whole = collect_or_read(Workspace(
    inputs=ModelInputs(model=model, batches=lambda: iter([(x, y)]), task=Task(type="regression"), examples=8),
    options=JobOptions(collection=Collection(batch_size=8)),
    machine=Machine(budget=MemoryBudget(device_bytes=2**62, host_bytes=budget)),
    ports=Ports(artifacts=None, scratch=ArtifactFiles(Path(sys.argv[2]), lambda *_: None)),
))
factor_bytes = sum(4 * (layer.in_dim ** 2 + layer.out_dim ** 2) for layer in whole.layers)
print(json.dumps({
    "passes": whole.passes, "micro_batch": whole.micro_batch, "factor_bytes": factor_bytes,
    "peak_bytes": peak_bytes(torch.device("cpu")),
    "trace": float(whole.load(len(whole.layers) - 1).A.diagonal().sum()),
}))
"""


@pytest.mark.nightly(
    covered_by=(
        "tests/engine/collection/test_data_pass.py::test_passes_change_no_digest",
        "tests/engine/collection/test_data_pass.py::test_less_memory_is_never_faster_and_never_enough_again",
    )
)
@pytest.mark.parametrize(("branches", "budgets"), [(70, 2), (140, 4)])
def test_factors_of_several_budgets_stay_within_one(tmp_path: Path, branches: int, budgets: int) -> None:
    """So many factors of 16 MB against the budget; the process's own peak is the witness."""
    budget = 520 * 2**20
    ran = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM, str(budget), str(tmp_path), str(branches)],
        capture_output=True, text=True, check=True,
        # this very tree, whatever is installed
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
    )  # fmt: skip
    seen = json.loads(ran.stdout)
    print({**seen, "budget": budget})  # noqa: T201 - the figures, with `pytest -s`
    assert seen["factor_bytes"] > budgets * budget
    assert seen["passes"] >= budgets
    assert seen["peak_bytes"] <= budget
    torch.manual_seed(0)
    nn.ModuleList(nn.Linear(2000, 2) for _ in range(branches))
    x = torch.randn(8, 2000)
    assert seen["trace"] == pytest.approx(float((branches * x).double().square().sum() / 8) + 1, rel=1e-5)
