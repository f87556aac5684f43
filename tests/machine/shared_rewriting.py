"""Rewriting of assertions, shared by the processes of a run: each begins with other files and skips what is there.

In a fresh clone each process would rewrite all files at the same time, which takes it ten seconds.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _rewrite_test, _write_pyc, assertstate_key, get_cache_dir, try_makedirs


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Rewrite, in a process of xdist, what no other process has rewritten, before the files are imported."""
    told = getattr(session.config, "workerinput", None)
    if told is not None and not sys.dont_write_bytecode:
        number = int(str(told["workerid"]).removeprefix("gw"))
        rewrite(in_turn(files_of(session.config.args), number, told["workercount"]), session.config)


def files_of(arguments: Sequence[str]) -> list[Path]:
    """Return the test files that a run is given, in their order."""
    places = [Path(each.partition("::")[0]).absolute() for each in arguments]
    return [file for place in places for file in (sorted(place.rglob("test_*.py")) if place.is_dir() else [place])]


def in_turn(files: Sequence[Path], number: int, count: int) -> list[Path]:
    """Return the files from the share of a process on, and then the others."""
    begin = len(files) * number // count
    return [*files[begin:], *files[:begin]]


def rewrite(files: Sequence[Path], config: pytest.Config) -> None:
    """Write the rewritten code of files where there is none; code of an earlier source is pytest's to renew."""
    for file in files:
        folder = get_cache_dir(file)
        code = folder / f"{file.stem}{PYC_TAIL}"
        if not code.exists() and try_makedirs(folder):
            digest, rewritten = _rewrite_test(file, config)
            _write_pyc(config.stash[assertstate_key], rewritten, digest, code)
