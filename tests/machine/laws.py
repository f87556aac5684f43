"""Laws: the test functions of a run, with the cases that a landing and a nightly run have of each.

Functions that try one law in several ways share it: `@pytest.mark.part(of=3, law="a killed job goes on")`.
A law may have no case in a landing only where its mark names the tests that hold the same there:
`@pytest.mark.nightly(covered_by="tests/chaos/test_kill_matrix.py::test_it")`. Fault kinds are those of the campaign
(`tests.chaos.fault_kinds`), each with the tests that bring it about.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.fault_kinds import BROUGHT_ABOUT_BY

ELSEWHERE = ("gpu", "docker", "slurm")
"""Marks of tests that `make test` leaves out, nightly or not."""


@dataclass(frozen=True)
class Law:
    """A test function, and how many of its cases run."""

    name: str
    """Its file and its function, as in a node id; of several functions, their file and their law."""
    landing: int
    nightly: int
    covered_by: tuple[str, ...] = ()
    """Node ids of tests that hold the same in each landing."""

    @property
    def room(self) -> str:
        """The folder of its file."""
        return str(Path(self.name.partition("::")[0]).parent)


def law_of(nodeid: str) -> str:
    """Return the name of a case's function: its node id without the parameters."""
    return nodeid.partition("[")[0]


def law_of_item(item: pytest.Item) -> str:
    """Return the name of a case's law: the one that its mark names, or its function."""
    for marker in item.iter_markers("part"):
        if "law" in marker.kwargs:
            return f"{item.nodeid.partition('::')[0]}::{marker.kwargs['law']}"
    return law_of(item.nodeid)


def list_laws(collected: Iterable[pytest.Item], chosen: Iterable[pytest.Item]) -> list[Law]:
    """Return the laws of a run.

    Args:
        collected: Every case, which is what a nightly run has.
        chosen: The cases that a landing has.
    """
    nightly: dict[str, list[pytest.Item]] = {}
    for item in collected:
        if not any(item.get_closest_marker(each) for each in ELSEWHERE):
            nightly.setdefault(law_of_item(item), []).append(item)
    in_landing: dict[str, int] = {}
    for item in chosen:
        name = law_of_item(item)
        in_landing[name] = in_landing.get(name, 0) + 1
    return [Law(name, in_landing.get(name, 0), len(items), _covering(items)) for name, items in nightly.items()]


def _covering(items: Sequence[pytest.Item]) -> tuple[str, ...]:
    """Return the node ids that the `nightly` marks of a law's cases name."""
    names: dict[str, None] = {}
    for item in items:
        for marker in item.iter_markers("nightly"):
            given = marker.kwargs.get("covered_by", ())
            names.update(dict.fromkeys((given,) if isinstance(given, str) else given))
    return tuple(names)


def find_gaps(
    laws: Sequence[Law], chosen: Collection[str], kinds: Mapping[str, Sequence[str]] = BROUGHT_ABOUT_BY
) -> list[str]:
    """Return a sentence for each law, and each fault kind, of which a landing has nothing.

    Args:
        laws: All of a run.
        chosen: Node ids of the cases that a landing has.
        kinds: Fault kinds, with the node ids of the tests that bring them about.
    """
    present = {*chosen, *map(law_of, chosen)}
    gaps = []
    for law in laws:
        if not law.landing and not law.covered_by:
            gaps.append(f"{law.name} has no case in a landing, and names no test that holds the same (covered_by)")
        gaps += [
            f"{law.name} names {each} as its cover, which a landing does not run"
            for each in law.covered_by
            if each not in present
        ]
    for kind, tests in kinds.items():
        gaps += [
            f"fault kind `{kind}` names {each}, which a landing does not run" for each in tests if each not in present
        ]
        if not tests:
            gaps.append(f"fault kind `{kind}` is brought about by no test of a landing")
    return gaps


def is_whole(config: pytest.Config) -> bool:
    """Whether a run collects every test."""
    return {Path(config.rootpath, each) for each in config.args} == {config.rootpath / "tests"}
