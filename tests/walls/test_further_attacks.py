"""Some forty further attacks of a job, beside another one, under a worker with the rights that Compose gives it."""

import json
import os
import subprocess
from typing import Any

import pytest

from tests.walls.conftest import open_to_all
from tests.walls.interpreter import PACKAGES, PROGRAMS, ROOT, WORKER, as_worker, environment, is_open

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not is_open(ROOT) or not is_open(PACKAGES),
    reason="only root may start a worker with these rights, on a project that every user may read",
)

FIRST = 23_100
"""Nobody else's: a job that ends every process of its user would end another test's too."""
SECRET = "canary-of-a-tenant"


def attacked(tmp_path_factory: pytest.TempPathFactory, python: str, attacks_as: int) -> dict[str, Any]:
    """What the attacks of a user gained, and what the neighbour and the service found afterwards."""
    place = tmp_path_factory.mktemp("further")
    open_to_all(place)
    os.chown(place, WORKER, WORKER)
    arguments = [str(PROGRAMS / "two_jobs.py"), str(place), str(FIRST), str(attacks_as), SECRET]
    command = as_worker(python, "-P", *arguments)
    done = subprocess.run(command, env=environment(python), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-5_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"gained": json.loads(found["attacks"][-1])}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, python: str) -> dict[str, Any]:
    """The attacks of a job that is a user of its own."""
    return attacked(tmp_path_factory, python, FIRST)


def test_nothing_is_gained(told: dict[str, Any]) -> None:
    assert len(told["gained"]) >= 30
    assert {name: found for name, found in told["gained"].items() if found} == {}


def test_between_jobs_of_one_user_the_same_attacks_gain_much(
    tmp_path_factory: pytest.TempPathFactory, python: str
) -> None:
    gained = attacked(tmp_path_factory, python, FIRST + 1)["gained"]
    assert {
        "roots_of_processes",
        "descriptors_of_others",
        "folders_of_others",
        "shared_memory",
        "who_is_killed_first",
        "abstract_sockets",
    } <= {name for name, found in gained.items() if found}


def test_the_neighbour_and_what_is_kept_are_as_before(told: dict[str, Any]) -> None:
    neighbour = {"kept": SECRET, "posix": SECRET, "shm": SECRET, "frames": "", "nice": 0, "processors": True}
    assert told["neighbour"] == neighbour
    assert told["neighbour's end"] == 0
    assert told["kept"] == [SECRET] * 3


def test_nothing_of_either_job_runs_on(told: dict[str, Any]) -> None:
    assert told["outlived"] is True
    assert told["running"] == []
