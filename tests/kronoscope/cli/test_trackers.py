"""Results as a table, from a run's folder and from a service, and what trackers need that are not installed."""

import csv
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.kronoscope.cli.test_input_notices import Run
from tests.kronoscope.cli.test_serve import home as home  # noqa: PLC0414 - a fixture
from tests.kronoscope.cli.test_serve import url as url  # noqa: PLC0414 - a fixture
from tests.kronoscope.test_stored_run import RUN


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def agrees(table: list[dict[str, str]], layers: list[dict[str, Any]]) -> None:
    """Every number that a layer's metrics hold by themselves is in its line, bit for bit."""
    assert [(each["kind"], int(each["ordinal"]), each["layer"]) for each in table] == [
        (each["kind"], each["ordinal"], each["layer"]) for each in layers
    ]
    compared = 0
    for line, layer in zip(table, layers, strict=True):
        for name, value in (layer["metrics"] or {}).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                assert float(line[name]) == value, (layer["layer"], name)
                compared += 1
    assert compared > 20


def test_a_run_becomes_a_table_of_layers_and_metrics(kronoscope: Run, folder: Path) -> None:
    done = kronoscope("export", str(RUN), "--to", "csv", "--output", "tables/layers.csv")
    assert done.returncode == 0, done.stderr
    agrees(rows_of(folder / "tables" / "layers.csv"), json.loads((RUN / "results.json").read_text())["layers"])


def test_a_job_of_a_service_becomes_the_same_table(kronoscope: Run, folder: Path, url: str) -> None:
    submitted = kronoscope("submit", "job.yaml", "--wait", "--json", "--url", url)
    assert submitted.returncode == 0, submitted.stderr
    job = json.loads(submitted.stdout)["id"]
    done = kronoscope("export", job[-12:], "--to", "csv", "--output", "layers.csv", "--url", url)
    assert done.returncode == 0, done.stderr
    results = json.loads(kronoscope("results", job, "--json", "--url", url).stdout)
    agrees(rows_of(folder / "layers.csv"), results["layers"])


def test_a_layer_called_like_a_formula_is_text(kronoscope: Run, folder: Path) -> None:
    shutil.copytree(RUN, folder / "run")
    results = json.loads((RUN / "results.json").read_text())
    results["layers"][0] |= {"layer": "=HYPERLINK(1)", "sha256": None}
    (folder / "run" / "results.json").write_text(json.dumps(results))
    assert kronoscope("export", "./run", "--to", "csv", "--output", "layers.csv").returncode == 0
    assert rows_of(folder / "layers.csv")[0]["layer"] == "'=HYPERLINK(1)"


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_is_named_with_the_line_that_installs_it(
    kronoscope: Run, folder: Path, name: str
) -> None:
    assert importlib.util.find_spec(name) is None
    done = kronoscope("export", str(RUN), "--to", name, "--output", "runs")
    assert done.returncode == 2
    assert f'pip install "kronoscope[{name}]"' in " ".join(done.stderr.split())
    assert not (folder / "runs").exists()


def test_options_of_factors_and_places_that_cannot_be_are_refused(kronoscope: Run, folder: Path) -> None:
    done = kronoscope("export", str(RUN), "--to", "csv", "--output", "layers.csv", "--outputs", "3")
    assert done.returncode == 2
    assert "the other options are of factors" in " ".join(done.stderr.split())
    (folder / "taken").write_text("")
    done = kronoscope("export", str(RUN), "--to", "csv", "--output", "taken/layers.csv")
    assert done.returncode == 2
    assert "name a place that you may write" in " ".join(done.stderr.split())
