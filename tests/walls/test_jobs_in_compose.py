"""With the walls up jobs do what they do without them: they resume, divide, run as ranks, and give the same numbers."""

import os
from pathlib import Path
from typing import Any

import pytest

from engine.collection.checkpoints import MANIFEST
from jobs.records import LOCAL_TENANT
from jobs.repository.results import events_after
from tests.machine.stopwatch import until
from tests.walls.compose import Compose
from tests.walls.interpreter import PACKAGES, ROOT, is_open

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not is_open(ROOT) or not is_open(PACKAGES),
    reason="only root may start a worker with these rights, on a project that every user may read",
)

GATED = """
import time
from pathlib import Path
from torch import nn


class Model(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.head, self.folder = nn.Linear(12, 3), Path(folder)

    def forward(self, x):
        if not (self.folder / "open").exists():
            time.sleep(0.1)
        return self.head(x)


def model(folder):
    return Model(folder)
"""
SHAPES = {"plain": {}, "divided": {"shards": 3}, "ranks": {"world_size": 2}}


def gated(folder: Path) -> dict[str, Any]:
    name = "kronoscope_test_gated:model"
    return {
        "kind": ["factors", "capacity"],
        "model": {"source": "factory", "factory": name, "kwargs": {"folder": str(folder)}},
        "data": {"source": "synthetic", "shape": [12], "examples": 2000, "classes": 3},
        "task": {"type": "classification"},
        "collection": {"batch_size": 4},
    }


def checkpoints(compose: Compose, job_id: str) -> list[Path]:
    return list((compose.place / "artifacts" / job_id).rglob(MANIFEST))


@pytest.mark.nightly(
    covered_by=(
        "tests/chaos/test_kill_matrix.py::test_every_job_ends_as_if_nobody_had_killed_anything[worker-mid_layer]",
        "tests/walls/test_users.py::test_attempts_in_two_slots_are_two_users_and_a_later_attempt_is_the_same",
    )
)
def test_a_job_whose_worker_was_killed_goes_on_under_another(compose: Compose) -> None:
    compose.factory("kronoscope_test_gated", GATED)
    disturbed = compose.submit(gated(compose.place))
    first = compose.start(KRONOSCOPE_CHECKPOINT_SECONDS="0.3")
    until(lambda: checkpoints(compose, disturbed), 120, "a checkpoint stands")
    (manifest,) = checkpoints(compose, disturbed)
    owner = manifest.stat().st_uid
    assert manifest.stat().st_gid == owner
    assert owner != first.pid
    # as the kernel does for want of memory: no word, and nobody clears up
    first.kill()
    first.communicate()
    (compose.place / "open").touch()
    undisturbed = compose.submit(gated(compose.place))
    compose.done(KRONOSCOPE_CHECKPOINT_SECONDS="0.3")
    assert [compose.job(each).state for each in (disturbed, undisturbed)] == ["succeeded"] * 2
    assert compose.job(disturbed).attempt == 2
    told = [
        each.data["message"] for each in events_after(compose.ledger, LOCAL_TENANT, disturbed) if each.type == "log"
    ]
    assert any("collection resumed at batch" in each for each in told), told
    assert compose.digests(disturbed) == compose.digests(undisturbed) != {}
    assert not (compose.place / "artifacts" / disturbed / ".waiting").exists()


@pytest.mark.nightly(
    covered_by="tests/walls/test_namespaces.py::test_two_tenants_of_a_worker_get_the_numbers_of_one_without_walls"
)
def test_jobs_of_every_shape_give_the_numbers_of_a_worker_without_walls(compose: Compose) -> None:
    compose.factory("kronoscope_test_gated", GATED)
    (compose.place / "open").touch()
    document = gated(compose.place) | {"keep": ["factors"]}
    within = {name: compose.submit(document | shape) for name, shape in SHAPES.items()}
    gpus = {"KRONOSCOPE_FAKE_GPUS": "4GiB,4GiB"}
    log = compose.done(**gpus)
    for job_id in within.values():
        assert compose.job(job_id).state == "succeeded", log[-4_000:]
    without = {name: compose.submit(document | shape) for name, shape in SHAPES.items()}
    compose.done(walls=False, folder="artifacts without", **gpus)
    for name in SHAPES:
        assert compose.digests(within[name]) == compose.digests(without[name]) != {}, name
