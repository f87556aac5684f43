"""Results as a table, from a run's folder and from a service, and what trackers need that are not installed."""

import csv
import errno
import importlib.util
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import typer

from kronoscope.cli import trackers
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
    results["layers"][1] |= {"layer": "\n=1", "sha256": None}
    (folder / "run" / "results.json").write_text(json.dumps(results))
    assert kronoscope("export", "./run", "--to", "csv", "--output", "layers.csv").returncode == 0
    assert [row["layer"] for row in rows_of(folder / "layers.csv")[:2]] == ["'=HYPERLINK(1)", "'\n=1"]


@pytest.mark.parametrize(
    ("state", "failure", "code", "words"),
    [
        ("succeeded", None, 0, ""),
        ("running", None, 2, "./run is running, with the layers so far alone; export it once it has ended"),
        ("cancelled", None, 5, "the run was stopped before its end"),
        ("failed", {"category": "fatal", "code": "c", "message": "the disk broke"}, 4, "the disk broke"),
    ],
)
def test_the_state_of_a_job_is_in_its_table_and_ends_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    state: str, failure: dict[str, str] | None, code: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    shutil.copytree(RUN, "run")
    job = json.loads((RUN / "job.json").read_text()) | {"state": state, "failure": failure}
    Path("run", "job.json").write_text(json.dumps(job))
    ended = 0
    try:
        trackers.track("./run", "csv", "layers.csv", None)
    except typer.Exit as end:
        ended = end.exit_code
    shown = capsys.readouterr()
    assert (ended, words in " ".join(shown.err.split())) == (code, True), shown.err
    assert (f"of a job that is {state}" in shown.out) == (state in ("cancelled", "failed"))
    assert Path("layers.csv").exists() == (state != "running")
    if state != "running":
        assert {row["job_state"] for row in rows_of(Path("layers.csv"))} == {state}


def test_a_table_that_the_disk_has_no_room_for_leaves_the_earlier_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder / "layers.csv"
    place.write_text("an earlier one")
    cells = iter(range(40))

    def write(value: Any) -> Any:
        if next(cells, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return value

    with monkeypatch.context() as broken:
        broken.setattr(trackers, "table_cell", write)
        with pytest.raises(typer.Exit) as end:
            trackers.track(str(RUN), "csv", str(place), None)
    assert end.value.exit_code == 2
    assert place.read_text() == "an earlier one"
    assert not list(folder.glob(".part-*"))
    trackers.track(str(RUN), "csv", str(place), None)
    assert len(rows_of(place)) == 6


def test_a_pipe_is_written_to(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    reader = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    trackers.track(str(RUN), "csv", str(folder / "pipe"), None)
    assert os.read(reader, 2**16).startswith(b"kind,ordinal,layer,")
    os.close(reader)


def test_an_offline_run_that_is_cut_lacks_its_last_record() -> None:
    """A log of LevelDB: 32 KiB blocks of fragments, each after its checksum, length and kind; 1 whole, 2 to 4 parts."""
    wanted = [b"a" * 40_000, b"b" * (2 * 32_768 - 7 - 40_000 - 2 * 7 - 3 - 7), b"", b"the end"]
    content = b":W&B\0\0\0"
    for record in wanted:
        left, first = record, True
        while first or left:
            room = 32_768 - len(content) % 32_768
            if room < 7:
                content += bytes(room)
                room = 32_768
            part, left = left[: room - 7], left[room - 7 :]
            kind = 1 if first and not left else 2 if first else 3 if left else 4
            content += struct.pack("<IHB", 0, len(part), kind) + part
            first = False
    assert trackers.read_run_records(content) == wanted
    for length in (0, 7, 10, 32_768, 2 * 32_768, *range(len(content) - 40, len(content))):
        found = trackers.read_run_records(content[:length])
        assert found == wanted[: len(found)]
        assert found != wanted


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
