"""GPU runs: the tests marked `gpu` and the device benchmark, on a machine that need not have this project installed.

    python3 ops/gpu.py wheels DIR                            what such a machine lacks, as a folder of wheels
    python3 ops/gpu.py test  [--wheels DIR] [pytest's words]  the tests, in one process, the most valuable first
    python3 ops/gpu.py bench [--wheels DIR] [--sections …] [--add]  the benchmark, a process for each of its sections

A run needs Python with torch, numpy, scipy and transformers, a copy of the working tree and the folder of wheels (below
60 MiB together), but no network, `make` or virtual environment; only `wheels` needs pip and a network. What has been
measured is on the disk before the next begins: of each test a line of `.gpu-tests.jsonl`, of each row of a section its
part of `benchmarks/results/device.json`. A copy without its history says in KRONOSCOPE_COMMIT which commit it is.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
LACKING = (
    *("alembic", "hypothesis", "iniconfig", "mako", "nvidia-ml-py", "pluggy", "psutil", "psycopg", "psycopg-binary"),
    *("pygments", "pytest", "pytest-rerunfailures", "pytest-timeout", "sortedcontainers", "sqlalchemy"),
)
"""Pinned distributions that tests and benchmark need beside torch, numpy, scipy and transformers."""
PEERS = {
    "backpack-for-pytorch": "1.7.1",
    "curvlinops-for-pytorch": "3.0.1",
    "dattri-llm": "0.1.0",
    "einconv": "0.1.0",
    "kronfluence": "1.0.1",
    "unfoldNd": "0.2.3",
}
"""Peers of the benchmark, as in benchmarks/conformance/peers.txt, and what they import beside accelerate, einops,
linear-operator, opt-einsum, safetensors and tqdm. Where one of these is absent, the peer's rows say so."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_BYTES = 60 * 2**20
TESTS = (
    "collection",
    "operators",
    "eigenbasis",
    "guard",
    "gradient_rows",
    "reconstruction",
    "cross_check",
    "sharded_models",
    "semiseparable",
    "fewshot",
    "devices",
)
"""Files of tests/gpu, `test_…_on_cuda.py`, in their order; those of a job's own process come last."""
OF_PROCESSES = ("test_confined_child.py", "test_spare_child.py")
SECTIONS = {
    "gpt2_without_head": 95,
    "plans": 55,
    "gpt2_with_head": 65,
    "peers": 45,
    "llama_1b": 60,
    "eigh": 25,
    "mlp": 15,
}
"""Sections of the benchmark in their order, and the seconds that each may take, 6 minutes together."""
TEST_SECONDS = 240
RESULTS = ROOT / ".gpu-tests.jsonl"


