"""The folder of a run of 27 November 2026, written before results and factors had one reader.

`kronoscope run` wrote `stored_run`: factors (with EK-FAC's eigenvalues), capacity and reconstruction of two layers.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from catalog.record import plain
from kronoscope.cli.run_folder import read_run
from kronoscope.local import load_factors

Run = Callable[..., subprocess.CompletedProcess[str]]
RUN = Path(__file__).parent / "stored_run"
ADDED = dict.fromkeys(("accumulation_precision", "accumulation_fallback", "rank_bound_A", "rank_bound_G"))
"""What records hold since: it is not known of this run."""


@pytest.fixture
def results() -> dict[str, Any]:
    return dict(json.loads((RUN / "results.json").read_text()))


def test_results_are_read_as_they_were_written(results: dict[str, Any]) -> None:
    view, layers = read_run(RUN)
    written = [row | {"sha256": None, "record": row["record"] | ADDED} for row in results["layers"]]
    assert written == plain(layers)
    written = {
        kind: each | {"coverage": each["coverage"] | {"parts": None, "experts": None}}
        for kind, each in results["summary"].items()
    }
    assert plain(view.summary) == written
    job = json.loads((RUN / "job.json").read_text())
    assert {name: job[name] for name in view.manifest or ()} == view.manifest
    assert plain(view.job)["plan"] == job["plan"]
    assert [(each.name, each.sha256) for each in view.artifacts] == [
        (each["name"], each["sha256"]) for each in job["artifacts"]
    ]


def test_factors_are_analysed_to_the_metrics_of_their_run(
    results: dict[str, Any], folder: Path, kronoscope: Run
) -> None:
    assert load_factors(RUN, verify=True)["0"].eigenvectors_A is not None
    (folder / "stored.yaml").write_text(f"kind: capacity\nfactors: {{path: {RUN}}}\nstabilisation: {{damping: 1e-4}}\n")
    done = kronoscope("run", "stored.yaml", "--output", "again")
    assert done.returncode == 0, done.stderr
    again, metrics = (
        {row["layer"]: row["metrics"] for row in each["layers"] if row["kind"] == "capacity"}
        for each in (json.loads((folder / "again" / "results.json").read_text()), results)
    )
    # the other layer's G is singular, and its condition number is rounding
    numbers = {name: value for name, value in metrics["0"].items() if isinstance(value, (int, float))}
    assert {name: again["0"][name] for name in numbers} == pytest.approx(numbers, rel=1e-9)
