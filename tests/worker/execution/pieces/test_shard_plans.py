"""Shard plans: one, two, three and seven pieces measure what the undivided job measures, each figure as well as it can.

A sum over examples is rounded once for each piece, so factors differ by the rounding unit of their precision. What is
computed of them differs by that times its condition number, which bounds each figure below::

    traces, norms, ranks, top eigenvalues        1
    eigenvalues                                  λ_max / λ, as all of them move by ‖ΔF‖ at most (Weyl)
    condition numbers                            κ itself
    whatever is damped by δ                      λ_max / δ

Where the bound reaches 1, as of a condition number beyond 1e6 in float32, the figure is rounding and is not compared.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.machine.parts import ALL, chosen_part, first_of
from tests.worker.execution.pieces.conftest import Runner
from tests.worker.execution.pieces.test_division import (
    DIGITS,
    TOLERANCE,
    gpt2,
    require_digests,
    require_equal,
    sentences,
    with_dtype,
)


def first_layer(minilm: Path, folder: Path) -> Path:
    """The real encoder's tables and the first of its six layers."""
    own = folder / "first-layer"
    shutil.copytree(minilm, own, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = safetensors.torch.load_file(minilm / "model.safetensors")
    later = tuple(f"encoder.layer.{number}." for number in range(1, 6))
    kept = {name: tensor for name, tensor in weights.items() if not any(each in name for each in later)}
    safetensors.torch.save_file(kept, own / "model.safetensors", {"format": "pt"})
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return own


@pytest.fixture(params=["digits", "gpt2", "minilm"])
def document(request: pytest.FixtureRequest, saved: Callable[..., Path], minilm: Path, tmp_path: Path) -> Any:
    if request.param == "digits":
        return {**DIGITS, "kind": ["factors", "capacity", "spectrum"]}
    if request.param == "gpt2":
        return {**gpt2(saved, tmp_path), "kind": ["factors", "capacity"]}
    return sentences(first_layer(minilm, tmp_path), tmp_path)


def numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, own in value.items():
            yield from numbers(own, f"{place}.{name}" if place else name)
    elif isinstance(value, (list, tuple)):
        for at, own in enumerate(value):
            # rounding decides which quantiles are told, so they go by their level
            level = own.get("level", at) if isinstance(own, Mapping) else at
            yield from numbers(own, f"{place}.{level}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield place, float(value)


def condition(name: str, whole: float, metrics: Mapping[str, Any]) -> float:
    """The condition number of a figure, by its name and its value; infinite where it cannot be compared."""
    eigenvalues = (metrics.get("kfac") or {}).get("largest") or [{"value": 0.0}]
    largest = metrics.get("spectral_norm") or eigenvalues[0]["value"]
    (head, *_), last = name.split("."), name.rpartition(".")[2]
    if head == "effective_dimension_curve" and last.isdigit():
        return max(1.0, largest / metrics["effective_dimension_curve"]["damping"][int(last)])
    if name.startswith("kappa"):
        return whole
    if name.startswith(("effective_dimension", "logdet")):
        return largest / metrics["damping"]
    if last == "value" or head == "top_eigenvalues":
        return largest / whole if whole else math.inf
    # eigenvalues near the edge of a bin, or near the smallest that is counted, fall to one side or to the other
    counted = ("below", "first_rank", "last_rank", "zeros", "rank")
    return math.inf if "counts" in name or last in counted else 1.0


EXACT = ("dimension", "in_dim", "out_dim", "positions", "terms", "update_index", "samples", "seed", "calls")
OF_THE_RUN = {"pieces", "passes", "planned_peak_bytes", "examples_checked", "micro_batch", "gradient_identity"}
"""What says how a run was made."""


def compare(found: dict[str, Any], truth: dict[str, Any], tolerance: float) -> int:
    """Hold one row against the whole job's; return how many of its figures can be told apart from rounding."""
    compared = 0
    assert (found["status"], found["layer"]) == (truth["status"], truth["layer"])
    for block in ("metrics", "record"):
        own, expected = dict(numbers(found[block])), dict(numbers(truth[block]))
        for name in own.keys() & expected.keys() - OF_THE_RUN:
            bound = 0.0 if name in EXACT else tolerance * condition(name, expected[name], truth["metrics"] or {})
            if bound < 1:
                compared += 1
                assert own[name] == pytest.approx(expected[name], rel=bound, abs=bound), (truth["layer"], name)
    return compared


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_number_of_pieces_gives_the_figures_of_the_whole(
    runner: Runner, document: dict[str, Any], dtype: str, pytestconfig: pytest.Config
) -> None:
    part = chosen_part(pytestconfig)
    asked, tolerance = with_dtype(document, dtype), TOLERANCE[dtype]
    whole = runner.job("whole", asked)
    several = (1, 2, 7) if part == ALL else ((1, 2, 7)[first_of(part, 3)],)
    plans = {shards: runner.job(f"shards{shards}", {**asked, "shards": shards}) for shards in (*several, 3)}
    for shards, run in plans.items():
        # 45 examples in batches of 4, every second of which enters: six places to cut
        assert len(run.pieces) == min(shards, 6 if "update_freq" in asked["collection"] else 8)
        require_equal(run.factors, whole.factors, tolerance)
        require_digests(run, whole)
        assert [(row["kind"], row["layer"]) for row in run.rows] == [(row["kind"], row["layer"]) for row in whole.rows]
        compared = sum(compare(*pair, tolerance) for pair in zip(run.rows, whole.rows, strict=True))
        assert compared >= 20 * len(run.rows)
        if shards == 1 and run.factors.layers[0].name == "conv1":
            # a head and a table of one weight are stored apart, and joined once more
            assert run.digests == whole.digests
    torch.manual_seed(99)
    again = runner.job("again", {**asked, "shards": 3}, order=lambda pieces: list(pieces)[::-1])
    assert again.digests == plans[3].digests
