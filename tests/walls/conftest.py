"""Fixtures of the walls: real processes, real services, and the real ledger on both databases."""

import os
from pathlib import Path

import pytest

from tests.api.conftest import keyed
from tests.walls.interpreter import everybodys_python
from tests.worker.conftest import job, scripted, settings, submitted

__all__ = ["job", "keyed", "python", "reachable", "scripted", "settings", "submitted"]


def open_to_all(folder: Path) -> None:
    """Let every user come as far as a folder of pytest's."""
    for each in (folder, *folder.parents):
        if each.stat().st_uid == os.getuid() and str(each).startswith("/tmp/"):
            each.chmod(0o755)


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
