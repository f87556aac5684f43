"""The page of a deep net: a picture over depth, a table of which a part is drawn, and a number's one notation."""

import math
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from catalog.frames import layer_frame
from jobs.queue import attempt_endings, attempt_writes
from jobs.records import LOCAL_TENANT
from kronoscope.display.numbers import format_bytes, format_number, format_share
from tests.api import seeding
from tests.api.conftest import Embedded
from tests.api.routes.test_dashboard import browser, faultless_tab  # noqa: F401

pytestmark = pytest.mark.browser

DEPTH = 120
NAMES = [f"encoder.layer.{place // 3}.{('up', 'norm', 'down')[place % 3]}" for place in range(DEPTH)]


def trace(place: int) -> float:
    """The trace of a layer: a decade lower every 20 layers."""
    return 4.0 * 10 ** (-place / 20)


@pytest.fixture(scope="module")
def deep(embedded: Embedded) -> str:
    claim = seeding.claimed(embedded.engine, LOCAL_TENANT, seeding.DOCUMENT | {"kind": "capacity", "name": "deep"})
    for place, name in enumerate(NAMES):
        module = "LayerNorm" if name.endswith("norm") else "Linear"
        row = seeding.row("capacity", place, name, module, 10 + place, [1.0, 3.0], [trace(place) / 4])
        attempt_writes.write_layer(embedded.engine, claim, layer_frame(row))
    seeding.summarise(embedded.engine, claim)
    attempt_endings.finish(embedded.engine, claim)
    return claim.job_id


@pytest.fixture
def page(browser: Browser, embedded: Embedded, deep: str) -> Iterator[Page]:  # noqa: F811
    with faultless_tab(browser, embedded.server.url) as opened:
        opened.set_viewport_size({"width": 1440, "height": 900})
        opened.goto(f"/#/jobs/{deep}")
        expect(opened.locator(".depth svg")).to_be_visible()
        yield opened


def test_a_metric_over_depth_is_drawn_to_its_logarithm(page: Page) -> None:
    picture = page.locator(".depth svg")
    expect(picture.locator("title")).to_have_text("Trace over depth")
    expect(picture.locator("desc")).to_contain_text("120 layers in 40 blocks")
    expect(picture.locator("desc")).to_contain_text("from 4.49e-6 to 4, on a logarithmic axis")
    expect(page.locator(".type-key")).to_have_text(["Linear 80", "LayerNorm 40"])
    dots = re.findall(r"M([\d.]+),([\d.]+)a", picture.locator("path.mark.type-0").get_attribute("d") or "")
    assert len(dots) == 80
    heights = [float(y) for _, y in dots]
    places = [place for place, name in enumerate(NAMES) if not name.endswith("norm")]
    slope = (heights[-1] - heights[0]) / (places[-1] - places[0])
    assert heights == pytest.approx([heights[0] + slope * (place - places[0]) for place in places], abs=0.2)
    assert slope > 0
    # 119 layers lie 119 / 20 decades apart, which the ticks of the axis must confirm
    ticks = [
        float(y) for y in picture.locator("line.grid").evaluate_all("lines => lines.map(l => l.getAttribute('y1'))")
    ]
    words = picture.locator("text.tick").all_text_contents()
    decades = (ticks[0] - ticks[-1]) / (math.log10(float(words[-1])) - math.log10(float(words[0])))
    assert decades == pytest.approx(20 * slope, rel=0.02)


def test_the_heat_map_has_a_row_for_each_metric_and_chooses_it(page: Page) -> None:
    names = page.locator(".depth text.metric")
    expect(names.filter(has_text=re.compile("^(Trace|Effective rank|Parameters)$"))).to_have_count(4)
    page.get_by_role("combobox", name="Metric").select_option("Parameters")
    expect(page.locator(".depth title")).to_have_text("Parameters over depth")
    expect(page.locator(".depth desc")).not_to_contain_text("logarithmic")  # 10 to 129
    page.get_by_role("button", name="by type").click()
    expect(page.locator(".depth text.group")).to_have_text(["Linear", "LayerNorm"])


def test_the_picture_is_read_and_used_by_keyboard(page: Page) -> None:
    slider = page.get_by_role("slider", name="Trace of each layer")
    slider.focus()
    page.keyboard.press("End")
    expect(slider).to_have_attribute("aria-valuetext", "encoder.layer.39.down, Trace 4.49e-6")
    expect(page.get_by_role("complementary", name="Details")).to_contain_text("encoder.layer.39.down")
    expect(page.locator("tr[data-chosen] .layer-name")).to_have_text("encoder.layer.39.down")
    page.keyboard.press("ArrowLeft")
    expect(slider).to_have_attribute("aria-valuenow", "119")


