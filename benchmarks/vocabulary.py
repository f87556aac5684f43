"""GPT-2's vocabulary: factors, capacity and reconstruction of a tied head of 50257 classes, under three budgets.

A GPT-2 of two blocks is measured over 32,768 tokens in a process of its own for each budget of host memory. A dense G
of the head would be 10 GB, beyond every eigensolver; its probabilities 3.3 GB, and 8.6 GB for each question. The rows
say whether the head is covered, which metrics are null and why, and how the clipped head is stored; the kernel says
whether the process stayed within the plan that was printed before.

    python -m benchmarks.vocabulary [--width 64] [--budgets 4 8 24]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks import results_file
from benchmarks.cases.planning import Folder
from catalog import ANALYSES
from catalog.analyses.analysis import most_decomposed
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.estimate import plan_job
from engine.memory.budget import MemoryBudget
from engine.memory.guard import Guard
from engine.memory.memory_curve import MemoryCurve, StagePeaks
from engine.workspace import JobOptions, Machine, ModelInputs, Ports, Workspace
from worker.execution.resolve import resolve

KINDS = ("factors", "capacity", "reconstruction")
TOKENS, LENGTH, BLOCKS, BATCH = 32_768, 512, 2, 8
HEAD = "transformer.wte"
UNDEFINED = ("logdet", "kappa")
"""Metrics that may be null, for a reason that is given."""
UNASKED = ("no_spectrum", "nested", "convergence", "cross_check")
"""Fields that are null where all is well."""


def space(width: int, budget_bytes: int, folder: Path, plans: list[Any]) -> Workspace:
    """The job, as a worker's child would build it."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=BLOCKS, n_embd=width, n_head=max(1, width // 64), n_positions=LENGTH)
    generator = torch.Generator().manual_seed(1)
    # a few words are frequent and most are rare, as in any text
    rare = 1 / torch.arange(1, config.vocab_size + 1, dtype=torch.float64)
    ids = torch.multinomial(rare, TOKENS, replacement=True, generator=generator).view(-1, LENGTH)
    budget = MemoryBudget(device_bytes=0, host_bytes=budget_bytes)
    params = {kind: None if ANALYSES[kind].params is None else ANALYSES[kind].params() for kind in KINDS}  # type: ignore[misc]
    return Workspace(
        inputs=ModelInputs(
            model=GPT2LMHeadModel(config).eval(),
            batches=lambda: iter([(ids, ids)]),
            task=Task(type="causal_lm"),
            examples=ids.shape[0],
        ),
        options=JobOptions(
            collection=Collection(batch_size=BATCH),
            kinds=KINDS,
            params=params,
            decomposition=most_decomposed(params[kind] or ANALYSES[kind] for kind in KINDS),
        ),
        machine=Machine(
            budget=budget,
            guard=Guard(budget=budget, device=torch.device("cpu"), log=lambda _, text: print(text, file=sys.stderr)),
            curve=MemoryCurve(stages=StagePeaks(apart=True)),
        ),
        ports=Ports(
            artifacts=Folder(folder),
            scratch=Folder(folder),
            announce_plan=plans.append,
            report=lambda stage, done, total, unit: print(stage, done, total, unit, file=sys.stderr, flush=True),
        ),
    )


def run(width: int, budget_bytes: int) -> dict[str, Any]:
    """One job, and what its rows say of the head."""
    with tempfile.TemporaryDirectory() as folder:
        plans: list[Any] = []
        made = space(width, budget_bytes, Path(folder), plans)
        foreseen = plan_job(made)
        print(json.dumps(_told(foreseen.as_json()), indent=1), file=sys.stderr, flush=True)
        begun = time.perf_counter()
        rows = {}
        summaries = {}
        for kind in KINDS:
            generator = resolve(ANALYSES[kind].implementation)(made.options.params[kind], made).rows()
            while True:
                try:
                    row = next(generator)
                except StopIteration as end:
                    summaries[kind] = end.value
                    break
                rows[kind, row.layer] = row
        seconds = time.perf_counter() - begun
        capacity = rows["capacity", HEAD].metrics
        model = summaries["capacity"].model
        side = rows["reconstruction", HEAD].metrics.G
        return {
            "budget_bytes": budget_bytes,
            "planned": _told(plans[-1]),
            "seconds": seconds,
            "peak_bytes": made.machine.curve.stages.peak_bytes(made.machine.device),
            "stages": made.machine.curve.stages.as_json(),
            "status": rows["capacity", HEAD].status,
            "branch": rows["capacity", HEAD].record.branch,
            "why": rows["capacity", HEAD].record.why,
            "sketch_bound": rows["capacity", HEAD].record.sketch_bound,
            "covered_share": summaries["capacity"].coverage.covered_share,
            "null_in_layer": _null(capacity),
            "null_in_model": _null(model),
            "undefined": dict(capacity.undefined),
            "undefined_of_model": dict(model.undefined),
            "rank": capacity.rank,
            "rank_interval": (capacity.intervals or {}).get("rank"),
            "effective_rank": capacity.effective_rank,
            "quantiles": {each.level: each.value for each in capacity.quantiles or ()},
            "intervals": dict(capacity.intervals or {}),
            "clipped_head": {name: getattr(side, name) for name in ("kind", "update", "clipped", "kappa_reached")},
            "artifact_bytes": Path(folder, rows["reconstruction", HEAD].metrics.artifact.replace("/", "_") + ".kept")
            .stat()
            .st_size,
        }


def _told(plan: Any) -> dict[str, Any]:  # noqa: ANN401 - a plan's table
    return {key: plan[key] for key in ("host_peak_bytes", "why", "stages", "micro_batch", "sketched", "rungs")}


def _null(metrics: Any) -> list[str]:  # noqa: ANN401 - a record
    return [name for name, value in vars(metrics).items() if value is None and name not in UNASKED]


def main() -> None:
    """Each budget in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 8, 24], help="GiB")
    parser.add_argument("--one", type=int, help="bytes: run this budget alone, here")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(run(options.width, options.one)))
        return
    found = []
    for budget in options.budgets:
        command = [sys.executable, "-m", "benchmarks.vocabulary", "--width", str(options.width)]
        done = subprocess.run([*command, "--one", str(budget * 2**30)], check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
        found.append(json.loads(done.stdout.splitlines()[-1]))
    claims = []
    for each in found:
        name = f"GPT-2's head under {each['budget_bytes'] // 2**30} GiB"
        unexplained = [
            *(set(each["null_in_layer"]) - set(each["undefined"])),
            *(set(each["null_in_model"]) - set(each["undefined_of_model"])),
        ]
        claims += [
            results_file.claim(f"{name}: covered", float(each["status"] == "covered"), 1, at_most=False),
            results_file.claim(f"{name}: metrics that are null without a reason", len(unexplained), 0),
            results_file.claim(
                f"{name}: null metrics besides log-determinant and κ",
                len({*each["null_in_layer"], *each["null_in_model"]} - set(UNDEFINED)),
                0,
            ),
            results_file.claim(
                f"{name}: clipped and stored as an operator", float(each["clipped_head"]["update"] == "operator"), 1,
                at_most=False,
            ),
            results_file.claim(
                f"{name}: peak over plan", each["peak_bytes"] / each["planned"]["host_peak_bytes"], 1.0
            ),
        ]  # fmt: skip
    results_file.write("vocabulary", claims, {"width": options.width, "tokens": TOKENS, "jobs": found})


if __name__ == "__main__":
    main()
