"""Killed anywhere, with its checkpoint whole or harmed, a collection ends with all that an undisturbed one has found.

The whole grid is every moment of every setting (each batch, and after each file that is written or removed) with the
checkpoint as it was left, and every batch with each of its files missing, cut and flipped; of two ranks, with one
rank's harmed or both. It runs with ``KRONOSCOPE_ALL_KILLS=1``. Else the commit's hash chooses two settings that differ
in everything, and moments and harms in them; the kills that once went wrong are among them always.
"""

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.collection import checkpoints
from engine.distributed.group import join
from tests.engine.collection.killed_attempts import KINDS, WAYS, Attempt, Moments, Setting, harms, killed, outcome
from tests.engine.distributed.rank_processes import run_ranks

ALL = os.environ.get("KRONOSCOPE_ALL_KILLS") == "1"
# the whole grid of one setting takes up to an hour
pytestmark = [pytest.mark.timeout(0)] if ALL else []
SETTINGS = [Setting(model, kind, passes) for model in ("plain", "draws") for kind in KINDS for passes in (1, 3)]
WRITES = [Setting("writes", kind, passes) for kind in KINDS for passes in (1, 3)]
Kill = tuple[int, tuple[str, str]]


def chosen() -> random.Random:
    """Other choices with every commit, the same ones within one."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return random.Random(found.stdout)


def pair(settings: list[Setting]) -> list[Setting]:
    """All settings, or one and the one that differs from it in everything."""
    if ALL:
        return settings
    place = chosen().randrange(len(settings) // 2)
    return [settings[place], settings[-1 - place]]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every batch, in several files, and no waiting for a disk."""
    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    monkeypatch.setattr(checkpoints, "_FILE_BYTES", 600)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def kills(moments: Moments) -> Iterator[Kill]:
    """All kills of one setting, or a few: with files harmed in every way, and without."""
    if ALL:
        for moment in range(moments.count):
            every = harms(moments.left(moment)) if moment in moments.batches else [("", "intact")]
            yield from ((moment, each) for each in every)
        return
    pick = chosen()
    last = moments.count - 1
    yield last, ("", "intact")
    yield pick.randrange(last), ("", "intact")
    for way in WAYS:
        moment = pick.choice([each for each in moments.batches if each > moments.batches[0]])
        harmed = [each for each in harms(moments.left(moment)) if each[1] == way]
        manifest = [each for each in harmed if each[0].endswith(".json")]
        # the tensors more often than the manifest, of which there is one
        yield moment, pick.choice([pick.choice(harmed), *(each for each in harmed if each not in manifest)])


@pytest.mark.parametrize("setting", [*pair(SETTINGS), *pair(WRITES)[: None if ALL else 1]], ids=str)
@pytest.mark.part(of=3, law="a killed attempt goes on with the same bits")
def test_one_rank_is_killed_anywhere(setting: Setting, tmp_path: Path) -> None:
    truth = setting.undisturbed(folder=tmp_path / "undisturbed")
    moments = Moments(tmp_path / "first", tmp_path / "moments")
    first = setting.attempt(moments.folder, moments=moments)
    assert first.found == truth
    ways = set()
    for moment, harmed in kills(moments):
        again = killed(setting, moments.left(moment), tmp_path / "again", harmed)
        wrong = sorted(name for name in truth if again.found[name] != truth[name])
        assert not wrong, (moment, harmed, again.lines)
        ways.add(again.way)
    assert ways >= {"resumed", "discarded"}


def test_what_is_compared_is_not_nothing(tmp_path: Path) -> None:
    """Every layer is covered and counted, and another seed is another outcome of each."""
    found = Setting("draws", "ekfac", 3, options={"batch_variance": True}).undisturbed(folder=tmp_path / "one")
    assert set(found) == {"", "first", "norm", "left", "right", "head"}
    other = Setting("draws", "ekfac", 3, options={"batch_variance": True, "seed": 5}).undisturbed(
        folder=tmp_path / "other"
    )
    assert all(found[name] != other[name] for name in found if name)
    # four examples of the first batch, and one of others
    assert all((each.examples_checked or 0) > 4 for each in Setting().collected().layers)


