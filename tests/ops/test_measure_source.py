"""The measure of the source, on sources of its own."""

from pathlib import Path
from textwrap import dedent

import pytest

from ops.measure_source import FOLDERS, empty_entries, measure_source, near_identical, other_first_words
from ops.measure_source import modules as modules_of


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    return tmp_path


def write(checkout: Path, path: str, text: str) -> None:
    (checkout / path).write_text(dedent(text))


@pytest.mark.parametrize(
    ("entry", "empty"),
    [
        ("job_id: The job.", True),
        ("job_id: The id of the job", True),
        ("job_id: Of the parent.", False),
        ("job_id: At most 36 characters of the job id.", False),
    ],
)
def test_an_entry_is_empty_where_name_and_type_say_all_its_words(checkout: Path, entry: str, *, empty: bool) -> None:
    text = f'"""Jobs."""\n\ndef read(job_id: str) -> None:\n    """Read it.\n\n    Args:\n        {entry}\n    """\n'
    (checkout / "jobs" / "jobs.py").write_text(text)
    assert bool(empty_entries(checkout)) is empty


@pytest.mark.parametrize(
    ("name", "line", "found"),
    [
        ("duration", "A length of time.", 1),
        ("duration", "Durations, as people write them.", 0),
        ("fair_share", "The share of a tenant.", 0),
        ("auth", "Authentication of callers.", 0),
        ("__init__", "The front door.", 0),
    ],
)
def test_a_module_begins_with_its_name(checkout: Path, name: str, line: str, found: int) -> None:
    (checkout / "api" / f"{name}.py").write_text(f'"""{line}"""\n')
    assert len(other_first_words(checkout)) == found


def test_lines_are_code_docstrings_or_neither(checkout: Path) -> None:
    write(
        checkout,
        "engine/lines.py",
        '''\
        """Lines.

        Two more of them.
        """

        # a comment
        class Line:
            """A line."""

            length: int = 3
            """In characters."""
            text = """not a
            docstring"""
        ''',
    )
    found = measure_source(checkout)["engine"]
    assert (found["lines"], found["code"], found["docstrings"]) == (13, 4, 6)


def test_two_functions_with_other_names_are_a_pair(checkout: Path) -> None:
    body = """
        def {name}({a}, {b}):
            {c} = []
            for {d} in {a}:
                if {d} in {b} and {d}.size > 3:
                    {c}.append(({d}.size, {b}[{d}], {d}.shape))
                else:
                    {c}.extend(each for each in {d}.parts if each.size == {b}.size)
            return sorted({c}, key=lambda each: each[0])
    """
    first, second = (dict(zip(("name", *"abcd"), names, strict=True)) for names in ("fabcd", "gwxyz"))
    write(checkout, "engine/pairs.py", body.format(**first) + body.format(**second))
    ((alike, one, other),) = near_identical(list(modules_of(checkout)))
    assert (alike, one.split()[1], other.split()[1]) == (1.0, "f", "g")
    write(checkout, "engine/pairs.py", body.format(**first))
    assert near_identical(list(modules_of(checkout))) == []
