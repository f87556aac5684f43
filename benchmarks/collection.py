"""Collection against its floor and its peers: seconds of one more batch, and peak memory.

Every contender runs in a process of its own, collects the same batch of the same model again and
again in its own loop, and takes turns with the others, so that a drift of the machine meets all
(small batches several at a turn).
The first claims are about **one more batch** (between two pulls of the contender's own loop); what a
collection costs once (dry run, plan, finishing the factors) stands beside it as ``setup``. Peak
memory is that of the whole collection above the loaded model, by the kernel's account.

The others are about **whole jobs**: wall seconds of a warm process from the call to the returned
factors (of Kronoscope `measure` with `factors` alone, the self-check on, the exact trace off), over
several different batches. Each job is done anew on a copy of the model, and contenders take turns.

The peers live in an environment of their own (``benchmarks/conformance/environment.sh``, or
``make peers``); without it their claims are not measured.

    python -m benchmarks.collection [--cases mlp minilm] [--jobs "mlp, 8 batches of 256"] [--rounds 5]
                                    [--without-peers] [--output NAME]
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.cases import collection

ROOT = Path(__file__).parent.parent
PEERS_PYTHON = Path(os.environ.get("KRONOSCOPE_PEERS", ROOT / ".peers")) / "bin" / "python"
OURS, FLOOR = "kronoscope", "floor"
PEERS = ("kronfluence", "curvlinops", "bergson", "dattri_llm")
UNCHECKED = "kronoscope+check_off"
"""Whole jobs without the self-check, in no claim."""
JOB_ROUNDS = 3
OWN_ROWS = ("kronoscope+exact_trace", "kronoscope+every_parameter")
"""Also measured, and in no claim: what the exact trace costs, and the layers that no peer knows."""
OWN_ROUNDS = 1
ROUND_SECONDS, MOST = 0.5, 16
"""A round has as many batches as take the slowest so long, and not more than so many."""
OVER_FLOOR, OVER_PEER, OVER_PEER_MEAN = 1.15, 0.85, 0.6


@dataclass
class Contender:
    """A running process, and what it has told."""

    library: str
    case: str
    process: subprocess.Popen[str]
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begun(cls, library: str, case: str, rounds: int) -> "Contender":
        """Start the process."""
        python = str(PEERS_PYTHON) if library in PEERS else sys.executable
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        process = subprocess.Popen(  # noqa: S603 - our own module
            [python, "-m", "benchmarks.conformance.contender", library, case, "--most", str(MOST * rounds + 1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        return cls(library, case, process)

    def hear(self) -> str:
        """Wait for the next line and keep it; its event."""
        stream = self.process.stdout
        line = stream.readline() if stream is not None else ""
        if not line:
            self.told |= {"refused": f"the process ended with code {self.process.wait()}"}
            return "refused"
        said = json.loads(line)
        event = str(said.pop("event"))
        if event == "batch":
            self.wall.append(said.pop("wall"))
            self.cpu.append(said.pop("cpu"))
            self.told |= said
        elif event == "refused":
            self.told["refused"] = said["message"]
        else:
            self.told |= said
        return event

    def order(self, word: str) -> str:
        """Give an order; the event that answers it."""
        if self.process.stdin is None or "refused" in self.told:
            return "refused"
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        """End the process, which has nothing left to do."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()

    def figures(self) -> dict[str, Any]:
        """What was measured; the first batch warms up."""
        if "refused" in self.told:
            return {"refused": self.told["refused"]}
        figures = {name: value for name, value in self.told.items() if name not in ("traces", "package")}
        for name, seconds in (("wall", self.wall[1:]), ("cpu", self.cpu[1:])):
            figures[f"{name}_seconds"] = seconds
            figures[f"{name}_median"] = statistics.median(seconds)
            figures[f"{name}_spread"] = (max(seconds) - min(seconds)) / statistics.median(seconds)
        return figures


