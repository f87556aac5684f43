"""`kronoscope plan`: a job's memory and seconds without the job."""

import json
import re
from pathlib import Path

import pytest
import torch

from catalog.responses.time_estimate import Paced, written_seconds
from kronoscope.display.plan_tables import largest_terms_table, plan_lines
from tests.kronoscope.cli.test_run_job import Run


def test_a_plan_says_what_each_stage_takes_and_what_would_do(folder: Path, kronoscope: Run) -> None:
    shown = kronoscope("plan", "job.yaml")
    assert shown.returncode == 0, shown.stderr
    for said in (
        "collection",
        "decomposition",
        "one pass",
        "the smallest budget that would do",
        "assumed, as no weight",
    ):
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
    assert plan["host_peak_bytes"] <= smallest < 1.06 * plan["host_peak_bytes"]
    fitting = kronoscope("plan", "job.yaml", "--budget", f"{smallest // 2**20}MiB", "--json")
    assert json.loads(fitting.stdout)["fits"] is True
    # nor is it refused to the job itself, which holds weights and data
    done = kronoscope("run", "job.yaml", "--output", "out", "--set", f"memory.host={smallest // 2**20}MiB")
    assert done.returncode == 0, done.stderr
    stages = plan["stages"]
    assert plan["host_peak_bytes"] == max(stage["host_bytes"] for stage in stages.values())
    assert all(stage["seconds"] > 0 for stage in stages.values())


def test_seconds_are_shown_with_bounds_from_the_start_of_the_process(folder: Path, kronoscope: Run) -> None:
    shown = kronoscope("plan", "job.yaml").stdout
    stages = shown.partition("largest terms")[0].splitlines()
    cells = [line.rpartition("│")[2].strip() for line in stages if "│" in line]
    assert len(cells) == 3
    assert all(re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", cell) for cell in cells)
    assert "the fastest of" in shown
    whole = re.search(r"whole job: ([\d.]+) s \(([\d.]+) to ([\d.]+)\), of which ([\d.]+) s had passed", shown)
    assert whole is not None
    planned, low, high, start = map(float, whole.groups())
    # the start is a part of the whole: it is another process's, and has bounds as all else
    assert 0 < start <= planned
    assert low <= planned <= high


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here, and is measured")
def test_a_plan_for_a_device_that_is_not_here_counts_its_bytes_and_says_what_it_did_not_measure(
    folder: Path, kronoscope: Run
) -> None:
    # 83 weights in 16 bits and their copy in the precision that is computed in
    narrow = "\ndef narrow():\n    return model().to(torch.bfloat16)\n"
    (folder / "mine_for_kronoscope.py").write_text((folder / "mine_for_kronoscope.py").read_text() + narrow)
    told = ("--device", "cuda", "--set", "model.factory=mine_for_kronoscope:narrow")
    asked = kronoscope("plan", "job.yaml", *told, "--budget", "80GiB", "--json")
    assert asked.returncode == 0, asked.stderr
    plan = json.loads(asked.stdout)
    assert (plan["device"], plan["fits"], plan["budget"]["device_bytes"]) == ("cuda", True, 80 * 2**30)
    weights = {term["name"]: term["size_bytes"] for term in plan["terms"] if term["place"] == "device"}
    assert (weights["weights"], weights["converted weights"]) == (2 * 83, 8 * 83)
    assert all(rung in ("", "device_float64") for pair in plan["rungs"].values() for rung in pair)
    assert 0 < plan["smallest_budget"]["device_bytes"] < 80 * 2**30
    assert any(said.startswith("what CUDA takes for itself") for said in plan["unmeasured"])
    shown = kronoscope("plan", "job.yaml", *told, "--budget", "80GiB", "--set", "collection.dtype=float32",
                       "--set", "collection.amp=bf16")  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "not measured, as no cuda device is here: " in shown.stdout
    assert "as wide as the sums" in shown.stdout
    # without a budget there is nothing to hold it against
    for refused in (kronoscope("plan", "job.yaml", *told), kronoscope("plan", "job.yaml", "--device", "cuda",
                    "--set", "memory.device=0.5")):  # fmt: skip
        assert refused.returncode == 2
        assert "no device here to measure; name its bytes" in refused.stderr
    assert kronoscope("plan", "job.yaml", "--device", "cuda", "--url", "http://127.0.0.1:9").returncode == 2


@pytest.mark.parametrize(
    ("seconds", "pace", "shown"),
    [
        (24.3, "measured", "24 s (12 to 49)"), (24.3, "shared", "24 s (8.1 to 73)"),
        (24.3, "usual", "24 s (1.2 to 490)"), (0.07, "usual", ""),
        (9.9, "usual", ""), (0.07, "measured", "0.07 s (0.035 to 0.14)"),
        (123456.0, "measured", "120000 s (62000 to 250000)"),
        (0.0, "measured", ""), (None, "measured", ""),
    ],
)  # fmt: skip
def test_foreseen_seconds_as_a_person_reads_them(seconds: float | None, pace: Paced, shown: str) -> None:
    assert written_seconds(seconds, pace) == shown


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
    table = largest_terms_table({"terms": [common | term for term in (*blocks, head, whole)]})
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


def test_the_threads_that_were_chosen_stand_beside_those_that_were_tried() -> None:
    plan = {"why": "one pass", "device_peak_bytes": 0, "host_peak_bytes": 0, "disk_peak_bytes": 0,
            "threads": 1, "thread_speeds": {"2": 1e9, "1": 4e9}}  # fmt: skip
    said = "threads: 1, with which products are fastest now (4 with 1, 1 with 2; 10⁹ operations a second)"
    assert said in list(plan_lines(plan))


@pytest.mark.parametrize(("start", "passed"), [(0.0, ""), (3.76, ", of which 3.8 s had passed when it was planned")])
def test_what_had_passed_is_said_where_anything_had(start: float, passed: str) -> None:
    plan = {"why": "one pass", "device_peak_bytes": 0, "host_peak_bytes": 0, "disk_peak_bytes": 0,
            "seconds": 40.0, "seconds_range": [20.0, 80.0], "start_seconds": start}  # fmt: skip
    assert f"whole job: 40 s (20 to 80){passed}" in list(plan_lines(plan))
