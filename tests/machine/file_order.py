"""The order in which files are handed to the processes of a run: those that take long first.

A file stays in one process. Left to itself xdist begins with the files of many tests and ends with those of few, which
are the ones that start services and campaigns: at the end one process would work for a minute and the others wait.
"""

import pytest

SECONDS = {
    "tests/test_code_blocks.py": 240,
    "tests/worker/test_celery.py": 150,
    "tests/kronoscope/cli/test_serve.py": 120,
    "tests/chaos/test_divided_jobs.py": 90,
    "tests/chaos/test_removals.py": 85,
    "tests/worker/test_broker_faults.py": 80,
    "tests/ops/test_alerts_fire.py": 75,
    "tests/worker/devices/test_fake_gpus.py": 70,
    "tests/worker/execution/test_search_resume.py": 65,
    "tests/chaos/test_campaign.py": 60,
    "tests/chaos/test_named_faults.py": 60,
    "tests/engine/tracing/test_experts.py": 50,
    "tests/engine/model/test_pass_peak.py": 50,
    "tests/engine/planning/later/test_spectrum_plan.py": 45,
    "tests/chaos/test_lost_wakeups.py": 45,
    "tests/chaos/test_kill_matrix.py": 45,
    "tests/engine/analyses/test_spectrum.py": 40,
    "tests/kronoscope/test_training_example.py": 33,
    "tests/worker/devices/test_ranks.py": 30,
    "tests/kronoscope/cli/test_run_ranks.py": 20,
    "tests/test_wheel.py": 20,
    "tests/api/live/test_client_events.py": 15,
}
"""What the longest took on two cores, roughly; all others come after them, as they are collected."""


def sort_by_seconds(items: list[pytest.Item]) -> None:
    """Put the tests of long files first, and leave those of each file in their order."""
    items.sort(key=lambda item: -SECONDS.get(item.nodeid.partition("::")[0], 0))
