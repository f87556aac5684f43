"""Factors that ranks have added up are found by as many ranks, and by no other number of them."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from catalog.frames import Finished, Frame, LayerDone, Progress
from worker.execution.cache.factor_cache import CacheUse, FactorCache
from worker.process.child_process import EXECUTION, RANKS, Child


@pytest.fixture
def run(tmp_path: Path, store: Path) -> Any:
    """``run("name", 2)``: the frames of a job of two ranks, with the cache of all."""

    def make(name: str, ranks: int) -> list[Frame]:
        own = tmp_path / name
        own.mkdir()
        assignment = {
            "document": {
                "kind": "capacity",
                "model": {"source": "builtin", "name": "digits_mlp"},
                "data": {"source": "builtin", "name": "digits", "limit": 60},
                "task": {"type": "classification"},
                "collection": {"batch_size": 20},
                "world_size": ranks,
            },
            "artifacts": str(own / "artifacts"), "store": str(store), "scratch": str(own / "scratch"), "threads": 1,
            "allowed": {"directories": ["*"]}, "offline": True,
            "cache": str(tmp_path / "cache"), "cache_bytes": 10**9, "job": name,
        }  # fmt: skip
        child = Child.start(assignment, subprocess.DEVNULL, os.environ, RANKS if ranks > 1 else EXECUTION)
        try:
            frames = list(child.frames())
        finally:
            child.close()
        assert isinstance(frames[-1], Finished), frames[-1]
        return frames

    return make


def collects(frames: list[Frame]) -> bool:
    return any(isinstance(frame, Progress) and frame.stage == "collection" for frame in frames)


def test_ranks_take_what_as_many_ranks_have_collected(run: Any) -> None:
    alone, fresh, reused = run("alone", 1), run("fresh", 2), run("reused", 2)
    assert collects(alone)
    assert collects(fresh)
    assert not collects(reused)
    rows = [[frame for frame in frames if isinstance(frame, LayerDone)] for frames in (fresh, reused)]
    assert rows[0]
    # to the last bit of what the ledger's digests cover, those of the sums of two ranks
    assert [row.outcome for row in rows[0]] == [row.outcome for row in rows[1]]
    assert {row.outcome["record"]["world_size"] for row in rows[1]} == {2}
    assert {row.observed["factors_from"].partition(",")[0] for row in rows[1]} == {"fresh"}
    ended = [frames[-1] for frames in (alone, fresh, reused)]
    assert len({(each.model_sha256, each.data_sha256, each.examples) for each in ended}) == 1


def test_an_entry_that_one_rank_cannot_read_is_taken_by_none(tmp_path: Path) -> None:
    said: list[str] = []

    def cache(*, agree: bool, fills: bool) -> FactorCache:
        use = CacheUse(
            key="0" * 64, job="j", own=tmp_path / "own", refresh=False, fills=fills, agree=lambda found: found and agree
        )
        return FactorCache(
            tmp_path / "cache", use, limit_bytes=10**9, unchanged=lambda: True, log=lambda _, line: said.append(line)
        )

    filled, other = cache(agree=True, fills=True), cache(agree=True, fills=False)
    for each in (other, filled):
        each.shelf().save_json("factors/some.json", {"a": 1})
        each.keep()
        each.close()
    assert len(list((tmp_path / "cache").glob("0*"))) == 1
    assert cache(agree=False, fills=False).find() is None
    assert said == []
    found = cache(agree=True, fills=False).find()
    assert found is not None
    assert found[0].load_json("factors/some.json") == {"a": 1}
    assert any("nothing is collected" in line for line in said)
