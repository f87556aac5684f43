"""The page in a real browser: no console error, no breach of its own policy, everything it promises to show."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Route, expect

from api.routes import dashboard
from api.routes.dashboard import analyses_script
from catalog import ANALYSES
from catalog.frames import Failed, Finished, layer_frame
from jobs.codec import parse_document
from jobs.devices.registry import Device, Worker, pause, register
from jobs.devices.registry import remove as forget
from jobs.objects.artifacts import ArtifactFolder
from jobs.queue import attempt_endings, attempt_writes, claims
from jobs.records import LOCAL_TENANT
from jobs.repository.store import read_job, request_cancel
from jobs.repository.submission import submit
from jobs.schema.identifiers import new_id
from tests.api import seeding
from tests.api.chromium import PATIENCE_MS, chromium
from tests.api.conftest import Embedded, Keyed
from tests.machine.stopwatch import until
from tests.sharpness import ROW, SHARPNESS
from worker.supervision.job_reproduction import with_original

pytestmark = pytest.mark.browser

DASHBOARD = Path(dashboard.__file__).parents[1] / "dashboard"
MARKUP = "<img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@contextlib.contextmanager
def faultless_tab(browser: Browser, url: str) -> Iterator[Page]:
    """Open a tab; fail in the end at any console error, uncaught exception or policy breach."""
    context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("console", lambda said: complaints.extend(_complaint(said)))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("requestfailed", lambda failed: complaints.append(f"{failed.url}: {failed.failure}"))
    opened.add_init_script(
        "document.addEventListener('securitypolicyviolation', e => console.error('CSP', e.violatedDirective))"
    )
    yield opened
    # requests that a navigation aborts, and the 422 that a bad document is meant to bring, are no faults
    left = [each for each in complaints if "ERR_ABORTED" not in each and "status of 422" not in each]
    context.close()
    assert left == []


@pytest.fixture
def page(browser: Browser, embedded: Embedded) -> Iterator[Page]:
    with faultless_tab(browser, embedded.server.url) as opened:
        yield opened


def _complaint(said: ConsoleMessage) -> Iterator[str]:
    # the badge in the corner asks for a database that answers within a second; on a slow machine it may say no
    slow = said.location.get("url", "").endswith("/readyz") and "status of 503" in said.text
    if said.type in ("error", "warning") and not slow:
        yield f"{said.text} {said.location}"


@contextlib.contextmanager
def held(page: Page, path: str) -> Iterator[None]:
    """Requests for ``path`` wait until the block ends."""
    waiting: list[Route] = []
    page.route(path, lambda route: waiting.append(route))  # noqa: PLW0108 - a built-in method takes no mark of theirs
    yield
    for each in waiting:
        each.continue_()
    page.unroute(path)


@contextlib.contextmanager
def answered_late(page: Page, path: str) -> Iterator[list[Any]]:
    """The next request for ``path`` is answered when the block ends, with what was so when it was asked."""
    answers: list[tuple[Route, Any]] = []
    page.route(path, lambda route: answers.append((route, route.fetch())), times=1)
    yield answers
    until(lambda: page.wait_for_timeout(20) or answers)
    for route, answer in answers:
        route.fulfill(response=answer)
    page.wait_for_timeout(200)


@contextlib.contextmanager
def tab_of(browser: Browser, embedded: Embedded) -> Iterator[Page]:
    """A tab that may complain."""
    with contextlib.closing(browser.new_context(base_url=embedded.server.url)) as context:
        context.set_default_timeout(PATIENCE_MS)
        yield context.new_page()


@pytest.fixture(scope="module")
def finished(embedded: Embedded) -> str:
    return seeding.finished(embedded.engine, embedded.artifacts, LOCAL_TENANT)


@pytest.mark.part(of=2, law="the page shows it")
def test_the_job_page_shows_results(page: Page, finished: str) -> None:
    page.goto(f"/#/jobs/{finished}")
    expect(page.get_by_role("heading", level=1)).to_have_text("digits_cnn")
    expect(page.get_by_text("Succeeded", exact=True)).to_be_visible()
    expect(page.get_by_text("Effective dimension").first).to_be_visible()
    rows = page.locator("table.layers tbody tr")
    expect(rows).to_have_count(8)
    expect(rows.nth(7)).to_contain_text("not covered")
    expect(rows.nth(7)).to_contain_text("no gradient")
    expect(page.get_by_role("img", name="trainable parameters are covered")).to_be_visible()


@pytest.mark.part(of=2, law="the page shows it")
def test_a_part_of_a_model_does_not_look_like_a_success(page: Page, embedded: Embedded) -> None:
    job_id = seeding.partly_measured(embedded.engine, embedded.artifacts, LOCAL_TENANT)
    page.goto(f"/#/jobs/{job_id}")
    expect(page).to_have_title("factors + capacity · 35.1% measured · Kronoscope")
    expect(page.locator(".pill")).to_have_text("Partial, 35.1%")
    notice = page.get_by_role("status", name="Part of the model")
    expect(notice).to_contain_text("Only 35.1% of the model was measured")
    expect(notice).to_contain_text("(49.6%), embedding renormalised: words.weight (Embedding). To cover them: renorma")
    expect(notice).to_contain_text("collection.min_coverage: 0.35.")
    cards = page.locator(".figure-card")
    expect(cards).to_have_count(7)
    for card in cards.all():
        expect(card).to_contain_text("of the 35.1% that was measured")
    expect(page.get_by_text("figures of the 35.1% that was measured")).to_be_visible()
    page.goto("/#/")
    expect(page.locator(f'tr:has(a[href="#/jobs/{job_id}"]) .pill')).to_have_text("Partial, 35.1%")


@pytest.mark.part(of=2, law="the page shows it")
def test_a_model_of_diagonals_does_not_look_like_one_of_blocks(page: Page, embedded: Embedded) -> None:
    job_id = seeding.of_diagonals(embedded.engine, embedded.artifacts, LOCAL_TENANT)
    page.goto(f"/#/jobs/{job_id}")
    expect(page.locator(".pill")).to_have_text("Succeeded, 91.7% diagonal")
    card = page.get_by_role("region", name="Coverage")
    expect(card.get_by_role("img", name="covered: 8.3% full block, 91.7% diagonal alone")).to_be_visible()
    lines = card.locator(".coverage-key li")
    expect(lines).to_have_count(2)
    expect(lines.nth(1)).to_contain_text("91.7% diagonal alone: 29,133 of 31,770")
    expect(lines.nth(1)).to_contain_text("positions (no product to factorise)")
    page.goto("/#/")
    pill = page.locator(f'tr:has(a[href="#/jobs/{job_id}"]) .pill')
    expect(pill).to_have_text("Succeeded, 91.7% diagonal")
    page.get_by_role("button", name="partial", exact=True).click()
    expect(pill).to_have_count(0)
    page.get_by_role("button", name="diagonal", exact=True).click()
    expect(pill).to_be_visible()


@pytest.mark.part(of=2, law="the page shows it")
def test_starved_experts_and_those_that_no_token_reached_are_named(page: Page, embedded: Embedded) -> None:
    job_id = seeding.of_experts(embedded.engine, embedded.artifacts, LOCAL_TENANT)
    experts = page.request.get(f"/v1/jobs/{job_id}").json()["coverage"]["experts"]
    assert (experts["starved"], len(experts["most_starved"]), experts["unreached"]) == (9, 8, 1)
    page.goto(f"/#/jobs/{job_id}")
    card = page.get_by_role("region", name="Experts", exact=True)
    expect(card).to_contain_text("10 layers, 9 starved, 1 not reached")
    expect(card).to_contain_text("was sent 0 to 9 tokens.")
    rows = card.locator("tbody tr")
    expect(rows).to_have_count(8)
    expect(rows.first.locator("td")).to_have_text(["experts.1", "1", "1 of 64 (A)", "64 ×"])
    expect(card).to_contain_text("1 more is starved.")
    expect(card).to_contain_text("No token reached <b>experts</b>.down_proj[9].")


@pytest.mark.part(of=2, law="the page shows it")
def test_where_a_factory_raised_stands_on_the_page(page: Page, embedded: Embedded) -> None:
    page.goto(f"/#/jobs/{seeding.failed_in_factory(embedded.engine, LOCAL_TENANT)}")
    card = page.get_by_role("alert", name="Failure")
    expect(card).to_contain_text("raised ValueError: no weights")
    expect(card.locator("p code").first).to_have_text("lab.models:make")
    calls = card.get_by_role("listitem")
    expect(calls).to_have_text(["lab.models:12 in make", "lab.weights:7 in Store.read"])
    expect(page.get_by_text("SECRET")).to_have_count(0)


@pytest.mark.part(of=2, law="the page shows it")
def test_what_was_not_read_as_it_stands_is_a_notice_on_the_page(page: Page, embedded: Embedded) -> None:
    job_id = seeding.noticed(embedded.engine, embedded.artifacts, LOCAL_TENANT)
    page.goto(f"/#/jobs/{job_id}")
    notices = page.get_by_label("Notices of the inputs")
    expect(notices).to_contain_text("3 of 4 texts are longer than 12 tokens and are cut there")


def reproduced(embedded: Embedded, original: str | None, digest: str) -> str:
    """A job that has succeeded, and says that it reproduces another."""
    claim = seeding.claimed(embedded.engine, LOCAL_TENANT)
    seeding.write_rows(embedded.engine, embedded.artifacts, claim)
    seeding.summarise(embedded.engine, claim)
    told = dataclasses.replace(claim, document={**claim.document, "reproduces": original})
    folder, last = ArtifactFolder(embedded.artifacts), Finished(model_sha256=digest * 64)
    attempt_endings.finish(embedded.engine, claim, with_original(embedded.engine, folder, told, last))
    return claim.job_id


@pytest.mark.part(of=2, law="the page shows it")
def test_a_job_that_reproduces_another_says_whether_it_does(page: Page, embedded: Embedded) -> None:
    first = reproduced(embedded, None, "a")
    card = page.get_by_role("status", name="Reproduction")
    for digest, said in (("a", "The same numbers again"), ("b", f"model_sha256: {'a' * 64} then, {'b' * 64} now")):
        page.goto(f"/#/jobs/{reproduced(embedded, first, digest)}")
        expect(card).to_contain_text(said)
    card.get_by_role("link").click()
    expect(page).to_have_url(re.compile(f"#/jobs/{first}$"))
    expect(page.locator(".figure-card").first).to_be_visible()
    expect(card).to_have_count(0)


@pytest.mark.part(of=2, law="the page shows it")
def test_a_refused_analysis_does_not_look_like_a_success(page: Page, embedded: Embedded) -> None:
    job_id = seeding.partly_refused(embedded.engine, embedded.artifacts, LOCAL_TENANT)
    page.goto(f"/#/jobs/{job_id}")
    expect(page).to_have_title("factors + capacity · 1 of 2 refused · Kronoscope")
    expect(page.locator(".pill")).to_have_text("Partial, 1 of 2 refused")
    notice = page.get_by_role("status", name="Refused analyses")
    expect(notice).to_contain_text("1 analysis of 2 was refused")
    expect(notice).to_contain_text("Capacity metrics: layer features.0 has no curvature; take stabilisation")
    expect(notice.locator("code").first).to_have_text("features.0")
    expect(page.locator(".figure-card").first).to_be_visible()
    page.goto("/#/")
    row = page.locator(f'tr:has(a[href="#/jobs/{job_id}"]) .pill')
    expect(row).to_have_text("Partial, 1 of 2 refused")
    expect(row).to_have_attribute("title", re.compile("capacity: layer `features.0` has no curvature"))


@pytest.mark.part(of=2, law="the page shows it")
def test_the_spectrum_is_drawn_to_scale(page: Page, finished: str) -> None:
    page.goto(f"/#/jobs/{finished}")
    page.get_by_role("button", name="features.3", exact=True).click()
    picture = page.locator("#spectrum .picture")
    expect(picture).to_have_attribute("aria-label", re.compile("features.3"))
    keys = page.locator("#spectrum .key")
    expect(keys).to_have_text([re.compile("^A: 145 .*16 at zero"), re.compile("^G: 32 "), re.compile("^clip at")])
    A = [value for value in seeding.spectrum(145, 1.0, 1.35, dead=16) if value > 0][::-1]
    readout = page.locator("#spectrum .readout")
    picture.focus()
    page.keyboard.press("Home")
    expect(readout).to_contain_text("№ 1 ")
    (x1, y1), *_ = dots(picture)
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("№ 10 ")
    (x10, y10), *_ = dots(picture)
    page.keyboard.press("End")
    expect(readout).to_contain_text("№ 129")
    (x_last, y_last), *_ = dots(picture)
    # log-log: equal ratios are equal distances on both axes
    assert x10 - x1 == pytest.approx((x_last - x1) / math.log10(len(A)), abs=2)
    assert y10 - y1 == pytest.approx((y_last - y1) * math.log(A[0] / A[9]) / math.log(A[0] / A[-1]), abs=2)
    assert y1 < y10 < y_last
    rows = inked_rows(picture, x10)
    assert rows
    assert min(abs(row - y10) for row in rows) <= 2


def dots(picture: Locator) -> list[tuple[float, float]]:
    """Where the values under the cursor are drawn, one place for each curve, from the top left of the plot's area."""
    moves = picture.locator(".u-cursor-pt").evaluate_all("dots => dots.map(dot => dot.style.transform)")
    numbers = [re.findall(r"-?[\d.]+", move) for move in moves]
    return [(float(x), float(y)) for x, y in numbers]


