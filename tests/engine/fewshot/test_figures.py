"""The few-shot benchmark runs, judges honestly, and writes the table of the page; what is stored meets its bounds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.fewshot import NAME, PAGE, Sizes, claims_of, measure, recipes_found, stored_result, table
from benchmarks.fewshot_cases.episode_step import EpisodeSize
from benchmarks.fewshot_cases.recipes import Strokes, circulating_loop
from benchmarks.page_table import read_table, write_table

CPU = torch.device("cpu")
FALSE = {"seconds with checkpointing, over undivided, Conv4"}
"""Claims that are known not to hold: a forward pass of a Conv4 is more than a third of a step on a CPU."""
TINY = EpisodeSize(image_size=32, n_way=2, k_shot=2, n_query=4)
SIZES = Sizes(
    rows=5,
    features=64,
    dense_features=32,
    size=TINY,
    timed=("Conv4",),
    peaks=("Conv4",),
    chunk=3,
    rounds=1,
    alone=False,
    loop="Conv4",
    strokes=Strokes(
        size=EpisodeSize(image_size=16, n_way=2, k_shot=2, n_query=2),
        width=4,
        classes=(3, 2),
        per_class=4,
        episodes=3,
        tests=2,
    ),
)


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    figures = measure(SIZES, CPU)
    stored: dict[str, Any] = json.loads(json.dumps({"claims": claims_of(figures, CPU), "figures": figures}))
    return stored


@pytest.mark.nightly(covered_by="tests/engine/training/test_training_peak.py::test_the_peak_is_that_of_a_real_step")
def test_the_benchmark_runs_at_tiny_sizes(tiny: dict[str, Any]) -> None:
    claims = {each["claim"]: each for each in tiny["claims"]}
    peaks = {text: each for text, each in claims.items() if "peak" in text}
    assert len(peaks) == 4
    assert all(each["holds"] for each in peaks.values()), peaks
    rows = [line for line in table(tiny) if line.startswith("| ")]
    assert len(rows) == 3 + len(list(recipes_found(tiny["figures"]))) + len(claims) + len(tiny["figures"]["peaks"])


@pytest.mark.nightly(
    covered_by="tests/engine/analyses/test_fewshot_training.py::test_slices_train_to_the_weights_of_the_undivided_episode"
)
def test_slices_change_no_weight_and_the_loop_of_the_scripts_does(tiny: dict[str, Any]) -> None:
    apart = {name: found["weights_apart"] for name, found in tiny["figures"]["accuracies"].items()}
    assert apart["4 slices, float64"] <= 1e-10
    assert apart["the circulating loop, 4 steps"] >= 1e-4


@pytest.mark.nightly(
    covered_by="tests/engine/fewshot/test_figures.py::test_gradients_of_a_step_are_the_mean_of_those_that_enter_it"
)
def test_the_loop_of_the_scripts_saves_nothing_and_drops_gradients(tiny: dict[str, Any]) -> None:
    loop = tiny["figures"]["loop"]["steps"]
    assert min(loop["2"]["bytes"], loop["4"]["bytes"]) >= loop["1"]["bytes"]
    entered = tiny["figures"]["episodes_of_each_step"]
    assert entered == {"i % steps": [1, 4, 4], "(i + 1) % steps": [4, 4]}


def test_gradients_of_a_step_are_the_mean_of_those_that_enter_it() -> None:
    weight = torch.nn.Parameter(torch.zeros(()))
    optimiser = torch.optim.SGD([weight], lr=1.0)
    slopes = [1.0, 2.0, 3.0, 4.0, 5.0]
    losses = [lambda slope=slope: slope * weight for slope in slopes]
    assert circulating_loop(losses, optimiser, 2, first=1) == [2, 2]
    assert weight.item() == -(1 + 2) / 2 - (3 + 4) / 2


def test_what_is_stored_meets_its_bounds() -> None:
    stored = stored_result()
    assert {each["claim"] for each in stored["claims"] if each["holds"] is False} <= FALSE
    assert {row["case"].split(",")[0] for row in stored["figures"]["peaks"]} == {
        "Conv4/84",
        "ResNet18/84",
        "ResNet34/84",
    }
    assert all(row["holds"] and 0.8 <= row["ratio"] <= 1.1 for row in stored["figures"]["peaks"])
    said = {text: holds for text, _, holds in recipes_found(stored["figures"])}
    assert said['"−40 to −50 %" by 2 accumulation steps'] is False
    assert said['"< 0.5 % accuracy": 4 slices, float64'] is True


def test_the_page_has_the_table_of_what_is_stored() -> None:
    lines = list(table(stored_result()))
    assert read_table(PAGE, NAME) == "\n".join(lines), "run: .venv/bin/python -P -m benchmarks.fewshot --stored"


def test_a_table_is_written_between_its_marks_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n<!-- one: begin -->\nold\n<!-- one: end -->\n\n<!-- two: begin -->\n<!-- two: end -->\n")
    write_table(page, "one", ["| a |", "|---|"])
    assert read_table(page, "one") == "| a |\n|---|"
    assert read_table(page, "two") == ""
    before = page.read_text()
    write_table(page, "one", ["| a |", "|---|"])
    assert page.read_text() == before
    with pytest.raises(ValueError, match=r"page\.md must have the marks <!-- three: begin -->"):
        write_table(page, "three", [])
