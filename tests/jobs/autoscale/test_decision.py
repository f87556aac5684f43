"""How many machines are started: laws that a brute force over small cases confirms, and the cases people meet."""

import itertools
import random
from typing import Any

import pytest

from jobs.autoscale.classes import MachineClass
from jobs.autoscale.decision import ClassState, Decision, Room, WaitingJobs, cooldown_left, decide, room_of

GB = 10**9


def machine_class(name: str, gigabytes: float, **changes: Any) -> MachineClass:
    chosen: dict[str, Any] = {
        "name": name, "kind": "cuda", "device_bytes": int(gigabytes * GB), "devices": 1, "jobs_per_device": 1,
        "ceiling": 10, "cooldown_seconds": 60.0, "wall_seconds": None, "drain_seconds": 600.0, "factories": ("*",),
    } | changes  # fmt: skip
    return MachineClass.model_construct(**chosen)


def jobs(count: int, gigabytes: float = 0, **changes: Any) -> WaitingJobs:
    chosen: dict[str, Any] = {
        "needs_bytes": int(gigabytes * GB), "device_class": None, "world_size": 1, "factories": (),
        "count": count, "example": f"job-{gigabytes}",
    } | changes  # fmt: skip
    return WaitingJobs(**chosen)


def decided(waiting: list[WaitingJobs], *classes: MachineClass, rooms: list[Room] | None = None, **state: Any) -> Any:
    chosen = {"outstanding": 0, "wait_seconds": 0.0} | state
    return decide(waiting, rooms or [], [ClassState(machine_class=each, **chosen) for each in classes])


def started(decision: Decision) -> dict[str, int]:
    return {each.name: each.machines for each in decision.starts}


def test_each_job_goes_to_the_first_class_that_can_take_it() -> None:
    decision = decided([jobs(7, 3), jobs(5, 30)], machine_class("small", 8), machine_class("large", 80))
    assert started(decision) == {"small": 7, "large": 5}
    assert decision.refusals == ()


def test_a_ceiling_counts_machines_that_are_there_or_on_their_way() -> None:
    decision = decided([jobs(12, 3)], machine_class("small", 8, ceiling=5), outstanding=3)
    assert started(decision) == {"small": 2}
    (refusal,) = decision.refusals
    assert (refusal.name, refusal.jobs) == ("small", 10)
    assert refusal.why == "the class is at its ceiling of 5 machines"


def test_machines_that_are_on_their_way_are_not_asked_for_again() -> None:
    small = machine_class("small", 8, devices=2)
    decision = decided([jobs(5, 3)], small, rooms=[room_of(small), room_of(small)], outstanding=2)
    assert (decision.covered, started(decision)) == (4, {"small": 1})


def test_within_the_cool_down_nothing_is_started() -> None:
    decision = decided([jobs(2, 3)], machine_class("small", 8), wait_seconds=12.0)
    assert started(decision) == {}
    assert decision.refusals[0].why == "its cool-down lasts for 12 s yet"


def test_a_device_may_be_worth_several_jobs() -> None:
    small = machine_class("small", 8, devices=2, jobs_per_device=3)
    assert started(decided([jobs(13, 3)], small)) == {"small": 3}


def test_small_jobs_take_the_devices_that_a_large_one_leaves() -> None:
    classes = machine_class("small", 8), machine_class("large", 80, devices=4)
    assert started(decided([jobs(2, 3, example="s"), jobs(1, 30)], *classes, rooms=[room_of(classes[1])])) == {}


def test_ranks_need_so_many_devices_of_one_machine() -> None:
    pair, four = machine_class("pair", 80, devices=2), machine_class("four", 80, devices=4)
    assert started(decided([jobs(3, 30, world_size=4)], pair, four)) == {"four": 3}
    assert started(decided([jobs(3, 30, world_size=2)], pair, four)) == {"pair": 3}
    refusal = decided([jobs(1, 30, world_size=8)], pair, four).refusals[0]
    assert refusal.name is None
    assert refusal.why == "needs 8 devices of one machine; class four has the most, 4"


def test_ranks_share_a_host() -> None:
    host = machine_class("host", 8, kind="host")
    assert started(decided([jobs(2, 4, world_size=2)], host)) == {"host": 2}
    assert decided([jobs(2, 4, world_size=3)], host).refusals[0].name is None


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (jobs(3, 200), "needs 200 GB; class large has the most of those that could take it, 80 GB"),
        (jobs(1, 3, device_class="cpu"), "its first attempt computed on a device of class `cpu`, and no class has"),
        (jobs(1, 3, factories=("lab:net",)), "no class lists `lab:net`"),
    ],
)
def test_jobs_that_no_class_can_take_are_named_with_the_reason(job: WaitingJobs, why: str) -> None:
    classes = [machine_class(name, size, factories=()) for name, size in (("small", 8), ("large", 80))]
    (refusal,) = decided([job], *classes).refusals
    assert (refusal.name, refusal.jobs, refusal.example) == (None, job.count, job.example)
    assert refusal.why.startswith(why)


def test_the_cool_down_doubles_with_each_failure_in_a_row() -> None:
    assert cooldown_left(60, 0, None) == 0
    assert [cooldown_left(60, failures, 10) for failures in (0, 1, 2, 3, 99)] == [50, 110, 230, 470, 3590]
    assert cooldown_left(7200, 5, 0) == 7200


def test_no_more_machines_than_are_needed_and_as_many_as_may_be() -> None:
    """On random queues: against the least number of machines that any placement needs, found by trying all."""
    draw = random.Random(5)
    for _ in range(300):
        devices, ceiling, there = draw.randint(1, 3), draw.randint(1, 4), draw.randint(0, 3)
        only = machine_class("only", 8, devices=devices, ceiling=ceiling)
        rooms = [room_of(only) for _ in range(there)]
        needs = [draw.randint(1, devices) for _ in range(draw.randint(0, 5))]
        groups = [jobs(1, 3, world_size=each, example=str(number)) for number, each in enumerate(needs)]
        decision = decided(groups, only, rooms=rooms, outstanding=there)
        machines = started(decision).get("only", 0)
        assert machines <= max(0, ceiling - there)
        placed = len(needs) - sum(each.jobs for each in decision.refusals)
        assert placed == len(needs) or machines == max(0, ceiling - there)
        if placed == len(needs):
            assert machines == fewest_beyond(needs, devices, there)


def fewest_beyond(needs: list[int], devices: int, there: int) -> int:
    """The fewest further machines of so many devices that hold all jobs, by trying every placement."""
    for more in range(len(needs) + 1):
        bins = there + more
        for places in itertools.product(range(bins), repeat=len(needs)):
            held = [
                sum(size for size, place in zip(needs, places, strict=True) if place == each) for each in range(bins)
            ]
            if all(each <= devices for each in held):
                return more
    raise AssertionError("each job fits on a machine of its own")
