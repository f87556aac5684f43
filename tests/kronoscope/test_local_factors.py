"""Local factors: an export names the path that was given where no file can be written there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.errors import UsageError
from kronoscope.local import measure, operator
from kronoscope.local_factors import LayersFactors
from kronoscope.local_inputs import OptionRefused, WrongOptionType


def collected() -> LayersFactors:
    torch.manual_seed(0)
    return measure(
        nn.Linear(4, 3), [(torch.randn(8, 4), torch.arange(8) % 3)], task="classification", kinds="factors"
    ).factors


def refusal(path: Any) -> str:
    with pytest.raises(OptionRefused) as caught:
        collected().export("gptq", path)
    assert isinstance(caught.value, UsageError)
    return caught.value.message


def test_a_path_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    absent, file = tmp_path / "absent", tmp_path / "file"
    file.touch()
    for folder in (absent, file):
        said = refusal(folder / "x")
        assert said == f"`path` is '{folder / 'x'}', and '{folder}' is not a folder; make it, or name another"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_is_no_file_to_write(tmp_path: Path) -> None:
    said = refusal(str(tmp_path))
    assert said == f"`path` is '{tmp_path}', which is a folder; name a file, such as '{tmp_path / 'gptq'}'"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied", f"{tmp_path}/.part-x")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    said = refusal(tmp_path / "x")
    assert said == f"`path` is '{tmp_path / 'x'}', where no file can be made (Permission denied); name another"


@pytest.mark.parametrize("path", [None, 3])
def test_a_path_is_a_text_or_a_path(path: Any) -> None:
    assert re.fullmatch(rf"`path` must be a path \(got {path}\)", refusal(path))


def test_a_source_of_an_operator_that_is_none_is_named() -> None:
    with pytest.raises(WrongOptionType, match="`source` is NoneType; give a folder's path"):
        operator(None)  # type: ignore[arg-type]
