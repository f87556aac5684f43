"""The page of an influence: the training examples of each query, whose texts are a stranger's."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from playwright.sync_api import Browser, Page, expect
from torch import nn

from catalog.frames import Summarised, layer_frame
from catalog.record import plain
from jobs.queue import attempt_endings, attempt_writes
from jobs.records import LOCAL_TENANT
from kronoscope.local import measure
from tests.api import seeding
from tests.api.conftest import Embedded
from tests.api.routes.test_dashboard import browser, faultless_tab  # noqa: F401

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=document.title='taken'><b>bold</b>"


@pytest.fixture(scope="module")
def explained(embedded: Embedded) -> str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    data = torch.randn(30, 6), torch.randint(3, (30,))
    made = measure(
        net, data, query=(data[0][:3], data[1][:3]), task="classification", kinds="influence",
        params={"influence": {"top": 4, "listed": 2}},
    )  # fmt: skip
    found = made.summary["influence"]
    first = found.listed[0]
    lowering = (dataclasses.replace(first.lowering[0], text=HOSTILE), *first.lowering[1:])
    listed = (
        dataclasses.replace(first, text=HOSTILE, lowering=lowering, converged=False, residual=0.5),
        found.listed[1],
    )
    document = {
        **seeding.DOCUMENT,
        "kind": "influence",
        "influence": {"query": {"source": "builtin", "name": "digits"}},
    }
    claim = seeding.claimed(embedded.engine, LOCAL_TENANT, document)
    for row in made.layers:
        attempt_writes.write_layer(embedded.engine, claim, layer_frame(row))
    summary = plain(dataclasses.replace(found, listed=listed))
    attempt_writes.write_summary(embedded.engine, claim, Summarised(kind="influence", summary=summary))
    attempt_endings.finish(embedded.engine, claim)
    return claim.job_id


@pytest.fixture
def page(browser: Browser, embedded: Embedded) -> Iterator[Page]:  # noqa: F811
    with faultless_tab(browser, embedded.server.url) as opened:
        yield opened


def test_each_query_has_the_examples_that_move_its_loss_most(page: Page, explained: str) -> None:
    page.goto(f"/#/jobs/{explained}")
    page.get_by_text("Training examples of each query").click()
    table = page.get_by_role("region", name="Training examples of each query")
    expect(table.locator("tbody tr")).to_have_count(2)
    expect(table.locator("tbody tr").first.locator("td").first.locator("li")).to_have_count(4)
    expect(table.locator("tbody tr").first.locator("th")).to_contain_text("residual 0.5")
    expect(page.get_by_text("The first 2 of 3 queries")).to_be_visible()
    expect(page.locator(".figure-card").filter(has_text="Queries")).to_contain_text("30 training examples")
    # texts stand there as they are, and nothing of them runs
    expect(table).to_contain_text(HOSTILE)
    expect(table.locator("img, b")).to_have_count(0)
    assert "taken" not in page.title()
