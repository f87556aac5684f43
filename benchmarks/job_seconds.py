"""Planned seconds against what whole jobs take: thirty jobs from a tenth of a second to a minute after their plan.

Each job is a process of its own, in the foreground, from the start of its child to its last row. It runs with one and
with two threads on a machine that is idle, and with one beside a busy process for each core, where the pace of several
is not measured: their products wait for each other, and no moment tells how long. What had passed when the plan
was made is known; so beside the whole job, the part that was still to come is compared with its bounds.

    python -m benchmarks.job_seconds [--conditions quiet-1 quiet-2 busy-1] [--jobs N] [--output NAME]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.cases.seconds_jobs import documents
from catalog.responses.time_estimate import OFF_BY

ROOT = Path(__file__).parent.parent
CONDITIONS = ("quiet-1", "quiet-2", "busy-1")
WITHIN = 0.9
"""Share of the jobs whose time lies within the bounds: 27 of 30."""
WIDEST = {"quiet": 4.0, "busy": 9.0}
"""Most that the upper bound may be of the lower."""


@contextlib.contextmanager
def busy(wanted: bool) -> Iterator[None]:
    """Keep each core busy with another process, if that is wanted."""
    count = len(os.sched_getaffinity(0)) if wanted else 0
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def measured(document: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Run one job and return what was planned of its seconds, and what it took."""
    with tempfile.TemporaryDirectory() as folder:
        request = {"document": document, "threads": threads, "store": f"{folder}/store", "offline": True}
        command = [sys.executable, "-P", "-m", "worker.foreground", "--output", f"{folder}/out", "--frames-to-stdout"]
        given = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
        run = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, cwd=ROOT, env=given)  # noqa: S603 - our own module
        with run:
            # it stays open while the job runs: its end would stop the job
            print(json.dumps(request), file=run.stdin, flush=True)
            frames = [json.loads(line) for line in run.stdout or ()]
            run.wait()
        if run.returncode != 0:
            raise SystemExit(f"{document['labels']}: {frames[-1:]}")
        plan = next(frame["plan"] for frame in frames if "plan" in frame)
        (curve,) = (json.loads(each.read_text()) for each in Path(folder).rglob("memory_curve.json"))
    took = next(row["measured_seconds"] for row in curve["stages"] if row["stage"] == "whole job")
    if plan["seconds_range"] is None:
        raise SystemExit(f"{document['labels']}: other programs use the cores, and several threads are prescribed")
    low, high = plan["seconds_range"]
    start = plan["start_seconds"]
    return {
        "case": document["labels"]["case"],
        "pace": plan["pace"],
        "start_seconds": start,
        "planned_seconds": plan["seconds"],
        "seconds_range": [low, high],
        "measured_seconds": took,
        "whole_within": low <= took <= high,
        "rest_planned": plan["seconds"] - start,
        "rest_measured": took - start,
        "rest_over_planned": (took - start) / (plan["seconds"] - start),
        "rest_within": low - start <= took - start <= high - start,
        "width": OFF_BY[plan["pace"]] ** 2,
        "stages": {row["stage"]: [row["planned_seconds"], row["measured_seconds"]] for row in curve["stages"]},
    }


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conditions", nargs="*", default=list(CONDITIONS), choices=CONDITIONS)
    parser.add_argument("--jobs", type=int, default=None, help="only so many, spread over the list")
    parser.add_argument("--output", default="job_seconds")
    options = parser.parse_args()
    jobs = documents()
    if options.jobs:
        jobs = jobs[:: max(1, len(jobs) // options.jobs)]
    # conditions that are not measured again stay, each with its commit
    stored = results_file.RESULTS / f"{options.output}.json"
    figures = json.loads(stored.read_text())["figures"] if stored.exists() else {"jobs": {}, "commits": {}}
    table: dict[str, list[dict[str, Any]]] = figures["jobs"]
    figures.setdefault("commits", {})
    for condition in options.conditions:
        load, threads = condition.split("-")
        with busy(load == "busy"):
            table[condition] = [row(measured(document, int(threads))) for document in jobs]
            figures["commits"][condition] = results_file.commit()
    results_file.write(options.output, claims(table), figures)


def row(found: dict[str, Any]) -> dict[str, Any]:
    """Print one job, and return it."""
    low, high = found["seconds_range"]
    print(
        f"{found['case']:38} {found['pace']:9} planned {found['planned_seconds']:7.2f} s ({low:.2f} to {high:.2f}), "
        f"took {found['measured_seconds']:7.2f}; after the plan {found['rest_planned']:7.3f}, "
        f"took {found['rest_measured']:7.3f}: {found['rest_over_planned']:.2f} "
        f"{'' if found['rest_within'] else 'OUTSIDE'}",
        flush=True,
    )
    return found


def claims(table: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Claims that the figures decide."""
    found = []
    for condition, jobs in table.items():
        least = WITHIN * len(jobs)
        for part in ("whole", "rest"):
            inside = sum(job[f"{part}_within"] for job in jobs)
            text = f"{condition}: of {len(jobs)} jobs, those within their bounds ({part} of the job)"
            found.append(results_file.claim(text, inside, least, at_most=False))
        widest = max(job["width"] for job in jobs)
        text = f"{condition}: upper over lower bound, the most"
        found.append(results_file.claim(text, widest, WIDEST[condition.partition("-")[0]]))
    return found


if __name__ == "__main__":
    main()
