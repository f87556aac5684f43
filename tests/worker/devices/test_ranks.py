"""A job of two ranks on real PostgreSQL and a real worker with two made-up GPUs."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine

from engine.collection.checkpoints import MANIFEST
from jobs.devices.registry import list_devices
from jobs.records import LOCAL_TENANT
from jobs.repository.results import LayerQuery, layer_rows, list_artifacts
from jobs.scheduling.placement import placement_of
from tests.machine.stopwatch import Stopwatch
from tests.machine.template.client import forked

pytestmark = pytest.mark.real_programs

ROOMY = 4096 * 2**20


@pytest.fixture
def dialect() -> str:
    """PostgreSQL; the ledger's own tests run on both."""
    return "postgresql"


@pytest.mark.nightly(
    covered_by=(
        (
            "tests/worker/execution/ranks/test_launcher.py::"
            "test_a_killed_rank_is_named_within_seconds_though_the_other_listens_to_nobody"
        ),
        "tests/engine/collection/test_killed_attempts.py::test_one_rank_is_killed_anywhere",
    )
)
def test_after_the_death_of_a_rank_the_next_attempt_gives_the_undisturbed_numbers(
    ledger: Engine,
    started: Any,
    submitted: Any,
    job: Any,
    eventually: Any,
    gated: Any,
    events: Any,
    tmp_path: Path,
) -> None:
    asked = {**gated.document, "kind": ["factors", "capacity"], "world_size": 2}
    disturbed = submitted(**asked)
    environment = gated.environment | {"KRONOSCOPE_CHECKPOINT_SECONDS": "0.5"}
    worker = started("node", ROOMY, ROOMY, **environment)
    eventually(gated.begun)
    assert [each.jobs for each in list_devices(ledger)] == [1, 1]
    placed = placement_of(ledger, job(disturbed))
    assert placed is not None
    assert len(placed.devices) == 2
    assert placed.message.endswith("with 2 ranks")

    ranks = {
        int(each.environ()["RANK"]): each
        for each in psutil.Process(worker.pid).children(recursive=True)
        if "LOCAL_RANK" in each.environ()
    }
    assert sorted(ranks) == [0, 1]
    eventually(lambda: len({each.parents[1].name for each in tmp_path.rglob(f"rank-*/{MANIFEST}")}) == 2)
    os.kill(ranks[1].pid, signal.SIGKILL)
    since = Stopwatch()
    eventually(lambda: job(disturbed).failures == 1)
    assert since.seconds() < 10
    eventually(lambda: not ranks[0].is_running())
    (crash,) = events(disturbed, "crash")
    assert crash.data["signature"]["signal"] == "rank 1 of 2 (SIGKILL)"
    (told,) = [each.data["message"] for each in events(disturbed, "log") if each.data["level"] == "warning"]
    assert told.startswith("rank 1 of 2 ended without a word (SIGKILL)")

    gated.open()
    eventually(lambda: job(disturbed).ended)
    worker.terminate()
    worker.wait(240)
    undisturbed = submitted(**asked)
    with forked():  # nothing is done to its processes
        started("node", ROOMY, ROOMY, **environment)
    eventually(lambda: job(undisturbed).ended)
    done, plain = job(disturbed), job(undisturbed)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 2, 1)
    assert (plain.state, plain.attempt, plain.failures) == ("succeeded", 1, 0)
    assert any("collection resumed at batch" in each.data["message"] for each in events(disturbed, "log"))
    assert done.plan["threads"] == 1
    for name in ("model_sha256", "data_sha256", "examples"):
        assert done.manifest[name] == plain.manifest[name]
    assert done.manifest["examples"] == 400
    assert digests(ledger, disturbed) == digests(ledger, undisturbed) != {}
    (row,) = layer_rows(ledger, LOCAL_TENANT, disturbed, LayerQuery(kind="factors")).items
    assert (row.outcome["record"]["world_size"], row.outcome["record"]["positions"]) == (2, 400)
    eventually(lambda: {each.jobs for each in list_devices(ledger)} == {0})


def digests(engine: Engine, job_id: str) -> dict[str, str]:
    """Digests of rows and of files, but for those of measured times and bytes."""
    rows = {f"{each.kind}/{each.ordinal}": each.sha256 for each in layer_rows(engine, LOCAL_TENANT, job_id).items}
    files = {each.name: each.sha256 for each in list_artifacts(engine, LOCAL_TENANT, job_id)}
    files.pop("memory_curve.json")
    return rows | files
