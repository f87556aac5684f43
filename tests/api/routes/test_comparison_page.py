"""The page that compares jobs, chosen in the list, and the one of a series, in a browser."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from jobs.records import LOCAL_TENANT
from kronoscope.display.numbers import format_number
from tests.api import seeding
from tests.api.conftest import Embedded
from tests.api.routes.test_comparison import rows
from tests.api.routes.test_dashboard import browser, faultless_tab  # noqa: F401
from tests.api.routes.test_series import DOCUMENT, drawn_series, in_store

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def jobs(embedded: Embedded) -> list[str]:
    """Two jobs of the same layers, and one of others that has kept no spectra."""
    documents = [seeding.DOCUMENT | {"name": f"run {place}", "collection": {"seed": place}} for place in range(2)]
    made = [seeding.finished(embedded.engine, embedded.artifacts, LOCAL_TENANT, each) for each in documents]
    claim = seeding.claimed(embedded.engine, LOCAL_TENANT, seeding.DOCUMENT | {"name": "<b>other</b>"})
    for kind in claim.kinds:
        for place, name in enumerate(("head.0", "tail")):
            row = seeding.row(kind, place, name, "Linear", 10, [1.0, 3.0], [0.5, 1.0])
            seeding.attempt_writes.write_layer(embedded.engine, claim, seeding.layer_frame(row))
    seeding.summarise(embedded.engine, claim)
    seeding.attempt_endings.finish(embedded.engine, claim)
    return [*made, claim.job_id]


@pytest.fixture
def page(browser: Browser, embedded: Embedded) -> Iterator[Page]:  # noqa: F811
    with faultless_tab(browser, embedded.server.url) as opened:
        yield opened


def test_jobs_are_chosen_in_the_list_and_compared(page: Page, jobs: list[str], embedded: Embedded) -> None:
    page.goto("/#/")
    page.get_by_label(f"Compare run 0, {jobs[0][-8:]}").check()
    status = page.locator("main [role=status]").first
    expect(status).to_contain_text("1 job chosen; choose 2 to 8")
    expect(status.get_by_role("link", name="Compare")).to_have_count(0)
    page.get_by_label(f"Compare <b>other</b>, {jobs[2][-8:]}").check()
    # the list is drawn anew every few seconds, and keeps what was chosen
    page.get_by_role("button", name="succeeded", exact=True).click()
    expect(page.get_by_label(f"Compare run 0, {jobs[0][-8:]}")).to_be_checked()
    status.get_by_role("link", name="Compare").click()
    expect(page.get_by_role("heading", name="Comparison")).to_be_visible()
    assert page.url.endswith(f"#/compare/{jobs[0]},{jobs[2]}")
    facts = page.locator("main dl.facts a")
    expect(facts).to_have_text(["run 0", "<b>other</b>"])
    assert [each.get_attribute("href") for each in facts.all()] == [f"#/jobs/{jobs[0]}", f"#/jobs/{jobs[2]}"]
    only = page.get_by_label("Layers that not all have")
    expect(only).to_contain_text("Of <b>other</b>, and not of all: tail.")
    expect(only).to_contain_text("features.0, features.1")
    # a number of both, as the API has it
    page.get_by_label("Number", exact=True).select_option(label="trace")
    with embedded.server.client() as client:
        one, two = (rows(client, each)["capacity", "head.0"]["metrics"]["trace"] for each in (jobs[0], jobs[2]))
    cells = page.get_by_role("row", name=re.compile("^head.0")).get_by_role("cell")
    expect(cells).to_have_text([format_number(each) for each in (one, two, two - one, two / one)])
    alone = page.get_by_role("row", name=re.compile("^tail")).get_by_role("cell")
    expect(alone).to_have_text(["–", format_number(6.0), "–", "–"])
    expect(page.get_by_text("Fewer than two layers of both jobs")).to_be_visible()
    expect(page.get_by_text("No spectrum of this layer was kept by <b>other</b>")).to_be_visible()


def test_both_spectra_and_the_scatter_are_drawn(page: Page, jobs: list[str]) -> None:
    page.goto(f"/#/compare/{jobs[0]},{jobs[1]}")
    expect(page.locator(".picture")).to_have_count(2)
    scatter, spectra = page.locator(".picture").all()
    assert re.match(r"\w+ of 7 layers: run 1 against run 0, from ", scatter.get_attribute("aria-label") or "")
    label = spectra.get_attribute("aria-label") or ""
    assert [f"{side} of run {place}" in label for place in range(2) for side in "AG"] == [True] * 4
    scatter.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("output").first).to_contain_text("features")
    page.get_by_label("Layer", exact=True).select_option(label="head.2")
    expect(page.get_by_label(re.compile("^Spectra of head.2"))).to_be_visible()
    documents = page.get_by_role("region", name="Differences of the documents")
    expect(documents.get_by_role("row").nth(1)).to_have_text("collection.seed01")
    expect(page.get_by_label("Layers that not all have")).to_have_count(0)


def test_of_three_each_stands_beside_the_first(page: Page, jobs: list[str]) -> None:
    page.goto(f"/#/compare/{','.join(jobs)}")
    expect(page.get_by_role("columnheader", name="ratio")).to_have_count(2)
    page.get_by_label("Job beside the first").select_option(label="<b>other</b>")
    expect(page.get_by_text("Fewer than two layers of both jobs")).to_be_visible()


def test_what_cannot_be_compared_is_said(page: Page, jobs: list[str]) -> None:
    page.goto(f"/#/compare/{jobs[0]}")
    expect(page.get_by_role("alert")).to_contain_text("must be 2 to 8 ids")


def test_a_series_is_drawn_with_what_failed(page: Page, embedded: Embedded) -> None:
    page.goto(f"/#/jobs/{drawn_series(embedded)}")
    card = page.get_by_label("Series", exact=True)
    expect(card.get_by_role("heading", name="Series of 6 checkpoints")).to_be_visible()
    expect(card.locator(".plot-pair .picture")).to_have_count(2)
    stability, overlaps = card.locator(".plot-pair .picture").all()
    assert stability.get_attribute("aria-label") == (
        "λ_max over 6 checkpoints: λ_max of K-FAC, 2 / learning rate, from 2 to 12"
    )
    assert overlaps.get_attribute("aria-label") == (
        "overlap with the one before over 6 checkpoints: k = 1, k = 5, from 0.02 to 0.4"
    )
    stability.focus()
    for expected in (2, 4, None, 8):
        page.keyboard.press("ArrowRight")
        said = f"λ_max of K-FAC {format_number(expected)}   2 / learning rate 4"
        expect(card.locator("output").first).to_contain_text(said)
    card.get_by_label("Number", exact=True).select_option(label="trace")
    expect(card.get_by_label(re.compile("^trace over 6 checkpoints: whole model, a, b"))).to_be_visible()
    # a number that layers alone have
    card.get_by_label("Number", exact=True).select_option(label="trace_A")
    expect(card.get_by_label(re.compile("^trace_A over 6 checkpoints: a, b"))).to_be_visible()
    listed = page.get_by_role("region", name="Checkpoints")
    expect(listed.get_by_role("row").nth(3)).to_contain_text("/models/step2 holds no weights")
    expect(page.get_by_text("Checkpoints 5 and 6 could not be compared: not enough memory")).to_be_visible()
    listed.get_by_role("link", name="step1").click()
    expect(page.locator("main dl.facts").first).to_contain_text("of the series")


def test_a_series_under_way_shows_how_far_it_is(page: Page, embedded: Embedded) -> None:
    in_store(embedded.artifacts)
    with embedded.server.client() as client:
        series = client.post("/v1/jobs", json=DOCUMENT | {"name": "under way"}).json()["id"]
        page.goto(f"/#/jobs/{series}")
        expect(page.locator("main h1 + .pill")).to_have_text("In series")
        expect(page.get_by_label("Series", exact=True)).to_contain_text("Nothing to draw yet.")
        point = client.get(f"/v1/jobs/{series}/series").json()["points"][0]
        claim = seeding.claims.claim(embedded.engine, point["job"], "node:1", "token", 600)
        assert claim is not None
        seeding.attempt_endings.finish(embedded.engine, claim)
        expect(page.get_by_text("Measuring and comparing checkpoints · 1 of 7 jobs")).to_be_visible()
        assert client.post(f"/v1/jobs/{series}:cancel").status_code == 202
    expect(page.locator("main h1 + .pill")).to_have_text("Cancelled")
