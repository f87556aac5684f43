"""Every job is a user of its own: it reaches no process of another, and keeps its files for its later attempts."""

import os
import secrets
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from jobs.queue import attempt_endings, claims
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.results import events_after
from jobs.repository.store import delete_job, read_job
from tests.walls.interpreter import PACKAGES, ROOT, environment, is_open
from worker.agent.isolation import measure_isolation
from worker.process.child_process import Child
from worker.process.confinement import Confinement
from worker.supervision import child_launch
from worker.supervision.supervisor import Supervisor

FIRST = 20_000
CANARY = "canary-of-a-tenant"
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may start processes of other users")

BOMB = """
import os, time
started = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        started += 1
except OSError:
    print(started, flush=True)
"""
NEIGHBOUR = 'echo $$; canary="$CANARY"; while :; do sleep 1; done'
# every way to a process that the kernel offers to its owner
ATTACK = """
for place in environ mem maps auxv root cwd fd exe io syscall; do
    head -c 1 /proc/{pid}/$place >/dev/null 2>&1 && echo "opened $place"
    ls /proc/{pid}/$place/ >/dev/null 2>&1 && echo "listed $place"
done
for signal in 0 STOP TERM KILL; do kill -$signal {pid} 2>/dev/null && echo "sent $signal"; done
renice 19 {pid} >/dev/null 2>&1 && echo "renice"
echo tried
kill -KILL -1
"""


def claimed(ledger: Engine, job_id: str) -> Claim:
    made = claim(ledger, job_id, "worker", secrets.token_hex(8), 3600)
    assert made is not None
    return made


@as_root
def test_a_job_reaches_no_process_of_another_and_ends_none() -> None:
    environment = {"PATH": os.defpath, "CANARY": CANARY}
    start = ["/bin/sh", "-c"]
    with closing(
        Child.start({}, subprocess.PIPE, environment, [*start, NEIGHBOUR], Confinement(user=FIRST))
    ) as neighbour:
        pid = int(next(neighbour.output(1000)))
        attack = [*start, ATTACK.replace("{pid}", str(pid))]
        with closing(
            Child.start({}, subprocess.PIPE, {"PATH": os.defpath}, attack, Confinement(user=FIRST + 1))
        ) as evil:
            said = list(evil.output(1000))
        assert said == [b"tried\n"]
        assert Path(f"/proc/{pid}/stat").exists()
        assert f"CANARY={CANARY}".encode() in Path(f"/proc/{pid}/environ").read_bytes()


@as_root
def test_the_same_attack_reaches_a_process_of_its_own_user() -> None:
    attack = ATTACK.replace("for signal in 0 STOP TERM KILL", "for signal in 0").replace("kill -KILL -1", "")
    start = ["/bin/sh", "-c"]
    with closing(
        Child.start({}, subprocess.PIPE, {"PATH": os.defpath}, [*start, NEIGHBOUR], Confinement(user=FIRST))
    ) as neighbour:
        pid = int(next(neighbour.output(1000)))
        command = [*start, attack.replace("{pid}", str(pid))]
        with closing(Child.start({}, subprocess.PIPE, {"PATH": os.defpath}, command, Confinement(user=FIRST))) as evil:
            said = set(evil.output(1000))
    assert {b"opened environ\n", b"sent 0\n", b"tried\n"} <= said


def test_between_jobs_of_one_user_no_wall_is_said_to_hold(tmp_path: Path) -> None:
    assert not {"neighbours", "files"} & set(measure_isolation(Confinement(), os.environ, tmp_path))
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


