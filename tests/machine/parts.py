"""Parts of exhaustive grids, and what only nightly runs do: the tests of a landing, chosen by its commit.

`@pytest.mark.part(of=4)` on a parametrised test leaves a quarter of its cases, another one for each commit, and always
the first; with `by="form"`, the first of each value of that parameter. The choice is printed, and repeated by
`--part COMMIT`; `--part all` leaves every case, and every test marked `nightly`.
"""

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.machine.laws import find_gaps, is_whole, law_of, list_laws

ALL = "all"


def add_options(parser: pytest.Parser) -> None:
    """Register the option."""
    group = parser.getgroup("parts")
    group.addoption("--part", metavar="COMMIT", help="the part of this commit; `all`: every case, and nightly tests")


def chosen_part(config: pytest.Config) -> str:
    """Return what the parts are chosen by: the option, or the commit."""
    given = config.getoption("--part")
    if given:
        return str(given)
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return found.stdout.strip() or "unknown"


def is_chosen(part: str, nodeid: str, of: int) -> bool:
    """Whether a case is of a part."""
    digest = hashlib.sha256(f"{part} {nodeid}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % of == 0


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the cases of other parts, and nightly tests, unless a test is asked for by its name.

    Raises:
        pytest.UsageError: If that leaves nothing of a law, and a run of all tests would not notice.
    """
    part = chosen_part(config)
    if part == ALL or any("::" in each for each in config.args):
        return
    kept, left, begun = [], [], set()
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            left.append(item)
            continue
        marker = item.get_closest_marker("part")
        branch = (law_of(item.nodeid), _branch(item, marker))
        stays = marker is None or branch not in begun or is_chosen(part, item.nodeid, marker.kwargs["of"])
        begun.add(branch)
        (kept if stays else left).append(item)
    if is_whole(config) and (gaps := find_gaps(list_laws(items, kept), {item.nodeid for item in kept})):
        raise pytest.UsageError("\n".join(gaps))
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def _branch(item: pytest.Item, marker: pytest.Mark | None) -> str:
    """Return what distinguishes the branches of a test: the value of the parameter that its mark names."""
    named = marker.kwargs.get("by") if marker is not None else None
    return "" if named is None else repr(item.callspec.params[named])  # type: ignore[attr-defined]


def report_header(config: pytest.Config) -> str:
    """Return the line that says which part is run, and how to run it again."""
    part = chosen_part(config)
    if part == ALL:
        return "part: all cases, and nightly tests"
    return f"part: {part} (again: --part {part}; every case and nightly tests: --part {ALL})"
