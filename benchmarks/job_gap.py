"""Gap between two queued jobs of one worker: from the last device work of the first to the first of the second.

A real worker on a ledger of its own computes small jobs one after the other, with a child that was prepared (`always`)
and without (`never`), in turns. What the gap is made of, is read off the frames and the steps of the worker::

    committed    last row of the job before -> its end stands in the ledger and its process is gone
    claimed      -> the next job is claimed
    launched     -> its child is started, or has its order
    begun        -> its first frame: interpreter, imports and device are there
    first work   -> model and data are read, and the model has gone to the device

What follows until the first batch is counted (probe, proofs, plan) is work on the device, and stands beside the gap.

    python -m benchmarks.job_gap [--jobs 6] [--rounds 3] [--output NAME]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import Engine

from benchmarks import results_file
from catalog.frames import Frame, LayerDone, LogLine, Progress, Started
from jobs.codec import parse_document
from jobs.lifecycle import TERMINAL
from jobs.records import LOCAL_TENANT
from jobs.repository.results import layer_rows
from jobs.repository.store import read_job
from jobs.repository.submission import submit
from jobs.schema.database import open_database, upgrade_schema
from jobs.service_log import configure_logging
from worker.agent import agent as agent_module
from worker.agent.agent import Agent
from worker.process.child_process import Child
from worker.settings import WorkerSettings
from worker.supervision import child_launch

GAP_SECONDS = 2.0
DOCUMENT = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
    "cache": "off",
}
SEGMENTS = ("committed", "claimed", "launched", "begun", "first work")
BESIDE = "first batch"
_ON_DEVICE = "model: "
"""Beginning of the line that a child logs when its model has gone to the device."""


class Steps:
    """The moments of the steps of all jobs, in order."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, float]] = []

    def note(self, step: str) -> None:
        """Note a step now."""
        self.moments.append((step, time.monotonic()))

    def gaps(self) -> list[dict[str, float]]:
        """Return the segments between each job and the next, in seconds."""
        found, latest = [], {}
        for step, moment in self.moments:
            if step == "last row":
                latest = {step: moment}
            elif step not in latest and "last row" in latest:
                latest[step] = moment
                if step == BESIDE:
                    moments = [latest["last row"], *(latest[each] for each in (*SEGMENTS, BESIDE))]
                    pairs = zip((*SEGMENTS, BESIDE), moments[:-1], moments[1:], strict=True)
                    found.append({name: after - before for name, before, after in pairs})
                    found[-1]["gap"] = latest[SEGMENTS[-1]] - moments[0]
        return found


def step_of(frame: Frame) -> str | None:
    """Return the step that a frame shows, if any; the first of its kind counts, of rows the last."""
    if isinstance(frame, Started):
        return "begun"
    if isinstance(frame, LogLine) and frame.message.startswith(_ON_DEVICE):
        return SEGMENTS[-1]
    if isinstance(frame, Progress) and frame.stage == "collection":
        return BESIDE
    return "last row" if isinstance(frame, LayerDone) else None


def watch(steps: Steps) -> None:
    """Have the worker's steps noted in this process."""
    frames, claim, start, run = Child.frames, agent_module.claim, child_launch.start, agent_module.Supervisor.run

    def noted_frames(child: Child) -> Iterator[Frame]:
        for frame in frames(child):
            if (step := step_of(frame)) is not None:
                steps.note(step)
            yield frame

    def noted_claim(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - as it is
        held = claim(*given, **named)
        if held is not None:
            steps.note("claimed")
        return held

    def noted_start(*given: Any, **named: Any) -> Child:  # noqa: ANN401 - as it is
        child = start(*given, **named)
        steps.note("launched")
        return child

    def noted_run(supervisor: Any, *given: Any) -> None:  # noqa: ANN401 - as it is
        run(supervisor, *given)
        steps.note("committed")

    Child.frames = noted_frames  # type: ignore[method-assign]
    agent_module.claim = noted_claim
    child_launch.start = noted_start
    agent_module.Supervisor.run = noted_run  # type: ignore[method-assign]


def digests(engine: Engine, job_id: str) -> list[Mapping[str, Any]]:
    """Return the digests of a job's rows."""
    rows = layer_rows(engine, LOCAL_TENANT, job_id).items
    return [{name: row.outcome["record"][name] for name in ("digest_A", "digest_G")} for row in rows]


def measure(steps: Steps, spare_child: str, jobs: int) -> tuple[list[dict[str, float]], list[Any]]:
    """Compute so many jobs by a worker of its own; return the gaps after the second, and the digests of all."""
    steps.moments.clear()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        url = f"sqlite:///{place / 'ledger.sqlite'}"
        upgrade_schema(url)
        engine = open_database(url)
        environment = {
            "KRONOSCOPE_DATABASE_URL": url,
            "KRONOSCOPE_ARTIFACTS": str(place / "artifacts"),
            "KRONOSCOPE_MODEL_STORE": str(place / "models"),
            "KRONOSCOPE_SLOTS": "1",
            "KRONOSCOPE_SPARE_CHILD": spare_child,
        }
        agent = Agent(engine, WorkerSettings.from_environment(environment))
        document = parse_document(json.dumps(DOCUMENT).encode())
        queued = [submit(engine, LOCAL_TENANT, document).job.id for _ in range(jobs)]
        agent.start()
        for each in queued:
            while (job := read_job(engine, LOCAL_TENANT, each)) is None or job.state not in TERMINAL:
                time.sleep(0.05)
            if job.state != "succeeded":
                raise RuntimeError(f"a job ended as {job.state}: {job.failure}")
        agent.drain()
        kept = [digests(engine, each) for each in queued]
        engine.dispose()
    # the first job trains the model into the store, and its successor may come before its child was prepared
    return steps.gaps()[1:], kept


def main() -> None:
    """Measure, print a table, and store it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="job_gap")
    options = parser.parse_args()
    configure_logging("ERROR")
    steps = Steps()
    watch(steps)
    gaps: dict[str, list[dict[str, float]]] = {"never": [], "always": []}
    seen = []
    for _ in range(options.rounds):
        for spare_child in gaps:
            measured, kept = measure(steps, spare_child, options.jobs)
            gaps[spare_child] += measured
            seen += kept
    middle = {
        spare_child: {name: statistics.median(each[name] for each in found) for name in (*SEGMENTS, "gap", BESIDE)}
        for spare_child, found in gaps.items()
    }
    print(f"{'seconds':12}" + "".join(f"{name:>12}" for name in middle))
    for name in (*SEGMENTS, "gap", BESIDE):
        print(f"{name:12}" + "".join(f"{each[name]:12.3f}" for each in middle.values()))
    text = f"seconds from the last row to the first work of the next job, on {'a GPU' if _gpu() else 'the CPU'}"
    claims = [
        results_file.claim(text, middle["always"]["gap"], GAP_SECONDS),
        results_file.claim("sets of digests of all jobs", len({json.dumps(each) for each in seen}), 1),
    ]
    results_file.write(options.output, claims, {"median": middle, "gaps": gaps})


def _gpu() -> bool:
    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
