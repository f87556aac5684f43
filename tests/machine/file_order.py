"""The order of files, and the processes that they are handed to, by the seconds of a recorded run.

A file stays in one process. Files that take long come first: at the end one process would work for a minute, and the
others wait. Half of the processes take files that compute, the other half files that wait (for leases, polls,
brokers), so that these cost no processor; a process without work of its kind takes the other.

`make test RECORD=1` renews the record.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "suite.json"
UNKNOWN = {"wall": 10.0, "cpu": 10.0, "children": 0.0}
"""A file that no run has recorded."""
WAITS_BELOW = 0.5
"""Share of its wall seconds in which a file that waits has a processor, its children's included."""


@cache
def recorded() -> Mapping[str, Mapping[str, float]]:
    """Return the seconds of each file in the recorded run; nothing where there is none."""
    if not RECORD.exists():
        return {}
    files: dict[str, dict[str, float]] = json.loads(RECORD.read_text())["files"]
    return files


def waits(file: str) -> bool:
    """Whether a file mostly waits."""
    seconds = recorded().get(file, UNKNOWN)
    return seconds["cpu"] + seconds["children"] < WAITS_BELOW * seconds["wall"]


def sort_by_seconds(items: list[pytest.Item]) -> None:
    """Put the tests of long files first, and leave those of each file in their order."""
    items.sort(key=lambda item: -recorded().get(item.nodeid.partition("::")[0], UNKNOWN)["wall"])


class TwoKinds(LoadFileScheduling):  # type: ignore[misc]
    """Hands files that compute to the first half of the processes, and files that wait to the other."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        number = int(node.gateway.id.removeprefix("gw"))
        wanted = number >= self.numnodes / 2
        for file in self.workqueue:
            if waits(file) is wanted:
                self.workqueue.move_to_end(file, last=False)
                break
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TwoKinds | None:
    """Take this scheduler where files stay together."""
    return TwoKinds(config, log) if config.getvalue("dist") == "loadfile" else None
