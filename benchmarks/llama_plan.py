"""The plan of a seven-billion-parameter Llama from its configuration alone: what each stage takes, and how soon.

The model stands on the meta device, so no weight is read and nothing large is allocated. The table goes into
docs/planning.md, so that the page says what the code plans today.

    python -m benchmarks.llama_plan [--output NAME] [--docs]
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import results_file
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.estimate import estimate
from engine.memory.budget import MemoryBudget
from engine.memory.plan import readable_bytes
from engine.workspace import JobOptions, Machine, ModelInputs, Ports, Workspace
from worker.execution.files.artifact_files import ArtifactFiles

PAGE = Path(__file__).parent.parent / "docs" / "planning.md"
BEGIN, END = "<!-- llama: begin -->\n", "<!-- llama: end -->\n"
SEVEN_BILLION = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
MOST_SECONDS = 20.0
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One job to be planned."""

    host_gibibytes: int | None
    """The budget; None sets no limit."""
    examples: int = 1024
    batch_size: int = 4
    tokens: int = 512

    @property
    def budget(self) -> MemoryBudget:
        """In bytes; there is no device."""
        unlimited = MemoryBudget.unlimited()
        host = unlimited.host_bytes if self.host_gibibytes is None else self.host_gibibytes * GIB
        return MemoryBudget(device_bytes=unlimited.device_bytes, host_bytes=host)

    @property
    def words(self) -> str:
        """The budget, for a heading."""
        return "no limit" if self.host_gibibytes is None else f"{self.host_gibibytes} GiB"


def planned(config: Mapping[str, int], asked: Asked) -> dict[str, Any]:
    """The plan of ``asked`` for a Llama of ``config``, with the seconds that it took to make."""
    begun = time.perf_counter()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config))
    ids = torch.zeros(asked.batch_size, asked.tokens, dtype=torch.int64)
    with tempfile.TemporaryDirectory() as folder:
        files = ArtifactFiles(Path(folder), None)
        workspace = Workspace(
            inputs=ModelInputs(
                model=model,
                batches=lambda: iter([({"input_ids": ids}, ids)]),
                task=Task(type="causal_lm"),
                examples=asked.examples,
            ),
            options=JobOptions(collection=Collection(batch_size=asked.batch_size), kinds=("capacity",)),
            machine=Machine(budget=asked.budget),
            ports=Ports(artifacts=files, scratch=files),
        )
        plan = estimate(workspace)
    return plan | {"planning_seconds": time.perf_counter() - begun}


def table(found: Sequence[tuple[Asked, Mapping[str, Any]]]) -> str:
    """One row for each budget and stage, in Markdown."""
    lines = ["| budget | passes | micro-batch | stage | host | disk | hours |", "|---|---:|---:|---|---:|---:|---:|"]
    for asked, plan in found:
        for stage, figures in plan["stages"].items():
            host, disk = (readable_bytes(figures[f"{place}_bytes"]) for place in ("host", "disk"))
            spent = (figures["seconds"] or 0) / 3600
            hours = f"{spent:.1f}" if spent >= 1 else f"{spent:.1g}"
            lines.append(
                f"| {asked.words} | {len(plan['parts'])} | {plan['micro_batch']} | {stage} "
                f"| {host} | {disk if figures['disk_bytes'] else '–'} | {hours} |"
            )
    heaviest: dict[str, dict[str, Any]] = {}
    for term in sorted(found[0][1]["terms"], key=lambda term: -term["size_bytes"]):
        heaviest.setdefault(term["name"], term)
    lines += ["", "| largest terms without a limit | formula | bytes | stage |", "|---|---|---:|---|"]
    lines += [
        f"| {term['name']} | {term['formula']} | {readable_bytes(term['size_bytes'])} | {term['stage']} |"
        for term in list(heaviest.values())[:6]
    ]
    return "\n".join(lines) + "\n"


def with_table(page: str, made: str) -> str:
    """``page`` with ``made`` between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + made + END + rest.partition(END)[2]


def main() -> None:
    """Plan, write the figures, and the page's table where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="llama_plan", help="name of the file under benchmarks/results")
    parser.add_argument("--docs", action="store_true", help="write the table of docs/planning.md anew")
    chosen = parser.parse_args()
    jobs = [Asked(host_gibibytes=size) for size in (None, 80, 64)]
    found = [(asked, planned(SEVEN_BILLION, asked)) for asked in jobs]
    slowest = max(plan["planning_seconds"] for _, plan in found)
    claims = [results_file.claim("seconds to plan a 7B Llama with its smallest budget", slowest, MOST_SECONDS)]
    kept = ("stages", "micro_batch", "why", "fits", "smallest_budget", "planning_seconds", "host_peak_bytes", "pace")
    figures = {
        asked.words: {name: plan[name] for name in kept} | {"passes": len(plan["parts"])} for asked, plan in found
    }
    results_file.write(chosen.output, claims, figures)
    made = table(found)
    print(made)
    if chosen.docs:
        PAGE.write_text(with_table(PAGE.read_text(), made))


if __name__ == "__main__":
    main()