@pytest.mark.skipif(
    os.getuid() != 0 or not is_open(ROOT) or not is_open(PACKAGES),
    reason="only root may start processes of other users, on a project that every user may read",
)
def test_between_jobs_of_two_users_the_walls_are_tried_and_hold(python: str, reachable: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from worker.agent.isolation import measure_isolation;"
        "from worker.service import share_folders; from worker.process.confinement import Confinement;"
        "place = Path(sys.argv[1]); share_folders(place / 'artifacts', place / 'models');"
        "users = [Confinement(user=each) for each in (20000, 20001)];"
        "print(*measure_isolation(users[0], os.environ, place / 'artifacts', users[1]))"
    )
    (reachable / "artifacts").mkdir()
    done = subprocess.run(
        [python, "-P", "-c", program, str(reachable)],
        env=environment(python),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert {"own_user", "neighbours", "files"} <= set(done.stdout.split()), done.stderr


@as_root
def test_attempts_in_two_slots_are_two_users_and_a_later_attempt_is_the_same(
    ledger: Engine, settings: Any, submitted: Callable[..., str]
) -> None:
    chosen = settings(child_user=FIRST)
    chosen.ledger.artifact_root.mkdir(parents=True, exist_ok=True)
    # an interpreter that every user may execute stands in for the image's
    say = 'echo "{\\"frame\\":\\"log\\",\\"level\\":\\"info\\",\\"message\\":\\"$(id -u)\\"}" >&$4; exit 3'
    command = ["/bin/bash", "-c", say, "child"]
    ids = [submitted() for _ in range(2)]
    for job_id in (*ids, ids[0]):
        Supervisor(ledger, claimed(ledger, job_id), chosen, command).run()
    users = [
        [each.data["message"] for each in events_after(ledger, LOCAL_TENANT, job_id) if each.type == "log"]
        for job_id in ids
    ]
    assert [len(each) for each in users] == [2, 1]
    assert len({*users[0]}) == 1
    assert users[0][0] != users[1][0]
    assert all(FIRST <= int(each) < FIRST + claims.USERS for each in (users[0][0], users[1][0]))


@as_root
@pytest.mark.nightly(
    covered_by=(
        "tests/walls/test_stores.py::test_a_builtin_model_that_one_job_has_trained_serves_the_next_ones_user",
        "tests/worker/execution/models/test_builtin.py::test_a_damaged_file_is_trained_again_to_the_same_bytes",
    )
)
def test_the_worker_trains_a_model_that_the_package_lacks_once_for_all_jobs(
    ledger: Engine, settings: Any, submitted: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_launch, "_TRAINING_SECONDS", 600.0)  # other tests take their part of the processor
    chosen = settings(child_user=FIRST)
    chosen.ledger.artifact_root.mkdir(parents=True, exist_ok=True)
    english = {"data": {"source": "builtin", "name": "english"}, "task": {"type": "causal_lm"}}
    said = []
    for name in ("tiny_gpt", "tiny_gpt", "digits_mlp"):
        parts = english if name == "tiny_gpt" else {}
        job_id = submitted(model={"source": "builtin", "name": name}, **parts)
        Supervisor(ledger, claimed(ledger, job_id), chosen, ["/bin/false"]).run()
        logs = [each.data["message"] for each in events_after(ledger, LOCAL_TENANT, job_id) if each.type == "log"]
        said.append(sum("training the builtin model" in each for each in logs))
    assert said == [1, 0, 0]
    (weights,) = (chosen.model_store / "builtin").glob("*.safetensors")
    assert weights.stat().st_mode & 0o777 == 0o644


def test_a_number_comes_round_again_only_when_nobody_needs_it(
    ledger: Engine, submitted: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "USERS", 4)
    held = [claimed(ledger, submitted()) for _ in range(3)]
    numbers = [each.user_number for each in held]
    assert len(set(numbers)) == 3
    # two of them stay alive: those who come later share what is left, one after the other
    attempt_endings.finish(ledger, held[1])
    for _ in range(6):
        later = claimed(ledger, submitted())
        assert later.user_number not in (numbers[0], numbers[2])
        attempt_endings.finish(ledger, later)
    # a job that returns to the queue keeps its own
    attempt_endings.hand_back(ledger, held[0])
    assert claimed(ledger, held[0].job_id).user_number == numbers[0]


def test_the_number_goes_with_the_job(ledger: Engine, submitted: Callable[..., str]) -> None:
    held = claimed(ledger, submitted())
    attempt_endings.finish(ledger, held)
    delete_job(ledger, LOCAL_TENANT, held.job_id)
    assert read_job(ledger, LOCAL_TENANT, held.job_id) is None
    assert claimed(ledger, submitted()).user_number != held.user_number


@pytest.mark.parametrize(
    ("allowed", "slots", "ranks", "expected"),
    [
        (512, 1, 1, 448),
        (4096, 8, 1, 504),
        (4096, 8, 4, 2016),
        (100_000, 2, 1, 4096),
        (None, 2, 1, 4096),
        (50, 1, 1, 64),
    ],
)
def test_no_job_may_take_all_processes_of_its_container(
    settings: Any, monkeypatch: pytest.MonkeyPatch, allowed: int | None, slots: int, ranks: int, expected: int
) -> None:
    monkeypatch.setattr("worker.settings.process_limit", lambda: allowed)
    assert settings(child_user=FIRST, slots=slots).confinement(1, ranks).processes == expected


@as_root
def test_a_job_that_starts_processes_without_end_leaves_its_neighbour_room() -> None:
    # the limit is the kernel's count of the user's processes
    command = ["/usr/bin/python3", "-c", BOMB]
    held = Confinement(user=FIRST + 50, processes=40)
    with closing(Child.start({}, subprocess.PIPE, {"PATH": os.defpath}, command, held)) as evil:
        assert int(next(evil.output(1000))) < 40
        beside = Confinement(user=FIRST + 51, processes=40)
        with closing(Child.start({}, subprocess.PIPE, {"PATH": os.defpath}, ["/bin/echo", "on"], beside)) as neighbour:
            assert next(neighbour.output(1000)).startswith(b"on")
