"""One contender in a process of its own: loads a case, then collects batch by batch, or job by job, as it is told.

Speaks JSON lines on what was its standard output. The library's own loop pulls the batches, and
what lies between two pulls is one batch's cost; whoever orders the next batch decides when, so
that several contenders take turns. A whole job is one call, on a copy of the model, from its beginning to
the factors; the first warms the process.
"""

import argparse
import copy
import dataclasses
import gc
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from benchmarks.cases import collection
from benchmarks.conformance.problem import Factors

VARIANTS: dict[str, dict[str, Any]] = {
    "exact_trace": {"exact_trace": True},
    "every_parameter": {},
    "check_off": {"self_check": "off"},
}
"""Further rows of Kronoscope's own, with the options they take."""


@dataclass
class Turns:
    """The case's one batch, again and again, each time it is asked for; the first at once."""

    batch: tuple[Any, Tensor]
    output: TextIO
    most: int
    waited_wall: float = 0.0
    waited_cpu: float = 0.0
    busy_wall: float = 0.0
    busy_cpu: float = 0.0

    def __len__(self) -> int:
        """Batches, at most."""
        return self.most

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Hand out as many batches as are ordered, and say what each has cost once the next is pulled."""
        ordered = 1
        while True:
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(ordered):
                yield self.batch
            spent = time.perf_counter() - wall, time.process_time() - cpu
            self.busy_wall += spent[0]
            self.busy_cpu += spent[1]
            tell(self.output, event="batch", wall=spent[0] / ordered, cpu=spent[1] / ordered)
            wall, cpu = time.perf_counter(), time.process_time()
            words = sys.stdin.readline().split()
            self.waited_wall += time.perf_counter() - wall
            self.waited_cpu += time.process_time() - cpu
            if len(words) != 2 or words[0] != "batch":
                return
            ordered = int(words[1])


def main() -> None:
    """Load, wait for the order to begin, collect until told to stop, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("case")
    parser.add_argument("--most", type=int, default=6, help="batches, at most")
    arguments = parser.parse_args()
    # libraries print; the lines of this protocol must stand alone
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    library, _, variant = arguments.library.partition("+")
    adapter = importlib.import_module(f"benchmarks.conformance.adapters.{library}")
    if arguments.case in collection.JOBS:
        run_jobs(adapter, arguments.case, VARIANTS.get(variant, {}), output)
        return
    problem, batch = collection.built(arguments.case)
    if variant == "every_parameter":
        problem.model.requires_grad_(requires_grad=True)
    turns = Turns(batch, output, arguments.most)
    tell(output, event="ready", package=adapter.PACKAGE, version=version(adapter.PACKAGE))
    if sys.stdin.readline().split()[:1] != ["batch"]:
        return
    # weights mapped from a file take memory once they are touched
    for parameter in problem.model.parameters():
        float(parameter.detach().sum())
    loaded = forget_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        factors = adapter.collect(problem, turns, **VARIANTS.get(variant, {}))
    except Exception as error:  # noqa: BLE001 - a library may refuse with anything, and that is a result
        first = str(error).strip().partition("\n")[0]
        tell(output, event="refused", message=f"{type(error).__name__}: {first[:300]}")
        return
    busy_wall = time.perf_counter() - wall - turns.waited_wall
    busy_cpu = time.process_time() - cpu - turns.waited_cpu
    tell(
        output,
        event="done",
        # what a collection costs once, however many batches it sees
        setup_wall=busy_wall - turns.busy_wall,
        setup_cpu=busy_cpu - turns.busy_cpu,
        peak_bytes=resident("VmHWM") - loaded,
        loaded_bytes=loaded,
        layers=len(factors),
        traces=traces(factors),
        missing=[name for name in problem.layers if name not in factors],
        parameters=sum(parameter.numel() for parameter in _trained(problem.model, problem.layers)),
    )


def run_jobs(adapter: ModuleType, name: str, options: dict[str, Any], output: TextIO) -> None:
    """Do a whole job for each order, and say what it took.

    Args:
        adapter: The library's, with ``whole_job`` or ``collect``.
        name: The job.
        options: What the library's call takes besides.
        output: Where lines go.
    """
    problem, batches = collection.built_job(name)
    tell(output, event="ready", package=adapter.PACKAGE, version=version(adapter.PACKAGE))
    whole = getattr(adapter, "whole_job", adapter.collect)
    while sys.stdin.readline().split()[:1] == ["job"]:
        # libraries wrap a model, and leave it so
        own = dataclasses.replace(problem, model=copy.deepcopy(problem.model))
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            factors = whole(own, batches, **options)
        except Exception as error:  # noqa: BLE001 - a library may refuse with anything, and that is a result
            first = str(error).strip().partition("\n")[0]
            tell(output, event="refused", message=f"{type(error).__name__}: {first[:300]}")
            return
        spent = time.perf_counter() - wall, time.process_time() - cpu
        tell(output, event="batch", wall=spent[0], cpu=spent[1], layers=len(factors), traces=traces(factors))


def _trained(model: nn.Module, layers: tuple[str, ...]) -> Iterator[nn.Parameter]:
    for name in layers:
        yield from model.get_submodule(name).parameters()


def tell(output: TextIO, **line: object) -> None:
    """Write one line."""
    output.write(json.dumps(line) + "\n")
    output.flush()


def traces(factors: Factors) -> dict[str, tuple[float, float]]:
    """Trace of A and of G of each layer: enough to see whether two libraries measured the same."""
    return {
        name: (float(A.diagonal().sum()) if A.ndim == 2 else float(A.sum()), float(G.diagonal().sum()))
        for name, (A, G) in factors.items()
        if A.numel()
    }


def resident(field_name: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field_name}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def forget_peak() -> int:
    """Let the highest resident set begin anew where the kernel allows it; what is resident then, or was at most."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return resident("VmHWM")
    return resident("VmRSS")


if __name__ == "__main__":
    main()
