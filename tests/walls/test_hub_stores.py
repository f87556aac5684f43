"""Data sets of the hub in the store are read by jobs whose users may not write there, where the library locks files."""

import json
import os
import subprocess
from pathlib import Path

import datasets
import pytest

from tests.walls.interpreter import JOBS, PACKAGES, ROOT, environment, is_open

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not is_open(ROOT) or not is_open(PACKAGES),
    reason="only root may start processes of other users, on a project that every user may read",
)

READS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from worker.execution.data.huggingface import _table
source = SimpleNamespace(id="owner/words", name=None, split="train", revision=None)
table = _table(source, SimpleNamespace(context=SimpleNamespace(offline=True, store=Path(sys.argv[1]))))
print(table["text"], table["label"])
"""


def prepared(store: Path, source: Path) -> None:
    """A data set as the library leaves one of the hub's."""
    source.mkdir()
    (source / "train.csv").write_text("text,label\none,0\ntwo,1\n")
    datasets.load_dataset("csv", data_files=str(source / "train.csv"), cache_dir=str(source / "cache"))
    (made,) = (source / "cache").glob("csv/*/*/*/")
    place = store / "datasets" / "owner___words" / "default" / "0.0.0" / made.name
    place.parent.mkdir(parents=True)
    made.rename(place)
    (place / "csv-train.arrow").rename(place / "words-train.arrow")
    info = json.loads((place / "dataset_info.json").read_text())
    changed = info | {"config_name": "default", "dataset_name": "words", "builder_name": "words"}
    (place / "dataset_info.json").write_text(json.dumps(changed))
    (place.parent / f"{made.name}_builder.lock").touch()


def test_a_job_reads_a_data_set_of_a_store_that_is_closed_to_it(reachable: Path, python: str) -> None:
    prepared(reachable / "models", reachable / "source")
    (reachable / "own").mkdir()
    os.chown(reachable / "own", JOBS, JOBS)
    before = sorted(reachable.glob("models/**/*"))
    done = subprocess.run(
        [python, "-P", "-c", READS, str(reachable / "models")],
        env=environment(python)
        | {"HF_HUB_OFFLINE": "1", "TMPDIR": str(reachable / "own"), "HOME": str(reachable / "own")},
        user=JOBS,
        group=JOBS,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip() == "Column(['one', 'two']) Column([0, 1])", done.stderr[-3_000:]
    assert sorted(reachable.glob("models/**/*")) == before
