"""One piece of a divided collection of MiniLM, as a process of its own that waits for the others before it begins.

    python -P -m benchmarks.cases.scale_piece FOLDER BATCHES BEGIN END

It says ``ready`` once model and data stand in memory, begins at a line on its input, and says what the collection and
the writing took.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from benchmarks.cases.collection import encoder, paragraphs
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.merging.part_files import write_part
from engine.workspace import DataPart, JobOptions, ModelInputs, Ports, Workspace
from worker.execution.files.artifact_files import ArtifactFiles

BATCH = 32
MOST_TOKENS = 128


class _Counted(dict[str, Tensor]):
    """Tensors of a mapped file, of which those count that are taken from it: the others are never read."""

    def __init__(self, files: "CountedFiles", tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        found = super().__getitem__(name)
        self._files.read_bytes += found.numel() * found.element_size()
        return found


class CountedFiles(ArtifactFiles):
    """Files that count the bytes of the tensors that are read from them."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, None)
        self.read_bytes = 0

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        """Map tensors; each counts once it is taken."""
        return _Counted(self, super().load_tensors(name))


def data(batches: int) -> list[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """Batches of paragraphs of Python's own help, each paragraph under its number."""
    problem, _ = encoder()
    folder = problem.model.config._name_or_path  # noqa: SLF001 - where its tokenizer is
    texts = paragraphs()
    # more than there are come again, under numbers of their own
    chosen = [texts[place % len(texts)] for place in range(BATCH * batches)]
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for start in range(0, len(chosen), BATCH):
        encoded = tokenizer(
            chosen[start : start + BATCH], padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
        )
        inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        targets = torch.zeros(BATCH, problem.model.config.hidden_size)
        found.append((inputs, targets, torch.arange(start, start + BATCH)))
    return found


def model() -> nn.Module:
    """MiniLM with its real weights, whose linear layers are measured."""
    torch.manual_seed(0)
    problem, _ = encoder()
    return problem.model


def job(own: nn.Module, batches: list[Any], begin: int, end: int, folder: Path) -> Workspace:
    """The piece over the examples from ``begin`` to ``end``."""

    def chunks() -> Iterator[Any]:
        return iter(batches[begin // BATCH : end // BATCH])

    return Workspace(
        inputs=ModelInputs(
            model=own,
            batches=chunks,
            task=Task(type="sentence_embedding"),
            examples=end - begin,
            part=DataPart(begin=begin, end=end, examples=BATCH * len(batches), batches=lambda: iter(batches)),
        ),
        options=JobOptions(collection=Collection(batch_size=BATCH), kinds=("factors",)),
        ports=Ports(artifacts=CountedFiles(folder)),
    )


def formula_bytes(collected: FactorSet) -> tuple[int, int]:
    """Bytes of one triangle of every factor, ``Σ b·n(n + 1)/2``: with one A for the layers that share it, and one each.

    The first is what a piece writes, the second what a merge reads of it, layer by layer.
    """
    once, each, seen = 0, 0, set()
    for facts in collected.layers:
        factors = collected.load(facts.ordinal)
        for factor in (factors.A, factors.G):
            assert isinstance(factor, Tensor)
            numbers = factor.numel() if factor.ndim == 1 else factor.shape[0] * (factor.shape[0] + 1) // 2
            each += numbers * factor.element_size()
            if factor.data_ptr() not in seen:
                seen.add(factor.data_ptr())
                once += numbers * factor.element_size()
    return once, each


def main() -> None:
    """Wait, collect, write, and say what that took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("batches", type=int)
    parser.add_argument("begin", type=int)
    parser.add_argument("end", type=int)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    workspace = job(model(), data(chosen.batches), chosen.begin, chosen.end, chosen.folder)
    print("ready", flush=True)
    sys.stdin.readline()
    marks = [(time.perf_counter(), time.process_time())]
    collected = collect_or_read(workspace)
    marks.append((time.perf_counter(), time.process_time()))
    write_part(workspace.ports.artifacts, collected)
    marks.append((time.perf_counter(), time.process_time()))
    files = [file for file in chosen.folder.rglob("*.safetensors") if file.is_file()]
    (begun, ended, written), plan = marks, workspace.results.plan
    said = {
        "wall_seconds": ended[0] - begun[0],
        "cpu_seconds": ended[1] - begun[1],
        "store_wall_seconds": written[0] - ended[0],
        "store_cpu_seconds": written[1] - ended[1],
        "written_bytes": sum(file.stat().st_size for file in files),
        "formula_bytes": formula_bytes(collected),
        "planned_seconds": None if plan is None else plan.seconds["collection"],
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
