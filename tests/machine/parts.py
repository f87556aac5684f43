"""Parts of exhaustive grids, and what only nightly runs do: the tests of a landing, chosen by its commit.

`@pytest.mark.part(of=4)` leaves of a grid a quarter of its cases, others for each commit, and always one with each
value of each parameter. `by=("form", "pair.kind")` keeps the values of these alone; `by=()` is for examples of one
kind, of which only the first always runs; `per="file"` chooses whole files, whose cases share a server. The functions
of a file that try one thing in several ways, each with programs of its own, are such examples where their marks name
that: `law="a killed job goes on"`. The choice is printed, and repeated by `--part COMMIT`; `--part all` leaves
every case, and every test marked `nightly`.
"""

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.machine.laws import find_gaps, is_whole, law_of_item, list_laws

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


def first_of(part: str, of: int) -> int:
    """Return where a test that does one of so many steps begins in a part; a nightly run begins with the first."""
    return 0 if part == ALL else int.from_bytes(hashlib.sha256(part.encode()).digest()[:8], "big") % of


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the cases of other parts, and nightly tests, unless a test is asked for by its name.

    A run of all tests fails where that leaves nothing of a law.
    """
    part = chosen_part(config)
    if part == ALL or any("::" in each for each in config.args):
        return
    kept, left = [], []
    seen: dict[str, set[tuple[str, str]]] = {}
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            left.append(item)
            continue
        markers = list(item.iter_markers("part"))
        law = law_of_item(item)
        begun = law in seen
        known = seen.setdefault(law, set())
        stays = not begun or all(
            is_chosen(part, _chosen_by(item, marker), marker.kwargs["of"]) or not _values(item, marker) <= known
            for marker in markers
        )
        if stays:
            known.update(*(_values(item, marker) for marker in markers))
        (kept if stays else left).append(item)
    if is_whole(config) and (gaps := find_gaps(list_laws(items, kept), {item.nodeid for item in kept})):
        # a report, which a process of xdist sends on; an error would end it without a word
        report = pytest.CollectReport("tests", "failed", "\n".join(gaps), [])
        config.hook.pytest_collectreport(report=report)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def _chosen_by(item: pytest.Item, marker: pytest.Mark) -> str:
    """Return the name that a case is chosen by: its own, or that of its file."""
    return item.nodeid.partition("::")[0] if marker.kwargs.get("per") == "file" else item.nodeid


def _values(item: pytest.Item, marker: pytest.Mark) -> set[tuple[str, str]]:
    """Return the values of a case for the parameters that a mark names, or for all; `pair.kind` names an attribute."""
    callspec = getattr(item, "callspec", None)
    parameters = {} if callspec is None else callspec.params
    values = set()
    for name in marker.kwargs.get("by", () if "law" in marker.kwargs else parameters):
        value = parameters
        for part in name.split("."):
            value = value[part] if value is parameters else getattr(value, part)
        values.add((name, repr(value)))
    return values


def report_header(config: pytest.Config) -> str:
    """Return the line that says which part is run, and how to run it again."""
    part = chosen_part(config)
    if part == ALL:
        return "part: all cases, and nightly tests"
    return f"part: {part} (again: --part {part}; every case and nightly tests: --part {ALL})"
