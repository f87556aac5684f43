"""Markers of decompositions on the device: the attempt after one that ended there begins at the host for that layer."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from engine.artifacts import Artifacts
from engine.collect import collect_or_read
from engine.errors import StopRequested
from engine.linalg import eigendecomposition, eigensolvers
from engine.linalg.eigensolvers import Solved, Solver
from engine.measurement.layer_measurement import Measured, measure_layers
from engine.measurement.stored_decompositions import DEVICE_ASKED
from engine.memory.guard import FallbackFailed
from jobs.objects.scratch import Scratch
from tests.engine.measurement.test_decompose_layer import space
from tests.oracles import MemoryArtifacts
from worker.execution.attempt import adopt_checkpoint
from worker.execution.files.artifact_files import ArtifactFiles

ROWS = 9
"""Rows of the factor at which the device fails: G of the layer `last`."""
JOB = "01a00000-0000-7000-8000-000000000001"
PASSED_OVER = "G: those of the device, as an earlier attempt ended in device_float64"


PROGRAM = """
import signal, sys
from pathlib import Path
from tests.engine.measurement.test_device_markers import two_attempts
two_attempts(Path(sys.argv[1]), signal.Signals[sys.argv[2]])
"""


def with_device(fault: Callable[[], None]) -> Callable[..., tuple[Solver, ...]]:
    """The solvers of a machine whose device is the CPU, and fails at one factor."""
    original = eigensolvers.solvers

    def solvers(*args: Any, **options: Any) -> tuple[Solver, ...]:
        host = original(*args, **options)
        (same,) = [each for each in host if each.cost.name == "host_float64"]

        def solve(matrix: Tensor) -> Solved:
            if matrix.shape[0] == ROWS:
                fault()
            return same.solve(matrix)

        return replace(same, cost=replace(same.cost, name="device_float64"), solve=solve), *host

    return solvers


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Puts a failing device into the machine."""

    def put(fault: Callable[[], None]) -> None:
        monkeypatch.setattr(eigendecomposition, "solvers", with_device(fault))
        eigendecomposition.rungs.cache_clear()

    yield put
    eigendecomposition.rungs.cache_clear()


class Noting(MemoryArtifacts):
    """Keeps the names of all tables that were ever written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def save_json(self, name: str, value: object) -> None:
        self.written.append(name)
        super().save_json(name, value)

    @property
    def markers(self) -> list[str]:
        return [name for name in self.tables if name.endswith(DEVICE_ASKED)]

    @property
    def marked(self) -> int:
        return sum(name.endswith(DEVICE_ASKED) for name in self.written)


def attempt(
    scratch: Artifacts | None, *, planned: bool = True, rung: str | None = None
) -> tuple[dict[str, Measured], list[str]]:
    """Measure the layers, and return them with the warnings; ``rung`` is planned for all in place of the plan's own."""
    made = space()
    made.options.decomposition, made.ports.scratch = "vectors", scratch
    said: list[str] = []
    made.ports.log = lambda level, message: said.append(message) if level == "warning" else None
    collect_or_read(made)
    assert made.results.plan is not None
    chosen = made.results.plan.chosen
    if rung is not None:
        chosen = replace(chosen, rungs=dict.fromkeys(chosen.rungs, (rung, rung)))
    made.results.plan = replace(made.results.plan, chosen=chosen) if planned else None
    return {layer.facts.name: layer for layer in measure_layers(made)}, said


