"""kill -9 of each part at each point of a job: it ends, each layer is stored once, with the digests of a quiet run."""

from typing import Any

import pytest

from tests.chaos.cells import run_cell
from tests.chaos.stack.stack import Stack


@pytest.mark.parametrize(
    ("part", "point"),
    [
        ("api", "cancelling"),
        pytest.param("sender", "before_claim", marks=pytest.mark.nightly),
        ("worker", "mid_layer"),
        ("child", "mid_collection"),
        ("redis", "before_claim"),
        ("postgres", "write_to_settle"),
    ],
)
def test_every_job_ends_as_if_nobody_had_killed_anything(
    stack: Stack, undisturbed: list[Any], part: str, point: str
) -> None:
    run_cell(stack, part, point, undisturbed)
