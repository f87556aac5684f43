"""One stack a file, with quick rounds and long leases, for the faults of this room that leave it whole.

A stack that nobody uses takes a sixth of a processor, which a file that ends gives back.
"""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos import removals
from tests.chaos.stack.databases import copy_from
from tests.chaos.stack.documents import run_alone
from tests.chaos.stack.gated_jobs import document
from tests.chaos.stack.stack import LONG_LEASES, Stack, running_stack
from tests.conftest import Databases
from tests.machine.template.client import forked

CHECKPOINTS = {"KRONOSCOPE_CHECKPOINT_SECONDS": "0.001"}
"""As many as the engine makes at most."""


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack for every test of a file; ``stack`` hands it over whole.

    The matrix of the soak has a third worker, whose clearing up it misses where that is taken away.
    """
    folder = tmp_path_factory.mktemp("stack")
    held = removals.preload(folder / "changes", "held wake-ups")
    with running_stack(folder, settings=LONG_LEASES | CHECKPOINTS, preload=held) as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """The shared stack, with every part running before the test."""
    shared_stack.revive()
    return shared_stack


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The rows of a job that nobody disturbed, as `outcomes` gives them."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with forked():  # nothing is done to its processes
        truth = run_alone(document(), folder)
    rows = json.loads((folder / "out" / "results.json").read_text())["layers"]
    layers = {(row["kind"], row["ordinal"]): row["layer"] for row in rows}
    return [(*place, layers[place], sha256) for place, sha256 in sorted(truth.rows.items())]


@pytest.fixture(scope="module")
def quick_stack(tmp_path_factory: pytest.TempPathFactory, postgres_url: str, databases: Databases) -> Iterator[Stack]:
    """Two workers whose children compute nothing, on a PostgreSQL that other tests use too: no fault reaches it."""
    settings = LONG_LEASES | {"CHAOS_QUICK": "1", "KRONOSCOPE_SLOTS": "2"}
    server: Any = SimpleNamespace(url=postgres_url.replace("+psycopg", "", 1), alive=True)
    copy_from(server.url, lambda: databases.migrated("postgresql"))
    with running_stack(tmp_path_factory.mktemp("quick"), settings=settings, postgres=server) as stack:
        yield stack


@pytest.fixture
def quick(quick_stack: Stack) -> Stack:
    quick_stack.revive()
    return quick_stack
