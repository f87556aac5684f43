"""The jobs of a campaign, and what an undisturbed run of each gives: the truth that results are held against."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.codec import sha256_of

FACTORIES = Path(__file__).parents[1] / "factories"
LABEL = "chaos"
"""The label by which a job tells which intention of which client it is."""
PLAIN, ANOTHER, DIVIDED, RANKS, TWICE_DIVIDED = range(5)
"""The variants: two ordinary jobs, one of three pieces, one of two ranks, and one that EK-FAC divides twice."""
VARIANTS = (DIVIDED, RANKS, PLAIN, TWICE_DIVIDED, ANOTHER)
GATED = -1
_CHANGES: Mapping[int, Mapping[str, Any]] = {
    DIVIDED: {"shards": 3},
    RANKS: {"world_size": 2},
    TWICE_DIVIDED: {"shards": 3, "collection": {"batch_size": 4, "ekfac": True}},
}
MEASURED = frozenset({"memory_curve.json"})
"""Artifacts that hold what was observed: no two runs have the same bytes."""
_KRONOSCOPE = (sys.executable, "-P", "-c", "from kronoscope.cli import main; main()")


@dataclass(frozen=True)
class Pace:
    """How long a job takes beyond computing."""

    batches: int
    batch_seconds: float
    row_seconds: float

    @property
    def seconds(self) -> float:
        """What an undisturbed job sleeps."""
        return self.batches * self.batch_seconds + 2 * DEPTH * self.row_seconds


DEPTH = 6


@dataclass(frozen=True)
class Truth:
    """Digests of an undisturbed run."""

    rows: Mapping[tuple[str, int], str]
    artifacts: Mapping[str, str]


def document(variant: int, pace: Pace, label: str | None = None) -> dict[str, Any]:
    """One of the variants: all factors are collected and kept, and their capacity measured."""
    model = {"depth": DEPTH, "seed": variant, "batch_seconds": pace.batch_seconds, "row_seconds": pace.row_seconds}
    made: dict[str, Any] = {
        "kind": ["factors", "capacity"],
        "model": {"source": "factory", "factory": "kronoscope_paced:make", "kwargs": model},
        "data": {"source": "synthetic", "shape": [12], "examples": 4 * pace.batches, "classes": 5, "seed": variant},
        "task": {"type": "classification"},
        "collection": {"batch_size": 4},
        "keep": ["factors"],
    } | dict(_CHANGES.get(variant, {}))
    return made if label is None else made | {"labels": {LABEL: label}}


def variant_of(stored: Mapping[str, Any]) -> int:
    """Which of them a stored document is; ``GATED`` for the jobs of `gated_jobs`."""
    return int(stored["model"]["kwargs"].get("seed", GATED))


def undisturbed(variant: int, pace: Pace, folder: Path) -> Truth:
    """Run the document without a service, at full speed, and take the digests of what comes out."""
    truth = run_alone(document(variant, Pace(pace.batches, 0.0, 0.0)), folder)
    assert len(truth.rows) == 2 * DEPTH, truth
    return truth


def run_alone(asked: Mapping[str, Any], folder: Path) -> Truth:
    """`kronoscope run` of a document."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(asked))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KRONOSCOPE_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*_KRONOSCOPE, "run", str(folder / "job.json"), "--output", str(folder / "out")],
        env=environment,
        cwd=FACTORIES,  # where the command looks for factories
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {}
    for row in json.loads((folder / "out/results.json").read_text())["layers"]:
        outcome = {name: value for name, value in row.items() if name not in ("observed", "sha256")}
        rows[row["kind"], row["ordinal"]] = sha256_of(outcome)
    listed = json.loads((folder / "out/job.json").read_text())["artifacts"]
    artifacts = {each["name"]: each["sha256"] for each in listed if each["name"] not in MEASURED}
    assert rows
    assert artifacts
    return Truth(rows, artifacts)
