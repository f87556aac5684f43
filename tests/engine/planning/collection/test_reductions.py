"""What ranks hold while they add up, as the plan foresees it, against the profiler's account on each rank."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from catalog.requests.woodbury import Woodbury
from engine.collect import collect_or_read
from engine.distributed.group import join
from engine.distributed.node_memory import Sized, hold_once, join_node
from engine.workspace import Workspace
from tests.engine.distributed.rank_processes import asked_for, run_ranks
from tests.memory_profile import peak_bytes
from tests.oracles import workspace

RANKS, BATCH = 2, 32
CASES = {"gram": (12_000, 512), "gather": (12_000, 512), "dense": (2500, 256)}
"""Outputs and examples: of rows that are far larger than a Gram matrix, and of a triangle in two panels."""


def job(rank: int, reduction: str) -> Workspace:
    outputs, count = CASES[reduction]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, outputs))
    inputs, labels, index = torch.randn(count, 64), torch.randint(0, outputs, (count,)), torch.arange(count)
    chunks = list(zip(*(each.split(BATCH) for each in (inputs, labels, index)), strict=True))[rank::RANKS]
    options: dict[str, Any] = {"fisher": "mc", "dtype": "float32", "self_check": "off", "exact_trace": False}
    made = workspace(model, chunks, "classification", batch_size=BATCH, reduction=reduction, **options)
    made.options.woodbury = Woodbury(policy="dense" if reduction == "dense" else "all", softmax_head=False)
    made.inputs.examples = count // RANKS
    made.machine.ranks = join(torch.device("cpu"))
    return made


def measured(rank: int, reductions: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for reduction in reductions:
        outputs, count = CASES[reduction]
        made = job(rank, reduction)
        peak = peak_bytes(lambda made=made: collect_or_read(made))  # type: ignore[misc]
        if reduction == "gram":
            # the profiler counts all of the memory that ranks hold together, on each of them
            peak -= outputs * count * 4 * (RANKS - 1) // RANKS
        # two copies of a small model are there before the plan is made, which counts them with the process
        peak -= 2 * sum(each.nbytes for each in made.inputs.model.parameters())
        plan, ranks = made.results.plan, made.machine.ranks
        assert plan is not None
        beside = [term for term in plan.terms if term.source == "measured" or term.name == "libraries"]
        foreseen = plan.stage_bytes("host", "collection") - sum(term.size_bytes for term in beside)
        found[reduction] = peak, foreseen, ranks.traffic.reductions["2"], ranks.traffic.total("rows").received
    ranks = join(torch.device("cpu"))
    join_node(ranks)
    (together,) = hold_once(ranks, [Sized((RANKS, 3), torch.float64)]) or [torch.empty(0)]
    together[rank] = rank + 1.0
    ranks.meet("written")
    found["together"] = together.clone()
    ranks.one_node = False
    found["apart"] = hold_once(ranks, [Sized((1,), torch.float32)])
    return found


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[Any]:
    results = run_ranks(RANKS, measured, asked_for(request, "reduction"))
    for each in results:
        if isinstance(each, Exception):
            raise each
    return results


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("reduction", CASES)
def test_the_plan_counts_what_a_reduction_holds(reduction: str, found: list[Any]) -> None:
    for each in found:
        peak, foreseen, made, brought = each[reduction]
        assert (made, brought) == (reduction, 0)
        assert peak > 30e6
        assert 0.98 <= foreseen / peak <= 1.25


def test_ranks_of_one_node_write_to_memory_that_all_of_them_read(found: list[Any]) -> None:
    for each in found:
        assert each["together"].tolist() == [[1.0] * 3, [2.0] * 3]
        assert each["apart"] is None
