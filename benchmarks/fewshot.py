"""Few-shot training: the penalty without a dense matrix, slices, checkpointing, AMP, predicted peaks, and recipes.

    python -P -m benchmarks.fewshot             # measures, and stores benchmarks/results/fewshot.json
    python -P -m benchmarks.fewshot --docs      # the same, and the table of docs/few-shot.md
    python -P -m benchmarks.fewshot --stored    # the table alone, from what is stored

One thread. Ratios are medians over rounds in which the ways take turns. A claim that fails is stored as false.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import results_file
from benchmarks.fewshot_cases.episode_step import (
    EpisodeSize,
    activation_bytes,
    allocated_bytes,
    differentiate,
    draw_images,
    parameters_of,
    seconds_of,
    training_step,
)
from benchmarks.fewshot_cases.recipes import Strokes, compare_accuracies, entered_episodes, measure_loop
from benchmarks.fewshot_cases.step_peaks import compare, three_ways
from benchmarks.page_table import write_table
from engine.fewshot.regulariser import covariance, variance
from engine.training.batch_statistics import freeze_statistics
from engine.training.mixed_precision import choose_precision
from engine.training.ways import Way

PAGE = Path(__file__).resolve().parents[1] / "docs" / "few-shot.md"
NAME = "fewshot"
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """All that is measured."""

    rows: int = 25
    features: int = 25_088
    dense_features: int = 4096
    size: EpisodeSize = field(default_factory=EpisodeSize)
    timed: tuple[str, ...] = ("Conv4", "ResNet18")
    peaks: tuple[str, ...] = ("Conv4", "ResNet18", "ResNet34")
    chunk: int = 15
    alone: bool = True
    """Whether each peak is measured in a process of its own."""
    rounds: int = 3
    loop: str = "ResNet18"
    strokes: Strokes = field(default_factory=Strokes)


def penalty(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Return bytes and milliseconds of variance and covariance with their gradient, and of the dense form."""
    generator = torch.Generator().manual_seed(0)

    def dense(features: Tensor) -> Tensor:
        centred = features - features.mean(0)
        between = centred.mT @ centred / (len(features) - 1)
        deviations = (between.diagonal() + 1e-8).sqrt()
        spread = (1 - deviations).clamp(min=0).mean()
        return spread + (between - between.diagonal().diag_embed()).square().sum() / features.shape[1]

    def measure(of: Callable[[Tensor], Tensor], numbers: int) -> dict[str, float]:
        rows = torch.randn(sizes.rows, numbers, generator=generator).to(device).requires_grad_()

        def work() -> None:
            torch.autograd.grad(of(rows), rows)

        work()
        spent = [seconds_of(work, device) for _ in range(5)]
        return {"bytes": allocated_bytes(work, device), "milliseconds": 1e3 * statistics.median(spent)}

    gram = measure(lambda rows: variance(rows, 1.0) + covariance(rows), sizes.features)
    small = measure(dense, sizes.dense_features)
    # n d² operations and d² numbers
    scale = (sizes.features / sizes.dense_features) ** 2
    return {
        "rows": sizes.rows,
        "features": sizes.features,
        "gram": gram,
        f"dense of {sizes.dense_features} features": small,
        "dense, scaled by the square of the features": {name: scale * value for name, value in small.items()},
    }


def ways_of(size: EpisodeSize, narrow: torch.dtype | None) -> dict[str, Way]:
    """Return the ways that are compared, by name."""
    ways = {
        "undivided": Way(),
        "2 slices": size.slices_of(2),
        "4 slices": size.slices_of(4),
        "checkpointing": Way(checkpointing=True),
    }
    if narrow is not None:
        ways["AMP"] = Way(compute_dtype=narrow)
        ways["AMP, 4 slices"] = Way(chunk=size.slices_of(4).chunk, compute_dtype=narrow)
    return ways