def test_a_part_of_the_rows_is_drawn_and_all_are_reached(page: Page) -> None:
    rows = page.locator("table.layers tr[data-ordinal]")
    expect(rows.first).to_be_visible()
    assert 36 <= rows.count() < 80
    body = page.locator(".layer-rows")
    body.evaluate("body => body.scrollIntoView()")
    foot = body.evaluate("body => body.getBoundingClientRect().bottom")
    seen = rows.evaluate_all("rows => rows.map(row => row.getBoundingClientRect().bottom)")
    assert sum(bottom <= foot for bottom in seen) >= 30
    expect(page.locator("table.layers")).to_have_attribute("aria-rowcount", str(DEPTH + 1))
    body.evaluate("body => { body.scrollTop = body.scrollHeight; body.scrollLeft = body.scrollWidth; }")
    expect(rows.last).to_have_attribute("aria-rowindex", str(DEPTH + 1))
    expect(rows.last.locator(".layer-name")).to_be_in_viewport()
    head = page.get_by_role("columnheader", name="Layer")
    assert head.evaluate("th => th.getBoundingClientRect().top") == body.evaluate("b => b.getBoundingClientRect().top")
    assert head.evaluate("th => th.getBoundingClientRect().left") == body.evaluate(
        "b => b.getBoundingClientRect().left"
    )
    rows.last.locator(".layer-name").click()
    page.keyboard.press("Home")
    expect(page.locator("tr[data-chosen] .layer-name")).to_be_focused()
    expect(page.locator("tr[data-chosen] .layer-name")).to_have_text(NAMES[0])
    page.get_by_role("button", name="Trace", exact=True).click()
    page.get_by_role("button", name="Trace", exact=True).click()
    expect(rows.first).to_contain_text(NAMES[-1])
    page.get_by_label("Filter layers by name").fill("layernorm")
    expect(rows).to_have_count(40)


def test_where_it_is_narrow_the_metric_stands_beside_the_name(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    heads = page.locator("table.layers thead th")
    expect(heads.nth(1)).to_have_text("Trace")
    # all alike but for rounding
    page.get_by_role("combobox", name="Metric").select_option("Effective rank")
    expect(heads.nth(1)).to_have_text("Effective rank")
    expect(page.locator(".depth text.tick")).to_have_count(1)
    page.locator(".layer-rows").evaluate("body => body.scrollIntoView()")
    expect(heads.nth(1)).to_be_in_viewport(ratio=0.9)
    first = page.locator("tr[data-ordinal] .layer-name").first
    assert first.text_content() == NAMES[0]
    assert first.evaluate("name => name.closest('th').scrollWidth <= name.closest('th').clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


NUMBERS = (0, 7, 1234, 89_938, 9_999_999, 12_345_678, 100_000, 1e6, 0.5, 12.5, 710.14, 1234.56, 84_117.3, 9_999_999.6,
           1.2345e9, 0.0123456, 1.23456e-4, 0.99996e-4, 4.321e-12, -3.2109, -413_262.4, 1e-4, 1e-5)  # fmt: skip


def test_a_number_has_one_notation_on_the_page_and_the_command_line(page: Page) -> None:
    sizes = [900, 2048, 1_700_000_000, 559 * 2**20, 1023 * 1024]
    shown = page.evaluate(
        """([numbers, sizes]) => import('/dashboard/scripts/format.js')
             .then((format) => [numbers.map((each) => format.number(each)), sizes.map(format.bytes)])""",
        [NUMBERS, sizes],
    )
    assert shown == [[format_number(each) for each in NUMBERS], [format_bytes(each) for each in sizes]]
    shares = [0, 1e-5, 0.000_45, -0.000_5, 0.012_34, -0.128, 0.566, 0.999_4, 0.999_6, 1, 12.5]
    told = page.evaluate(
        "shares => import('/dashboard/scripts/format.js').then((format) => shares.map(format.percent))", shares
    )
    assert told == [format_share(each) for each in shares]
    assert told[6:] == ["56.6%", "99.9%", "99.9%", "100.0%", "1250.0%"]
    assert format_number(84_117.3) == "84,120"
    assert format_number(1e6) == "1e6"


def test_values_far_apart_have_a_logarithmic_scale_and_equal_ones_a_flat_one(page: Page) -> None:
    cases = [[1, 1e6, 1e12], [0, 1e-3, 10], [1.75, 1.75 + 4e-16], [-1e3, 0, 1e3], [5, None, 7, 6]]
    shown = page.evaluate(
        """cases => import('/dashboard/plots/depth.js').then(({ scaleOf }) => cases.map((values) => {
             const scale = scaleOf(values);
             return [scale.log, values.filter((value) => value !== null).map(scale.share)];
           }))""",
        cases,
    )
    assert [log for log, _ in shown] == [True, True, False, False, False]
    expected = [[0, 0.5, 1], [0, 0, 1], [0.5, 0.5], [0, 0.5, 1], [0, 1, 0.5]]
    for (_, shares), wanted in zip(shown, expected, strict=True):
        assert shares == pytest.approx(wanted)


def test_blocks_are_named_by_their_number(page: Page) -> None:
    names = ["encoder.layer.3.mlp.up", "features.0", "head", "h.11.ln_1", "a.b.c"]
    shown = page.evaluate(
        "names => import('/dashboard/plots/groups.js').then((groups) => names.map((layer) => groups.blockOf({layer})))",
        names,
    )
    assert shown == ["encoder.layer.3", "features", "head", "h.11", "a.b"]