def download(folder: Path, python: str) -> None:
    """Fetch the wheels for one version of Python on x86-64 Linux.

    Raises:
        SystemExit: pip failed, or they are too many bytes.
    """
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
    wanted = [f"{name}=={versions[re.sub(r'[-_.]+', '-', name).lower()]}" for name in LACKING]
    wanted += [f"{name}=={version}" for name, version in PEERS.items()]
    platforms = [word for each in PLATFORMS for word in ("--platform", each)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([*command, "--python-version", python, *platforms, *wanted], check=True)  # noqa: S603 - fixed words
    size = sum(each.stat().st_size for each in folder.glob("*.whl"))
    if size > MOST_BYTES:
        raise SystemExit(f"{folder} holds {size:,} bytes; at most {MOST_BYTES:,} travel")


@contextmanager
def environment(wheels: Path | None) -> Iterator[Mapping[str, str]]:
    """Yield the variables of a run, which finds this tree and what the wheels hold."""
    with tempfile.TemporaryDirectory(prefix="kronoscope-gpu-") as place:
        for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place)
        path = [str(ROOT), place, *filter(None, [os.environ.get("PYTHONPATH")])]
        # deterministic matrix products on CUDA ask for a workspace
        fixed = {"OMP_NUM_THREADS": "8", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
        yield {**fixed, **os.environ, "PYTHONPATH": os.pathsep.join(path)}


def run_tests(variables: Mapping[str, str], words: Sequence[str], seconds: float) -> int:
    """Run the tests marked `gpu`; return pytest's exit code, which is not 0 where time was out."""
    files = [f"tests/gpu/{name}" for name in (*(f"test_{each}_on_cuda.py" for each in TESTS), *OF_PROCESSES)]
    RESULTS.unlink(missing_ok=True)
    limit = {"KRONOSCOPE_GPU_SECONDS": str(seconds)}
    # the conftest of the whole suite starts servers, which no test here needs
    words = words or files
    options = ["--noconftest", "-pno:cacheprovider", "-pno:xdist", "-pops.gpu", "-mgpu", "-v", "--durations=15"]
    command = [sys.executable, "-P", "-m", "pytest", *options, *words]
    done = subprocess.run(command, check=False, cwd=ROOT, env={**variables, **limit})  # noqa: S603 - fixed words
    return done.returncode


def run_benchmark(
    variables: Mapping[str, str], names: Sequence[str], *, add: bool = False, patience: float = 1.0
) -> int:
    """Run sections of the benchmark, each within its seconds; return how many did not end well.

    Args:
        variables: Of the environment.
        names: The sections.
        add: Whether the first adds to what is stored of this commit and machine, as the others do.
        patience: A factor of each section's seconds, which are those of a machine with a GPU.

    Returns:
        Sections that failed or were stopped.
    """
    failed = 0
    for number, name in enumerate(names):
        more = ["--add"] if add or number else []
        command = [sys.executable, "-P", "-m", "benchmarks.device", "--sections", name, *more]
        begun, limit = time.monotonic(), SECTIONS[name] * patience
        try:
            code = subprocess.run(  # noqa: S603 - fixed words
                command, check=False, cwd=ROOT, env=variables, timeout=limit
            ).returncode
            ended = f"exit code {code}"
        except subprocess.TimeoutExpired:
            code, ended = 1, f"stopped after its {limit:g} s"
        failed += code != 0
        sys.stdout.write(f"==> {name}: {time.monotonic() - begun:.0f} s, {ended}\n")
        sys.stdout.flush()
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="ops/gpu.py", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    wheels = commands.add_parser("wheels", help="download what a bare machine lacks")
    wheels.add_argument("folder", type=Path)
    wheels.add_argument("--python", default="3.12", help="its version of Python")
    test = commands.add_parser("test", help="run the tests marked gpu")
    test.add_argument("--seconds", type=float, default=TEST_SECONDS, help="no test begins later")
    test.add_argument("words", nargs="*", help="files and tests in place of all")
    bench = commands.add_parser("bench", help="run benchmarks/device.py")
    bench.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    bench.add_argument("--add", action="store_true", help="add to what is stored of this commit and machine")
    bench.add_argument("--patience", type=float, default=1.0, help="a factor of each section's seconds")
    for each in (test, bench):
        each.add_argument("--wheels", type=Path, help="a folder of wheels that this machine lacks")
    options = parser.parse_args(arguments)
    if options.command == "wheels":
        download(options.folder, options.python)
        return 0
    with environment(options.wheels) as variables:
        if options.command == "test":
            return run_tests(variables, options.words, options.seconds)
        return run_benchmark(variables, options.sections, add=options.add, patience=options.patience)


# --- the plugin of a run of tests: a line on the disk for each test that has ended, and an end in time


class Lines:
    """Writes a line for each test, and ends the run with the first test that ends after its seconds."""

    def __init__(self, session: "pytest.Session", seconds: float) -> None:
        self._session, self._last = session, time.monotonic() + seconds

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        """Write how a test ended."""
        if report.when == "teardown" and time.monotonic() > self._last:
            self._session.shouldstop = "the time of this run is out"
        if report.when != "call" and report.passed:
            return
        line: dict[str, str | float] = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if not report.passed:
            line["said"] = str(report.longrepr)[-4000:]
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_sessionstart(session: "pytest.Session") -> None:
    """Register the lines."""
    session.config.pluginmanager.register(Lines(session, float(os.environ["KRONOSCOPE_GPU_SECONDS"])))


if __name__ == "__main__":
    sys.exit(main())