def attempt_in_process(folder: Path, number: signal.Signals, told: Path) -> None:
    """One attempt, whose device ends the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    eigendecomposition.solvers = with_device(lambda: os.kill(os.getpid(), number))
    layers, said = attempt(ArtifactFiles(folder, None))
    rows = {
        name: (layer.record.rungs_G, layer.observed.refused_rungs, spectrum_of(layer).tolist())
        for name, layer in layers.items()
    }
    told.write_text(json.dumps([rows, said]))


def two_attempts(folder: Path, number: signal.Signals) -> None:
    """Attempts of one job, each a process that is forked from this one, which has computed nothing."""
    scratch, told, ended = Scratch(folder / "scratch"), folder / "told.json", list[int | None]()
    for fence in (1, 2):
        own = scratch.attempt_folder(JOB, fence)
        adopt_checkpoint(own, scratch.before(JOB, fence))
        process = multiprocessing.get_context("fork").Process(target=attempt_in_process, args=(own, number, told))
        process.start()
        process.join(300)
        ended.append(process.exitcode)
        if fence == 1:
            scratch.prune(JOB, 1)  # as between two attempts, however long that takes
    json.dump([ended, json.loads(told.read_text())], sys.stdout)


def spectrum_of(layer: Measured) -> Tensor:
    """The eigenvalues of G."""
    assert layer.G.spectrum is not None
    return layer.G.spectrum


def is_oracle_spectrum(name: str, spectrum: Tensor | list[float]) -> bool:
    """Whether these are NumPy's eigenvalues of a layer's G."""
    whole = collect_or_read(space())
    (facts,) = [each for each in whole.layers if each.name == name]
    factors = whole.load(facts.ordinal)
    assert isinstance(factors.G, Tensor)
    truth = np.linalg.eigvalsh(factors.G.double().numpy()) * factors.scale_G
    return np.allclose(np.maximum(truth, 0), np.asarray(spectrum), rtol=1e-9, atol=1e-15)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSEGV"])
def test_after_a_crash_on_the_device_the_layer_is_decomposed_on_the_host(number: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), number]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, timeout=600, check=False, text=True)
    assert done.returncode == 0, done.stderr
    ended, (layers, (said,)) = json.loads(done.stdout)
    assert ended == [-signal.Signals[number], 0]
    assert said == (
        "the eigendecomposition of G of layer `last` begins with `host_float64`: an earlier attempt of the job ended "
        "in device_float64"
    )
    assert layers["last"][:2] == [["host_float64"], [PASSED_OVER]]
    assert layers["query"][:2] == [["device_float64"], []]
    for name in ("last", "query", "key", "table"):
        assert is_oracle_spectrum(name, layers[name][2])


@pytest.mark.parametrize("planned", [True, False])
def test_a_lost_device_leaves_a_marker(planned: bool, device: Callable[[Callable[[], None]], None]) -> None:
    def lose() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device(lose)
    scratch = Noting()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        attempt(scratch, planned=planned)
    assert len(scratch.markers) == 1
    # whatever has become of its text
    scratch.tables[scratch.markers[0]]["sha256"] = ""
    layers, (said,) = attempt(scratch, planned=planned)
    assert "an earlier attempt of the job ended in the device" in said
    assert layers["last"].record.rungs_G == ("host_float64",)
    assert layers["last"].observed.refused_rungs == (PASSED_OVER.replace("device_float64", "the device"),)
    assert is_oracle_spectrum("last", spectrum_of(layers["last"]))
    assert layers["last"].record.rungs_A == ("device_float64",)
    assert layers["query"].observed.refused_rungs == ()
    # a third attempt does not ask the device either, should it have to decompose anew
    assert len(scratch.markers) == 1


@pytest.mark.parametrize("error", [StopRequested(), KeyboardInterrupt(), ValueError("a mistake")])
def test_an_attempt_that_stops_by_itself_leaves_none(
    error: BaseException, device: Callable[[Callable[[], None]], None]
) -> None:
    def stop() -> None:
        raise error

    device(stop)
    scratch = Noting()
    with pytest.raises(type(error)):
        attempt(scratch)
    assert scratch.marked == 1  # of the layer that comes first
    assert scratch.markers == []
    device(lambda: None)
    layers, said = attempt(scratch)
    assert said == []
    assert layers["last"].record.rungs_G == ("device_float64",)
    assert scratch.markers == []
    assert scratch.marked == 1 + 6  # a diagonal is sorted on the host


def test_a_solver_that_fails_leaves_none(device: Callable[[Callable[[], None]], None]) -> None:
    def fail() -> None:
        raise FallbackFailed("it did not converge")

    device(fail)
    scratch = Noting()
    layers, _ = attempt(scratch)
    assert layers["last"].record.rungs_G == ("device_float64", "host_float64")
    assert scratch.markers == []


def test_none_is_written_where_the_device_is_not_asked(device: Callable[[Callable[[], None]], None]) -> None:
    scratch = Noting()
    attempt(scratch)
    attempt(scratch, planned=False)
    # the first attempt's plan was made on another machine
    attempt(scratch, rung="device_float64")
    assert scratch.marked == 0
    device(lambda: None)
    on_host = Noting()
    layers, _ = attempt(on_host, rung="host_syevr")
    assert layers["last"].record.rungs_G == ("host_syevr",)
    assert on_host.marked == 0
    attempt(None)
