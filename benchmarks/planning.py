"""The plan against what happens: six models at three budgets each, every run in a process of its own.

The budgets lie between the least that a plan fits and what the job was measured to take without a guard, so that
each binds. Each is held by the kernel, and the same job done with and without the guard. Predicted and measured
peaks stand side by side for each stage: the bytes that the plan names, without what the process held before and
what libraries may load, against the profiler's account of torch's allocations (LAPACK's workspace among them) and the
kernel's of the resident set. For two models every way to do the job is timed, and fits if it ends within the budget.

    python -m benchmarks.planning [--cases NAME ...] [--output NAME]
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.cases.planning import STAGES
from benchmarks.cases.planning_models import CASES

ROOT = Path(__file__).parent.parent
TIMED = ("digits CNN", "ResNet-18, narrow")
LEAST, MOST = 0.8, 1.1
CANDIDATES = tuple((passes, slices) for passes in (1, 2) for slices in (1, 2, 3, 4, 8))
"""Passes, and slices of a batch."""
FINALISTS, FINALS = 3, 4
"""So many of the fastest ways are timed so often again, in turn with the chosen one, and the least of each counts.

The fastest of many would else be the luckiest. Others use the machine, too: what is compared are seconds of the
processor, of which a job of one thread takes as many.
"""
NOISE = 1.1
"""Of two ways whose times differ by less, either is the fastest on a machine that others use."""


def child(case: str, *arguments: str) -> dict[str, Any]:
    """One run; what it said."""
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "benchmarks.cases.planning", case, "--folder", folder, *arguments],
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
    """One model at one budget: held with the guard and without it, and profiled in the way the guard had gone."""
    budget = ("--above", str(above))
    guarded = child(case, *budget, "--limit")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as chosen:
        json.dump(guarded.get("chosen", {}), chosen)
        chosen.flush()
        profiled = guarded if "failed" in guarded else child(case, *budget, "--profile", chosen.name)
    return {
        "above": above,
        "profiled": profiled,
        "guarded": guarded,
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
                    "rungs": ran["rungs"],
                    "predicted": predicted,
                    "profiled": profiled,
                    "resident": each["guarded"].get("measured", {}).get(stage),
                    "ratio": predicted / profiled if profiled else None,
                }
            )
    return table


def timed(case: str, above: int) -> dict[str, Any]:
    """Every way to do the job within one budget: what ends within it fits, whether the guard admits it or not.

    With the guard a way takes the rungs for which it finds room, without it the first ones.
    """
    batch = CASES[case].batch_size
    held = ("--above", str(above), "--limit")
    # what the plan chooses by itself comes first
    ways: list[tuple[str, ...]] = [held]
    for passes, slices in CANDIDATES:
        way = (*held, "--candidate", str(passes), str(-(-batch // slices)))
        ways += [way, (*way, "--unguarded")]
    ended = [[child(case, *way)] for way in ways]
    # of those that end, and the chosen one in any case
    fitting = [place for place, found in enumerate(ended) if "failed" not in found[0]]
    ranked = sorted((place for place in fitting if place), key=lambda place: ended[place][0]["processor_seconds"])
    for place in (0, *ranked[:FINALISTS]) * FINALS:
        ended[place].append(child(case, *ways[place]))
    table = [
        {
            "way": list(way[len(held) + 1 :]),
            "all_seconds": [ran.get("processor_seconds") for ran in found],
            **min(found, key=lambda ran: ran.get("processor_seconds", math.inf)),
        }
        for way, found in zip(ways, ended, strict=True)
    ]
    fastest = min((table[place]["processor_seconds"] for place in ranked[:FINALISTS]), default=None)
    return {"above": above, "chosen": table[0], "ways": table[1:], "fastest": fastest}


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--output", default="planning")
    options = parser.parse_args()
    table: list[dict[str, Any]] = []
    figures: dict[str, Any] = {"cases": {}, "timed": {}}
    for case in options.cases:
        free = child(case, "--unguarded")
        if "failed" in free:
            print(case, free["failed"])
            continue
        plan = child(case, "--budgets", str(max(free["measured"].values())))
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
        claim("profiled runs that took other rungs than the guard", sum(map(_unlike, runs)), 0),
        claim("budgets kept under RLIMIT_DATA with the guard", kept, len(runs), at_most=False),
        claim("of those budgets, unguarded runs that fail under the same limit", ended, len(runs), at_most=False),
        claim("sweeps in which more memory is slower, or fits no longer", sum(map(_worse, sweeps)), 0),
    ]
    for case, run in figures["timed"].items():
        if run["fastest"] is not None and "failed" not in run["chosen"]:
            ratio = run["chosen"]["processor_seconds"] / run["fastest"]
            found.append(claim(f"{case}: the chosen plan's seconds over the fastest that fits", ratio, NOISE))
    return found


def _unlike(run: dict[str, Any]) -> bool:
    """Whether the profiled run went another way than the guarded one."""
    return any(run["profiled"].get(key) != run["guarded"].get(key) for key in ("passes", "micro_batch", "rungs"))


def _worse(sweep: list[list[Any]]) -> bool:
    """Whether feasibility flips back, or more memory means more passes, or as many with smaller slices."""
    fits = [entry[1] for entry in sweep]
    costs = [(entry[2], -entry[3]) for entry in sweep if entry[1]]
    return fits != sorted(fits) or costs != sorted(costs, reverse=True)


if __name__ == "__main__":
    main()
