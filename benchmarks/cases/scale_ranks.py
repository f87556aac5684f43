"""Reductions of several ranks: the bytes that each moves and holds, and what travelling together saves.

    torchrun --nproc-per-node W -m benchmarks.cases.scale_ranks CASE

Bytes moved are counted where they are handed to the backend. Bytes held are those of the tensors that stand for G; of
memory that ranks hold together the kernel's account, the rank's proportional share (Pss) of the mapped file.
"""

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import results_file
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from catalog.requests.woodbury import Woodbury
from engine.collect import collect_or_read
from engine.distributed.group import Ranks, start, stop
from engine.distributed.traffic import held_bytes, sent_bytes
from engine.distributed.transfers import Label, run_together, sum_triangle_
from engine.factors.low_rank import LowRank
from engine.workspace import JobOptions, Machine, ModelInputs, Ports, Workspace
from worker.execution.files.artifact_files import ArtifactFiles

ROOT = Path(__file__).parent.parent.parent
OUTPUTS, ROWS, DENSE = 50_257, 512, 4096
WIDTH, BATCH = 8, 8
LAYERS, LAYER, TURNS = 16, 1024, 3
CASES = ("gram", "gather", "dense", "owner", "overlap")
SIZES = (2, 4)
MOST_APART = 0.01
LAYER_NAME = "0"


def measure() -> dict[str, Any]:
    """Run every case over 2 and 4 ranks."""
    return {"by_ranks": {str(size): {case: _launched(size, case) for case in CASES} for size in SIZES}}


def claims(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The targets of the ranks."""
    for size, cases in found["by_ranks"].items():
        for case in ("gram", "gather", "dense", "owner"):
            what = f"`dense` to a layer's owner at o = {DENSE}" if case == "owner" else f"`{case}`"
            what += f" at o = {DENSE}" if case == "dense" else ""
            what += f" at o = {OUTPUTS}, T = {ROWS}" if case in ("gram", "gather") else ""
            for bytes_ in ("moved", "held"):
                own = [each for each in cases[case] if each[f"{bytes_}_formula"]]
                mean = statistics.fmean(each[bytes_] for each in own)
                formula = statistics.fmean(each[f"{bytes_}_formula"] for each in own)
                text = f"{size} ranks: bytes {bytes_} by {what}, off the formula"
                yield results_file.claim(text, abs(mean / formula - 1), MOST_APART)


def _launched(size: int, case: str) -> list[dict[str, Any]]:
    """Start the ranks by torch's launcher; what each says."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "SCALE_FOLDER": folder}
        command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        subprocess.run(  # noqa: S603 - our own module
            [*command, "-m", "benchmarks.cases.scale_ranks", case],
            check=True,
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
        )
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(size)]


