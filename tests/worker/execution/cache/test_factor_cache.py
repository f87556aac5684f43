"""The factor cache: the same collection is made once, and nothing else is ever taken for it."""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from catalog.frames import CacheAnswer, CacheAsked, CacheFilled, Frame, LayerDone, LogLine, Progress, decode
from catalog.requests.assignment import read_assignment
from engine.errors import StopRequested
from engine.model.state.generators import seed_generators
from tests.worker.execution.pieces.conftest import found_once
from worker.disk import cache_folder
from worker.execution.__main__ import execute
from worker.execution.attempt import StopFlag, parse_document
from worker.execution.factor_cache import (
    CacheUse,
    FactorCache,
    Witness,
    data_digest,
    factor_key,
    model_digest,
    reason_uncacheable,
)
from worker.execution.frame_pipe import FramePipe
from worker.foreground.cache_rows import RunCache

__all__ = ["found_once"]  # a fixture

KEY = "0" * 64


class AnsweringPipe(FramePipe):
    """A pipe whose other end, with the cache of a run in the foreground, is in this process too."""

    def __init__(self, descriptor: int, run: RunCache) -> None:
        super().__init__(descriptor)
        self.run = run

    def ask(self, question: CacheAsked, checkpoint: Callable[[], None]) -> CacheAnswer:
        checkpoint()
        return self.run.answer(question)

    def send(self, frame: Frame) -> None:
        said = self.run.take(frame) if isinstance(frame, CacheFilled) else frame
        if said is not None:
            super().send(said)


class Runner:
    """Jobs in this process, each with a folder of its own and one cache."""

    def __init__(self, root: Path, store: Path) -> None:
        self.root, self.store, self.count = root, store, 0
        self.cache = root / "cache"

    def __call__(self, **changes: Any) -> list[Frame]:
        self.count += 1
        own = self.root / str(self.count)
        own.mkdir()
        document = {
            "kind": "capacity",
            "model": {"source": "builtin", "name": "digits_mlp"},
            "data": {"source": "builtin", "name": "digits", "limit": 60},
            "task": {"type": "classification"},
            "collection": {"batch_size": 20, "self_check": "off"},
        } | changes
        request = {"document": document, "cache": str(self.cache), "cache_bytes": 10**9, "job": f"job {self.count}"}
        run = RunCache(request, own / "artifacts")
        given = {
            "document": document,
            "artifacts": str(own / "artifacts"), "store": str(self.store), "scratch": str(own / "scratch"),
            "allowed": {"directories": ["*"]}, "threads": 1, "offline": True, "cache_bytes": 10**9,
        } | {"cache": str(run.told())}  # fmt: skip
        with (own / "frames").open("wb") as frames:
            execute(
                read_assignment(json.dumps(given).encode()), AnsweringPipe(os.dup(frames.fileno()), run), StopFlag()
            )
        return [decode(line) for line in (own / "frames").read_bytes().splitlines()]


@pytest.fixture
def jobs(tmp_path: Path, store: Path) -> Iterator[Runner]:
    deterministic = torch.get_deterministic_debug_mode()
    yield Runner(tmp_path, store)
    torch.set_deterministic_debug_mode(deterministic)


