"""The factor cache: the same collection is made once, and nothing else is ever taken for it."""

import copy
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from catalog.frames import Frame, LayerDone, LogLine, Progress, decode
from engine.errors import StopRequested
from worker.disk.cache_folder import ENTRY, cache_of_tenant, discard, part, publish, sweep, sweep_tenants
from worker.execution.__main__ import execute, parse_document
from worker.execution.assignment import read_assignment
from worker.execution.cache.factor_cache import CacheUse, FactorCache
from worker.execution.cache.factor_cache_key import Witness, data_digest, factor_key, model_digest, reason_uncacheable
from worker.execution.frame_pipe import FramePipe
from worker.execution.stop_flag import StopFlag

KEY = "0" * 64


class Runner:
    """Jobs in this process, each with a folder of its own and one cache."""

    def __init__(self, root: Path, store: Path) -> None:
        self.root, self.store, self.count = root, store, 0
        self.cache = root / "cache"

    def __call__(self, **changes: Any) -> list[Frame]:
        self.count += 1
        own = self.root / str(self.count)
        own.mkdir()
        given = {
            "document": {
                "kind": "capacity",
                "model": {"source": "builtin", "name": "digits_mlp"},
                "data": {"source": "builtin", "name": "digits", "limit": 60},
                "task": {"type": "classification"},
                "collection": {"batch_size": 20},
            }
            | changes,
            "artifacts": str(own / "artifacts"), "store": str(self.store), "scratch": str(own / "scratch"),
            "allowed": {"directories": ["*"]}, "threads": 1, "offline": True,
            "cache": str(self.cache), "cache_bytes": 10**9, "job": f"job {self.count}",
        }  # fmt: skip
        with (own / "frames").open("wb") as frames:
            execute(read_assignment(json.dumps(given).encode()), FramePipe(os.dup(frames.fileno())), StopFlag())
        return [decode(line) for line in (own / "frames").read_bytes().splitlines()]


@pytest.fixture
def jobs(tmp_path: Path, store: Path) -> Iterator[Runner]:
    deterministic = torch.get_deterministic_debug_mode()
    yield Runner(tmp_path, store)
    torch.set_deterministic_debug_mode(deterministic)


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
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    second = jobs()
    assert collections(second)
    assert any("damaged" in frame.message for frame in second if isinstance(frame, LogLine))
    assert not collections(jobs())
    assert [frame.outcome for frame in rows(first)] == [frame.outcome for frame in rows(second)]


