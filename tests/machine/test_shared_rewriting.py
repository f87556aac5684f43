"""Code that is rewritten beforehand is what pytest takes."""

from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, get_cache_dir

from tests.machine.shared_rewriting import files_of, in_turn, rewrite


def test_each_file_is_rewritten_once_and_taken_by_pytest(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "below").mkdir()
    for name in ("test_one.py", "below/test_two.py", "no_test.py"):
        (tmp_path / name).write_text("def test_it():\n    assert 1 + 1 == 2\n")
    files = files_of([str(tmp_path), f"{tmp_path}/test_one.py::test_it"])
    assert [each.name for each in files] == ["test_two.py", "test_one.py", "test_one.py"]
    rewrite(files, pytestconfig)
    codes = [get_cache_dir(each) / f"{each.stem}{PYC_TAIL}" for each in files]
    told = [_read_pyc(file, code) for file, code in zip(files, codes, strict=True)]
    assert all(each is not None and "@pytest_ar" in each.co_names for each in told)
    written = [each.stat().st_ino for each in codes]
    rewrite(files, pytestconfig)
    assert [each.stat().st_ino for each in codes] == written
    files[0].write_text("def test_it():\n    assert 2 + 2 == 4\n")
    assert _read_pyc(files[0], codes[0]) is None


def test_processes_begin_with_other_files_and_have_all() -> None:
    files = [Path(f"test_{number}.py") for number in range(10)]
    shares = [in_turn(files, number, 3) for number in range(3)]
    assert [each[0].stem for each in shares] == ["test_0", "test_3", "test_6"]
    assert all(sorted(each) == sorted(files) for each in shares)