@pytest.fixture(scope="module")
def of_another_job(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """The cache of one job, which tests copy."""
    deterministic = torch.get_deterministic_debug_mode()
    first = Runner(tmp_path_factory.mktemp("first"), store)
    first()
    torch.set_deterministic_debug_mode(deterministic)
    return first.cache


def rows(frames: list[Frame]) -> list[LayerDone]:
    return [frame for frame in frames if isinstance(frame, LayerDone)]


def collections(frames: list[Frame]) -> bool:
    return any(isinstance(frame, Progress) and frame.stage == "collection" for frame in frames)


def test_three_analyses_share_what_another_job_has_collected(jobs: Runner) -> None:
    assert collections(jobs(kind="capacity"))
    several = ["factors", "capacity", "reconstruction"]
    reused, fresh = jobs(kind=several), jobs(kind=several, cache="off")
    assert not collections(reused)
    assert collections(fresh)
    # to the last bit of what the ledger's digests cover
    assert [frame.outcome for frame in rows(reused)] == [frame.outcome for frame in rows(fresh)]
    assert {frame.observed["factors_from"].partition(",")[0] for frame in rows(reused)} == {"job 1"}
    assert {frame.observed["factors_from"] for frame in rows(fresh)} == {None}
    assert (jobs.root / "2/artifacts/factors/factors.index.json").is_file()


def test_a_damaged_entry_is_collected_again_and_replaced(jobs: Runner) -> None:
    first = jobs()
    (victim,) = jobs.cache.glob("*/factors/1.safetensors")
    victim.chmod(0o644)
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    second = jobs()
    assert collections(second)
    assert any("damaged" in frame.message for frame in second if isinstance(frame, LogLine))
    assert not collections(jobs())
    assert [frame.outcome for frame in rows(first)] == [frame.outcome for frame in rows(second)]


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"ekfac": True},
        {"precision": "tf32"},
        {"exact_trace": False},
        {"data": {"source": "builtin", "name": "digits", "limit": 59}},
        {"woodbury": {"policy": "dense"}},
        {"cache": "refresh"},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_another_collection_is_another_key(jobs: Runner, of_another_job: Path, changes: dict[str, Any]) -> None:
    shutil.copytree(of_another_job, jobs.cache)
    asked = {"batch_size": 20, "self_check": "off"}
    options = changes if changes.keys() & {"data", "woodbury", "cache"} else {"collection": asked | changes}
    assert collections(jobs(**options))


def test_the_same_collection_is_found_in_the_cache_of_another_job(jobs: Runner, of_another_job: Path) -> None:
    """So that it is by what differs that the test above collects."""
    shutil.copytree(of_another_job, jobs.cache)
    assert not collections(jobs())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.BatchNorm1d(4), nn.Linear(4, 4))


def changed(change: Callable[[Any], object]) -> nn.Module:
    model = net()
    with torch.no_grad():
        change(model)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.view(torch.int32)[0, 0].bitwise_xor_(1),
        lambda model: model[2].running_mean.add_(1e-6),
        lambda model: model[0].bias.requires_grad_(False),
        lambda model: setattr(model[2], "eps", 1e-6),
        lambda model: setattr(model[3], "weight", model[3].bias),
        lambda model: model.double(),
        lambda model: model.append(nn.Identity()),
        lambda model: model.__setitem__(1, nn.ReLU()),
    ],
)
def test_whatever_differs_in_a_model_shows(change: Callable[[Any], object]) -> None:
    assert model_digest(net()) == model_digest(copy.deepcopy(net()))
    assert model_digest(changed(change)) != model_digest(net())


def test_a_tied_weight_is_not_two_equal_ones() -> None:
    equal, tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for model in (equal, tied):
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    tied[1].weight = tied[0].weight
    assert model_digest(equal) != model_digest(tied)


def test_data_are_told_by_bytes_shapes_names_and_order() -> None:
    x, y = torch.arange(6.0).reshape(2, 3), torch.tensor([0, 1])
    streams = [
        [(x, y)], [(x.reshape(3, 2)[:2], y)], [(x.double(), y)], [({"a": x}, y)], [({"b": x}, y)], [(x, None)],
        [(x[:1], y[:1]), (x[1:], y[1:])], [(x.flip(0), y)], [(x, y, torch.tensor([5, 6]))],
    ]  # fmt: skip
    found = [data_digest(lambda stream=stream: iter(stream), 0, lambda: None) for stream in streams]  # type: ignore[misc]
    assert len(set(found)) == len(streams)
    assert found[0] == data_digest(lambda: iter([(x.clone(), y.clone())]), 0, lambda: None)


