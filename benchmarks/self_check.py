"""What the self-check adds to a collection, in processor seconds of the same run.

The cases of the collection benchmark whose batches have 32 examples or more. Each collects eight batches with
``self_check: growing``; the seconds of the first check, of the later ones, and of a batch without any are
taken apart, and from them follows the share of a collection of 30 and of 200 batches. What a
collection takes once besides its batches is left out, which makes the share larger than it is.

    python -m benchmarks.self_check [--cases mlp minilm] [--output NAME]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import results_file
from benchmarks.architecture_cases.judgement import NoArtifacts
from benchmarks.cases.collection import built
from catalog.collection import Collection
from catalog.inputs import Task
from engine.collect import collect_or_read
from engine.gradient_identity.self_check import SelfCheck
from engine.workspace import JobOptions, ModelInputs, Ports, Workspace

CASES = ("mlp", "resnet18", "minilm")
BATCHES = 8
SHARES = {30: 0.10, 200: 0.03}
"""Of how many batches, and the most that the check may add."""


@dataclass
class Times:
    """Processor seconds of one collection."""

    first: float = 0.0
    later: list[float] = field(default_factory=list)
    checked: float = 0.0
    """Of the checks since the last batch."""
    batches: list[float] = field(default_factory=list)
    """Of each batch, without its check."""
    last: float = 0.0

    def batch_done(self, stage: str, done: int, *_: object) -> None:
        """Note one batch."""
        now = time.process_time()
        if stage == "collection" and done > 1:
            self.batches.append(now - self.last - self.checked)
        self.last, self.checked = now, 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time every check."""
        kept = SelfCheck.check_first, SelfCheck.check_later

        def wrapped(check: Callable[..., Any], *, first: bool) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the check takes and returns
                begun = time.process_time()
                returned = check(*args, **kwargs)
                spent = time.process_time() - begun
                if first:
                    self.first += spent
                else:
                    self.later.append(spent)
                    self.checked += spent
                return returned

            return run

        try:
            SelfCheck.check_first = wrapped(kept[0], first=True)  # type: ignore[method-assign]
            SelfCheck.check_later = wrapped(kept[1], first=False)  # type: ignore[method-assign]
            yield
        finally:
            SelfCheck.check_first, SelfCheck.check_later = kept  # type: ignore[method-assign]


def measured(name: str) -> dict[str, Any]:
    """Seconds of one case."""
    problem, (inputs, targets) = built(name)
    times = Times()
    space = Workspace(
        inputs=ModelInputs(
            model=problem.model,
            batches=lambda: iter([(inputs, targets)] * BATCHES),
            task=Task(type=problem.task),
            examples=BATCHES * problem.examples,
        ),
        options=JobOptions(collection=Collection(fisher=problem.fisher, batch_size=problem.examples)),
        ports=Ports(artifacts=NoArtifacts()),
    )
    space.ports.report = times.batch_done
    with times.timed():
        whole = collect_or_read(space)
    batch = statistics.median(times.batches)
    later = statistics.mean(times.later)
    shares = {count: (times.first + (count - 1).bit_length() * later) / (count * batch) for count in SHARES}
    return {
        "examples": problem.examples,
        "first_check_seconds": times.first,
        "later_check_seconds": later,
        "batch_seconds": batch,
        "shares": {str(count): share for count, share in shares.items()},
        "largest_difference": max(layer.gradient_identity or 0.0 for layer in whole.layers),
        "layers": len(whole.layers),
    }


def main() -> None:
    """Measure every case and store the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--output", default="self_check")
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = {name: measured(name) for name in options.cases}
    claims = [
        results_file.claim(
            f"{name}: the check's share of a collection of {count} batches", found["shares"][str(count)], most
        )
        for name, found in figures.items()
        for count, most in SHARES.items()
    ]
    results_file.write(options.output, claims, figures)


if __name__ == "__main__":
    main()
