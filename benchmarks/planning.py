"""The plan against what happens: six models at three budgets each, every run in a process of its own.

Predicted and measured peaks stand side by side for each stage: the bytes that the plan names, without what the
process held before and what libraries may load, against the profiler's account of torch's allocations (LAPACK's
workspace among them) and the kernel's of the resident set. Each budget is then held by the kernel, and the
same job done with and without the guard. For two models every way to do the job is timed once.

    python -m benchmarks.planning [--cases NAME ...] [--output NAME]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.planning_cases import CASES, STAGES

ROOT = Path(__file__).parent.parent
TIMED = ("digits CNN", "ResNet-18, narrow")
LEAST, MOST = 0.8, 1.1
CANDIDATES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2))
"""Passes, and slices of a batch."""
NOISE = 1.1
"""Of two ways whose times differ by less, either is the fastest on a machine that others use."""


def child(case: str, *arguments: str) -> dict[str, Any]:
    """One run; what it said."""
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "benchmarks.planning_cases", case, "--folder", folder, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"failed": f"code {run.returncode}: {run.stderr.strip().splitlines()[-1:] or ''}"}
    said: dict[str, Any] = json.loads(lines[-1])
    return said


def at_budget(case: str, above: int) -> dict[str, Any]:
    """One model at one budget: profiled, held with the guard, and held without it."""
    budget = ("--above", str(above))
    return {
        "above": above,
        "profiled": child(case, *budget, "--profile"),
        "guarded": child(case, *budget, "--limit"),
        "unguarded": child(case, *budget, "--limit", "--unguarded"),
    }


def rows(case: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a budget and stage."""
    table = []
    for each in found:
        ran = each["profiled"]
        if "failed" in ran:
            table.append({"case": case, "above": each["above"], "failed": ran["failed"]})
            continue
        for stage in STAGES:
            predicted, profiled = ran["foreseen"][stage], ran["profiled"].get(stage, 0)
            table.append(
                {
                    "case": case,
                    "above": each["above"],
                    "passes": ran["passes"],
                    "micro_batch": ran["micro_batch"],
                    "stage": stage,
                    "predicted": predicted,
                    "profiled": profiled,
                    "resident": each["guarded"].get("measured", {}).get(stage),
                    "ratio": predicted / profiled if profiled else None,
                }
            )
    return table


def timed(case: str, above: int) -> dict[str, Any]:
    """Every way to do the job, timed once, and whether the plan counts it as fitting the budget."""
    batch = CASES[case].batch_size
    chosen = child(case, "--above", str(above))
    ways = []
    for passes, slices in CANDIDATES:
        ran = child(case, "--candidate", str(passes), str(-(-batch // slices)))
        if "failed" not in ran:
            ways.append({"passes": passes, "slices": slices, "seconds": ran["seconds"], "foreseen": ran["foreseen"]})
    limit = above - 96 * 2**20
    fitting = [way["seconds"] for way in ways if max(way["foreseen"].values()) <= limit]
    return {"above": above, "chosen": chosen, "ways": ways, "fastest": min(fitting, default=None)}


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--output", default="planning")
    options = parser.parse_args()
    table: list[dict[str, Any]] = []
    figures: dict[str, Any] = {"cases": {}, "timed": {}}
    for case in options.cases:
        plan = child(case, "--budgets")
        if "failed" in plan:
            print(case, plan["failed"])
            continue
        found = [at_budget(case, above) for above in plan["above"]]
        figures["cases"][case] = {"plan": plan, "budgets": found}
        fresh = rows(case, found)
        for row in fresh:
            print(json.dumps(row), flush=True)
        table += fresh
        if case in TIMED:
            figures["timed"][case] = timed(case, plan["above"][1])
            print(json.dumps(figures["timed"][case]), flush=True)
    results_file.write(options.output, claims(figures, table), {"table": table, **figures})


def claims(figures: dict[str, Any], table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the figures show."""
    claim = results_file.claim
    ratios = [row["ratio"] for row in table if row.get("ratio") is not None]
    runs = [run for case in figures["cases"].values() for run in case["budgets"]]
    kept = sum("failed" not in run["guarded"] for run in runs)
    ended = sum("failed" in run["unguarded"] for run in runs)
    sweeps = [case["plan"]["sweep"] for case in figures["cases"].values()]
    found = [
        claim("largest predicted over measured peak of a stage", max(ratios, default=0.0), MOST),
        claim("smallest predicted over measured peak of a stage", min(ratios, default=0.0), LEAST, at_most=False),
        claim("budgets kept under RLIMIT_DATA with the guard", kept, len(runs), at_most=False),
        claim("of those budgets, unguarded runs that end under the same limit", ended, len(runs), at_most=False),
        claim("sweeps in which more memory is slower, or fits no longer", sum(map(_worse, sweeps)), 0),
    ]
    for case, run in figures["timed"].items():
        if run["fastest"] is not None and "failed" not in run["chosen"]:
            ratio = run["chosen"]["seconds"] / run["fastest"]
            found.append(claim(f"{case}: the chosen plan's seconds over the fastest that fits", ratio, NOISE))
    return found


def _worse(sweep: list[list[Any]]) -> bool:
    """Whether feasibility flips back, or more memory means more passes, or as many with smaller slices."""
    fits = [entry[1] for entry in sweep]
    costs = [(entry[2], -entry[3]) for entry in sweep if entry[1]]
    return fits != sorted(fits) or costs != sorted(costs, reverse=True)


if __name__ == "__main__":
    main()