@pytest.mark.parametrize("draw", [lambda: torch.rand(2, 3), lambda: torch.tensor([random.random()])])
@pytest.mark.parametrize("seed", [3, 3 + 2**32])
def test_data_that_are_drawn_have_the_digest_of_a_pass(seed: int, draw: Callable[[], torch.Tensor]) -> None:
    def stream() -> Iterator[tuple[torch.Tensor, None]]:
        yield draw(), None

    seed_generators(seed)
    expected = draw()
    assert data_digest(stream, seed, lambda: None) == data_digest(lambda: iter([(expected, None)]), 0, lambda: None)


def test_looking_at_data_leaves_the_generators_as_they_were() -> None:
    def random() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield torch.rand(2, 3), torch.zeros(2)

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    data_digest(random, 0, lambda: None)
    assert torch.equal(torch.rand(3), expected)


def test_code_that_is_not_known_has_no_key() -> None:
    document = parse_document(
        {
            "kind": "factors",
            "model": {"source": "builtin", "name": "digits_cnn"},
            "data": {"source": "builtin", "name": "digits"},
            "task": {"type": "classification"},
        }
    )
    assert reason_uncacheable(document, net()) is None

    class Own(nn.Linear):
        pass

    hooked, patched = net(), net()
    hooked[0].register_forward_hook(lambda *_: None)  # type: ignore[index]
    patched[0].forward = lambda x: x  # type: ignore[index, method-assign]
    for model in (nn.Sequential(Own(3, 3)), hooked, patched):
        assert reason_uncacheable(document, model) is not None
    keys = {factor_key(document, net(), "data", torch.device("cpu")) for _ in range(2)}
    assert len(keys) == 1


def cache(folder: Path, **changes: Any) -> FactorCache:
    """The cache of one job and its parent; `changes` are fields of its use, or options."""
    job, refresh = changes.pop("job", "one"), changes.pop("refresh", False)
    place = folder / f"run-{job}"
    request = {"cache": str(folder / "cache"), "cache_bytes": changes.pop("parent_bytes", 10**6), "job": job}
    run = RunCache(request | {"document": {"cache": "refresh" if refresh else "use"}}, place / "artifacts")
    options: dict[str, Any] = {"limit_bytes": 10**6, "unchanged": lambda: True, "log": lambda *_: None}
    log = changes.get("log", options["log"])

    def tell(filled: CacheFilled) -> None:
        said = run.take(filled)
        if said is not None:
            log(said.level, said.message)

    use = CacheUse(
        key=changes.pop("key", KEY),
        view=run.view,
        filled=place / "artifacts" / ".filled",
        refresh=refresh,
        ask=lambda key: run.answer(CacheAsked(key=key)),
        tell=tell,
    )
    return FactorCache(use, **options | changes)


def filled(one: FactorCache, value: float = 1.0) -> None:
    one.shelf().save_tensors("factors/0.safetensors", {"a": torch.full((4,), value)}, {})
    one.keep()


def entries(folder: Path) -> list[Path]:
    """The folders of entries, and whatever else than rows is there."""
    return [each for each in (folder / "cache").iterdir() if each.suffix != ".json"]


def test_two_who_fill_one_key_at_once_leave_one_entry(tmp_path: Path) -> None:
    first, second = cache(tmp_path), cache(tmp_path, job="two")
    first.shelf().save_tensors("factors/0.safetensors", {"a": torch.ones(4)}, {})
    second.shelf().save_tensors("factors/0.safetensors", {"a": torch.ones(4)}, {})
    second.keep()
    first.keep()
    found = cache(tmp_path).find()
    assert found is not None
    assert found[1].startswith("two")
    assert len(entries(tmp_path)) == 1


def test_a_refreshed_entry_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    filled(cache(tmp_path))
    assert cache(tmp_path, refresh=True).find() is None
    filled(cache(tmp_path, job="two", refresh=True), 2.0)
    found = cache(tmp_path).find()
    assert found is not None
    assert found[1].startswith("two")
    assert torch.equal(found[0].load_tensors("factors/0.safetensors")["a"], torch.full((4,), 2.0))
    assert len(entries(tmp_path)) == 1


