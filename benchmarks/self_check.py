"""What the self-check adds to a job, in processor seconds.

The share is (with − without) / with, where both are the processor seconds of whole jobs of 8 batches, `self_check:
growing` and `off`, set-up and finishing included: the median of five alternating pairs. Jobs of 200 batches are run
on the MLP; for the other cases they follow from the parts, which another run of 8 batches with the check takes apart.

    python -m benchmarks.self_check [--cases mlp minilm] [--pairs N] [--output NAME]
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks import results_file
from benchmarks.architecture_cases.judgement import NoArtifacts
from benchmarks.cases.collection import built
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.collect import collect_or_read
from engine.collection import data_pass
from engine.collection.first_check import Verification
from engine.factors.factor_set import FactorSet
from engine.gradient_identity.schedule import Glances
from engine.gradient_identity.self_check import SelfCheck
from engine.gradient_identity.summed_rows import SummedRows
from engine.model.batches import map_tensors
from engine.workspace import JobOptions, ModelInputs, Ports, Workspace

BATCHES, MANY = 8, 200
CASES: dict[str, tuple[str, int | None, float]] = {
    "mlp": ("mlp", 256, 0.20),
    "resnet18": ("resnet18", None, 0.20),
    "gpt2_with_head": ("gpt2_with_head", None, 0.20),
    "gpt2_without_head": ("gpt2_without_head", None, 0.20),
    "gpt2_with_head_of_4": ("gpt2_with_head", 4, 0.30),
    "gpt2_without_head_of_4": ("gpt2_without_head", 4, 0.30),
    "minilm": ("minilm", None, 0.20),
}
"""Benchmark case, examples of a batch where they are fewer than the case's, and the largest share of 8 batches."""
OF_MANY = 0.05
"""The largest share of 200 batches."""
GLANCING = 0.02
"""The largest share of a batch that signature and glance may take."""

Part = tuple[type[Any] | Any, str, str]
PARTS: tuple[Part, ...] = (
    (Verification, "_checked", "first"),
    (Verification, "cuts_padding", "padding"),
    (SelfCheck, "check_later", "later"),
    (SelfCheck, "glance_differs", "glance"),
    (SelfCheck, "is_due", "signature"),
    (SelfCheck, "observe", "rows"),
    (SummedRows, "begin", "rows"),
    (SummedRows, "predicted", "signature"),
    (SummedRows, "directed", "rows"),
    (data_pass, "_varied", "batch"),
)
"""Functions whose processor seconds are those of a part of the check; ``batch`` holds some of them."""


@dataclass
class Parts:
    """Processor seconds of the parts of one job."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    glances: Glances = field(default_factory=Glances)
    """The batches that get one, in a job of any length."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time every part."""
        kept = [(owner, name, getattr(owner, name)) for owner, name, _ in PARTS]
        try:
            for owner, name, part in PARTS:
                setattr(owner, name, self._wrapped(getattr(owner, name), part))
            yield
        finally:
            for owner, name, before in kept:
                setattr(owner, name, before)

    def of(self, part: str) -> float:
        """Seconds of a part over the whole job."""
        return sum(self.seconds.get(part, ()))

    def _wrapped(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the function takes and returns
            if args and isinstance(args[0], SelfCheck):
                self.glances = args[0].glances
            begun = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds.setdefault(part, []).append(time.process_time() - begun)

        return run


def job_seconds(name: str, batches: int, mode: Literal["growing", "off"]) -> tuple[float, FactorSet]:
    """Processor seconds of one whole job, and its factors."""
    case, examples, _ = CASES[name]
    problem, (inputs, targets) = built(case)
    size = problem.examples if examples is None else examples
    batch = tuple(map_tensors(each, lambda tensor: tensor[:size]) for each in (inputs, targets))
    space = Workspace(
        inputs=ModelInputs(
            model=problem.model,
            batches=lambda: iter([batch] * batches),
            task=Task(type=problem.task),
            examples=batches * size,
        ),
        options=JobOptions(collection=Collection(fisher=problem.fisher, batch_size=size, self_check=mode)),
        ports=Ports(artifacts=NoArtifacts()),
    )
    begun = time.process_time()
    whole = collect_or_read(space)
    return time.process_time() - begun, whole


def share_of(name: str, batches: int, pairs: int) -> tuple[float, list[dict[str, float]]]:
    """Median share of the check in jobs of so many batches, and the seconds of each pair."""
    figures = []
    for _ in range(pairs):
        with_check, _ = job_seconds(name, batches, "growing")
        without, _ = job_seconds(name, batches, "off")
        figures.append({"with": with_check, "without": without, "share": (with_check - without) / with_check})
    return statistics.median(each["share"] for each in figures), figures


def measured(name: str, pairs: int) -> dict[str, Any]:
    """Shares and parts of one case."""
    job_seconds(name, 2, "growing")  # what is loaded once
    share, figures = share_of(name, BATCHES, pairs)
    parts = Parts()
    with parts.timed():
        seconds, whole = job_seconds(name, BATCHES, "growing")
    batch = statistics.median(parts.seconds["batch"]) - (parts.of("rows") + parts.of("signature")) / BATCHES
    glances = parts.seconds.get("glance") or _glances_of_a_longer_job(name)
    each = statistics.median(glances) if glances else 0.0
    glancing = parts.of("signature") / BATCHES + each / parts.glances.every
    later = parts.seconds.get("later", [])
    checks = statistics.mean(later) if later else 0.0
    looked = glancing + parts.of("rows") / BATCHES
    beside = parts.of("first") + parts.of("padding") + checks * math.ceil(math.log2(MANY)) + MANY * looked
    without = statistics.median(pair["without"] for pair in figures) + (MANY - BATCHES) * batch
    many, of_many = beside / (beside + without), "from parts"
    if name == "mlp":
        many, _ = share_of(name, MANY, max(1, pairs // 2 + 1))
        of_many = "run"
    return {
        "share_of_8": share,
        "share_of_200": many,
        "share_of_200_is": of_many,
        "signature_and_glance_of_a_batch": glancing / batch,
        "pairs": figures,
        "parts": {
            part: parts.of(part) / seconds for part in ("first", "padding", "later", "glance", "signature", "rows")
        },
        "batch_seconds": batch,
        "later_check_seconds": checks,
        "looked_at": None if whole.looked_at is None else vars(whole.looked_at),
        "largest_difference": max(layer.gradient_identity or 0.0 for layer in whole.layers),
        "layers": len(whole.layers),
    }


def _glances_of_a_longer_job(name: str) -> list[float]:
    """Seconds of each glance, where the batches of a short job that would get one are all checked in full."""
    parts = Parts()
    with parts.timed():
        job_seconds(name, 4 * BATCHES, "growing")
    return parts.seconds.get("glance", [])


def main() -> None:
    """Measure every case and store the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output", default="self_check")
    options = parser.parse_args()
    torch.manual_seed(0)
    claims, figures = [], {}
    for name in options.cases:
        found = figures[name] = measured(name, options.pairs)
        wanted = (
            (f"the check's share of a job of {BATCHES} batches", "share_of_8", CASES[name][2]),
            (f"the check's share of a job of {MANY} batches", "share_of_200", OF_MANY),
            ("signature and glance, of a batch", "signature_and_glance_of_a_batch", GLANCING),
        )
        claims += [results_file.claim(f"{name}: {text}", found[key], most) for text, key, most in wanted]
    results_file.write(options.output, claims, figures)


if __name__ == "__main__":
    main()