@pytest.mark.parametrize(
    "changes",
    [
        {"collection": {"batch_size": 20, "seed": 1}},
        {"collection": {"batch_size": 20, "ekfac": True}},
        {"collection": {"batch_size": 20, "exact_trace": False}},
        {"data": {"source": "builtin", "name": "digits", "limit": 59}},
        {"woodbury": {"policy": "dense"}},
        {"cache": "refresh"},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_another_collection_is_another_key(jobs: Runner, changes: dict[str, Any]) -> None:
    jobs()
    assert collections(jobs(**changes))


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
    use = {"key": KEY, "job": "one", "own": folder / "own", "refresh": False}
    options: dict[str, Any] = {"limit_bytes": 10**6, "unchanged": lambda: True, "log": lambda *_: None}
    use |= {name: changes.pop(name) for name in use if name in changes}
    return FactorCache(folder / "cache", CacheUse(**use), **options | changes)


def filled(one: FactorCache, value: float = 1.0) -> None:
    one.shelf().save_tensors("factors/0.safetensors", {"a": torch.full((4,), value)}, {})
    one.keep()


def test_two_who_fill_one_key_at_once_leave_one_entry(tmp_path: Path) -> None:
    first, second = cache(tmp_path), cache(tmp_path, job="two")
    first.shelf().save_tensors("factors/0.safetensors", {"a": torch.ones(4)}, {})
    second.shelf().save_tensors("factors/0.safetensors", {"a": torch.ones(4)}, {})
    second.keep()
    first.keep()
    found = cache(tmp_path).find()
    assert found is not None
    assert found[1].startswith("two")
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [KEY]


def test_what_is_read_stays_when_the_entry_goes(tmp_path: Path) -> None:
    filled(cache(tmp_path))
    found = cache(tmp_path).find()
    assert found is not None
    discard(tmp_path / "cache" / KEY)
    assert torch.equal(found[0].load_tensors("factors/0.safetensors")["a"], torch.ones(4))
    assert cache(tmp_path).find() is None


def test_data_that_change_from_pass_to_pass_are_not_kept(tmp_path: Path) -> None:
    filled(cache(tmp_path, unchanged=lambda: False))
    assert cache(tmp_path).find() is None
    draws = iter(range(10))
    witness = Witness(lambda: iter([(torch.tensor([next(draws)]), None)]))
    for _ in range(2):
        list(witness())
    assert len(set(witness.digests)) == 2


def test_a_disk_that_is_full_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    one = cache(tmp_path, log=lambda _, message: heard.append(message))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    filled(one)
    monkeypatch.undo()
    assert "No space left" in heard[0]
    assert cache(tmp_path).find() is None
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EMFILE])
def test_an_entry_that_cannot_be_had_now_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    filled(cache(tmp_path))
    heard: list[str] = []

    def refused(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as scratch:
        scratch.setattr(os, "link", refused)
        scratch.setattr(shutil, "copyfile", refused)
        assert cache(tmp_path, log=lambda _, message: heard.append(message)).find() is None
    assert os.strerror(number) in heard[0]
    assert "damaged" not in heard[0]
    assert not (tmp_path / "own").exists()
    assert cache(tmp_path).find() is not None


def test_a_file_that_a_disk_has_lost_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(cache(tmp_path))

    def lost(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("worker.execution.cache.factor_cache._sha256", lost)
    assert cache(tmp_path).find() is None
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("name", [ENTRY, "factors/0.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_in_an_entry_is_damage(tmp_path: Path, name: str, kind: str) -> None:
    filled(cache(tmp_path))
    spoiled, elsewhere = tmp_path / "cache" / KEY / name, tmp_path / "elsewhere"
    spoiled.rename(elsewhere)
    if kind == "link":
        # its content is right now, and another's to change
        spoiled.symlink_to(elsewhere)
    else:
        os.mkfifo(spoiled)
    heard: list[str] = []
    assert cache(tmp_path, log=lambda _, message: heard.append(message)).find() is None
    assert "damaged" in heard[0]
    assert elsewhere.is_file()
    filled(cache(tmp_path))
    assert cache(tmp_path).find() is not None


def test_a_folder_that_lost_its_manifest_is_in_nobodys_way(tmp_path: Path) -> None:
    filled(cache(tmp_path))
    (tmp_path / "cache" / KEY / ENTRY).unlink()
    assert cache(tmp_path).find() is None
    filled(cache(tmp_path, job="two"))
    found = cache(tmp_path).find()
    assert found is not None
    assert found[1].startswith("two")
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [KEY]


def test_a_file_in_the_place_of_an_entry_is_in_nobodys_way(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / KEY).write_text("no folder")
    (folder / ".trash-0").write_text("no folder")
    aged(folder / ".trash-0", 600)
    assert sweep(folder, 10**9) == 1
    assert cache(tmp_path).find() is None
    filled(cache(tmp_path))
    assert cache(tmp_path).find() is not None
    assert [each.name for each in folder.iterdir()] == [KEY]


def test_a_disk_that_is_nearly_full_is_left_to_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.execution.cache.factor_cache._free_share", lambda _: 0.04)
    heard: list[str] = []
    filled(cache(tmp_path, log=lambda _, message: heard.append(message)))
    assert "5% of the disk" in heard[0]
    assert cache(tmp_path).find() is None


def aged(place: Path, seconds: float) -> None:
    """As if nobody had written there for so long."""
    then = time.time() - seconds
    for path in (place, *place.rglob("*")):
        os.utime(path, (then, then))


FILLS_AND_WAITS = """
import sys, time
from pathlib import Path
import torch
from worker.execution.cache.factor_cache import CacheUse, FactorCache
cache = FactorCache(
    Path(sys.argv[1]), CacheUse(key="0" * 64, job="one", own=Path(sys.argv[1]) / "own", refresh=False),
    limit_bytes=10**6, unchanged=lambda: True, log=print,
)
cache.shelf().save_tensors("factors/0.safetensors", {"a": torch.ones(4)}, {})
print("written", flush=True)
time.sleep(300)
"""


def test_whoever_is_killed_while_filling_leaves_nothing_for_long(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with subprocess.Popen([sys.executable, "-c", FILLS_AND_WAITS, str(folder)], stdout=subprocess.PIPE) as filling:
        try:
            assert filling.stdout is not None
            assert filling.stdout.readline() == b"written\n"
            (left,) = folder.iterdir()
            aged(left, 600)
            # alive, and slow
            assert sweep(folder, 10**9) == 0
        finally:
            filling.kill()
    assert cache(tmp_path).find() is None
    assert sweep(folder, 10**9) == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("idle_seconds", "removed"), [(1, 0), (1_000, 0), (90_000, 1)])
def test_without_locks_a_day_tells_what_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle_seconds: float, removed: int
) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    one = cache(tmp_path)
    one.shelf().save_tensors("factors/0.safetensors", {"a": torch.ones(4)}, {})
    (left,) = (tmp_path / "cache").iterdir()
    aged(left, idle_seconds)
    assert sweep(tmp_path / "cache", 10**9) == removed


def test_what_is_being_filled_counts(tmp_path: Path) -> None:
    filled(cache(tmp_path))
    other = cache(tmp_path, key="1" * 64)
    other.shelf().save_tensors("factors/0.safetensors", {"a": torch.ones(1000)}, {})
    assert sweep(tmp_path / "cache", 4500) == 0
    assert sweep(tmp_path / "cache", 4100) == 1
    other.keep()
    assert [each.name for each in (tmp_path / "cache").iterdir()] == ["1" * 64]


def test_a_job_that_ends_early_leaves_nothing(jobs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Path]] = []

    def stops(*_: Any) -> Any:
        seen.append(list(jobs.cache.iterdir()))
        raise StopRequested

    monkeypatch.setattr("engine.measurement.layer_measurement.keep_spectra", stops)
    with pytest.raises(StopRequested):
        jobs()
    assert len(seen[0]) == 1
    assert list(jobs.cache.iterdir()) == []


def test_the_longest_unused_leave_first(tmp_path: Path) -> None:
    folder = cache_of_tenant(tmp_path, "a tenant")
    for place, key in enumerate("abc"):
        here = part(folder)
        here.mkdir(parents=True)
        (here / "file").write_bytes(b"\0" * 100)
        (here / ENTRY).write_text("{}")
        publish(here, folder, key * 64, replace=False)
        os.utime(folder / (key * 64) / ENTRY, (place, place))
    os.utime(folder / ("a" * 64) / ENTRY)
    assert sweep_tenants(tmp_path, 250) == 1
    assert {each.name[0] for each in folder.iterdir()} == {"a", "c"}
    assert sweep_tenants(tmp_path, 0) == 2
    assert cache_of_tenant(tmp_path, "another") != folder
