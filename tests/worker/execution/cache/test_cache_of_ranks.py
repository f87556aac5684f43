"""Factors that ranks have added up are found by as many ranks, and by no other number of them."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from catalog.frames import CacheAnswer, CacheAsked, CacheFilled, Finished, Frame, LayerDone, Progress
from worker.execution.factor_cache import CacheUse, FactorCache, ask_parent
from worker.execution.frame_pipe import FramePipe
from worker.foreground.cache_rows import RunCache
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
            "cache_bytes": 10**9,
        }  # fmt: skip
        request = {"cache": str(tmp_path / "cache"), "cache_bytes": 10**9, "job": name}
        cache = RunCache(request | {"document": assignment["document"]}, own / "artifacts")
        command = RANKS if ranks > 1 else EXECUTION
        frames = []
        child = Child.start(assignment | {"cache": str(cache.told())}, subprocess.DEVNULL, os.environ, command)
        try:
            for frame in child.frames():
                frames.append(frame)
                if isinstance(frame, CacheAsked):
                    child.answer(cache.answer(frame))
                elif isinstance(frame, CacheFilled):
                    assert cache.take(frame) is None
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
    run = RunCache({"cache": str(tmp_path / "cache"), "cache_bytes": 10**9, "job": "j"}, tmp_path / "artifacts")

    def cache(*, agree: bool, fills: bool) -> FactorCache:
        use = CacheUse(
            key="0" * 64,
            view=run.view,
            filled=tmp_path / "artifacts" / ".filled",
            refresh=False,
            ask=lambda key: run.answer(CacheAsked(key=key)),
            tell=lambda filled: said.extend(each.message for each in [run.take(filled)] if each is not None),
            fills=fills,
            agree=lambda found: found and agree,
        )
        return FactorCache(use, limit_bytes=10**9, unchanged=lambda: True, log=lambda _, line: said.append(line))

    filled, other = cache(agree=True, fills=True), cache(agree=True, fills=False)
    for each in (other, filled):
        each.shelf().save_json("factors/some.json", {"a": 1})
        each.keep()
        each.close()
    assert len(list((tmp_path / "cache").glob("0*.json"))) == 1
    assert cache(agree=False, fills=False).find() is None
    assert said == []
    found = cache(agree=True, fills=False).find()
    assert found is not None
    assert found[0].load_json("factors/some.json") == {"a": 1}
    assert any("nothing is collected" in line for line in said)


@dataclass
class _Ranks:
    """A rank beside one that has asked with a key, and has got an answer."""

    rank: int
    told: tuple[str, CacheAnswer]

    def gather(self, value: Any, _operation: str) -> list[Any]:
        return [self.told, value]


@pytest.mark.parametrize(("key", "job"), [("0" * 64, "j"), ("1" * 64, None)])
def test_ranks_whose_keys_differ_have_no_entry(key: str, job: str | None) -> None:
    ranks: Any = _Ranks(rank=1, told=(key, CacheAnswer(job="j")))
    # rank 1 asks nobody
    assert ask_parent(FramePipe(-1), ranks, lambda: None)("0" * 64).job == job
