"""Arguments that name nothing, are too long or not text: refused in a sentence, before anything is read or sent."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kronoscope.cli.documents import DocumentUnreadable, require_uploads
from kronoscope.cli.exit_codes import run_command
from kronoscope.cli.main import app

LONG = "x" * 300
AWAY = ("--url", "http://127.0.0.1:9")
Said = Callable[..., tuple[int, str]]
SURROGATE = os.fsdecode(b"a\xff")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Said:
    """The exit code of a command in an empty folder, and what it says on one line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("kind: capacity\n")

    def run(*words: str) -> tuple[int, str]:
        code = run_command(lambda: app(list(words)))
        return code, " ".join(capsys.readouterr().err.replace("│", " ").split())

    return run


PATHS = [
    ("import", "{}"), ("run", "job.yaml", "-o", "{}"), ("reproduce", "job_1", "-o", "{}"),
    ("submit", "job.yaml", "--upload", "{}"), ("results", "job_1", "--download", "{}"),
    ("serve", "--data-dir", "{}"), ("autoscale", "--launcher", "slurm", "--classes", "{}"),
]  # fmt: skip
NAMES = [
    ("results", "{}"), ("export", "{}", "--to", "csv", "-o", "a.csv"), ("compare", "{}", "job_1"), ("reproduce", "{}"),
    ("watch", "{}"), ("logs", "{}"), ("cancel", "{}"), ("rerun", "{}"), ("jobs", "--parent", "{}"),
]  # fmt: skip


@pytest.mark.parametrize("words", [*PATHS, *NAMES, ("export", "job_1", "--to", "csv", "-o", "{}")], ids=" ".join)
def test_an_empty_name_is_refused_and_not_the_current_folder(said: Said, words: tuple[str, ...]) -> None:
    code, error = said(*(word.format("") for word in words))
    assert code == 2
    assert "must be a path (got '')" in error or "must not be empty (got '')" in error


@pytest.mark.parametrize("words", PATHS, ids=" ".join)
def test_a_path_that_is_too_long_is_refused(said: Said, words: tuple[str, ...]) -> None:
    code, error = said(*(word.format(LONG) for word in words))
    assert code == 2
    assert "File name too long; name another" in error


@pytest.mark.parametrize("words", NAMES, ids=" ".join)
def test_a_name_that_is_too_long_for_a_folder_may_be_that_of_a_job(said: Said, words: tuple[str, ...]) -> None:
    code, error = said(*(word.format(LONG) for word in words), *AWAY)
    assert code == 3
    assert "nothing answers at http://127.0.0.1:9" in error


@pytest.mark.parametrize(
    "words",
    [("jobs", "--name", SURROGATE), ("watch", SURROGATE), ("submit", "job.yaml", "--name", SURROGATE)],
    ids=lambda words: words[0],
)
def test_bytes_that_are_no_text_are_named(said: Said, words: tuple[str, ...]) -> None:
    code, error = said(*words, *AWAY)
    assert code == 2
    assert r"\udcff' holds a byte that is not text in UTF-8; name it otherwise" in error


def test_a_folder_whose_name_is_no_text_is_not_computed_again(said: Said, tmp_path: Path) -> None:
    source = tmp_path / SURROGATE
    source.mkdir()
    job = {"format": "kronoscope.run/1", "state": "succeeded", "document": DIGITS}
    (source / "job.json").write_text(json.dumps(job))
    (source / "results.json").write_text(json.dumps({"summary": {}, "layers": []}))
    code, error = said("reproduce", f"{source}/")
    assert (code, "not text in UTF-8" in error) == (2, True), error
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([SURROGATE, "job.yaml"])


DIGITS = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}


def test_a_list_is_cut_at_a_number_that_python_counts_to(said: Said) -> None:
    code, error = said("jobs", "--limit", "99999999999999999999", *AWAY)
    assert (code, "--limit" in error) == (2, True)


def test_a_kind_that_is_none_is_answered_with_those_that_there_are(said: Said) -> None:
    code, error = said("compare", "a", "b", "--kind", "capacty")
    assert code == 2
    assert "must be one of factors, capacity," in error
    assert "did you mean `capacity`" in error


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "data.safetensors").write_bytes(b"x")
    with pytest.raises(DocumentUnreadable, match=r"neither a model's folder \(config\.json"):
        require_uploads({}, [tmp_path])
    (tmp_path / "config.json").write_text("{}")
    assert require_uploads({}, [tmp_path])["model"]["source"] == "upload"
