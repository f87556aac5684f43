"""Folders of runs that are damaged or not ended: one sentence names the file, the field and the remedy."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import BrokenFactors
from kronoscope.local import load_factors, load_stabilised, load_structures
from tests.kronoscope.conftest import FACTORIES, JOB, KRONOSCOPE, environment

Run = Callable[..., subprocess.CompletedProcess[str]]


def run_in(folder: Path) -> Path:
    """Run the folder's document, and return the folder of its results."""
    done = subprocess.run(
        [*KRONOSCOPE, "run", "job.yaml", "--output", "out"],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has succeeded."""
    folder = tmp_path_factory.mktemp("ran")
    (folder / "mine_for_kronoscope.py").write_text(FACTORIES)
    (folder / "job.yaml").write_text(JOB)
    return run_in(folder)


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda value: value.pop(name)


def sets(name: str, wrong: Any) -> Callable[[dict[str, Any]], object]:
    return lambda value: value.update({name: wrong})


DAMAGES: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "no state": ("job.json", without("state"), "`state` must be a text (it is missing)"),
    "a state that is not one": ("job.json", sets("state", 5), "`state` must be a text (got 5)"),
    "no document": ("job.json", without("document"), "`document` must be an object (it is missing)"),
    "a document that is a list": ("job.json", sets("document", [1]), "`document` must be an object (got [1])"),
    "artifacts that are a number": ("job.json", sets("artifacts", 5), "has 5 as ResultsView.artifacts"),
    "an environment that is a number": ("job.json", sets("environment", 5), "`environment` must be an object (got 5)"),
    "an adapter that is a number": ("job.json", sets("adapters", [1]), "`adapters[0]` must be an object (got 1)"),
    "a comparison that is a number": ("job.json", sets("reproduction", 5), "`reproduction` must be an object (got 5)"),
    "no summary": ("results.json", without("summary"), "`summary` must be an object (it is missing)"),
    "a summary that is a list": ("results.json", sets("summary", [1]), "`summary` must be an object (got [1])"),
    "an analysis that is a list": (
        "results.json", sets("summary", {"capacity": [1]}), "`summary.capacity` must be an object (got [1])"),
    "rows that are no list": ("results.json", sets("layers", {}), "`layers` must be a list (got {})"),
    "a row that is a number": ("results.json", sets("layers", [5]), "`layers[0]` has 5 as Layer"),
}  # fmt: skip
DAMAGES |= {
    "a metric of another number": (
        "results.json",
        lambda value: value["layers"][2]["metrics"].update(trace=value["layers"][2]["metrics"]["trace"] + 1e-6),
        "`layers[2]` is not what the run wrote, by its SHA-256",
    ),
    "a summary of another number": (
        "results.json",
        lambda value: value["summary"]["capacity"].update(trace=0.5),
        "`summary` is not what the run wrote, by its SHA-256",
    ),
}
COMMANDS = (
    ("results", "out"),
    ("compare", "whole", "out"),
    ("import", "out"),
    ("reproduce", "out", "--output", "again"),
    ("export", "out", "--to", "csv", "--output", "out.csv"),
)


@pytest.mark.part(of=20, by=())
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_file_field_and_remedy(
    folder: Path, ran: Path, kronoscope: Run, damage: str
) -> None:
    name, change, fault = DAMAGES[damage]
    shutil.copytree(ran, folder / "whole")
    shutil.copytree(ran, folder / "out")
    value = json.loads((ran / name).read_text())
    change(value)
    (folder / "out" / name).write_text(json.dumps(value))
    for command in COMMANDS:
        refused = kronoscope(*command)
        assert refused.returncode == 2, (command, refused.stderr)
        (line,) = refused.stderr.splitlines()
        assert f"out/{name}" in line
        assert fault in line
        assert "the file is damaged: run the document again" in line
    assert not (folder / "again").exists()


def test_a_run_that_was_stopped_says_how_to_go_on(folder: Path, ran: Path, kronoscope: Run) -> None:
    shutil.copytree(ran, folder / "out")
    for rows in (4, 0):
        for name, field, value in (("job.json", "state", "cancelled"), ("results.json", "layers", [])):
            if name == "job.json" or not rows:
                written = json.loads((folder / "out" / name).read_text()) | {field: value}
                (folder / "out" / name).write_text(json.dumps(written))
        shown = kronoscope("results", "out")
        assert shown.returncode == 5
        assert "the run was stopped before its end at 20" in shown.stderr
        assert "`kronoscope run DOCUMENT -o out` goes on with it" in shown.stderr
        assert "rerun" not in shown.stderr


def test_a_run_that_was_killed_says_how_to_go_on(folder: Path, ran: Path, kronoscope: Run) -> None:
    (folder / "out").mkdir()
    job = json.loads((ran / "job.json").read_text()) | {"state": "running", "finished_at": None}
    (folder / "out" / "job.json").write_text(json.dumps(job))
    shown = kronoscope("results", "out")
    assert shown.returncode == 2
    assert "the run in out has not ended: it still computes, or it was killed, and" in shown.stderr
    assert "`kronoscope run DOCUMENT -o out` goes on with it" in shown.stderr
    again = kronoscope("run", "job.yaml", "-o", "out")
    assert again.returncode == 0, again.stderr


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifacts of a run that keeps factors, clipped eigenbases and structures."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "job.yaml").write_text(
        "kind: [factors, reconstruction, compression]\ntask: {type: classification}\n"
        "model: {source: builtin, name: digits_mlp}\ndata: {source: builtin, name: digits, limit: 32}\n"
        "collection: {ekfac: true, self_check: 'off'}\nreconstruction: {route: eigenbasis}\n"
    )
    return run_in(folder)


def read_factors(folder: Path) -> None:
    for each in load_factors(folder).values():
        _ = each.A, each.G, each.corrected_eigenvalues


READERS: dict[str, Callable[[Path], object]] = {
    "factors": read_factors,
    "stabilised": lambda folder: list(load_stabilised(folder).values()),
    "structures": load_structures,
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_with_another_byte_hands_out_no_numbers(folder: Path, kept: Path, name: str) -> None:
    READERS[name](kept)
    shutil.copytree(kept, folder / "out")
    files = sorted((folder / "out" / "artifacts" / name).iterdir())
    assert {each.suffix for each in files} == {".json", ".safetensors"}
    for file in files:
        written = file.read_bytes()
        if file.suffix == ".json":
            others = [re.sub(rb"(\d)(\D*)$", lambda own: b"%d%s" % (9 - int(own[1]), own[2]), written)]
        else:
            begin = 8 + int.from_bytes(written[:8], "little")
            places = (begin, (begin + len(written)) // 2, len(written) - 1)
            others = [written[:at] + bytes([written[at] ^ 1]) + written[at + 1 :] for at in places]
        for changed in others:
            assert changed != written
            file.write_bytes(changed)
            with pytest.raises(BrokenFactors):
                READERS[name](folder / "out")
        file.write_bytes(written)
    READERS[name](folder / "out")
    # what is not listed as a run wrote it, is not judged
    shutil.copytree(kept / "artifacts" / name, folder / "alone" / name)
    READERS[name](folder / "alone" if name == "structures" else folder / "alone" / name)