def inked_rows(picture: Locator, x: float) -> list[float]:
    """The rows of the canvas that have the colour of the first series at ``x``, as distances from the plot's top."""
    rows: list[float] = picture.evaluate(
        """(picture, x) => {
            const canvas = picture.querySelector("canvas");
            const area = picture.querySelector(".u-over");
            const left = Math.round((area.offsetLeft + x) * devicePixelRatio);
            const pixels = canvas.getContext("2d").getImageData(left, 0, 1, canvas.height).data;
            const wanted = getComputedStyle(document.documentElement).getPropertyValue("--series-a").trim();
            const rows = [];
            for (let row = 0; row < canvas.height; row += 1) {
                const part = [...pixels.slice(4 * row, 4 * row + 3)];
                const hex = "#" + part.map((value) => value.toString(16).padStart(2, "0")).join("");
                if (hex === wanted) rows.push(row / devicePixelRatio - area.offsetTop);
            }
            return rows;
        }""",
        x,
    )
    return rows


@pytest.mark.part(of=2, law="the page shows it")
def test_a_layer_chosen_before_the_spectra_are_there_is_the_one_that_is_opened(page: Page, finished: str) -> None:
    with held(page, "**/results"):
        page.goto(f"/#/jobs/{finished}")
        page.get_by_role("button", name="features.3", exact=True).click()
        expect(page.locator("#spectrum")).to_have_count(0)
    expect(page.locator("#spectrum .picture")).to_have_attribute("aria-label", re.compile("features.3"))
    expect(page.get_by_role("combobox", name="Layer")).to_have_value("features.3")


