"""Two queued jobs of one worker: the second is computed by the child that was prepared during the first."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from jobs.records import LOCAL_TENANT, Job
from jobs.repository.results import layer_rows
from tests.chaos.stack.processes import gone
from worker.agent.agent import Agent
from worker.process.child_process import EXECUTION, Child
from worker.process.process_group import descendants
from worker.process.spare_child import SpareChild
from worker.supervision import child_launch

pytestmark = [pytest.mark.real_programs, pytest.mark.parametrize("dialect", ["postgresql"])]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each child began: `new`, or `prepared`."""
    monkeypatch.setattr(child_launch, "_SPARE_FREE_BYTES", 0)
    found = []
    start, begin = Child.start.__func__, Child.begin  # type: ignore[attr-defined]

    def noted_start(*given: Any, **named: Any) -> Any:
        found.append("new")
        return start(Child, *given, **named)

    def noted_begin(*given: Any) -> None:
        found.append("prepared")
        begin(*given)

    monkeypatch.setattr(Child, "start", noted_start)
    monkeypatch.setattr(Child, "begin", noted_begin)
    return found


@pytest.fixture
def agent(ledger: Engine, settings: Any, begun: list[str]) -> Iterator[Agent]:
    """A worker that prepares children; drained after the test."""
    made = Agent(ledger, settings(spare_child="always"), EXECUTION)
    yield made
    assert made.drain(240)


def waiting(agent: Agent) -> SpareChild:
    """The place of the child that waits."""
    assert agent._spare is not None
    return agent._spare


@pytest.mark.nightly(
    covered_by=(
        # of a worker as in Compose: begun alike, the same digests, and nothing left
        "tests/walls/test_spare_child.py::test_the_second_of_two_jobs_is_prepared_and_comes_to_nothing_more_than_the_first",
        "tests/worker/process/test_spare_child.py::test_no_orphan_is_left_of_a_worker_that_was_killed_or_that_closed_it",
    )
)
def test_the_second_job_is_the_prepared_childs_and_has_the_same_rows(
    ledger: Engine, agent: Agent, begun: list[str], submitted: Any, job: Callable[[str], Job], eventually: Any
) -> None:
    queued = [submitted(kind="factors", cache="off") for _ in range(2)]
    agent.start()
    eventually(lambda: all(job(each).ended for each in queued))
    assert [(job(each).state, job(each).attempt, job(each).failures) for each in queued] == [("succeeded", 1, 0)] * 2
    assert begun == ["new", "prepared"]
    first, second = (layer_rows(ledger, LOCAL_TENANT, each).items for each in queued)
    digests = [[(row.outcome["record"]["digest_A"], row.outcome["record"]["digest_G"]) for row in rows]
               for rows in (first, second)]  # fmt: skip
    assert digests[0] == digests[1] != []
    guardian = waiting(agent).pid
    assert guardian is not None
    left = [guardian, *descendants(guardian)]
    assert agent.drain(240)
    assert gone(left, 0)


@pytest.mark.nightly(
    covered_by=(
        "tests/worker/process/test_spare_child.py::test_one_that_was_killed_begins_nothing_and_the_next_is_there",
        # its first job finds none that waits, either
        "tests/walls/test_spare_child.py::test_the_second_of_two_jobs_is_prepared_and_comes_to_nothing_more_than_the_first",
    )
)
def test_one_that_was_killed_meanwhile_costs_no_attempt(
    agent: Agent, begun: list[str], submitted: Any, job: Callable[[str], Job], eventually: Any
) -> None:
    first = submitted(cache="off")
    agent.start()
    eventually(lambda: job(first).ended)
    guardian = waiting(agent).pid
    assert guardian is not None
    eventually(lambda: descendants(guardian))
    os.kill(descendants(guardian).pop(), signal.SIGKILL)
    assert gone([guardian], 240)
    second = submitted(cache="off")
    agent.wake()
    eventually(lambda: job(second).ended)
    assert (job(second).state, job(second).attempt, job(second).failures) == ("succeeded", 1, 0)
    assert begun == ["new", "new"]
    assert waiting(agent).pid not in (None, guardian)


@pytest.mark.parametrize(("choice", "kept"), [("never", False), ("auto", False), ("always", True)])
def test_without_a_gpu_a_worker_prepares_one_only_where_it_is_asked_to(settings: Any, choice: str, kept: bool) -> None:
    assert (child_launch.spare_child(settings(spare_child=choice), EXECUTION) is not None) == kept
