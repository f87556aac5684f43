"""The lineage of a job, its log, its note and labels, and the devices, on the page: every text of others is text."""

import re
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from catalog.frames import LogLine
from jobs.codec import parse_document
from jobs.devices.registry import Device, Worker, register
from jobs.queue import attempt_endings, attempt_writes
from jobs.records import LOCAL_TENANT
from jobs.repository.store import read_job, request_cancel
from jobs.repository.submission import submit
from jobs.schema.identifiers import new_id
from tests.api import seeding
from tests.api.conftest import Embedded
from tests.api.routes.test_dashboard import browser, faultless_tab  # noqa: F401

pytestmark = pytest.mark.browser

MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>"
HOSTILE = f"\x1b[2J{MARKUP}\r\n\u202egone"


@pytest.fixture
def page(browser: Browser, embedded: Embedded) -> Iterator[Page]:  # noqa: F811
    with faultless_tab(browser, embedded.server.url) as opened:
        yield opened


def family(embedded: Embedded) -> tuple[str, str, str]:
    """A finished job, one that uses its factors and a third job, which no longer exists."""
    source = seeding.finished(embedded.engine, embedded.artifacts, LOCAL_TENANT)
    gone = new_id()
    named = {"kind": "compare_curvature", "factors": {"job": source}, "name": MARKUP[:40]}
    named |= {"compare_curvature": {"against": {"job": gone}}}
    user = submit(embedded.engine, LOCAL_TENANT, parse_document(seeding.raw(named))).job.id
    return source, user, gone


def test_a_job_leads_to_those_whose_factors_it_used_and_back(page: Page, embedded: Embedded) -> None:
    source, user, gone = family(embedded)
    page.goto(f"/#/jobs/{user}")
    card = page.get_by_role("region", name="Lineage", exact=True)
    expect(card.get_by_role("listitem")).to_have_text(
        [
            re.compile(f"began from job {source[-8:]} factors \\+ capacity, succeeded"),
            re.compile(f"compared with those of {gone} \\(there is no such job now\\)"),
        ]
    )
    card.get_by_role("link").click()
    expect(page).to_have_url(re.compile(f"{source}$"))
    expect(card.get_by_role("listitem")).to_have_text(
        [re.compile(f"^{re.escape(MARKUP[:40])} compare_curvature, queued; began from them$")]
    )
    card.get_by_text("History").click()
    rows = card.locator("tbody tr")
    expect(rows.locator("td:nth-child(2)")).to_have_text(["queued", "running", "succeeded"])
    assert Axe().run(page).response["violations"] == []


def test_the_log_is_followed_while_the_job_runs(page: Page, embedded: Embedded) -> None:
    claim = seeding.running(embedded.engine, LOCAL_TENANT)
    attempt_writes.write_log_line(embedded.engine, claim, LogLine(level="warning", message=HOSTILE))
    page.goto(f"/#/jobs/{claim.job_id}")
    log = page.get_by_role("region", name="Log", exact=True)
    log.locator("summary").click()
    lines = log.get_by_role("listitem")
    expect(lines.first).to_contain_text("state queued, attempt 0")
    expect(lines.last).to_contain_text(f"warning \ufffd[2J{MARKUP}\ufffd\ufffd\ufffdgone")
    for number in range(150):  # more than a page of them
        attempt_writes.write_log_line(embedded.engine, claim, LogLine(level="info", message=f"line {number}"))
    expect(lines.last).to_contain_text("line 149")
    assert Axe().run(page).response["violations"] == []
    assert lines.count() == len({lines.nth(place).inner_text() for place in range(lines.count())})
    request_cancel(embedded.engine, LOCAL_TENANT, claim.job_id)
    attempt_endings.hand_back(embedded.engine, claim)
    expect(lines.last).to_contain_text("state cancelled")
    expect(page.locator("main img, main script")).to_have_count(0)


def test_note_and_labels_are_edited_and_shown_as_text(page: Page, embedded: Embedded) -> None:
    job_id = seeding.finished(embedded.engine, embedded.artifacts, LOCAL_TENANT)
    page.goto(f"/#/jobs/{job_id}")
    own = page.get_by_role("region", name="Note and labels")
    own.get_by_text("Edit note and labels").click()
    own.get_by_label("Note").fill(f"first line\n{MARKUP}")
    own.get_by_label("Labels").fill("bad name!=x")
    own.get_by_role("button", name="Save").click()
    expect(own.get_by_role("alert")).to_contain_text("take names of A-Z, a-z, 0-9")
    assert Axe().run(page).response["violations"] == []
    own.get_by_label("Labels").fill("project=a=b\n\nstage = baseline ")
    own.get_by_role("button", name="Save").click()
    expect(own.locator(".note")).to_have_text(f"first line\n{MARKUP}")
    expect(page.locator("header .tag")).to_have_text(["project: a=b", "stage: baseline"])
    stored = read_job(embedded.engine, LOCAL_TENANT, job_id)
    assert stored is not None
    assert (stored.labels, stored.note) == ({"project": "a=b", "stage": "baseline"}, f"first line\n{MARKUP}")
    page.reload()
    expect(own.locator(".note")).to_have_text(f"first line\n{MARKUP}")
    expect(page.locator("main img, main script")).to_have_count(0)


def test_devices_have_a_page(page: Page, embedded: Embedded) -> None:
    page.goto("/#/devices")
    expect(page.get_by_role("heading", name="Devices")).to_be_visible()
    worker = Worker(id=new_id(), node=MARKUP[:30], process_space="here", version="1", slots=1, factories=())
    gpu = Device(uuid="FAKE-1", kind="fake", name="Simulated GPU", capacity_bytes=16 * 2**30, used_bytes=4 * 2**30)
    register(embedded.engine, worker, [gpu], 600)
    row = page.locator("tbody tr")
    expect(row).to_contain_text(MARKUP[:30])
    expect(row).to_contain_text("4 GiB held by others · 12 GiB free")
    expect(row.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "25")
