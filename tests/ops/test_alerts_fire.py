"""Each alert by the fault that must fire it: a real Prometheus on a real API, PostgreSQL, Redis and workers.

The rules' expressions are as they ship, and stand for seconds where they ship with minutes. Where an age counts,
the row that it is counted from is moved back, in place of waiting for it. One stack runs through all of it, so the
tests stand in order.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import insert, make_url, select, update

from jobs.records import LOCAL_TENANT
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import device_leases, jobs, metadata, worker_devices, workers
from tests.api.server import KEY_SECRET
from tests.chaos.stack.gated_jobs import GatedJob
from tests.chaos.stack.processes import below
from tests.chaos.stack.stack import LONG_LEASES, ROOT, Stack, running_stack
from tests.machine.stopwatch import until
from tests.ops.prometheus import Prometheus, running_prometheus
from tests.ops.test_alert_rules import rules

pytestmark = pytest.mark.real_programs

ON_MADE_SERIES = pytest.mark.nightly(
    covered_by=(
        "tests/ops/test_alert_rules.py::test_it_fires_when_it_should_and_alone",
        "tests/api/routes/test_metrics.py::test_what_the_alerts_read_is_told",
        "tests/jobs/metrics/test_counters.py::test_the_snapshot_of_a_ledger",
    )
)
"""A landing holds the rules against made series, and the metrics that they read against the API and the ledger."""
TOKEN = "a-token-that-only-the-tests-know"
PENDING, PATIENTLY = "2s", "60s"
"""The second for what must not fire: a machine that stands still for a while makes scrapes fail, and nothing else."""
SECRETS = {
    "KRONOSCOPE_METRICS_TOKEN": TOKEN,
    "AWS_SECRET_ACCESS_KEY": "canary-of-the-store",
    "HF_TOKEN": "canary-of-the-hub",
}
SETTINGS = {
    **LONG_LEASES,
    **SECRETS,
    "KRONOSCOPE_METRICS_SECONDS": "0.5",
}
SILENT = """
CREATE FUNCTION silent() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN NEW.changed_at := clock_timestamp() - interval '300 s'; RETURN NEW; END $$;
CREATE TRIGGER silent BEFORE INSERT OR UPDATE ON counters FOR EACH ROW WHEN (NEW.label = 'reaper')
EXECUTE FUNCTION silent();
UPDATE counters SET value = value WHERE label = 'reaper'
"""
"""As if the reaper's last round had been long ago, however often one ends."""
DEAF = {"CHAOS_IDLE": "1"}
BROKEN_NODE = """
import os, sys
if "worker.execution" in sys.orig_argv:
    os.abort()
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("alerts"), workers=1, settings=SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(stack: Stack) -> Iterator[Prometheus]:
    target = stack.url.removeprefix("http://")
    with running_prometheus(stack.folder / "prometheus", target, TOKEN, PENDING) as running:
        yield running


def readiness(stack: Stack) -> tuple[int, str]:
    """Status and body of `/readyz`, whose answers are kept for a second."""
    answer = httpx.get(f"{stack.url}/readyz", trust_env=False, timeout=300, verify=False)
    return answer.status_code, answer.text


def await_readiness(stack: Stack, status: int, text: str) -> None:
    """Wait for this answer: a probe that takes longer than its second says that something does not answer."""
    until(lambda: (said := readiness(stack))[0] == status and text in said[1], 120, lambda: f"{readiness(stack)}")


def forget_workers(stack: Stack) -> None:
    """As if every worker had been silent for the length of its lease; those that live come back."""
    with writing(stack.engine) as connection:
        connection.execute(update(workers).values(expires_at=ledger_now(-1)))


def cancel_all(stack: Stack, *ids: str) -> None:
    for job_id in ids:
        stack.cancel(job_id)
    stack.await_end(*ids)


@pytest.mark.nightly(
    covered_by=(
        "tests/ops/test_alert_rules.py::test_nothing_fires",
        "tests/ops/test_alert_rules.py::test_nothing_fires_in_a_quiet_hour_and_the_check_can_fail",
    )
)
def test_while_jobs_are_done_none_fires(stack: Stack, tmp_path: Path) -> None:
    target = stack.url.removeprefix("http://")
    with running_prometheus(tmp_path / "patient", target, TOKEN, PATIENTLY, every="2s") as prometheus:
        stay_quiet(stack, prometheus)


def stay_quiet(stack: Stack, prometheus: Prometheus) -> None:
    first = [GatedJob(stack, f"quiet{number}").submit() for number in range(2)]
    assert stack.await_end(*first) == ["succeeded", "succeeded"]
    until(lambda: prometheus.query('kronoscope_jobs_ended_total{state="succeeded"} == 2'), 120, "Prometheus sees both")
    time.sleep(5)
    until(lambda: not prometheus.standing(), 120, lambda: f"nothing is wrong: {prometheus.standing()}")
    assert prometheus.ever_fired() == set()
    await_readiness(stack, 200, '"ready"')


@ON_MADE_SERIES
def test_a_worker_that_hangs_beyond_its_lease(stack: Stack, prometheus: Prometheus) -> None:
    """It loses its job, keeps its device, and wants to go on."""
    job = GatedJob(stack, "hung")
    job.hold("batch3")
    job.submit()
    job.await_at("batch3")
    (worker,) = stack.workers
    seen = [Path(f"/proc/{pid}/{file}").read_bytes() for pid in below(worker.pid) for file in ("cmdline", "environ")]
    seen += [Path(f"/proc/{part.pid}/cmdline").read_bytes() for part in stack.parts]
    assert len(seen) >= 5
    assert found_in(stack, b"\n".join(seen)) == []
    worker.pause()
    stack.take_from(worker)
    leave_a_lease_of_its_device(stack)
    prometheus.await_firing("KronoscopeLeasesReaped", "KronoscopeDeviceDraining")
    worker.resume()
    prometheus.await_firing("KronoscopeFencedWrites")
    job.release("batch3")
    assert stack.await_end(job.id) == ["succeeded"]


def leave_a_lease_of_its_device(stack: Stack) -> None:
    """As one stands there whose attempt is over and whose processes nobody has seen end."""
    with writing(stack.engine) as connection:
        offered = connection.execute(select(worker_devices)).first()
        assert offered is not None
        connection.execute(
            insert(device_leases).values(
                job_id=new_id(),
                fence=1,
                tenant_id=LOCAL_TENANT,
                device_uuid=offered.device_uuid,
                bytes=1,
                whole=False,
                worker_id=offered.worker_id,
                process_space="",
                leased_at=ledger_now(-100),
                draining_at=ledger_now(),
            )
        )


@ON_MADE_SERIES
def test_jobs_wait_and_no_worker_lives(stack: Stack, prometheus: Prometheus) -> None:
    (worker,) = stack.workers
    worker.kill()
    forget_workers(stack)
    job_id = GatedJob(stack, "alone").submit()
    assert "KronoscopeQueueOld" not in prometheus.firing()
    with writing(stack.engine) as connection:
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(queued_at=ledger_now(-1200)))
    prometheus.await_firing("KronoscopeNoWorker", "KronoscopeQueueOld", meanwhile=lambda: forget_workers(stack))

    stack.redis.kill()
    await_readiness(stack, 200, "degraded")
    with writing(stack.engine) as connection:
        connection.exec_driver_sql(SILENT)
    prometheus.await_firing("KronoscopeReconcilerSilent")
    with writing(stack.engine) as connection:
        connection.exec_driver_sql("DROP FUNCTION silent CASCADE")
    cancel_all(stack, job_id)
    prometheus.await_silence("KronoscopeNoWorker", "KronoscopeQueueOld")
    deaf = stack.add_worker("deaf", **DEAF)
    until(lambda: prometheus.query('kronoscope_worker_slots{state="idle"} == 1'), 300, deaf.tail)
    waiting = GatedJob(stack, "unheard").submit()
    prometheus.await_firing("KronoscopeWorkerIdle")
    cancel_all(stack, waiting)
    deaf.kill()
    forget_workers(stack)
    stack.redis.restart()
    prometheus.await_silence("KronoscopeReconcilerSilent")


@ON_MADE_SERIES
def test_a_node_on_which_no_process_lives_long(stack: Stack, prometheus: Prometheus) -> None:
    folder = stack.folder / "broken"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BROKEN_NODE)
    broken = stack.add_worker("broken", PYTHONPATH=f"{folder}:{ROOT}")
    ids = [GatedJob(stack, f"crash{number}").submit() for number in range(3)]
    assert stack.await_end(*ids) == ["failed"] * 3
    prometheus.await_firing("KronoscopeJobsFail")
    crashed = 'kronoscope_attempts_failed_total{category="fatal",code="crashed"} == 3'
    until(lambda: len(prometheus.query(crashed)) == 1, 120, "each of them crashed")
    broken.kill()


@ON_MADE_SERIES
def test_a_disk_below_its_floor(stack: Stack, prometheus: Prometheus, tmp_path: Path) -> None:
    stack.api.kill()
    prometheus.await_firing("KronoscopeAbsent")  # for nobody tells anything
    assert (
        prometheus.query('ALERTS{alertname="KronoscopeAbsent",alertstate="firing",metric!="kronoscope_database_up"}')
        == []
    )
    stack.api.start(KRONOSCOPE_DISK_FLOOR_BYTES=str(10**15))
    stack.await_ready(stack.api)
    prometheus.await_firing("KronoscopeDiskLow")
    await_readiness(stack, 503, "disk_failing")
    prometheus.await_silence("KronoscopeAbsent")


@ON_MADE_SERIES
def test_a_database_that_is_gone(stack: Stack, prometheus: Prometheus) -> None:
    stack.postgres.kill()
    prometheus.await_firing("KronoscopeDatabaseDown")
    # that it answers within a second all the same is what the alert fired by
    answer = httpx.get(
        f"{stack.url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=300
    )
    assert answer.status_code == 200
    assert "kronoscope_database_up 0.0" in answer.text
    assert "kronoscope_disk_free_bytes" in answer.text
    assert "kronoscope_jobs" not in answer.text
    await_readiness(stack, 503, "database_failing")
    with stack.client(timeout=300) as client:
        refused = client.get("/v1/jobs")
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    stack.postgres.restart()
    prometheus.await_silence("KronoscopeDatabaseDown")


@ON_MADE_SERIES
def test_every_alert_has_fired(prometheus: Prometheus) -> None:
    assert prometheus.ever_fired() == {rule["alert"] for rule in rules()}


@pytest.mark.nightly(
    covered_by=(
        "tests/jobs/test_service_log.py::test_any_value_makes_one_line",
        "tests/jobs/test_service_log.py::test_last_words_are_lines",
    )
)
def test_every_line_that_was_logged_is_one_object(stack: Stack) -> None:
    """Through all of those faults, by every process."""
    for part in stack.parts:
        lines = part.lines()
        assert lines
        for line in lines:
            assert isinstance(json.loads(line, parse_constant=pytest.fail), dict), line
    told = [json.loads(line) for line in stack.api.lines()]
    refused = [each for each in told if "does not answer" in each["event"] and "request" in each]
    assert refused
    assert all(each["request"] in each["event"] for each in refused)
    assert {"job", "attempt", "fence", "owner"} <= next(each for each in told if each["event"] == "lease reaped").keys()


@pytest.mark.nightly(
    covered_by=(
        "tests/jobs/test_service_log.py::test_addresses_that_are_asked_are_in_no_line",
        "tests/jobs/test_settings.py::test_secrets_come_from_files_and_do_not_show",
        "tests/worker/process/test_child_process.py::test_a_service_hands_no_secret_down",
    )
)
def test_no_secret_is_in_any_of_its_sinks(stack: Stack) -> None:
    """After jobs that succeeded, were cancelled, crashed and were taken from a zombie, without Redis and PostgreSQL."""
    sinks = {part.name: part.log.read_bytes() for part in stack.parts}
    with stack.engine.connect() as connection:
        for table in metadata.sorted_tables:
            sinks[f"table {table.name}"] = repr(connection.execute(select(table)).all()).encode()
        ids = connection.execute(select(jobs.c.id)).scalars().all()
    for path in stack.artifacts.rglob("*"):
        if path.is_file():
            sinks[str(path)] = path.read_bytes()
    with stack.client() as client:
        for job_id in ids:
            for part in ("", "/log", "/results", "/layers", "/artifacts"):
                sinks[job_id + part] = client.get(f"/v1/jobs/{job_id}{part}").content
        sinks["metrics"] = client.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"}).content
    assert len(ids) == 8
    assert len(sinks) > 60
    assert {name: found for name, sink in sinks.items() if (found := found_in(stack, sink))} == {}
    assert found_in(stack, KEY_SECRET.encode()) == ["the secret of the keys"]  # it can find one


def found_in(stack: Stack, sink: bytes) -> list[str]:
    """The names of the secrets that are there."""
    secrets = {
        "the secret of the keys": KEY_SECRET,
        "the caller's key": stack.key,
        "the password of PostgreSQL": str(make_url(stack.database_url).password),
        "the password of Redis": str(urlsplit(stack.redis.url).password),
        **SECRETS,
    }
    return [name for name, secret in secrets.items() if secret.encode() in sink]
