"""Every threat of docs/threat-model.md names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ATTACKS = {
    "test_a_hostile_config_is_refused_in_a_second",
    "test_no_field_of_a_configuration_acts",
    "test_labels_are_numbers_or_names_and_nothing_is_guessed",
    "test_a_page_that_declares_two_gib_is_refused",
    "test_bytes_that_drip_are_read_no_otherwise",
    "test_the_others_leave_and_the_next_start_goes_on_with_the_job",
    "test_a_caller_learns_where_a_factory_raised_and_nothing_else_of_it",
}
"""An attack of each door by which a stranger's bytes or code come in; a row that is dropped takes its attack along."""
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/threat-model.md"


def threats() -> list[tuple[str, str, str]]:
    """The rows of the tables whose last column names tests."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    below_attackers = rows[rows.index(["threat", "what stands in the way", "the attack"]) :]
    # a row with a bar within a cell is one that nobody checks
    assert {len(row) for row in below_attackers} == {3}
    return [(row[0], row[1], row[2]) for row in below_attackers if row[0] != "threat" and not set(row[0]) <= {"-"}]


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_kind_of_attacker_has_its_threats() -> None:
    assert len(threats()) >= 35
    named = " ".join(attack for _, _, attack in threats())
    assert [each for each in sorted(ATTACKS) if f"::{each}`" not in named] == []


@pytest.mark.parametrize(("threat", "protection", "attack"), threats(), ids=lambda cell: cell[:40])
def test_a_threat_names_what_stops_it_and_tests_that_exist(threat: str, protection: str, attack: str) -> None:
    assert threat
    assert protection
    named = re.findall(r"`([^`]+)`", attack)
    assert named
    for each in named:
        path, _, function = each.partition("::")
        assert (ROOT / path).is_file(), each
        assert function in functions_of(ROOT / path), each


def test_every_promise_of_the_security_page_stands_there_with_its_tests() -> None:
    section = (ROOT / "SECURITY.md").read_text().split("## What counts")[1].split("## Before")[0]
    promises = [
        " ".join(each.split()) for each in re.findall(r"^- (.*?)(?=\n- |\n\n)", section, re.MULTILINE | re.DOTALL)
    ]
    assert len(promises) == 6
    assert promises == [threat for threat, _, _ in threats()][:6]
