"""Files of two runs: how many were compared, which only one of them has, and that of dropped ones none was."""

from collections.abc import Mapping

import pytest

from catalog.responses.reproduction import Reproduction, Run, compare_runs

FILES = {"factors/0.safetensors": "a", "factors/1.safetensors": "b", "memory_curve.json": "c"}


def compared(then: Mapping[str, str] | None, now: Mapping[str, str]) -> Reproduction:
    runs = (Run(name, {}, None, (), {}, files) for name, files in (("first", then), ("second", now)))
    return compare_runs(*runs)


def test_equal_files_are_counted() -> None:
    apart = {"memory_curve.json": "d", "factors/bases/0.safetensors": "e"}
    # a later version adds facts to the index of factors, and its numbers are those of before
    found = compared(FILES | {"factors/factors.index.json": "f"}, FILES | apart | {"factors/factors.index.json": "g"})
    assert found.equal
    assert found.sentences == (
        "equal to first: 0 rows with digests and metrics, the summaries and the files (in all: 2)",
    )


@pytest.mark.parametrize("when", ["then", "now"])
def test_a_file_of_one_run_is_a_difference_that_is_named(when: str) -> None:
    more = FILES | {"spectra/0.safetensors": "e"}
    found = compared(*((more, FILES) if when == "then" else (FILES, more)))
    assert not found.equal
    (difference,) = found.differences
    assert (difference.stage, difference.field, difference.count) == ("files", "spectra/0.safetensors", 1)
    assert f"files only {when}: spectra/0.safetensors (in all: 1)" in found.sentences


def test_of_dropped_files_none_was_compared() -> None:
    found = compared(None, FILES)
    assert found.equal
    assert found.sentences == (
        "equal to first: 0 rows with digests and metrics, the summaries",
        "no file was compared: those of one run are no longer kept",
    )
