"""``kronoscope compare`` against what the jobs and the folders of runs hold."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from catalog.responses.comparison import ComparedJob, ComparedLayer, ComparedMetric, ComparisonView
from jobs.records import LOCAL_TENANT
from kronoscope.cli.finished_jobs import _show
from tests.api import seeding
from tests.api.conftest import Embedded, embedded
from tests.kronoscope.conftest import settings

__all__ = ["embedded"]

Run = Callable[..., subprocess.CompletedProcess[str]]


def ran(kronoscope: Run, folder: Path, name: str, *changes: str) -> dict[str, dict[str, Any]]:
    """Run the job into a folder; return the metrics of `capacity` by layer."""
    done = kronoscope("run", "job.yaml", "--output", name, *settings(changes))
    assert done.returncode == 0, done.stderr
    rows = json.loads((folder / name / "results.json").read_text())["layers"]
    return {row["layer"]: row["metrics"] for row in rows if row["kind"] == "capacity"}


@pytest.mark.part(of=2, law="runs and jobs are compared")
def test_folders_of_runs_are_compared(kronoscope: Run, folder: Path) -> None:
    first, second = (ran(kronoscope, folder, f"run{seed}", f"collection.seed={seed}") for seed in (0, 1))
    done = kronoscope("compare", "./run0", "run1", "--json")
    assert done.returncode == 0, done.stderr
    compared = json.loads(done.stdout)
    assert compared["documents"] == {"collection.seed": ["0", "1"]}
    rows = {each["layer"]: each["metrics"] for each in compared["layers"] if each["kind"] == "capacity"}
    assert set(rows) == set(first) == {"0", "2"}
    for layer, metrics in rows.items():
        for name in ("trace", "effective_rank", "logdet_damped"):
            one, two = first[layer][name], second[layer][name]
            assert one != two
            assert metrics[name] == {"values": [one, two], "differences": [0, two - one], "ratios": [1, two / one]}
    shown = kronoscope("compare", "run0", "./run1", "--kind", "capacity", "--metric", "trace").stdout
    ratio = second["2"]["trace"] / first["2"]["trace"]
    assert f"{ratio:.4g}" in next(line for line in shown.splitlines() if line.startswith("2 "))
    assert "collection.seed: 0 | 1" in shown


@pytest.mark.part(of=2, law="runs and jobs are compared")
def test_jobs_of_a_service_are_compared_with_a_folder(kronoscope: Run, folder: Path, embedded: Embedded) -> None:
    one, two = (
        seeding.finished(embedded.engine, embedded.artifacts, LOCAL_TENANT, seeding.DOCUMENT | {"name": name})
        for name in ("first", "second")
    )
    mine = ran(kronoscope, folder, "mine")
    done = kronoscope("compare", one[-12:], two, "./mine", "--json", KRONOSCOPE_URL=embedded.server.url)
    assert done.returncode == 0, done.stderr
    compared = json.loads(done.stdout)
    assert [each["id"] for each in compared["jobs"]] == [one, two, "mine"]
    assert compared["jobs"][2]["only"] == ["0", "2"]
    assert compared["jobs"][0]["only"] == [name for name, *_ in seeding.LAYERS] + [seeding.DECLARED[0]]
    (trace,) = [
        each["metrics"]["trace"]
        for each in compared["layers"]
        if (each["kind"], each["layer"]) == ("capacity", "2")
    ]  # fmt: skip
    assert trace["values"] == [None, None, mine["2"]["trace"]]
    shown = kronoscope("compare", one, two, KRONOSCOPE_URL=embedded.server.url).stdout
    assert {"first", "second", "difference", "ratio"} <= set(shown.split())


def test_a_number_that_two_analyses_have_is_shown_with_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Once where it is one measurement, as numbers of the record are, and by analysis where they differ."""

    def metric(first: float, second: float) -> dict[str, ComparedMetric]:
        return {"trace_A": ComparedMetric(values=(first, second), differences=(0, second - first), ratios=(1, 2))}

    def layer(kind: str, name: str, place: int, *values: float) -> ComparedLayer:
        return ComparedLayer(kind=kind, layer=name, ordinals=(place, place), metrics=metric(*values))

    jobs = tuple(ComparedJob(id=each, name=each, state="succeeded", only=()) for each in ("one", "two"))
    layers = (
        layer("factors", "a", 0, 2, 4), layer("factors", "b", 1, 3, 6), layer("factors", "b", 2, 3, 6),
        layer("capacity", "a", 0, 2, 4), layer("capacity", "b", 1, 5, 10), layer("capacity", "b", 2, 3, 6),
    )  # fmt: skip
    _show(ComparisonView(jobs=jobs, layers=layers, model={"capacity": metric(7, 14)}, documents={}))
    lines = [" ".join(each.replace("│", " ").split()) for each in capsys.readouterr().out.splitlines()]
    assert [each for each in lines if each[:2] in ("a ", "b ", "wh")] == [
        "a factors, capacity 2 4 2 2",
        "b factors 3 6 3 2",
        "b factors, capacity 3 6 3 2",
        "b capacity 5 10 5 2",
        "whole model capacity 7 14 7 2",
    ]
    _show(ComparisonView(jobs=jobs, layers=layers[:3], model={}, documents={}))
    assert "factors" not in capsys.readouterr().out  # of one analysis alone no column says which


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("./job.yaml",), "1 jobs are given; name 2 to 8"),
        (("./nowhere", "./job.yaml"), "holds no job.json"),
    ],
)
def test_what_cannot_be_compared_is_said(kronoscope: Run, arguments: tuple[str, ...], said: str) -> None:
    done = kronoscope("compare", *arguments)
    assert done.returncode == 2
    assert said in done.stderr.replace("\n", " ")


@pytest.mark.part(of=2, law="runs and jobs are compared")
def test_a_number_that_no_job_has_is_refused(kronoscope: Run, embedded: Embedded) -> None:
    ids = [seeding.finished(embedded.engine, embedded.artifacts, LOCAL_TENANT) for _ in range(2)]
    done = kronoscope("compare", *ids, "--metric", "trce", KRONOSCOPE_URL=embedded.server.url)
    assert done.returncode == 2
    assert "no such number" in done.stderr
