"""Names of a job or of a folder that are neither, paths that are no folders, and documents that uploads do not fit."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.api import seeding
from tests.api.conftest import Embedded, embedded

__all__ = ["embedded"]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(
    "command",
    [
        ("results", "nope"),
        ("compare", "nope", "nope"),
        ("export", "nope", "--to", "csv", "--output", "nope.csv"),
        ("export", "nope", "--to", "corda", "--output", "nope.pt"),
        ("reproduce", "nope"),
    ],
)
def test_a_mistyped_folder_is_named(kronoscope: Run, embedded: Embedded, command: tuple[str, ...]) -> None:
    url = embedded.server.url
    refused = kronoscope(*command, "--url", url)
    assert refused.returncode == 2
    assert f"nope is neither a folder here nor a job at {url}" in refused.stderr
    assert "`kronoscope jobs` lists the jobs there" in refused.stderr
    away = kronoscope(*command, "--url", "http://127.0.0.1:9")
    assert away.returncode == 3
    assert "there is no folder nope here, and nothing answers at http://127.0.0.1:9" in away.stderr


@pytest.mark.parametrize("command", ["watch", "logs", "cancel", "rerun"])
def test_an_id_of_no_job_is_named(kronoscope: Run, folder: Path, embedded: Embedded, command: str) -> None:
    refused = kronoscope(command, "nope", "--url", embedded.server.url)
    assert refused.returncode == 2
    assert f"nope is not a job at {embedded.server.url} (there is no such job); `kronoscope jobs`" in refused.stderr
    (folder / "out").mkdir()
    (folder / "out" / "job.json").write_text("{}")
    refused = kronoscope(command, "out", "--url", embedded.server.url)
    assert refused.returncode == 2
    assert "it is the folder of a run: `kronoscope run DOCUMENT -o out` computes it" in refused.stderr


@pytest.mark.parametrize("command", ["results", "watch", "logs", "cancel", "rerun"])
def test_an_id_that_no_folder_could_have_is_that_of_no_job(kronoscope: Run, embedded: Embedded, command: str) -> None:
    for name in ("x" * 300, "x" * 300 + "/a"):
        refused = kronoscope(command, name, "--url", embedded.server.url)
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: ")
        assert "Traceback" not in refused.stderr
        assert name in refused.stderr


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["-o", ""], "must be a path (got '')"),
        (["-o", "out", "--cache", "job.yaml"], "'--cache': must be a folder (got 'job.yaml'): job.yaml is a file"),
        (["-o", "out", "--cache", "job.yaml/a"], "'--cache': must be a folder (got 'job.yaml/a'): job.yaml is a file"),
        (["-o", "out", "--cache", ""], "'--cache': must be a path (got '')"),
        (["-o", "out", "--store", "job.yaml"], "'--store': must be a folder (got 'job.yaml'): job.yaml is a file"),
    ],
)
def test_a_path_that_is_no_folder_is_refused(folder: Path, kronoscope: Run, options: list[str], fault: str) -> None:
    before = sorted(folder.iterdir())
    refused = kronoscope("run", "job.yaml", *options)
    assert refused.returncode == 2
    assert fault in " ".join(refused.stderr.replace("│", " ").split())
    assert sorted(folder.iterdir()) == before


def uploads(embedded: Embedded) -> int:
    with embedded.engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM upload_files")).scalar_one())


BROKEN: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "data that are a text": ({"data": "digits"}, [], "`data` must be a block beside --upload x.jsonl (got 'digits')"),
    "data that are a list": ({"data": [1]}, [], "`data` must be a block beside --upload x.jsonl (got [1])"),
    "two files of data": (
        {},
        ["--upload", "y.jsonl"],
        "--upload y.jsonl is `data` of the document, as --upload x.json",
    ),
    "one that is none": ({}, ["--upload", "z.zip"], "--upload z.zip is neither a model's folder"),
    "a wrong field": ({"collection": {"batch_size": -2}}, [], "/collection/batch_size is -2"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_nothing_is_sent_for_a_document_that_is_refused(
    folder: Path, kronoscope: Run, embedded: Embedded, broken: str
) -> None:
    change, more, fault = BROKEN[broken]
    for name in ("x.jsonl", "y.jsonl", "z.zip"):
        (folder / name).write_text('{"text": "a", "label": 0}\n')
    (folder / "up.json").write_text(json.dumps({**seeding.DOCUMENT, **change}))
    before = uploads(embedded)
    refused = kronoscope("submit", "up.json", "--upload", "x.jsonl", *more, "--url", embedded.server.url)
    assert refused.returncode == 2, refused.stderr
    assert fault in refused.stderr
    assert "Traceback" not in refused.stderr
    assert uploads(embedded) == before


def test_nothing_is_sent_to_validate_only(folder: Path, kronoscope: Run, embedded: Embedded) -> None:
    (folder / "x.jsonl").write_text('{"text": "a", "label": 0}\n')
    (folder / "up.json").write_text(json.dumps({**seeding.DOCUMENT, "data": None}))
    before = uploads(embedded)
    asked = ("submit", "up.json", "--upload", "x.jsonl", "--validate-only", "--url", embedded.server.url)
    checked = kronoscope(*asked)
    assert checked.returncode == 0, checked.stderr
    assert "nothing was submitted, and nothing was sent" in checked.stdout
    assert json.loads(kronoscope(*asked, "--json").stdout)["data"]["source"] == "upload"
    assert uploads(embedded) == before
