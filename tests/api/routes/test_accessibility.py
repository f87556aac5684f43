"""Every view of the page by the rules of axe-core: contrast, names, roles, order of headings, what scrolls."""

from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from jobs.codec import parse_document
from jobs.queue import attempt_endings
from jobs.records import LOCAL_TENANT
from jobs.repository.submission import submit
from tests.api import seeding
from tests.api.conftest import Embedded
from tests.api.routes.test_dashboard import browser, faultless_tab  # noqa: F401
from tests.api.routes.test_influence_page import explained  # noqa: F401
from tests.api.routes.test_layer_page import deep  # noqa: F401
from tests.api.routes.test_series import drawn_series
from tests.machine.parts import ALL, chosen_part, first_of

pytestmark = pytest.mark.browser

LOOKS = [
    pytest.param("light", 1440, id="light-wide"),
    pytest.param("dark", 390, id="dark-narrow"),
    pytest.param("dark", 1440, id="dark-wide", marks=pytest.mark.nightly),
    pytest.param("light", 390, id="light-narrow", marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module")
def views(embedded: Embedded, deep: str, explained: str) -> dict[str, str]:  # noqa: F811
    """What each view must show before it is looked at, by its address."""
    ledger, files, tenant = embedded.engine, embedded.artifacts, LOCAL_TENANT
    cancelled = seeding.running(ledger, tenant)
    attempt_endings.hand_back(ledger, cancelled)
    drawn = [seeding.finished(ledger, files, tenant), seeding.partly_measured(ledger, files, tenant), deep]
    drawn += [seeding.of_experts(ledger, files, tenant)]
    drawn += [seeding.of_diagonals(ledger, files, tenant), seeding.partly_refused(ledger, files, tenant)]
    told = [seeding.failed(ledger, tenant), seeding.failed_in_factory(ledger, tenant), cancelled.job_id]
    told += [seeding.running(ledger, tenant).job_id, submit(ledger, tenant, parse_document(seeding.raw())).job.id]
    return {
        "/#/": "main table tbody tr",
        f"/#/compare/{','.join(sorted(drawn)[:3])}": ".u-over",
        f"/#/jobs/{drawn_series(embedded)}": ".u-over",
        "/#/new": "main textarea",
        "/#/devices": "main h1",
        **{f"/#/jobs/{job_id}": ".depth svg" for job_id in drawn},
        f"/#/jobs/{explained}": "main details summary",
        **{f"/#/jobs/{job_id}": "main h1" for job_id in told},
    }


@pytest.fixture
def page(browser: Browser, embedded: Embedded) -> Iterator[Page]:  # noqa: F811
    with faultless_tab(browser, embedded.server.url) as opened:
        yield opened


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_no_view_breaks_a_rule_of_axe(
    page: Page, views: dict[str, str], scheme: str, width: int, request: pytest.FixtureRequest
) -> None:
    """In a landing half of the views are looked at, each in one of two looks, which the commit chooses."""
    part = chosen_part(request.config)
    step = 1 if part == ALL else 4
    chosen = list(views.items())[(first_of(part, step) + (scheme == "dark")) % step :: step]
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light", reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    broken = []
    for address, shown in chosen:
        page.goto(address)
        expect(page.locator(shown).first).to_be_visible()
        found = Axe().run(page)
        assert len(found.response["passes"]) > 15, "axe-core looked at nothing"
        broken += [
            f"{address} {rule['id']}: {part['html'][:160]}: {part['failureSummary']}"
            for rule in found.response["violations"]
            for part in rule["nodes"]
        ]
    assert broken == []


def test_axe_sees_a_fault(page: Page) -> None:
    """The rules look at the page itself: a grey word and an image without a text are found."""
    page.goto("/#/")
    expect(page.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()
    page.evaluate("document.querySelector('main h1').style.color = '#ccc'")
    page.evaluate("document.querySelector('main').append(new Image())")
    assert {rule["id"] for rule in Axe().run(page).response["violations"]} == {"color-contrast", "image-alt"}
