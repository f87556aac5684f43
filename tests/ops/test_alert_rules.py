"""Each alert on made series, by Prometheus's own `promtool`: silent in a quiet hour, and firing when it should."""

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.servers import prometheus_binary

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "ops/alerts.yml"
MINUTES = 60

QUIET = {
    "kronoscope_database_up": "1",
    'kronoscope_jobs{state="queued"}': "0",
    "kronoscope_queue_oldest_age_seconds": "0",
    "kronoscope_workers": "2",
    'kronoscope_worker_slots{state="idle"}': "2",
    'kronoscope_reconciler_last_round_age_seconds{reconciler="reaper"}': "5",
    "kronoscope_leases_reaped_total": "7",
    "kronoscope_fenced_writes_total": "4",
    'kronoscope_jobs_failed_total{category="fatal"}': "3",
    'kronoscope_jobs_failed_total{category="transient"}': "2",
    'kronoscope_jobs_failed_total{category="usage"}': "50+1x59",
    'kronoscope_jobs_ended_total{state="succeeded"}': "900+1x59",
    'kronoscope_jobs_ended_total{state="failed"}': "55+1x59",
    'kronoscope_device_leases_draining{kind="cuda"}': "0",
    "kronoscope_disk_free_bytes": "10e9",
    "kronoscope_disk_floor_bytes": "256e6",
}
BUSY = {'kronoscope_jobs{state="queued"}': "40", 'kronoscope_worker_slots{state="idle"}': "0"}
GONE = "_"

# the change to a quiet hour, a minute in which nothing fires yet, one in which this alert does
FIRES: dict[str, tuple[dict[str, str], int, int]] = {
    "KronoscopeQueueOld": ({**BUSY, "kronoscope_queue_oldest_age_seconds": "600+60x59"}, 9, 13),
    "KronoscopeNoWorker": (
        {**BUSY, "kronoscope_workers": "2x9 0x50"},
        11,
        13,
    ),
    "KronoscopeWorkerIdle": ({**BUSY, 'kronoscope_worker_slots{state="idle"}': "0x9 1x50"}, 14, 16),
    "KronoscopeReconcilerSilent": (
        {'kronoscope_reconciler_last_round_age_seconds{reconciler="reaper"}': "5x9 5+60x49"},
        12,
        16,
    ),
    "KronoscopeLeasesReaped": ({"kronoscope_leases_reaped_total": "7x9 8x50"}, 9, 12),
    "KronoscopeFencedWrites": ({"kronoscope_fenced_writes_total": "4x9 5x50"}, 9, 12),
    "KronoscopeJobsFail": ({'kronoscope_jobs_failed_total{category="fatal"}': "3x9 3+1x49"}, 11, 30),
    "KronoscopeDeviceDraining": ({'kronoscope_device_leases_draining{kind="cuda"}': "0x9 1x50"}, 19, 21),
    "KronoscopeDatabaseDown": ({"kronoscope_database_up": "1x9 0x50"}, 10, 12),
    "KronoscopeDiskLow": ({"kronoscope_disk_free_bytes": "10e9x9 400e6x50"}, 10, 12),
}
NEVER: dict[str, dict[str, str]] = {
    "a busy hour": {**BUSY, "kronoscope_queue_oldest_age_seconds": "300"},
    "nobody works and nothing waits": {"kronoscope_workers": "0", 'kronoscope_worker_slots{state="idle"}': "0"},
    "jobs come and go beside an idle worker": {'kronoscope_jobs{state="queued"}': "0 1x2 0 1x2 0 1x2 0 1x2 0x45"},
    "what callers must mend": {
        'kronoscope_jobs_failed_total{category="usage"}': "50+9x59",
        'kronoscope_jobs_ended_total{state="failed"}': "55+9x59",
    },
    "two of two jobs failed": {
        'kronoscope_jobs_failed_total{category="fatal"}': "3x9 5x50",
        'kronoscope_jobs_ended_total{state="failed"}': "55x9 57x50",
        'kronoscope_jobs_ended_total{state="succeeded"}': "900",
        'kronoscope_jobs_failed_total{category="usage"}': "50",
    },
    "artifacts in a bucket": {"kronoscope_disk_free_bytes": GONE, "kronoscope_disk_floor_bytes": GONE},
    "another process cannot reach the disk of the first": {'kronoscope_disk_free_bytes{instance="b"}': "9e9"},
}


