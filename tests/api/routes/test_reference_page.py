"""The page of the REST API in a real browser: the whole schema, tried out, with nothing from elsewhere."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.api.chromium import PATIENCE_MS, chromium
from tests.api.conftest import Embedded, Keyed

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


def watched(browser: Browser, url: str) -> tuple[Page, list[str], set[str]]:
    """A tab, what it complains of, and the hosts that it asks."""
    context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    tab = context.new_page()
    complaints: list[str] = []
    hosts: set[str] = set()
    tab.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda sent: hosts.add(urlsplit(sent.url).netloc or "inline"))
    tab.add_init_script(
        "document.addEventListener('securitypolicyviolation', e => console.error('CSP', e.violatedDirective))"
    )
    return tab, complaints, hosts


def test_every_operation_is_shown_and_can_be_tried(browser: Browser, embedded: Embedded) -> None:
    tab, complaints, hosts = watched(browser, embedded.server.url)
    tab.goto("/docs")
    listed = tab.locator(".opblock")
    expect(listed.first).to_be_visible()
    schema = tab.request.get("/openapi.json").json()
    methods = {"get", "post", "put", "patch", "delete", "head"}
    assert listed.count() == sum(len(methods & set(path)) for path in schema["paths"].values())
    tab.locator("#operations-jobs-list_jobs").get_by_role("button").first.click()
    tab.get_by_role("button", name="Execute").click()
    expect(tab.locator(".live-responses-table tbody .response-col_status").first).to_contain_text("200")
    if os.environ.get("KRONOSCOPE_SCREENSHOTS"):
        tab.screenshot(path=Path(os.environ["KRONOSCOPE_SCREENSHOTS"]) / "reference.png")
    assert complaints == []
    assert hosts - {"inline"} == {urlsplit(embedded.server.url).netloc}
    tab.context.close()


def test_where_keys_are_needed_the_page_asks_for_one(browser: Browser, keyed: Keyed) -> None:
    tab, complaints, _ = watched(browser, keyed.server.url)
    tab.goto("/docs")
    tab.get_by_label("API key").fill("wrong")
    tab.get_by_role("button", name="Use this key").click()
    expect(tab.get_by_role("alert")).to_contain_text("not valid")
    tab.get_by_label("API key").fill(keyed.key)
    tab.get_by_role("button", name="Use this key").click()
    expect(tab.locator(".opblock").first).to_be_visible()
    expect(tab.get_by_label("API key")).to_be_hidden()
    assert [said for said in complaints if "401" not in said] == []
    tab.context.close()