@pytest.mark.part(of=2, law="the page shows it")
def test_a_view_that_was_left_before_it_was_there_does_not_come_back(page: Page, finished: str) -> None:
    with held(page, "**/v1/analyses"):
        with page.expect_request("**/v1/analyses"):
            page.goto(f"/#/jobs/{finished}")
        page.get_by_role("link", name="Jobs", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Jobs")
        expect(page.locator("table.jobs")).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_have_text("Jobs")
    assert page.title().startswith("Jobs")


@pytest.mark.part(of=2, law="the page shows it")
def test_rows_that_come_late_do_not_take_the_place_of_later_ones(page: Page, embedded: Embedded) -> None:
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    page.add_init_script("Date.now = () => globalThis.later ?? 1_000_000_000_000")
    # the second of two, for the analysis that is opened first is asked for first
    with page.expect_response("**/layers?kind=factors*"):
        page.goto(f"/#/jobs/{claim.job_id}")
    usual = page.get_by_role("columnheader", name="Effective dim.")
    with answered_late(page, "**/layers?*") as late:
        seeding.write_rows(embedded.engine, embedded.artifacts, claim, ("factors",))
        seeding.progress(embedded.engine, claim, stage="factors", done=7, total=7, unit="layers", layers_done=7)
        expect(page.get_by_text("7 of 7 layers")).to_be_visible()
        # it is not yet time for more rows: they are asked for beside the watch once it is
        with page.expect_request("**/layers?*"):
            page.evaluate("globalThis.later = 1_000_000_002_000")
        until(lambda: page.wait_for_timeout(20) or late)
        seeding.write_rows(embedded.engine, embedded.artifacts, claim, ("capacity",))
        seeding.summarise(embedded.engine, claim)
        attempt_endings.finish(embedded.engine, claim)
        expect(usual).to_be_visible()
    expect(usual).to_be_visible()


@pytest.mark.part(of=2, law="the page shows it")
def test_a_cancellation_that_is_answered_late_does_not_undo_the_end(page: Page, embedded: Embedded) -> None:
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    page.goto(f"/#/jobs/{claim.job_id}")
    ended = page.get_by_text("Cancelled", exact=True)
    with answered_late(page, "**/v1/jobs/*:cancel"):
        page.get_by_role("button", name="Cancel job").click()
        expect(page.get_by_role("button", name="Cancelling…")).to_be_visible()
        attempt_endings.hand_back(embedded.engine, claim)
        expect(ended).to_be_visible()
    expect(ended).to_be_visible()


@pytest.mark.part(of=2, law="the page shows it")
def test_what_is_pressed_is_not_exchanged_before_it_is_let_go(page: Page, embedded: Embedded) -> None:
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    page.goto("/")
    for path, target in (
        ("**/v1/jobs?limit=25", page.locator(f'a[href="#/jobs/{claim.job_id}"]')),
        (f"**/v1/jobs/{claim.job_id}?wait=20", page.get_by_role("button", name="Cancel job")),
    ):
        target.hover()
        with page.expect_response(path):
            page.mouse.down()
            seeding.progress(embedded.engine, claim, stage="collection", done=25, total=29, unit="batches", percent=60)
        page.wait_for_timeout(200)
        page.mouse.up()
        expect(page.get_by_role("heading", level=1)).to_have_text("digits_cnn")
        seeding.progress(embedded.engine, claim, stage="collection", done=26, total=29, unit="batches", percent=61)
        # An answer that came while the button is down would be held, and no further one asked for.
        expect(page.get_by_role("progressbar", name="Progress of the job")).to_have_attribute("aria-valuenow", "61")
    expect(page.get_by_role("button", name="Cancelling…")).to_be_visible()
    attempt_endings.hand_back(embedded.engine, claim)


@pytest.mark.part(of=2, law="the page shows it")
def test_how_long_a_job_will_take_is_what_the_service_says(page: Page, embedded: Embedded) -> None:
    claim = seeding.claimed(embedded.engine, LOCAL_TENANT)
    page.goto(f"/#/jobs/{claim.job_id}")
    card = page.get_by_role("region", name="Progress")
    known = {"stage": "collection", "done": 17, "total": 29, "unit": "batches", "percent": 41.0}
    seeding.progress(embedded.engine, claim, **known, eta_seconds=7805.0)
    expect(card).to_contain_text("about 2 h 10 min left")
    expect(card.get_by_role("progressbar").first).to_have_attribute("aria-valuenow", "41")
    unknown = {"stage": "collection", "done": 1234, "total": None, "unit": "batches", "percent": None}
    seeding.progress(embedded.engine, claim, **unknown, eta_seconds=None)
    expect(card).to_contain_text("1,234 batches")
    assert "left" not in card.inner_text()
    assert "%" not in card.inner_text()
    assert card.get_by_role("progressbar").first.get_attribute("aria-valuenow") is None
    attempt_endings.hand_back(embedded.engine, claim)


@pytest.mark.part(of=2, law="the page shows it")
def test_a_spectrum_that_is_late_is_not_the_one_before(page: Page, finished: str) -> None:
    picture = page.locator("#spectrum .picture")
    page.goto(f"/#/jobs/{finished}")
    expect(picture).to_have_attribute("aria-label", re.compile("features.0"))
    with held(page, "**/spectra/2.json?*"):
        page.get_by_role("button", name="features.3", exact=True).click()
        expect(picture).to_have_count(0)
    expect(picture).to_have_attribute("aria-label", re.compile("features.3"))


@pytest.mark.part(of=2, law="the page shows it")
def test_a_list_that_fails_late_does_not_take_the_place_of_a_later_one(browser: Browser, embedded: Embedded) -> None:
    seeding.failed(embedded.engine, LOCAL_TENANT)
    with tab_of(browser, embedded) as tab:
        tab.goto("/")
        failed = tab.locator("table.jobs tbody tr[data-state=failed]")
        expect(failed.first).to_be_visible()
        waiting: list[Route] = []
        tab.route("**/v1/jobs?limit=25", lambda route: waiting.append(route), times=1)  # noqa: PLW0108 - as above
        with tab.expect_request("**/v1/jobs?limit=25"):
            tab.get_by_role("button", name="all", exact=True).click()
        tab.get_by_role("button", name="failed", exact=True).click()
        expect(tab.locator("table.jobs tbody tr:not([data-state=failed])")).to_have_count(0)
        waiting[0].fulfill(status=503, json={"detail": "The disk is asleep."})
        tab.wait_for_timeout(200)
        assert tab.get_by_text("The disk is asleep.").count() == 0
        expect(failed.first).to_be_visible()


@pytest.mark.part(of=2, law="the page shows it")
def test_a_submission_whose_answer_was_lost_is_no_second_job(browser: Browser, embedded: Embedded) -> None:
    with tab_of(browser, embedded) as tab:
        tab.goto("/#/new")
        tab.get_by_label("Job document").fill(json.dumps({**seeding.DOCUMENT, "labels": {"lost": "answer"}}))
        tab.route("**/v1/jobs", lambda route: (route.fetch(), route.abort()), times=1)
        tab.get_by_role("button", name="Submit job").click()
        expect(tab.get_by_text("The service does not answer.")).to_be_visible()
        tab.get_by_role("button", name="Submit job").click()
        expect(tab.get_by_text("Waiting for a worker")).to_be_visible()
        again = tab.request.get("/v1/jobs", params={"label": "lost=answer"})
        assert len(again.json()["items"]) == 1
        # what was answered is over: the same document is another job from here on
        tab.goto("/#/new")
        tab.get_by_label("Job document").fill(json.dumps({**seeding.DOCUMENT, "labels": {"lost": "answer"}}))
        tab.get_by_role("button", name="Submit job").click()
        expect(tab.get_by_text("Waiting for a worker")).to_be_visible()
        again = tab.request.get("/v1/jobs", params={"label": "lost=answer"})
        assert len(again.json()["items"]) == 2


@pytest.mark.part(of=2, law="the page shows it")
def test_a_file_that_came_at_last_has_its_note_again(browser: Browser, embedded: Embedded, finished: str) -> None:
    with tab_of(browser, embedded) as tab:
        tab.route("**/log", lambda route: route.fulfill(status=503, json={"detail": "The disk is asleep."}), times=1)
        tab.goto(f"/#/jobs/{finished}")
        file = tab.get_by_role("listitem").filter(has_text="log.jsonl")
        file.get_by_role("button").click()
        expect(file).to_contain_text("The disk is asleep.")
        with tab.expect_download():
            file.get_by_role("button").click()
        expect(file).to_contain_text("reproducibility record of every layer")


@pytest.mark.part(of=2, law="the page shows it")
def test_an_answer_that_breaks_off_is_asked_for_again(browser: Browser, embedded: Embedded, finished: str) -> None:
    with tab_of(browser, embedded) as tab:
        tab.route("**/results", lambda route: route.fulfill(body='{"job": {', content_type="application/json"), times=1)
        tab.goto(f"/#/jobs/{finished}")
        expect(tab.get_by_text("broke off. Trying again.")).to_be_visible()
        expect(tab.locator("#spectrum .picture canvas")).to_be_visible()


@pytest.mark.part(of=2, law="the page shows it")
def test_a_service_without_room_for_one_more_who_waits_is_not_besieged(page: Page, embedded: Embedded) -> None:
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    asked: list[float] = []

    def at_once(route: Route) -> None:
        asked.append(time.monotonic())
        route.fulfill(status=304)

    page.route("**/v1/jobs/*?wait=20", at_once)
    began = time.monotonic()
    page.goto(f"/#/jobs/{claim.job_id}")
    expect(page.get_by_role("progressbar", name="Progress of the job")).to_be_visible()
    page.wait_for_timeout(700)
    assert 1 <= len(asked) <= 2 + (time.monotonic() - began)
    attempt_endings.hand_back(embedded.engine, claim)


@pytest.mark.part(of=2, law="the page shows it")
def test_a_service_that_has_fallen_silent_is_not_called_ready(page: Page) -> None:
    page.clock.install()
    page.goto("/")
    expect(page.locator("#service")).to_have_text("Service ready")
    with held(page, "**/readyz"):
        with page.expect_request("**/readyz"):
            page.clock.fast_forward(15_000)
        page.clock.fast_forward(20_000)
        expect(page.locator("#service")).to_have_text("Service not ready")


@pytest.mark.parametrize("path", ["**/results", "**/layers?*"])
@pytest.mark.part(of=2, law="the page shows it")
def test_what_cannot_be_had_for_a_moment_is_asked_for_again(
    browser: Browser, embedded: Embedded, finished: str, path: str
) -> None:
    with contextlib.closing(browser.new_context(base_url=embedded.server.url)) as context:
        context.set_default_timeout(PATIENCE_MS)
        tab = context.new_page()
        tab.route(path, lambda route: route.fulfill(status=503, json={"detail": "The disk is asleep."}))
        tab.goto(f"/#/jobs/{finished}")
        notice = tab.get_by_text("The disk is asleep. Trying again.")
        expect(notice).to_be_visible()
        tab.unroute(path)
        expect(tab.locator("#spectrum .picture")).to_have_attribute("aria-label", re.compile("features.0"))
        expect(tab.locator("table.layers tbody tr")).to_have_count(8)
        expect(notice).to_have_count(0)


@pytest.mark.part(of=2, law="the page shows it")
def test_the_models_spectrum_is_drawn_to_scale(page: Page, finished: str) -> None:
    page.goto(f"/#/jobs/{finished}")
    card = page.get_by_role("region", name="Spectrum of the model")
    made = seeding.model()
    assert made.density is not None
    shown = list(itertools.dropwhile(lambda count: not count, made.density.counts))
    pictures = card.locator(".picture")
    expect(pictures).to_have_count(2)
    density, curve = pictures.all()
    bins = walk(page, density, len(shown))
    base = max(y for _, y in bins)
    heights = [base - y for _, y in bins]
    least = min(shown)
    scale = max(heights) / (max(shown) - least)
    assert heights == pytest.approx([(count - least) * scale for count in shown], abs=1.5)
    points = walk(page, curve, 37)
    # half decades are evenly spaced, and the curve falls
    gaps = [right[0] - left[0] for left, right in itertools.pairwise(points)]
    assert gaps == pytest.approx([sum(gaps) / 36] * 36, abs=1.5)
    assert [y for _, y in points] == sorted(y for _, y in points)
    assert points[0][1] < points[-1][1]
    expect(card.locator(".readout").nth(1)).to_contain_text("directions at damping")
    expect(card.get_by_text("0.06 in features.0")).to_be_visible()
    expect(card.get_by_text("effective rank (7 layers)")).to_be_visible()
    star = page.locator("table.layers tbody tr").first.get_by_role("note")
    expect(star).to_have_attribute("aria-label", re.compile("^not converged: extrapolates to "))


def walk(page: Page, picture: Locator, count: int) -> list[tuple[float, float]]:
    """The places of the first curve's values, gone through by keyboard; the last step must stay where it is."""
    picture.focus()
    page.keyboard.press("Home")
    places = [dots(picture)[0]]
    for _ in range(count):
        page.keyboard.press("ArrowRight")
        places.append(dots(picture)[0])
    assert places[-1] == places[-2] != places[-3]
    return places[:-1]


@pytest.mark.part(of=2, law="the page shows it")
def test_the_table_sorts_by_keyboard_and_filters(page: Page, finished: str) -> None:
    page.goto(f"/#/jobs/{finished}")
    expect(page.locator("table.layers tbody tr")).to_have_count(8)
    page.get_by_role("button", name="Parameters").focus()
    page.keyboard.press("Enter")
    head = page.get_by_role("columnheader", name="Parameters")
    expect(head).to_have_attribute("aria-sort", "descending")
    expect(page.locator("table.layers tbody tr").first).to_contain_text("features.7")
    page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(page.locator("table.layers tbody tr").first).to_contain_text("head.temperature")
    page.get_by_role("button", name="factors", exact=True).click()
    expect(page.get_by_role("columnheader", name="Trace of A")).to_be_visible()
    page.get_by_label("Filter layers by name").fill("head")
    expect(page.locator("table.layers tbody tr")).to_have_count(3)


def test_a_new_analysis_is_shown_by_its_record_alone(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ANALYSES, "sharpness", SHARPNESS)
    script = analyses_script()
    page.route("**/analyses.js", lambda route: route.fulfill(body=script, content_type="text/javascript"))
    page.goto("/")
    shown = page.evaluate(
        """async ([row, summary]) => {
          const { LayerTable } = await import("/dashboard/scripts/layers.js");
          const { figuresCard } = await import("/dashboard/scripts/figures.js");
          const place = document.createElement("div");
          new LayerTable(place, () => undefined).show([row], ["sharpness"]);
          const texts = (parent, what) => [...parent.querySelectorAll(what)].map((each) => each.textContent);
          const card = figuresCard("sharpness", summary, "Sharpness");
          return [texts(place, "thead th"), texts(place, "td.numeric"), texts(card, ".figure-card *"),
            [...place.querySelectorAll(".small-bar")].map((bar) => bar.title)];
        }""",
        [ROW, {"layers": 3, "largest_eigenvalue": 12.5}],
    )
    assert shown == [
        ["Layer", "Type", "A × G", "Parameters", "Largest eigenvalue", "Step", "Time"],
        ["–", "5,130", "12.5", "0.16", "–"],
        ["Sharpness", "12.5", "of 3 layers"],
        ["100.0%"],
    ]


@pytest.mark.part(of=2, law="the page shows it")
def test_every_script_of_the_page_is_asked_for_at_once() -> None:
    """Modules that import each other come one after the other where nothing names them beforehand."""
    html = (DASHBOARD / "index.html").read_text()
    named = set(re.findall(r'rel="modulepreload" href="/dashboard/(.*?)"', html))
    own = {
        path.relative_to(DASHBOARD).as_posix()
        for folder in ("scripts", "plots")
        for path in (DASHBOARD / folder).iterdir()
    }
    assert named == own - {"scripts/app.js", "scripts/reference.js"} | {"scripts/analyses.js"}


@pytest.mark.part(of=2, law="the page shows it")
def test_the_pages_script_holds_what_the_catalog_says(page: Page) -> None:
    page.goto("/")
    told = page.evaluate("import('/dashboard/scripts/analyses.js').then((script) => script.ANALYSES)")
    assert list(told) == list(ANALYSES)
    assert [kind for kind, each in told.items() if each["opens"]] == ["capacity"]
    assert [kind for kind, each in told.items() if not each["damped"]] == [
        "factors",
        "compression",
        "fewshot_training",
        "export",
        "sensitivity",
    ]
    assert {"short", "line", "joined"}.isdisjoint(
        name for each in told.values() for part in (*each["columns"], *each["figures"]) for name in part
    )


@pytest.mark.part(of=2, law="the page shows it")
def test_a_running_job_moves_and_ends_before_the_eyes(page: Page, embedded: Embedded) -> None:
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    page.goto(f"/#/jobs/{claim.job_id}")
    bar = page.get_by_role("progressbar", name="Progress of the job")
    expect(bar).to_have_attribute("aria-valuenow", "41")
    expect(page.get_by_text("17 of 29 batches")).to_be_visible()
    seeding.progress(embedded.engine, claim, stage="collection", done=25, total=29, unit="batches", percent=60.0)
    expect(bar).to_have_attribute("aria-valuenow", "60")
    seeding.write_rows(embedded.engine, embedded.artifacts, claim, ("factors",))
    seeding.progress(embedded.engine, claim, stage="factors", done=7, total=7, unit="layers", layers_done=7)
    expect(page.locator("table.layers tbody tr")).to_have_count(8)
    expect(page.get_by_text("Analysis 1 of 2")).to_be_visible()
    page.get_by_role("button", name="Trace of A", exact=True).click()
    seeding.write_rows(embedded.engine, embedded.artifacts, claim, ("capacity",))
    seeding.progress(
        embedded.engine, claim, stage="capacity", done=7, total=7, unit="layers", percent=99.0, layers_done=14
    )
    expect(page.get_by_role("columnheader", name="Effective dim.")).to_be_visible()
    expect(page.locator("table.layers tbody tr")).to_have_count(8)
    seeding.summarise(embedded.engine, claim)
    attempt_endings.finish(embedded.engine, claim)
    expect(page.get_by_text("Succeeded", exact=True)).to_be_visible()
    expect(page.locator("#spectrum .picture canvas")).to_be_visible()
    expect(bar).to_have_count(0)


@pytest.mark.part(of=2, law="the page shows it")
def test_a_job_that_is_queued_again_shows_what_its_checkpoint_holds(page: Page, embedded: Embedded) -> None:
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    kept = {"stages": {"collection": 0.5}, "percent": 38.0}
    seeding.progress(
        embedded.engine, claim, stage="collection", done=25, total=29, unit="batches", percent=60.0, kept=kept
    )
    page.goto(f"/#/jobs/{claim.job_id}")
    bar = page.get_by_role("progressbar", name="Progress of the job")
    expect(bar).to_have_attribute("aria-valuenow", "60")
    attempt_endings.hand_back(embedded.engine, claim)
    expect(page.get_by_text("Queued", exact=True)).to_be_visible()
    expect(bar).to_have_attribute("aria-valuenow", "38")
    shown = page.request.get(f"/v1/jobs/{claim.job_id}").json()["progress"]
    assert (shown["stage"], shown["percent"]) == (None, 38.0)
    assert "kept" not in shown
    again = claims.claim(embedded.engine, claim.job_id, "test", secrets.token_hex(8), 600)
    assert again is not None
    expect(page.get_by_role("heading", name="Starting")).to_be_visible()
    failure = Failed(category="transient", code="crashed", message="SIGKILL", pointer=None, layer=None, detail=None)
    attempt_endings.fail(embedded.engine, again, failure)
    expect(page.get_by_text("Waiting for a worker, after 1 failed attempt")).to_be_visible()
    assert claims.claim(embedded.engine, claim.job_id, "test", secrets.token_hex(8), 600) is not None
    expect(page.get_by_text("Starting again, after 1 failed attempt")).to_be_visible()
    expect(bar).to_have_attribute("aria-valuenow", "38")


@pytest.mark.part(of=2, law="the page shows it")
def test_cancelling(page: Page, embedded: Embedded) -> None:
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    page.goto(f"/#/jobs/{claim.job_id}")
    page.get_by_role("button", name="Cancel job").click()
    expect(page.get_by_role("button", name="Cancelling…")).to_be_disabled()
    job = read_job(embedded.engine, LOCAL_TENANT, claim.job_id)
    assert job is not None
    assert job.state == "cancelling"
    attempt_endings.hand_back(embedded.engine, claim)
    expect(page.get_by_text("Cancelled", exact=True)).to_be_visible()
    said = page.get_by_role("status", name="Cancellation")
    expect(said).to_contain_text(re.compile(r"Asked for \d+ \w+ \d+, [\d:]+; it ended"))
    expect(said).to_contain_text("No layer had been measured; the log is kept.")
    kept = seeding.running(embedded.engine, LOCAL_TENANT)
    seeding.write_rows(embedded.engine, embedded.artifacts, kept, ("factors",))
    seeding.progress(embedded.engine, kept, stage="factors", done=3, total=7, unit="layers", layers_done=3)
    request_cancel(embedded.engine, LOCAL_TENANT, kept.job_id, by="kr_first")
    page.goto(f"/#/jobs/{kept.job_id}")
    expect(said).to_contain_text(re.compile(r"with the API key kr_first, .*; it stops before its next batch or layer"))
    attempt_endings.hand_back(embedded.engine, kept)
    expect(said).to_contain_text(re.compile(r"; it ended .*Kept: 8 of 14 rows of the layer table"))
    expect(said.locator("code").last).to_have_text(f"kronoscope rerun {kept.job_id[-12:]}")


@pytest.mark.part(of=2, law="the page shows it")
def test_what_a_cancelled_job_kept_is_counted_where_its_attempt_is_forgotten(page: Page, embedded: Embedded) -> None:
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    seeding.write_rows(embedded.engine, embedded.artifacts, claim, ("factors",))
    attempt_endings.hand_back(embedded.engine, claim)
    request_cancel(embedded.engine, LOCAL_TENANT, claim.job_id)
    page.goto(f"/#/jobs/{claim.job_id}")
    said = page.get_by_role("status", name="Cancellation")
    expect(said).to_contain_text("Kept: 8 rows of the layer table")


@pytest.mark.part(of=2, law="the page shows it")
def test_a_failure_says_why(page: Page, embedded: Embedded) -> None:
    page.goto(f"/#/jobs/{seeding.failed(embedded.engine, LOCAL_TENANT)}")
    alert = page.get_by_role("alert", name="Failure")
    expect(alert).to_contain_text("holds 3 values that are not finite")
    expect(alert).to_contain_text("features.3")
    assert "SECRET" not in page.content()


@pytest.mark.part(of=2, law="the page shows it")
def test_names_from_the_server_are_text(page: Page, embedded: Embedded) -> None:
    document = {**seeding.DOCUMENT, "labels": {"note": MARKUP}}
    claim = seeding.claimed(embedded.engine, LOCAL_TENANT, document)
    attempt_writes.write_layer(embedded.engine, claim, layer_frame(seeding.declared("capacity", 0, MARKUP)))
    attempt_endings.finish(embedded.engine, claim)
    page.goto(f"/#/jobs/{claim.job_id}")
    expect(page.locator("table.layers tbody tr")).to_contain_text(MARKUP)
    assert page.locator("main img").count() == 0
    assert page.title() != "broken"


@pytest.mark.part(of=2, law="the page shows it")
def test_figures_have_one_word_each_and_names_are_whole(page: Page, finished: str) -> None:
    page.goto(f"/#/jobs/{finished}")
    expect(page.get_by_text("Sum of effective ranks", exact=True)).to_be_visible()
    expect(page.get_by_text("Effective rank of the model", exact=True)).to_be_visible()
    names = page.get_by_role("combobox", name="Layer").locator("option")
    expect(names).to_have_text([name for name, *_ in seeding.LAYERS])
    shown = page.evaluate(
        """async () => {
          const { condition } = await import("/dashboard/scripts/format.js");
          return [condition(null, 3), condition(null, null), condition(12.5, 3)];
        }"""
    )
    assert shown == ["∞", "–", "12.5"]


@pytest.mark.part(of=2, law="the page shows it")
def test_the_list_and_a_submission(page: Page, embedded: Embedded) -> None:
    page.goto("/")
    page.get_by_role("link", name="New job").first.click()
    editor = page.get_by_label("Job document")
    expect(editor).to_have_value(re.compile("digits_cnn"))
    document: dict[str, Any] = json.loads(editor.input_value())
    expect(page.locator("#document-help")).to_contain_text("a few-shot training takes data alone")
    page.get_by_label("Example").select_option("Few-shot training on drawn characters (a minute or two)")
    page.get_by_role("button", name="Check only").click()
    expect(page.get_by_text("The document is valid.")).to_be_visible()
    editor.fill(json.dumps({**document, "collection": {"batch_size": -1}}, indent=2))
    page.get_by_role("button", name="Check only").click()
    expect(page.get_by_role("alert")).to_contain_text("take 1 to 65536")
    page.get_by_role("button", name="/collection/batch_size").click()
    assert page.evaluate("getSelection().toString()") == '"batch_size": -1'
    editor.fill(json.dumps(document))
    page.get_by_role("button", name="Submit job").click()
    expect(page.get_by_text("Waiting for a worker")).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_have_text("digits_cnn")
    page.get_by_role("link", name="Jobs", exact=True).click()
    row = page.locator("table.jobs tbody tr").first
    expect(row).to_contain_text("Queued")
    page.get_by_role("button", name="succeeded").click()
    expect(page.locator("table.jobs tbody tr[data-state=queued]")).to_have_count(0)


@pytest.mark.part(of=2, law="the page shows it")
def test_a_job_is_found_by_its_name_and_the_end_of_its_id(page: Page, embedded: Embedded) -> None:
    name = "a run & its <b>name</b>"
    made = submit(embedded.engine, LOCAL_TENANT, parse_document(seeding.raw({**seeding.DOCUMENT, "name": name}))).job
    page.goto("/")
    rows = page.locator("table.jobs tbody tr")
    expect(rows.first).to_contain_text(name)
    expect(rows.first).to_contain_text("digits_cnn on digits")
    page.get_by_label("Find jobs by name").fill("& ITS <")
    expect(rows).to_have_count(1)
    page.get_by_label("Find jobs by name").fill("nobody's")
    expect(page.get_by_text("No job has a name with “nobody's”.")).to_be_visible()
    page.goto(f"/#/jobs/{made.id[-8:]}")
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    expect(page).to_have_title(f"{name} · Kronoscope")
    expect(page.locator(".facts")).to_contain_text("digits_cnn")


@pytest.mark.part(of=2, law="the page shows it")
def test_the_memory_curve_is_drawn_beside_its_plan(page: Page, finished: str) -> None:
    page.goto(f"/#/jobs/{finished}")
    card = page.get_by_role("region", name="Memory", exact=True)
    picture = card.get_by_role(
        "img", name=re.compile(r"Memory over 22 s: at most 559 MiB .*, 900 MiB planned; .*1.58 GiB")
    )
    expect(picture).to_be_visible()
    expect(card.locator(".key")).to_have_count(5)
    # to scale: the plans' lines stand in the ratio of their bytes above the axis
    picture.focus()
    page.keyboard.press("Home")
    expect(card.locator(".readout")).to_contain_text("resident on the host")
    base = float(picture.locator(".u-over").evaluate("area => area.clientHeight"))
    host, device = (base - y for _, y in dots(picture)[3:])
    assert device / host == pytest.approx(2 * 2**30 / (900 * 2**20), rel=0.02)
    stages = card.get_by_role("region", name="Stages, planned and measured").locator("tbody tr")
    expect(stages).to_have_count(2)
    expect(stages.nth(0)).to_have_text("collection2 GiB1.58 GiB−21%500 MiB550 MiB+10%about 10 s13 s+25%")
    expect(stages.nth(0).locator("strong")).to_have_text("+10%")
    card.get_by_text("Operation by operation").click()
    rows = card.get_by_role("region", name="Memory by operation").locator("tbody tr")
    expect(rows).to_have_count(10)
    expect(rows.nth(2)).to_contain_text("pass 1")
    expect(rows.nth(2)).to_contain_text("13 s")


@pytest.mark.part(of=2, law="the page shows it")
def test_what_is_not_all_is_not_called_all(page: Page) -> None:
    page.goto("/")
    shares = [1, 0.99999, 0.9996, 0.351, 0]
    shown = page.evaluate(
        "shares => import('/dashboard/scripts/format.js').then(format => shares.map(format.portion))", shares
    )
    assert shown == ["100.0%", "99.9%", "99.9%", "35.1%", "0.0%"]


@pytest.mark.part(of=2, law="the page shows it")
def test_downloads(page: Page, finished: str) -> None:
    page.goto(f"/#/jobs/{finished}")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="log.jsonl").click()
    assert waiting.value.suggested_filename == "log.jsonl"
    assert len(waiting.value.path().read_text().splitlines()) == 16


