"""The kinds of faults: those of the nemesis, no more and no fewer."""

from typing import Any

from tests.chaos.fault_kinds import BROUGHT_ABOUT_BY
from tests.chaos.nemesis import Nemesis


def test_each_fault_of_the_nemesis_has_tests_of_its_own() -> None:
    nowhere: Any = None
    assert set(Nemesis(nowhere, nowhere, 0, 1, 3).kinds) == set(BROUGHT_ABOUT_BY)