def ways_beside_undivided(backbone: str, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Return bytes and seconds of each way, and their ratios to those of the undivided step.

    Beside the ways, ``forward`` is a pass without a graph: each of the others takes one more than the undivided step.
    """
    step = training_step(backbone, sizes.size, device)
    images = draw_images(step, device)
    ways = ways_of(sizes.size, narrow_dtype(device))
    held = {name: activation_bytes(step, images, way) for name, way in ways.items()}
    spent: dict[str, list[float]] = {name: [] for name in (*ways, "forward")}
    for _ in range(sizes.rounds):
        for name, way in ways.items():
            spent[name].append(seconds_of(partial(differentiate, step, images, way), device))
            for parameter in parameters_of(step):
                parameter.grad = None
        with torch.no_grad(), freeze_statistics(step.model):
            spent["forward"].append(seconds_of(partial(step.model, images), device))
    whole = held["undivided"]
    found: dict[str, Any] = {
        name: {
            "seconds": seconds,
            "seconds_ratio": statistics.median(
                one / other for one, other in zip(seconds, spent["undivided"], strict=True)
            ),
        }
        for name, seconds in spent.items()
    }
    for name, size in held.items():
        found[name] |= {"bytes": size, "bytes_ratio": {count: size[count] / whole[count] for count in whole}}
    return found


def narrow_dtype(device: torch.device) -> torch.dtype | None:
    """Return the 16 bits that AMP takes on a device; None where it takes none, or a scaled float16."""
    dtype = choose_precision(True, device).compute_dtype
    return dtype if dtype == torch.bfloat16 else None


def measure(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Measure all."""
    narrow = narrow_dtype(device)
    loop = measure_loop(sizes.loop, sizes.size, (1, 2, 4), 4, device)
    return {
        "penalty": penalty(sizes, device),
        "ways": {backbone: ways_beside_undivided(backbone, sizes, device) for backbone in sizes.timed},
        "peaks": [
            compare(case, device, alone=sizes.alone)
            for backbone in sizes.peaks
            for case in three_ways(backbone, sizes.size, sizes.chunk)
        ],
        "loop": {"backbone": sizes.loop, "steps": loop},
        "episodes_of_each_step": entered_episodes(10, 4),
        "accuracies": compare_accuracies(sizes.strokes, 4, narrow, device),
        "amp": None if narrow is None else str(narrow).removeprefix("torch."),
    }


def claims_of(found: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Return the claims about what was measured."""
    claim, gram = results_file.claim, found["penalty"]["gram"]
    shape = f"{found['penalty']['rows']} rows of {found['penalty']['features']} features"
    claims = [
        claim(f"milliseconds of variance and covariance with their gradient, {shape}", gram["milliseconds"], 50),
        claim(f"MiB of the same beyond the features, {shape}", gram["bytes"] / MIB, 64),
    ]
    for backbone, ways in found["ways"].items():
        for name, bound in (("2 slices", 0.55), ("4 slices", 0.35)):
            ratio = max(ways[name]["bytes_ratio"].values())
            claims.append(claim(f"peak of activations in {name}, over undivided, {backbone}", ratio, bound))
        for name, bound in (("2 slices", 1.45), ("4 slices", 1.45), ("checkpointing", 1.4)):
            ratio = ways[name]["seconds_ratio"]
            claims.append(claim(f"seconds with {name}, over undivided, {backbone}", ratio, bound))
    ratios = [row["ratio"] for row in found["peaks"]]
    claims += [
        claim("predicted over measured peak, the least", min(ratios), 0.8, at_most=False),
        claim("predicted over measured peak, the most", max(ratios), 1.1),
    ]
    if device.type != "cuda":
        reason = "no GPU: unproven on CUDA; tests/gpu/test_fewshot_on_cuda.py measures it"
        claims.append(results_file.not_measured("predicted over max_memory_allocated", 1.1, reason))
    return claims


def table(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table: claims of recipes with findings, then the bounds."""
    yield "| claim | finding | holds |"
    yield "|---|---|---|"
    for said, text, holds in recipes_found(stored["figures"]):
        yield f"| {said} | {text} | {_word(holds)} |"
    yield ""
    yield (
        "Each accuracy is of one training, with an interval over test episodes. The row of float32 shows the effect of "
        "rounding alone."
    )
    yield ""
    yield "| bounded here | found | bound | holds |"
    yield "|---|---:|---:|---|"
    for each in stored["claims"]:
        value = "–" if each["value"] is None else f"{each['value']:.3g}"
        yield f"| {each['claim']} | {value} | {each['target']:g} | {_word(each['holds'])} |"
    shares = {backbone: ways["forward"]["seconds_ratio"] for backbone, ways in stored["figures"]["ways"].items()}
    text = " and ".join(f"{share:.2f} ({backbone})" for backbone, share in shares.items())
    yield ""
    yield f"Slices and checkpointing take one forward pass more, which is {text} of the seconds of an undivided step."
    yield ""
    yield "| step | predicted, MiB | measured, MiB | ratio | pages of the process beyond, MiB |"
    yield "|---|---:|---:|---:|---:|"
    for row in stored["figures"]["peaks"]:
        pages = row["growth_beyond_allocated_bytes"]
        yield (
            f"| {row['case']} | {row['predicted_bytes'] / MIB:.0f} | {row['measured_bytes'] / MIB:.0f} "
            f"| {row['ratio']:.3f} | {'–' if pages is None else f'{pages / MIB:.0f}'} |"
        )


def recipes_found(figures: Mapping[str, Any]) -> Iterator[tuple[str, str, bool | None]]:
    """Yield each claim that circulates, what is found, and whether it holds; None where that is not measured."""
    loop, ways = figures["loop"]["steps"], figures["ways"]
    for steps, said, least in (
        ("2", '"−40 to −50 %" by 2 accumulation steps', -0.4),
        ("4", '"−50 to −75 %" by 4', -0.5),
    ):
        change = loop[steps]["bytes"] / loop["1"]["bytes"] - 1
        slices = _changes(ways, f"{steps} slices", "bytes_ratio")
        text = (
            f"bytes of a step {_percent(change)} ({figures['loop']['backbone']}): it accumulates over *episodes*; "
            f"{steps} slices of one: activations {slices}"
        )
        yield said, text, change <= least
    yield from _amp_found(figures)
    seconds, update = loop["1"]["seconds_an_episode"], loop["1"]["optimiser_seconds"]
    saved, change = 0.75 * update / seconds, loop["4"]["seconds_an_episode"] / seconds - 1
    text = (
        f"4 steps save three of four optimiser's steps, {100 * saved:.0f} % of an episode's seconds "
        f"({figures['loop']['backbone']}; {_percent(change)} in one run)"
    )
    yield '"10 to 30 % faster" by accumulation', text, saved >= 0.1
    yield from _accuracies_found(figures["accuracies"])
    for form, entered in figures["episodes_of_each_step"].items():
        text = f"10 episodes: steps of {', '.join(map(str, entered))}; {10 - sum(entered)} dropped"
        yield f'"a step of 4 episodes" by `{form}`', text, sum(entered) == 10 and set(entered) == {4}


def _amp_found(figures: Mapping[str, Any]) -> Iterator[tuple[str, str, bool | None]]:
    ways, amp = figures["ways"], figures["amp"]
    if amp is None:
        for said in ('"−50 %" by AMP', '"2–3x faster" by AMP', '"−60 to −70 %" by both'):
            yield said, "not measured: this machine does not compute in bfloat16", None
        return
    narrow = [way["AMP"]["bytes_ratio"]["allocated"] for way in ways.values()]
    both = [way["AMP, 4 slices"]["bytes_ratio"]["allocated"] for way in ways.values()]
    paces = [1 / way["AMP"]["seconds_ratio"] for way in ways.values()]
    text = f"activations {_changes(ways, 'AMP', 'bytes_ratio')}, in {amp}; weights, moments and gradients stay"
    yield '"−50 %" by AMP', text, max(narrow) <= 0.5
    text = " and ".join(f"{pace:.2f}x ({name})" for name, pace in zip(ways, paces, strict=True))
    yield '"2–3x faster" by AMP', f"{text}, on one thread", min(paces) >= 2
    text = f"activations {_changes(ways, 'AMP, 4 slices', 'bytes_ratio')}, with 4 slices of one episode"
    yield '"−60 to −70 %" by both', text, max(both) <= 0.4


def _accuracies_found(accuracies: Mapping[str, Any]) -> Iterator[tuple[str, str, bool | None]]:
    for name, found in accuracies.items():
        if found["beside"] == name:
            continue
        beyond, own = found["beyond"], found["accuracy"]
        text = (
            f"{beyond['mean']:+.2f} ± {beyond['half_width']:.2f} points beside {found['beside']} "
            f"({own['mean']:.1f} ± {own['half_width']:.1f} %); weights differ by {found['weights_apart']:.1g}"
        ).replace("-", "−")
        yield f'"< 0.5 % accuracy": {name}', text, _is_within(beyond, 0.5)


def _is_within(interval: Mapping[str, float], bound: float) -> bool | None:
    """Tell whether a difference is below a bound; None where its interval does not decide it."""
    distance, half_width = abs(interval["mean"]), interval["half_width"]
    if distance + half_width <= bound:
        return True
    return False if distance - half_width > bound else None


def _changes(ways: Mapping[str, Any], name: str, ratio: str) -> str:
    found = ((backbone, way[name][ratio]["allocated"] - 1) for backbone, way in ways.items())
    return " and ".join(f"{_percent(change)} ({backbone})" for backbone, change in found)


def _percent(change: float) -> str:
    return f"{100 * change:+.0f} %".replace("-", "−")


def _word(holds: bool | None) -> str:
    return {True: "yes", False: "**no**", None: "not decided"}[holds]


def stored_result() -> dict[str, Any]:
    """Return what is stored, of whatever commit and machine."""
    found: dict[str, Any] = json.loads((results_file.RESULTS / f"{NAME}.json").read_text())
    return found


def main() -> int:
    """Measure, store and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="write the table of docs/few-shot.md")
    parser.add_argument("--stored", action="store_true", help="write it from what is stored: nothing is measured")
    options = parser.parse_args()
    if not options.stored:
        torch.set_num_threads(1)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        found = measure(Sizes(), device)
        results_file.write(NAME, claims_of(found, device), found)
    lines = list(table(stored_result()))
    print("", *lines, sep="\n")
    if options.docs or options.stored:
        write_table(PAGE, NAME, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