@pytest.mark.parametrize("width", [320, 480, 768])
@pytest.mark.part(of=2, law="the page shows it")
def test_nothing_sticks_out_where_it_is_narrow(page: Page, finished: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    for address, heading, last in (
        ("/#/", "Jobs", "main table tbody tr"),
        ("/#/new", "New job", "main textarea"),
        (f"/#/jobs/{finished}", "digits_cnn", "#spectrum .picture"),
    ):
        page.goto(address)
        # a change of the hash loads nothing: only what is shown tells that the view is there
        expect(page.get_by_role("heading", level=1, name=heading)).to_be_visible()
        expect(page.locator(last).first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address


@pytest.mark.part(of=2, law="the page shows it")
def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, keyed: Keyed) -> None:
    context = browser.new_context(base_url=keyed.server.url)
    context.set_default_timeout(PATIENCE_MS)
    tab = context.new_page()
    tab.goto("/")
    dialog = tab.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key").fill("wrong")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog.get_by_role("alert")).to_contain_text("not valid")
    dialog.get_by_label("Key").fill("no key…")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog.get_by_role("alert")).to_contain_text("visible ASCII characters only")
    dialog.get_by_label("Key").fill(keyed.key)
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog).to_be_hidden()
    expect(tab.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()
    expect(tab.get_by_text("No jobs yet")).to_be_visible()
    tab.reload()
    expect(tab.get_by_text("No jobs yet")).to_be_visible()
    assert tab.evaluate("localStorage.length") == 0
    context.close()


@pytest.mark.part(of=2, law="the page shows it")
def test_a_job_that_no_device_can_hold_says_so(page: Page, embedded: Embedded) -> None:
    worker = Worker(id=new_id(), node="node-1", process_space="s", version="0", slots=1, factories=())
    device = Device(uuid="FAKE-a", kind="fake", name="fake GPU", capacity_bytes=1_000)
    document = parse_document(seeding.raw())
    job = submit(embedded.engine, LOCAL_TENANT, document, needs_bytes=40 * 10**9).job
    register(embedded.engine, worker, [device], 600)
    page.goto(f"/#/jobs/{job.id}")
    said = page.get_by_role("status", name="Placement")
    expect(said).to_contain_text("No device can hold this job")
    expect(said).to_contain_text("Needs 40 GB; the largest known device is FAKE-a with 1 kB.")
    forget(embedded.engine, worker.id)


@pytest.mark.part(of=2, law="the page shows it")
def test_a_job_that_waits_for_room_on_a_disk_says_so(page: Page, embedded: Embedded) -> None:
    reason = "its disk has 201 MB free, and it takes jobs from 268 MB on"
    worker = Worker(id=new_id(), node="node-1", process_space="s", version="0", slots=1, factories=(), paused=reason)
    device = Device(uuid="HOST-b", kind="host", name="host memory", capacity_bytes=40 * 10**9)
    job = submit(embedded.engine, LOCAL_TENANT, parse_document(seeding.raw()), needs_bytes=10**9).job
    register(embedded.engine, worker, [device], 600)
    page.route(re.compile(r"\?wait=20"), lambda route: route.continue_(url=route.request.url.replace("=20", "=1")))
    page.goto(f"/#/jobs/{job.id}")
    said = page.get_by_role("status", name="Placement")
    expect(said).to_contain_text(f"the workers that could hold it take no jobs at the moment (node-1: {reason}).")
    pause(embedded.engine, worker.id, None)
    # the reason changes without the job
    expect(said).to_contain_text("Why this job waits")
    forget(embedded.engine, worker.id)
