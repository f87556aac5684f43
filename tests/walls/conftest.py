"""Fixtures of the walls: real processes, real services, and the real ledger on both databases."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.schema.database import open_database
from tests.api.conftest import keyed
from tests.conftest import Databases, Dialect
from tests.walls.compose import Compose
from tests.walls.interpreter import everybodys_python
from tests.worker.conftest import dialect, job, scripted, settings, submitted
from tests.worker.execution.conftest import store

__all__ = ["dialect", "job", "keyed", "python", "reachable", "scripted", "settings", "store", "submitted"]


def open_to_all(folder: Path) -> None:
    """Let every user come as far as a folder of pytest's."""
    for each in (folder, *folder.parents):
        if each.stat().st_uid == os.getuid() and str(each).startswith("/tmp/"):
            each.chmod(0o755)


@pytest.fixture
def ledger_url(databases: Databases, dialect: Dialect) -> Iterator[str]:
    """A ledger with nothing in it; what a test leaves to nobody else is emptied for the next."""
    url = databases.recycled(dialect)
    yield url
    databases.recycle(url)


@pytest.fixture
def reachable(tmp_path: Path) -> Path:
    """The test's folder, which every user may enter."""
    open_to_all(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that every user may execute."""
    folder = tmp_path_factory.mktemp("interpreter")
    open_to_all(folder)
    return everybodys_python(folder)


@pytest.fixture
def compose(reachable: Path, databases: Databases, python: str) -> Iterator[Compose]:
    """A service as Compose has it, on a ledger of PostgreSQL, which several users reach."""
    url = databases.migrated("postgresql")
    engine = open_database(url)
    yield Compose(reachable, url, engine, python)
    engine.dispose()
