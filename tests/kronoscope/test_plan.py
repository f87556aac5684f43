"""`kronoscope plan`: a job's memory and seconds without the job."""

import json
from pathlib import Path

from kronoscope.plan_tables import heaviest_table, plan_lines
from tests.kronoscope.test_run import Run


def test_a_plan_says_what_each_stage_takes_and_what_would_do(folder: Path, kronoscope: Run) -> None:
    shown = kronoscope("plan", "job.yaml")
    assert shown.returncode == 0, shown.stderr
    for said in ("collection", "decomposition", "one pass", "the smallest budget that would do", "taken for given"):
        assert said in shown.stdout
    # nothing is run, and nothing is left but what Python leaves of a module that it has imported
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"job.yaml", "mine_for_kronoscope.py"}


def test_a_budget_that_is_too_small_names_the_one_that_would_do(folder: Path, kronoscope: Run) -> None:
    asked = kronoscope("plan", "job.yaml", "--budget", "1MiB", "--json")
    assert asked.returncode == 0, asked.stderr
    plan = json.loads(asked.stdout)
    assert plan["fits"] is False
    assert plan["budget"]["host_bytes"] == 2**20
    smallest = plan["smallest_budget"]["host_bytes"]
    assert plan["host_peak_bytes"] <= smallest < plan["host_peak_bytes"] + 2**20
    # another process holds a little more or less
    fitting = kronoscope("plan", "job.yaml", "--budget", f"{smallest // 2**20 + 32}MiB", "--json")
    assert json.loads(fitting.stdout)["fits"] is True
    stages = plan["stages"]
    assert plan["host_peak_bytes"] == max(stage["host_bytes"] for stage in stages.values())
    assert all(stage["seconds"] > 0 for stage in stages.values())


def test_factors_bring_no_model_to_plan(folder: Path, kronoscope: Run) -> None:
    (folder / "later.yaml").write_text("kind: capacity\nfactors: {path: nowhere}\n")
    asked = kronoscope("plan", "later.yaml")
    assert asked.returncode == 2
    assert asked.stderr.startswith("error: /factors bring no model")
    assert "give `model`, `data` and `task`" in asked.stderr


def test_layers_of_one_shape_are_one_line_of_the_largest_terms() -> None:
    common = {"place": "host", "stage": "decomposition", "source": "exact"}
    blocks = [
        {"name": "host_float64", "formula": "n = 769 of A", "size_bytes": 3 * 2**20, "layer": f"blocks.{block}.mlp.up"}
        for block in range(12)
    ]
    head = {"name": "host_float64", "formula": "n = 10 of G", "size_bytes": 2**20, "layer": "head"}
    whole = {"name": "factors", "formula": "Σ in² + Σ out²", "size_bytes": 2**30, "layer": None}
    table = heaviest_table({"terms": [common | term for term in (*blocks, head, whole)]})
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["bytes"] == ["1 GiB", "3 MiB", "1 MiB"]
    assert columns["what"] == ["factors", "host_float64", "host_float64"]
    assert columns["layer"] == ["", "b.0.mlp.up and 11 alike", "head"]


def test_a_budget_under_which_less_is_kept_says_what() -> None:
    plan = {
        "why": "nothing fits", "device_peak_bytes": 0, "host_peak_bytes": 9 * 2**30, "disk_peak_bytes": 0,
        "budget": {"device_bytes": 2**62, "host_bytes": 2**30}, "smallest_budget": {"host_bytes": 2**31},
        "smallest_budget_keeps": {"device": None, "host": "the diagonal and the trace alone of the G of `head`"},
    }  # fmt: skip
    assert list(plan_lines(plan))[1] == (
        "host: a peak of 9 GiB does not fit into 1 GiB; the smallest budget that would do is 2048MiB, "
        "with the diagonal and the trace alone of the G of `head`"
    )
