"""A few-shot training through PostgreSQL, Redis, a Celery worker and the API: killed in the middle, and on the page."""

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from engine.analyses.spectra.search_checkpoints import MANIFESTS
from kronoscope.client import Client
from tests.api.routes.test_dashboard import browser, faultless_tab
from tests.chaos.stack.documents import Truth, run_alone
from tests.chaos.stack.stack import LONG_LEASES, Stack, running_stack
from tests.kronoscope.conftest import KRONOSCOPE
from tests.machine.stopwatch import until

__all__ = ["browser"]

pytestmark = pytest.mark.browser

EPISODES, TESTED = 30, 5
TRAINED = 2 * EPISODES
JOB: dict[str, Any] = {
    "kind": "fewshot_training",
    "data": {"source": "strokes", "image_size": 16, "channels": 1},
    "fewshot_training": {
        "backbone": "Conv4", "width": 4, "n_way": 3, "k_shot": 2, "n_query": 3, "num_epoch": 2, "n_episode": EPISODES,
        "test_iter": TESTED, "dtype": "float64", "use_amp": False,
    },
}  # fmt: skip
COMPONENTS = [*(f"backbone.block{place}" for place in range(1, 5)), "backbone.pool", "head", "optimiser"]
ACCURACY = r"\d+\.\d% ± \d+\.\d%"


@dataclass(frozen=True, kw_only=True)
class Story:
    """A job whose computing process was killed, and the same document run alone."""

    stack: Stack
    job_id: str
    page: Page
    saved: int
    """Episodes of the checkpoint that stood when the process was killed."""
    undisturbed: Truth
    summary: dict[str, Any]
    """Summary of the undisturbed run."""

    @property
    def client(self) -> Client:
        return Client(self.stack.url, self.stack.key)