def measured(case: str, libraries: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """One case: every contender's figures."""
    contenders = [
        Contender.begun(library, case, OWN_ROUNDS if library in OWN_ROWS else rounds) for library in libraries
    ]
    try:
        for contender in contenders:
            contender.hear()
        for contender in contenders:
            contender.order("batch 1")
        # a batch of milliseconds alone would measure how cold the caches are after the others' turns
        slowest = max((contender.cpu[0] for contender in contenders if contender.cpu), default=1.0)
        together = min(MOST, math.ceil(ROUND_SECONDS / slowest))
        for number in range(rounds):
            for contender in contenders:
                if number < OWN_ROUNDS or contender.library not in OWN_ROWS:
                    contender.order(f"batch {together}")
        for contender in contenders:
            contender.order("stop")
    finally:
        for contender in contenders:
            contender.close()
    _, (inputs, _) = collection.built(case)
    return {
        "batches_per_round": together,
        "padding_share": collection.padding_share(inputs),
        "contenders": {contender.library: contender.figures() for contender in contenders},
        "agreement_of_A": {
            contender.library: _agreement(contender, contenders[0])
            for contender in contenders
            if contender.library in PEERS
        },
    }


def measured_job(name: str, libraries: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """One whole job: every contender's figures."""
    contenders = [Contender.begun(library, name, rounds) for library in libraries]
    try:
        for contender in contenders:
            contender.hear()
        # the first one of each warms its process
        for _ in range(rounds + 1):
            for contender in contenders:
                contender.order("job")
    finally:
        for contender in contenders:
            contender.close()
    return {
        "contenders": {contender.library: contender.figures() for contender in contenders},
        "agreement_of_A": {
            contender.library: _agreement(contender, contenders[0])
            for contender in contenders
            if contender.library in PEERS
        },
    }


def job_claims(figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The targets of whole jobs."""
    for name, job in figures.items():
        seconds = {library: row["wall_median"] for library, row in job["contenders"].items() if "refused" not in row}
        text, most = f"{name}: wall seconds of a whole job over the fastest peer", collection.JOBS[name].over_peer
        peers = [library for library in PEERS if library in seconds]
        if not peers:
            yield results_file.not_measured(text, most, "the peers' environment is not there: make peers")
            continue
        fastest = min(peers, key=seconds.__getitem__)
        yield results_file.claim(f"{text} ({fastest})", seconds[OURS] / seconds[fastest], most)


def _agreement(one: Contender, ours: Contender) -> dict[str, float] | None:
    """Trace of A over ours, smallest and largest over the layers: alike where both counted the same positions."""
    left, right = one.told.get("traces"), ours.told.get("traces")
    if not left or not right:
        return None
    ratios = [left[name][0] / right[name][0] for name in left if name in right]
    return {"least": min(ratios), "most": max(ratios), "layers": len(ratios)} if ratios else None


def steadier(figures: dict[str, Any]) -> str:
    """The clock, wall or CPU, whose rounds lie closer together over all cases and contenders."""
    spreads: dict[str, list[float]] = {"wall": [], "cpu": []}
    for case in figures.values():
        for found in case["contenders"].values():
            for clock, values in spreads.items():
                if "refused" not in found:
                    values.append(found[f"{clock}_spread"])
    return min(spreads, key=lambda clock: statistics.median(spreads[clock] or [0.0]))


def claims(figures: dict[str, Any], clock: str) -> Iterator[dict[str, Any]]:
    """Every target of the benchmark, met or not."""
    over_fastest = []
    unmeasured = "the peers' environment is not there: make peers"
    for name, case in figures.items():
        found = {library: row for library, row in case["contenders"].items() if "refused" not in row}
        seconds = {library: row[f"{clock}_median"] for library, row in found.items()}
        yield results_file.claim(
            f"{name}: seconds of a batch over the floor", seconds[OURS] / seconds[FLOOR], OVER_FLOOR
        )
        peers = [library for library in PEERS if library in found]
        time_text, memory_text = (
            f"{name}: seconds of a batch over the fastest peer",
            f"{name}: peak over the leanest peer",
        )
        if not peers:
            yield results_file.not_measured(time_text, OVER_PEER, unmeasured)
            yield results_file.not_measured(memory_text, 1.0, unmeasured)
            continue
        fastest = min(peers, key=seconds.__getitem__)
        over_fastest.append(seconds[OURS] / seconds[fastest])
        yield results_file.claim(f"{time_text} ({fastest})", over_fastest[-1], OVER_PEER)
        leanest = min(peers, key=lambda library: found[library]["peak_bytes"])
        ratio = found[OURS]["peak_bytes"] / found[leanest]["peak_bytes"]
        yield results_file.claim(f"{memory_text} ({leanest})", ratio, 1.0)
    text = "seconds of a batch over the fastest peer, geometric mean of the cases"
    if over_fastest:
        yield results_file.claim(text, math.exp(statistics.fmean(map(math.log, over_fastest))), OVER_PEER_MEAN)
    else:
        yield results_file.not_measured(text, OVER_PEER_MEAN, unmeasured)


def main() -> None:
    """Measure the cases one after the other and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=collection.CASES, default=list(collection.CASES))
    parser.add_argument("--jobs", nargs="*", choices=collection.JOBS, default=list(collection.JOBS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--job-rounds", type=int, default=JOB_ROUNDS)
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--without-own-rows", action="store_true")
    parser.add_argument("--output", default="collection", help="name of the result")
    arguments = parser.parse_args()
    peers = PEERS if PEERS_PYTHON.exists() and not arguments.without_peers else ()
    if not peers:
        print(f"The peers are not measured: {PEERS_PYTHON} is not there, or they were left out. `make peers` makes it.")
    own = () if arguments.without_own_rows else OWN_ROWS
    figures = {}
    for case in arguments.cases:
        figures[case] = measured(case, (OURS, FLOOR, *peers, *own), arguments.rounds)
        _print(case, figures[case])
    unchecked = () if arguments.without_own_rows else (UNCHECKED,)
    jobs = {}
    for name in arguments.jobs:
        jobs[name] = measured_job(name, (OURS, *peers, *unchecked), arguments.job_rounds)
        _print_job(name, jobs[name])
    clock = steadier(figures)
    results_file.write(
        arguments.output,
        [*(claims(figures, clock) if figures else ()), *job_claims(jobs)],
        {
            "method": __doc__,
            "clock": f"{clock} seconds, the steadier of the two over all rounds",
            "rounds": arguments.rounds,
            "differences": DIFFERENCES,
            "cases": figures,
            "jobs": jobs,
        },
    )


DIFFERENCES = {
    "all": "fp32, one sampled label per loss term, A and G of linear and convolutional layers with their biases; "
    "embeddings and norms are frozen, since no peer knows them (row kronoscope+every_parameter has them); "
    "GPT-2's Conv1D is nn.Linear for everyone, and its head is not tied",
    "floor": "patches of convolutions and the direction are free; nothing is drawn, checked or normalised",
    "kronoscope": "labels drawn by counter, non-finite numbers refused; padded positions dropped, and where a "
    "trial shows that padding decides nothing, cut off before the model sees it (not by the floor); exact_trace off",
    "kronfluence": "padded positions are zeroed, not dropped, and counted out",
    "curvlinops": "computes weight gradients; counts padding as data; labels by torch.multinomial",
    "dattri_llm": "computes no weight gradients of linear layers; hashes every example; counts padding as data",
    "bergson": "drops padding, and each sequence's last position; takes (N, T, d) alone, hence neither (a) nor (b)",
}


def _print(case: str, figures: dict[str, Any]) -> None:
    print(f"{case}: {figures['padding_share']:.0%} padding")
    for library, row in figures["contenders"].items():
        if "refused" in row:
            print(f"  {library:28} refused: {row['refused']}")
            continue
        print(
            f"  {library:28} batch {row['wall_median']:7.3f} s wall, {row['cpu_median']:7.3f} s CPU "
            f"(±{row['cpu_spread']:.0%}); setup {row['setup_cpu']:6.3f} s; peak {row['peak_bytes'] / 2**20:7.0f} MiB",
            flush=True,
        )


def _print_job(name: str, figures: dict[str, Any]) -> None:
    print(f"{name}:")
    for library, row in figures["contenders"].items():
        if "refused" in row:
            print(f"  {library:28} refused: {row['refused']}")
            continue
        wall, cpu, spread = row["wall_median"], row["cpu_median"], row["wall_spread"]
        print(f"  {library:28} {wall:7.3f} s wall, {cpu:7.3f} s CPU (±{spread:.0%})", flush=True)


if __name__ == "__main__":
    main()