def test_a_batch_without_loss_terms_proves_nothing_of_a_layer(tmp_path: Path) -> None:
    """Killed after it: its inputs have entered A, and that no gradient has arrived means nothing."""
    setting = Setting(ignored=True, options={"self_check": "off"})
    truth = setting.collected()
    assert truth.passes == 1
    moments = Moments(tmp_path / "first", tmp_path / "moments")
    setting.attempt(moments.folder, moments=moments)
    again = killed(setting, moments.left(moments.batches[1]), tmp_path / "again", ("", "intact"))
    assert again.way == "resumed"
    assert again.found == outcome(truth)


# ---- two ranks


def campaign(rank: int, size: int, root: Path, settings: list[Setting]) -> list[tuple[Any, ...]]:
    """Kill both ranks of every setting; return each kill with the layers that differ, and how the attempt went on."""
    checkpoints._SHARE, checkpoints._FILE_BYTES = 0, 600
    os.fsync = lambda _: None
    own, results = root / str(rank), list[tuple[Any, ...]]()
    for number, setting in enumerate(settings):
        place = own / str(number)
        truth = setting.undisturbed(ranks(), place / "undisturbed")
        moments = Moments(place / "first", place / "moments")
        first = setting.attempt(moments.folder, ranks(), moments)
        results.append((str(setting), "undisturbed", differing(first, truth), first.way))
        for moment, harmed in rank_kills(rank, moments, root / "0" / str(number) / "moments"):
            again = killed(setting, moments.left(moment), place / "again", harmed, ranks())
            results.append((str(setting), moment, harmed, differing(again, truth), again.way, again.lines))
    return results


def ranks() -> Any:
    return join(torch.device("cpu"))


def differing(attempt: Attempt, truth: dict[str, str]) -> list[str]:
    return sorted(name for name in truth if attempt.found.get(name) != truth[name])


def rank_kills(rank: int, moments: Moments, of_first: Path) -> Iterator[Kill]:
    """Kills of one rank, as many as of the other: at the same batch or the next one, with files of one rank harmed.

    Both have files of the same names but for the numbers of a checkpoint; those of rank 0 say which are harmed.
    """
    pick, intact = random.Random(chosen().random()), ("", "intact")
    last = len(moments.batches) - 1
    steps = range(1, last + 1) if ALL else [pick.randrange(1, last + 1)]
    for step in steps:
        yield moments.batches[step], intact
        # one rank is a batch ahead
        yield moments.batches[step - (rank == 0)], intact
    ranks()  # once both are here, that of the other is whole
    first = Moments.of(of_first)
    for step in range(1, last + 1) if ALL else [pick.randrange(1, last) for _ in WAYS]:
        every = [each for each in harms(first.left(first.batches[step])) if each[1] != "intact"]
        for harmed in every if ALL else [pick.choice(every)]:
            victim = pick.choice([0, 1, 2])
            is_here = (moments.left(moments.batches[step]) / harmed[0]).is_file()
            yield moments.batches[step], harmed if is_here and victim in (rank, 2) else intact


# several passes with a decay are where ranks once went on with other numbers
FEW = [Setting("plain", "ekfac", 3), pytest.param(pair(SETTINGS)[0], marks=pytest.mark.nightly)]


@pytest.mark.parametrize("setting", SETTINGS if ALL else FEW, ids=str)
@pytest.mark.part(of=3, law="a killed attempt goes on with the same bits")
def test_two_ranks_are_killed_anywhere(setting: Setting, tmp_path: Path) -> None:
    found = run_ranks(2, campaign, 2, tmp_path, [setting], most_seconds=3600 if ALL else 300)
    for rank, results in enumerate(found):
        assert isinstance(results, list), results
        for result in results:
            assert [] in result, (rank, result)
    assert {result[-2] for result in found[0][1:] if len(result) == 6} >= {"resumed", "discarded"}