@pytest.fixture(scope="module")
def story(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Kill the training after some episodes, while the page shows it, and await the second attempt's end."""
    alone = tmp_path_factory.mktemp("alone")
    settings = LONG_LEASES | {"KRONOSCOPE_CHECKPOINT_SECONDS": "0.001"}
    with ThreadPoolExecutor(1) as beside, contextlib.ExitStack() as held:
        quiet = beside.submit(run_alone, JOB, alone)
        stack = held.enter_context(running_stack(tmp_path_factory.mktemp("stack"), workers=1, settings=settings))
        page = held.enter_context(faultless_tab(browser, stack.url))
        job_id = stack.submit(JOB)
        saved = stop_in_the_middle(stack, job_id)
        page.add_init_script(f"sessionStorage.setItem('kronoscope.key', {stack.key!r})")
        page.goto(f"/#/jobs/{job_id}")
        expect(page.get_by_role("heading", level=1)).to_have_text("Few-shot training")
        progress = page.get_by_label("Progress", exact=True)
        expect(progress.get_by_role("heading")).to_have_text(re.compile(r"^Training · [1-9]\d* of 70 episodes$"))
        expect(progress).not_to_contain_text("layers")
        (child,) = stack.computing(stack.workers[0])
        stack.kill_process(child)
        assert stack.await_end(job_id) == ["succeeded"], stack.describe(job_id)
        truth = quiet.result()
        summary = json.loads((alone / "out/results.json").read_text())["summary"]["fewshot_training"]
        yield Story(stack=stack, job_id=job_id, page=page, saved=saved, undisturbed=truth, summary=summary)


def stop_in_the_middle(stack: Stack, job_id: str) -> int:
    """Stop the computing process once a checkpoint and the progress of episodes stand; the checkpoint's episodes."""
    worker = stack.await_holder(job_id)
    manifest = stack.artifacts / job_id / ".waiting" / "1" / MANIFESTS[1]
    until(manifest.exists, 200, lambda: f"a checkpoint stands; {stack.describe(job_id)}")
    (child,) = stack.computing(worker)
    os.kill(child, signal.SIGSTOP)
    saved = int(json.loads(manifest.read_text())["body"]["counts"]["episodes"])
    assert 1 <= saved < TRAINED
    until(lambda: stack.row(job_id).progress["unit"] == "episodes")
    return saved


def test_a_killed_training_ends_as_one_that_nobody_disturbed(story: Story) -> None:
    stack, row = story.stack, story.stack.row(story.job_id)
    assert (row.attempt, row.failures) == (2, 1)
    assert row.summary["fewshot_training"]["model_sha256"] == story.summary["model_sha256"]
    rows = stack.layers(story.job_id)
    assert [each.layer for each in rows] == COMPONENTS
    assert {(each.kind, each.ordinal): each.sha256 for each in rows} == story.undisturbed.rows
    assert len(stack.events(story.job_id, "layer")) == len(rows)
    said = [event.data["message"] for event in stack.events(story.job_id, "log")]
    assert f"the training resumed after {story.saved} of {TRAINED} episodes" in said
    assert row.progress["unit"] == "episodes"
    assert (row.progress["done"], row.progress["percent"]) == (2 * 3 * TESTED, 100.0)


def test_the_log_counts_episodes_and_has_no_curvature(story: Story) -> None:
    (worker,) = story.stack.workers
    lines = [json.loads(line)["event"] for line in worker.lines() if '"fewshot_training ' in line]
    assert len(lines) == len(COMPONENTS) + 1
    assert f"episodes={TRAINED} " in lines[-1]
    assert len(re.findall(rf"(?:validation|test) accuracy {ACCURACY}", lines[-1])) == 2
    assert not [line for line in lines if "=-" in line or "λ" in line or "kappa" in line]


def test_files_are_those_of_the_undisturbed_run(story: Story, tmp_path: Path) -> None:
    with story.client as client:
        results = client.results(story.job_id)
        listed = {each.name: each for each in results.artifacts}
        # a download is compared with the digest that is listed
        for name in ("model.safetensors", "curve.json"):
            client.download(story.job_id, listed[name], tmp_path)
        assert len(client.log(story.job_id).splitlines()) == len(COMPONENTS)
    assert {name: listed[name].sha256 for name in story.undisturbed.artifacts} == story.undisturbed.artifacts
    assert len(json.loads((tmp_path / "curve.json").read_text())["episodes"]) == TRAINED
    with story.stack.client() as client:
        table = list(csv.DictReader(client.get(f"/v1/jobs/{story.job_id}/layers.csv").text.splitlines()))
    assert [row["layer"] for row in table] == COMPONENTS
    assert all(row["planned_bytes"] and row["measured_bytes"] for row in table)


@pytest.mark.nightly(
    covered_by=(
        "tests/kronoscope/test_train_test_example.py::test_a_plan_without_data",
        "tests/api/routes/test_estimates.py::test_an_estimate_is_waited_for",
    )
)
def test_the_service_plans_it(story: Story) -> None:
    with story.client as client:
        estimate = client.estimate(JOB)
    assert estimate.fits
    assert (estimate.plan or {})["stages"].keys() == {"training", "testing"}


def test_the_command_line_says_the_accuracy(story: Story) -> None:
    given = {"KRONOSCOPE_URL": story.stack.url, "KRONOSCOPE_KEY": story.stack.key, "COLUMNS": "140"}

    def said(*arguments: str) -> str:
        command = [*KRONOSCOPE, "results", story.job_id, *arguments]
        return subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=True).stdout

    assert re.search(rf"validation: {ACCURACY} .*; test: {ACCURACY} .*; 60 training episodes", said())
    assert "We computed the accuracy of FSCT_cosine on Conv4" in said("--methods")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_the_training(story: Story, width: int) -> None:
    page = story.page
    page.set_viewport_size({"width": width, "height": 900})
    shown = page.get_by_role("region", name="Few-shot training")
    cards = shown.locator(".figure-card")
    expect(cards.locator(".label")).to_have_text(["Accuracy, validation", "Accuracy, test", "Episodes", "Memory"])
    for card, tested in zip(cards.all(), story.summary["accuracies"], strict=False):
        expect(card).to_contain_text(f"{100 * tested['accuracy']:.1f}%± {100 * tested['half_width']:.1f}%; pixels ")
    expect(cards.nth(2)).to_contain_text(f"Episodes{TRAINED}")
    expect(cards.nth(3).locator(".big")).to_have_text(re.compile("MiB"))
    table = page.get_by_role("region", name="Component table")
    columns = ["Component", "Parameters", "Planned", "Measured", "Seconds"]
    if width < 720:  # the metric of the picture stands beside the name
        columns.insert(1, columns.pop())
    expect(table.get_by_role("columnheader")).to_have_text(columns)
    expect(table.locator("tbody tr")).to_have_count(len(COMPONENTS))
    expect(page.get_by_role("heading", level=2)).to_have_text(
        ["Components", "Few-shot training", "Memory", "Files", "Lineage"]
    )
    for card in page.locator("main .card").all():
        expect(card).not_to_be_empty()
    expect(page.get_by_label("Files")).to_contain_text("the component table for a spreadsheet")
    assert "–" not in page.locator(".facts").inner_text()
    assert "layer" not in shown.inner_text() + table.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_list_names_a_training_by_its_analysis(story: Story) -> None:
    page = story.page
    page.goto("/#/")
    cell = page.locator(f'td:has(a[href="#/jobs/{story.job_id}"])')
    expect(cell).to_have_text(re.compile(r"^Few-shot training\s*on strokes$"))