def _collected(ranks: Ranks, mode: str) -> dict[str, Any]:
    """Collect one layer, whose gradient rows or dense G the ranks reduce."""
    size, count = (DENSE, BATCH * ranks.size) if mode == "dense" else (OUTPUTS, ROWS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, size, bias=False))
    inputs, labels, index = torch.randn(count, WIDTH), torch.randint(0, size, (count,)), torch.arange(count)
    batches = list(zip(*(each.split(BATCH) for each in (inputs, labels, index)), strict=True))[ranks.rank :: ranks.size]
    workspace = Workspace(
        inputs=ModelInputs(
            model=model,
            batches=lambda: iter(batches),
            task=Task(type="classification"),
            examples=sum(len(each[0]) for each in batches),
        ),
        options=JobOptions(
            collection=Collection(
                batch_size=BATCH, dtype="float32", self_check="off", reduction=mode, exact_trace=False
            ),
            woodbury=Woodbury(policy="dense" if mode == "dense" else "all", softmax_head=False),
        ),
        machine=Machine(ranks=ranks),
        ports=Ports(artifacts=ArtifactFiles(Path(os.environ["SCALE_FOLDER"]), None)),
    )
    before = _mapped(ranks, "before")
    begun = time.perf_counter()
    factors = collect_or_read(workspace)
    seconds = time.perf_counter() - begun
    workspace.inputs.batches = None
    mapped = _mapped(ranks, "after") - before
    side = factors.load(0).G
    # rows on a file that all ranks map are counted there
    own = [side] if isinstance(side, Tensor) else [] if mapped or not isinstance(side, LowRank) else [side.rows]
    own += [side.known_gram] if isinstance(side, LowRank) and side.known_gram is not None else []
    item, label = 4, "G" if mode == "dense" else mode
    moved = ranks.traffic.moved[LAYER_NAME, label]
    again = ranks.traffic.total("rows")
    sizes = {"ranks": ranks.size, "rows": count, "size": size, "item": item}
    return {
        "moved": moved.sent + again.sent,
        "moved_formula": sent_bytes(mode, **sizes),  # type: ignore[arg-type]
        "held": mapped + sum(each.numel() * each.element_size() for each in own),
        # a matrix stands whole once it is added up
        "held_formula": item * size**2 if mode == "dense" else held_bytes(mode, **sizes),  # type: ignore[arg-type]
        "seconds": seconds,
        "mapped": mapped,
    }


def _owned(ranks: Ranks) -> dict[str, Any]:
    """Add a dense G up at its owner."""
    own = torch.ones(DENSE, DENSE)
    begun = time.perf_counter()
    run_together([sum_triangle_(ranks, own, Label(LAYER_NAME, "G"), owner=0)])
    seconds = time.perf_counter() - begun
    mine = ranks.rank == 0
    moved = ranks.traffic.moved[LAYER_NAME, "G"]
    triangle = 4 * DENSE * (DENSE + 1) // 2
    return {
        "moved": moved.received if mine else moved.sent,
        "moved_formula": (ranks.size - 1) * triangle if mine else triangle,
        "held": own.numel() * own.element_size() if mine else 0,
        "held_formula": 4 * DENSE**2 if mine else 0,
        "seconds": seconds,
    }


def _overlapped(ranks: Ranks) -> dict[str, Any]:
    """Add up many layers, one at a time and two together: seconds, and those spent waiting."""
    found: dict[str, Any] = {}
    matrices = [torch.ones(LAYER, LAYER) for _ in range(LAYERS)]
    for under_way in (1, 2) * TURNS:
        ranks.meet("overlap")
        begun, cpu = time.perf_counter(), time.process_time()
        run_together((sum_triangle_(ranks, each, Label(LAYER_NAME, "G")) for each in matrices), under_way)
        own = found.setdefault(str(under_way), {"wall_seconds": [], "cpu_seconds": []})
        own["wall_seconds"].append(time.perf_counter() - begun)
        own["cpu_seconds"].append(time.process_time() - cpu)
    return found


def _mapped(ranks: Ranks, place: str) -> int:
    """This rank's share of the memory that ranks map together, once every rank has come here; the others wait."""
    gc.collect()
    ranks.meet(place)
    held, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "/kronoscope-" in line
        elif inside and line.startswith("Pss:"):
            held += int(line.split()[1]) * 1024
    ranks.meet(f"{place} for all")
    return held


def main() -> None:
    """One rank: measure a case, and leave what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    case = parser.parse_args().case
    torch.set_num_threads(1)
    ranks = start(torch.device("cpu"))
    if ranks.size == 1:
        raise SystemExit("this needs torch's launcher: torchrun --nproc-per-node 2 -m benchmarks.cases.scale_ranks")
    try:
        if case in ("gram", "gather", "dense"):
            found = _collected(ranks, case)
        else:
            found = _owned(ranks) if case == "owner" else _overlapped(ranks)
        (Path(os.environ["SCALE_FOLDER"]) / str(ranks.rank)).write_text(json.dumps(found))
    finally:
        stop()


if __name__ == "__main__":
    main()
