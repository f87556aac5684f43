"""Threads of an attempt: chosen by the first one, where it may, and kept by every later one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from catalog.requests.assignment import Assignment
from worker.execution import computing_environment
from worker.execution.computing_environment import settle_threads

SPEEDS = {2: 1e9, 1: 4e9}
"""Operations a second: beside a busy program one thread is faster than two."""


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Two threads, of which one is faster; the counts that were tried."""
    before, tried = torch.get_num_threads(), list[int]()

    def fastest(most: int) -> tuple[int, dict[int, float]]:
        tried.append(most)
        torch.set_num_threads(1)
        return 1, SPEEDS

    monkeypatch.setattr(computing_environment, "fastest_threads", fastest)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    torch.set_num_threads(2)
    yield tried
    torch.set_num_threads(before)


def settled(tmp_path: Path, **given: Any) -> dict[str, Any]:
    return settle_threads(Assignment(**({"document": {}, "artifacts": tmp_path, "scratch": tmp_path} | given)))


def test_a_first_attempt_takes_the_fastest_and_says_what_it_tried(tmp_path: Path) -> None:
    chosen = settled(tmp_path, choose_threads=True)
    assert chosen == {"threads": 1, "thread_speeds": {"2": 1e9, "1": 4e9}}
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({"choose_threads": True, "plan": {"threads": 3}}, 3),
        ({"choose_threads": True, "plan": {}}, 2),
        ({"choose_threads": True, "document": {"shards": {"count": 2}}}, 2),
        ({"threads": 3, "plan": {"threads": 1}}, 3),
        ({}, 2),
    ],
    ids=["later attempt", "a plan without threads", "pieces", "given", "may not choose"],
)
def test_any_other_attempt_keeps_what_it_has(
    given: dict[str, Any], threads: int, two_threads: list[int], tmp_path: Path
) -> None:
    assert settled(tmp_path, **given) == {"threads": threads}
    assert (torch.get_num_threads(), two_threads) == (threads, [])


def test_ranks_keep_what_they_have(two_threads: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert settled(tmp_path, choose_threads=True) == {"threads": 2}
    assert two_threads == []
