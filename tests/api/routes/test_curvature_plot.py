"""The densities of a spectrum job on its page, from a real job's results: K-FAC's over the exact one and its band."""

import dataclasses
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect
from torch import nn

from catalog.analyses.analysis import LayerResult
from catalog.analyses.spectrum import SpectrumParams, SpectrumSummary
from catalog.frames import Summarised, layer_frame
from catalog.record import plain
from engine.analyses.spectrum import Spectrum
from jobs.queue import attempt_endings, attempt_writes
from jobs.records import LOCAL_TENANT
from tests.api import seeding
from tests.api.conftest import Embedded
from tests.api.routes.test_dashboard import browser, page  # noqa: F401 - fixtures
from tests.oracles import workspace

pytestmark = pytest.mark.browser

DOCUMENT = {**seeding.DOCUMENT, "kind": "spectrum", "spectrum": {"of": ["kfac", "ggn", "hessian"]}}


@pytest.fixture(scope="module")
def results() -> tuple[list[LayerResult], SpectrumSummary]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).double()
    data = [(torch.randn(40, 8, dtype=torch.float64), torch.randint(0, 4, (40,)))]
    params = SpectrumParams(of=("kfac", "ggn", "hessian"), k=3, steps=25, probes=4, trace_products=12)
    space = workspace(model, data, "classification", batch_size=20)
    space.options.kinds, space.options.params = ("spectrum",), {"spectrum": params}
    rows = []
    found = Spectrum(params, space).rows()
    while True:
        try:
            rows.append(next(found))
        except StopIteration as end:
            return rows, end.value


@pytest.fixture(scope="module")
def job(embedded: Embedded, results: Any) -> str:
    return seeded(embedded.engine, results)


def seeded(engine: Any, results: tuple[list[LayerResult], SpectrumSummary]) -> str:
    rows, summary = results
    claim = seeding.claimed(engine, LOCAL_TENANT, DOCUMENT)
    for row in rows:
        attempt_writes.write_layer(engine, claim, layer_frame(row))
    attempt_writes.write_summary(engine, claim, Summarised(kind="spectrum", summary=plain(summary)))
    attempt_endings.finish(engine, claim)
    return claim.job_id


def test_kfacs_density_is_drawn_over_the_exact_one_and_its_band(page: Page, job: str, results: Any) -> None:  # noqa: F811
    page.goto(f"/#/jobs/{job}")
    section = page.get_by_role("region", name="Density of the eigenvalues")
    expect(section.get_by_role("heading", level=2)).to_have_text("Density of the eigenvalues")
    expect(section.locator(".key")).to_have_text(["K-FAC", "GGN and its 95% band", "K-FAC", "GGN and its 95% band"])
    first = section.get_by_role("img", name="Density of the eigenvalues: K-FAC and GGN")
    # the band is drawn: pixels of the exact curve's colour that are nearly clear
    assert (
        first.locator("canvas").evaluate(
            """canvas => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let faint = 0;
            for (let at = 3; at < data.length; at += 4) faint += data[at] > 30 && data[at] < 80;
            return faint;
        }"""
        )
        > 200
    )
    # read by keyboard, the numbers are those of the record
    curvatures = {each.of: each for each in results[1].curvatures}
    first.focus()
    page.keyboard.press("Home")
    readout = section.locator("output").first
    expect(readout).to_contain_text("|λ| = ")
    for _ in range(200):
        page.keyboard.press("ArrowRight")
        if "GGN" in (readout.text_content() or ""):
            break
    said = readout.text_content() or ""
    density = curvatures["ggn"].density
    assert density is not None
    magnitude = float(said.split()[2].replace(",", ""))
    point = min(density.log10, key=lambda each: abs(10**each - magnitude))
    value = density.positive.density[density.log10.index(point)]
    assert value is not None
    assert f"GGN {100 * value:.1f}".removesuffix(".0") in said
    expect(section).to_contain_text("passes over the data")


def test_another_curvature_is_chosen_by_keyboard_and_its_negative_part_is_dashed(page: Page, job: str) -> None:  # noqa: F811
    page.goto(f"/#/jobs/{job}")
    section = page.get_by_role("region", name="Density of the eigenvalues")
    tabs = section.get_by_role("group", name="Exact curvature").get_by_role("button")
    expect(tabs).to_have_text(["GGN", "Hessian"])
    expect(tabs.nth(0)).to_have_attribute("aria-pressed", "true")
    tabs.nth(1).focus()
    page.keyboard.press("Enter")
    expect(tabs.nth(1)).to_have_attribute("aria-pressed", "true")
    expect(tabs.nth(1)).to_be_focused()
    keys = section.locator(".key")
    expect(keys.nth(1)).to_have_text("Hessian and its 95% band")
    expect(keys.nth(2)).to_have_text("Hessian, negative eigenvalues by magnitude")
    expect(keys.nth(2)).to_have_class("key G limit ")
    cards = page.locator(".figure-card")
    expect(cards).to_have_count(3)
    expect(cards.nth(2)).to_contain_text("Hessian, largest eigenvalue")
    expect(cards.nth(2)).to_contain_text("negative")
    rows = page.locator("table.layers tbody tr")
    expect(rows).to_have_count(2)
    expect(page.locator("table.layers thead")).to_contain_text("λ_max")


@pytest.mark.parametrize("width", [360, 1280])
def test_the_densities_do_not_stick_out(page: Page, job: str, width: int) -> None:  # noqa: F811
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(f"/#/jobs/{job}")
    section = page.get_by_role("region", name="Density of the eigenvalues")
    expect(section.get_by_role("img")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_without_a_density_there_is_no_figure(page: Page, embedded: Embedded, results: Any) -> None:  # noqa: F811
    rows, summary = results
    bare = dataclasses.replace(
        summary, curvatures=tuple(dataclasses.replace(each, density=None) for each in summary.curvatures)
    )
    page.goto(f"/#/jobs/{seeded(embedded.engine, (rows, bare))}")
    expect(page.locator(".figure-card")).to_have_count(3)
    expect(page.locator("table.layers tbody tr")).to_have_count(2)
    expect(page.get_by_role("region", name="Density of the eigenvalues")).to_have_count(0)