def test_what_is_read_stays_when_the_entry_goes(tmp_path: Path) -> None:
    filled(cache(tmp_path))
    found = cache(tmp_path).find()
    assert found is not None
    for each in entries(tmp_path):
        cache_folder.discard(each)
    assert torch.equal(found[0].load_tensors("factors/0.safetensors")["a"], torch.ones(4))
    assert cache(tmp_path).find() is None


def test_data_that_change_from_pass_to_pass_are_not_kept(tmp_path: Path) -> None:
    filled(cache(tmp_path, unchanged=lambda: False))
    assert not (tmp_path / "run-one/artifacts/.filled").exists()
    assert cache(tmp_path).find() is None
    draws = iter(range(10))
    witness = Witness(lambda: iter([(torch.tensor([next(draws)]), None)]))
    for _ in range(2):
        list(witness())
    assert len(set(witness.digests)) == 2


@pytest.mark.parametrize("whose", ["child", "parent"])
def test_a_disk_that_is_full_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    heard: list[str] = []
    one = cache(tmp_path, log=lambda _, message: heard.append(message))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    if whose == "parent":
        one.shelf().save_tensors("factors/0.safetensors", {"a": torch.ones(4)}, {})
    monkeypatch.setattr(os, "fsync", full)
    if whose == "parent":
        one.keep()
    else:
        filled(one)
    monkeypatch.undo()
    assert "No space left" in heard[0]
    assert cache(tmp_path).find() is None
    assert not (tmp_path / "cache").exists() or entries(tmp_path) == []
    assert not (tmp_path / "run-one/artifacts/.filled").exists()


def test_more_than_the_cache_holds_is_not_kept(tmp_path: Path) -> None:
    heard: list[str] = []
    filled(cache(tmp_path, limit_bytes=10, log=lambda _, message: heard.append(message)))
    filled(cache(tmp_path, parent_bytes=10, log=lambda _, message: heard.append(message)))
    assert [each.partition("10 bytes")[0] for each in heard] == [
        "factors are not cached: they take more than the cache's "
    ] * 2
    assert cache(tmp_path).find() is None


def test_a_disk_that_is_nearly_full_is_left_to_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    with monkeypatch.context() as scratch:
        scratch.setattr("worker.execution.factor_cache.free_share", lambda *_: 0.04)
        filled(cache(tmp_path, log=lambda _, message: heard.append(message)))
    with monkeypatch.context() as scratch:
        scratch.setattr("worker.disk.cache_folder.free_share", lambda *_: 0.04)
        filled(cache(tmp_path, log=lambda _, message: heard.append(message)))
    assert "5% of the disk is free" in heard[0]
    assert "5% of the disk would be free" in heard[1]
    assert cache(tmp_path).find() is None


def test_whoever_is_killed_while_the_job_waits_for_an_answer_leaves_no_answer() -> None:
    answers, parent = os.pipe()
    read, frames = os.pipe()
    os.close(parent)
    answer = FramePipe(frames, answers).ask(CacheAsked(key=KEY), lambda: None)
    assert answer == CacheAnswer(job=None)
    assert isinstance(decode(os.read(read, 1000)), CacheAsked)


def test_a_job_that_is_to_stop_waits_for_no_answer() -> None:
    answers, parent = os.pipe()
    read, frames = os.pipe()

    def stop() -> None:
        raise StopRequested

    with pytest.raises(StopRequested):
        FramePipe(frames, answers).ask(CacheAsked(key=KEY), stop)
    for each in (answers, parent, read, frames):
        os.close(each)


def test_a_job_that_ends_early_leaves_nothing(jobs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Path]] = []

    def stops(*_: Any) -> Any:
        seen.append(list(jobs.root.glob("1/artifacts/.filled/*")))
        raise StopRequested

    monkeypatch.setattr("engine.measurement.layer_measurement.keep_spectra", stops)
    with pytest.raises(StopRequested):
        jobs(keep=["spectra"])
    assert seen[0]
    assert not (jobs.root / "1/artifacts/.filled").exists()
    assert not jobs.cache.exists()
