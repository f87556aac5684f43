"""The walls between jobs in real containers: attacks from the image's own worker, with Docker's profile around it."""

import json
from typing import Any

import httpx
import pytest

from tests.docker.stack import DIGITS, FACTORY, Stack, digests, ended, submit
from tests.walls.programs.kronoscope_test_evil import told

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

FIRST = 23_100
SECRET = "canary-of-a-tenant"
HONEST = DIGITS | {"keep": ["factors"], "cache": "refresh"}


def files(client: httpx.Client, job_id: str) -> dict[str, str]:
    artifacts = client.get(f"/v1/jobs/{job_id}/results").raise_for_status().json()["artifacts"]
    return {each["name"]: each["sha256"] for each in artifacts if each["name"] != "memory_curve.json"}


def test_forty_attacks_on_the_job_beside_it_gain_nothing(stack: Stack) -> None:
    attack = f"mkdir -m 0711 /tmp/walls && exec python -P /programs/two_jobs.py /tmp/walls {FIRST} {FIRST} {SECRET}"
    command = ("run", "--rm", "--no-TTY", "--no-deps", "worker", "sh", "-c", attack)
    found: dict[str, Any] = json.loads(stack.compose(*command, timeout=600).splitlines()[-1])
    gained = json.loads(found["attacks"][-1])
    assert len(gained) >= 30
    assert {name: what for name, what in gained.items() if what} == {}
    neighbour = {"kept": SECRET, "posix": SECRET, "shm": SECRET, "frames": "", "nice": 0, "processors": True}
    assert (found["neighbour"], found["neighbour's end"]) == (neighbour, 0)
    assert (found["kept"], found["outlived"], found["running"]) == ([SECRET] * 3, True, [])


def test_the_job_beside_another_tenants_attacker_gets_the_numbers_of_an_undisturbed_run(
    stack: Stack, client: httpx.Client
) -> None:
    stack.up(workers=1, WORKER_SLOTS="2")
    try:
        with stack.client(stack.key("attacked")) as attacked:
            alone = submit(attacked, HONEST)
            assert ended(attacked, alone)["state"] == "succeeded"
            beside = submit(attacked, HONEST)
            folders = {"artifacts": "/data/artifacts", "models": "/data/models", "known": [alone, beside]}
            evil = {"source": "factory", "factory": FACTORY, "kwargs": folders}
            data = {"source": "synthetic", "shape": [12], "examples": 40, "classes": 3}
            attacker = submit(client, HONEST | {"model": evil, "data": data})
            for who, job_id in ((attacked, beside), (client, attacker)):
                job = ended(who, job_id)
                assert (job["state"], job["attempt"]) == ("succeeded", 1), job["failure"]
            assert digests(attacked, beside) == digests(attacked, alone)
            assert files(attacked, beside) == files(attacked, alone) != {}
            later = submit(attacked, HONEST | {"cache": "use"})
            assert ended(attacked, later)["state"] == "succeeded"
            assert digests(attacked, later) == digests(attacked, alone)
        page = client.get(f"/v1/jobs/{attacker}/layers").raise_for_status().json()
        (layer,) = {row["layer"] for row in page["items"]}
        said = told(layer)
        assert said["others"], "the two have met"
        assert (said["gains"], said["seen"]) == (0, [])
    finally:
        stack.up()