def rules() -> list[dict[str, Any]]:
    groups = YAML(typ="safe", pure=True).load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [str(prometheus_binary("promtool")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **more)


def series(changes: Mapping[str, str]) -> list[dict[str, str]]:
    """Each steady where it says nothing else, `_` for one that is not told."""
    said = QUIET | changes
    return [
        {"series": name, "values": values if "x" in values or values == GONE else f"{values}x{MINUTES - 1}"}
        for name, values in said.items()
        if values != GONE
    ]


def check(folder: Path, changes: Mapping[str, str], expected: Mapping[int, Iterable[str]]) -> str:
    """Run the rules over an hour; empty where exactly the expected alerts fire in those minutes."""
    expressions = [
        {
            "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in names],
        }
        for minute, names in expected.items()
    ]
    test = {"interval": "1m", "input_series": series(changes), "promql_expr_test": expressions}
    path = folder / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    done = promtool("test", "rules", str(path))
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_promtool_accepts_rules_and_configuration(tmp_path: Path) -> None:
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stderr
    token = tmp_path / "token"
    token.write_text("t")
    text = (ROOT / "ops/prometheus.yml").read_text().replace("/run/secrets/kronoscope_metrics_token", str(token))
    (tmp_path / "prometheus.yml").write_text(text)
    (tmp_path / "alerts.yml").write_text(RULES.read_text())
    done = promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert done.returncode == 0, done.stderr
    assert f"{len(rules())} rules found" in done.stdout


@pytest.mark.parametrize("name", FIRES)
def test_it_fires_when_it_should_and_alone(name: str, tmp_path: Path) -> None:
    changes, before, after = FIRES[name]
    assert check(tmp_path, changes, {before: [], after: [name]}) == ""


@pytest.mark.parametrize("name", NEVER)
def test_nothing_fires(name: str, tmp_path: Path) -> None:
    assert check(tmp_path, NEVER[name], {key: [] for key in (3, 8, 12, 20, 40, 59)}) == ""


def test_nothing_fires_in_a_quiet_hour_and_the_check_can_fail(tmp_path: Path) -> None:
    minutes = {key: [] for key in range(0, MINUTES, 3)}
    assert check(tmp_path, {}, minutes) == ""
    assert "KronoscopeNoWorker" in check(tmp_path, FIRES["KronoscopeNoWorker"][0], minutes)


def test_every_alert_is_tried() -> None:
    assert {rule["alert"] for rule in rules()} == {*FIRES, "KronoscopeAbsent"}


def test_every_metric_that_an_alert_reads_is_paired_with_absent() -> None:
    """The floor is a setting of the same process that tells the free bytes."""
    read: set[str] = set()
    paired: dict[str, str] = {}
    for rule in rules():
        if rule["alert"] == "KronoscopeAbsent":
            (name,) = re.findall(r"^absent\((kronoscope_\w+)", rule["expr"])
            assert rule["labels"]["metric"] == name
            paired[name] = rule["expr"]
        else:
            read |= set(re.findall(r"kronoscope_\w+", rule["expr"]))
    assert read - {"kronoscope_disk_floor_bytes"} == set(paired)


@pytest.mark.parametrize(
    "rule", [rule for rule in rules() if rule["alert"] == "KronoscopeAbsent"], ids=lambda rule: rule["labels"]["metric"]
)
def test_a_metric_that_is_gone_is_missed(rule: dict[str, Any], tmp_path: Path) -> None:
    gone = {name: GONE for name in QUIET if name.partition("{")[0] == rule["labels"]["metric"]}
    assert gone
    assert check(tmp_path, gone, {1: [], 4: ["KronoscopeAbsent"]}) == ""


def test_while_the_database_is_down_its_metrics_are_not_missed(tmp_path: Path) -> None:
    gone = {name: GONE for name in QUIET if "disk" not in name} | {"kronoscope_database_up": "0"}
    assert check(tmp_path, gone, {0: [], 10: ["KronoscopeDatabaseDown"]}) == ""


def test_every_alert_says_what_it_means_and_where_to_read_on() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert f"\n### {rule['alert']}\n" in page, rule["alert"]
