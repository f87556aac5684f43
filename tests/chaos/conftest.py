"""One stack a file, with quick rounds and long leases, for the faults of this room that leave it whole.

A stack that nobody uses takes a sixth of a processor, which a file that ends gives back.
"""

from collections.abc import Iterator

import pytest

from tests.chaos.cells import matrix_stack
from tests.chaos.stack.gated_jobs import document, outcomes
from tests.chaos.stack.stack import LONG_LEASES, Stack, running_stack

CHECKPOINTS = {"KRONOSCOPE_CHECKPOINT_SECONDS": "0.001"}
"""As many as the engine makes at most."""


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack for every test of a file; ``stack`` hands it over whole."""
    with matrix_stack(tmp_path_factory.mktemp("stack"), settings=LONG_LEASES | CHECKPOINTS) as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """The shared stack, with every part running before the test."""
    shared_stack.revive()
    return shared_stack


@pytest.fixture(scope="module")
def undisturbed(shared_stack: Stack) -> list[object]:
    """The rows of a job that nobody disturbed."""
    job_id = shared_stack.submit(document())
    assert shared_stack.await_end(job_id) == ["succeeded"]
    return list(outcomes(shared_stack, job_id))


@pytest.fixture(scope="module")
def quick_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers whose children compute nothing."""
    settings = LONG_LEASES | {"CHAOS_QUICK": "1", "KRONOSCOPE_SLOTS": "2"}
    with running_stack(tmp_path_factory.mktemp("quick"), settings=settings) as stack:
        yield stack


@pytest.fixture
def quick(quick_stack: Stack) -> Stack:
    quick_stack.revive()
    return quick_stack
