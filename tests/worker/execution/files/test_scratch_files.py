"""The scratch place of an attempt: what it reports as kept."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog.frames import Progress, decode
from worker.execution.attempt import MANIFESTS, ScratchFiles
from worker.execution.frame_pipe import FramePipe


class Reports:
    """A pipe, and the progress frames that came through it."""

    def __init__(self) -> None:
        self.reads, writes = os.pipe()
        os.set_blocking(self.reads, False)
        self.pipe = FramePipe(writes)

    @property
    def kept(self) -> list[tuple[str, int]]:
        frames = [decode(line) for line in os.read(self.reads, 65536).splitlines()]
        return [(frame.stage, frame.done) for frame in frames if isinstance(frame, Progress) and frame.kept]


@pytest.fixture
def reports() -> Iterator[Reports]:
    reports = Reports()
    yield reports
    os.close(reports.reads)
    os.close(reports.pipe._descriptor)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_checkpoint_keeps_the_last_report_though_that_one_was_not_sent(
    reports: Reports, tmp_path: Path, name: str
) -> None:
    scratch = ScratchFiles(tmp_path, reports.pipe.keep)
    scratch.save_json(name, {})  # before anything is reported
    for done in range(1, 4):
        reports.pipe.report("collection", done, 9, "batches")
    assert reports.kept == []
    scratch.save_json("factors/0.json", {})
    scratch.save_json(name, {})
    assert reports.kept == [("collection", 3)]


def test_scored_queries_are_kept_beside_a_checkpoint_alone(reports: Reports, tmp_path: Path) -> None:
    scratch = ScratchFiles(tmp_path, reports.pipe.keep)
    reports.pipe.report("influence", 8, 40, "queries")
    scratch.save_json("influence/0.json", {})
    assert reports.kept == []
    scratch.save_json(MANIFESTS[0], {})
    reports.pipe.report("influence", 16, 40, "queries")
    scratch.save_json("influence/1.json", {})
    assert reports.kept == [("influence", 8), ("influence", 16)]
