"""The plan's figures: what a budget is held against, and what a layer's record may quote."""

import json

import pytest
import torch

from catalog.requests.memory import Memory
from engine.memory.budget import MemoryBudget
from engine.memory.plan import Chosen, Place, Plan, Source, Stage, Term


def term(
    size: int, place: Place, source: Source = "exact", stage: Stage = "throughout", layer: str | None = None
) -> Term:
    return Term(name="t", formula="f", size_bytes=size, place=place, source=source, stage=stage, layer=layer)


def test_the_record_quotes_only_what_shapes_foretell() -> None:
    """A process that held more before is the same faithful run, and must get the same digests."""
    shapes = (term(30, "host", "exact"), term(12, "host", "estimated"), term(5, "device", "exact"))
    plans = [Plan(terms=(*shapes, term(resident, "host", "measured"))) for resident in (100, 900)]
    assert [plan.largest_peak_bytes for plan in plans] == [42, 42]
    assert [plan.peak_bytes("host") for plan in plans] == [142, 942]


def test_a_stage_holds_one_layer_at_a_time_beside_what_it_holds_throughout() -> None:
    plan = Plan(
        terms=(
            term(100, "host"),
            term(10, "host", stage="collection"),
            term(3, "host", stage="decomposition"),
            # both of the second layer together are more than the largest term alone
            term(7, "host", stage="decomposition", layer="a"),
            term(5, "host", stage="decomposition", layer="b"),
            term(4, "host", stage="decomposition", layer="b"),
            term(6, "disk", stage="collection"),
        )
    )
    assert plan.stages == ("collection", "decomposition")
    assert plan.stage_bytes("host", "collection") == 100 + 10
    assert plan.stage_bytes("host", "decomposition") == 100 + 3 + 9
    assert [plan.peak_bytes(place) for place in ("device", "host", "disk")] == [0, 112, 6]


def test_what_a_plan_chose_reads_back_from_the_jobs_row() -> None:
    """The row is JSON, and a later attempt makes the same plan from it."""
    chosen = Chosen(
        parts=(("a", "b"), ("c",)),
        micro_batch=3,
        corrections=(("a",),),
        offload=True,
        activation_checkpointing=True,
        rungs={"a": ("device_float64", "host_float64")},
        placement={"a": "panels"},
    )
    stored = json.loads(json.dumps(Plan(terms=(), chosen=chosen).as_json()))
    read = Chosen.read(stored)
    assert read == chosen
    assert [read.rung("a", "A"), read.rung("a", "G"), read.rung("b", "A")] == ["device_float64", "host_float64", None]


PART = 2**26


@pytest.mark.parametrize(
    ("asked", "part", "expected"),
    [
        ("auto", PART, (int(0.9 * PART), 4)),
        (0.5, PART, (PART // 2, 4)),
        ("900TiB", PART, (PART, 4)),
        ("1MiB", PART, (2**20, 1)),
        ("1MiB", 2**61, (2**20, 1)),
    ],
)
def test_of_a_shared_host_a_job_has_its_part_unless_it_asks_for_less(
    asked: str | float, part: int, expected: tuple[int, int]
) -> None:
    bounds = MemoryBudget(device_bytes=2**62, host_bytes=part, host_shared_by=4)
    found = MemoryBudget.measure(Memory(host=asked), torch.device("cpu"), bounds)
    assert (found.host_bytes, found.host_shared_by) == expected
