"""The spare child on a GPU: it opens no device before it has a job, and its fork computes what a new program does."""

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from catalog.frames import Finished, LayerDone, Started
from tests.machine.stopwatch import until
from worker.process.child_process import EXECUTION, Child, Hold, child_environment
from worker.process.confinement import Confinement
from worker.process.guardian import node_seconds
from worker.process.process_group import descendants
from worker.process.spare_child import SpareChild

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SECONDS = 240


def computed(child: Child) -> tuple[str, list[Any]]:
    """The device that computed, and the digests of all rows."""
    with contextlib.closing(child):
        frames = list(child.frames())
        said = b"".join(child.output(10_000)).decode(errors="replace")
        assert child.wait(SECONDS) == 0, said
    assert isinstance(frames[0], Started), said
    assert isinstance(frames[-1], Finished), said
    assert "not used" not in said
    records = [frame.outcome["record"] for frame in frames if isinstance(frame, LayerDone)]
    return frames[0].environment["device"], [(each["digest_A"], each["digest_G"]) for each in records]


def opened(process: int) -> list[str]:
    """The device files of GPUs that a process has open or mapped."""
    place = Path("/proc") / str(process)
    names = [str(each.readlink()) for each in (place / "fd").iterdir()]
    names += [line.split(maxsplit=5)[-1].strip() for line in (place / "maps").read_text().splitlines()]
    return [each for each in names if each.startswith("/dev/nvidia")]


def test_the_fork_computes_on_the_gpu_that_the_spare_child_has_not_opened(tmp_path: Path) -> None:
    environment = child_environment(os.environ)

    def assignment(name: str) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        return {
            "document": {
                "kind": "factors",
                "model": {"source": "builtin", "name": "digits_cnn"},
                "data": {"source": "builtin", "name": "digits"},
                "task": {"type": "classification"},
            },
            "artifacts": str(tmp_path / name),
            "scratch": str(tmp_path / name / ".waiting"),
            "threads": 1,
            "store": str(tmp_path / "store"),
            "leased": "cuda",
        }

    hold = Hold(until=node_seconds() + SECONDS)
    with contextlib.closing(SpareChild(environment | {"CUDA_VISIBLE_DEVICES": ""})) as spare:
        spare.prepare(None)
        guardian = spare.pid
        assert guardian is not None
        until(lambda: descendants(guardian), SECONDS, "its importer runs")
        (importer,) = descendants(guardian)
        if os.getuid() == 0:  # its memory is closed to others
            maps = Path("/proc") / str(importer) / "maps"
            until(lambda: "libtorch_cuda" in maps.read_text(), SECONDS, "torch is imported")
            assert opened(importer) == []
        fresh = computed(Child.start(assignment("new"), subprocess.PIPE, environment, EXECUTION, Confinement(), hold))
        if os.getuid() == 0:
            assert opened(importer) == []
        child = spare.take(assignment("prepared"), environment, Confinement(), hold)
        assert child is not None
        assert computed(child) == fresh
        assert fresh[0] == "cuda"
