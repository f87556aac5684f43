"""The page of a new job: YAML as the command line reads it, an estimate, and a job run again."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from jobs.codec import parse_document
from jobs.records import LOCAL_TENANT
from jobs.repository.store import read_job
from kronoscope.cli.documents import read_document
from tests.api import seeding
from tests.api.conftest import Embedded
from tests.api.routes.test_dashboard import browser, page  # noqa: F401 - fixtures

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[3]
READ = [
    *(path.read_text() for path in sorted((ROOT / "examples").glob("*.yaml"))),
    "a: 1e-4\nb: yes\nc: no\nd: ~\ne:\nf: 'it''s'\ng: \"x\\ny\\u00e9\"\nh: 007\ni: 0x1F\nj: .5\nk: 3.\nl: +4\nm: -0\n",
    "model: {source: builtin, name: digits_cnn}\nx: {a, b: , c: [1, {d: e}]}\ny: {\"b\": 1, 'c': 2,}\n",
    "a:\n- 1\n- b: 2\n  c: 3\n-\n  d: 4\n- - x\n  - y\nb:\n    - z\n",
    "---\na: b # c\n# whole\n'q # x': \"r # s\"\nu: http://x.y/z#frag\n",
    "a: [1,\n  2,\n  {b: 3}]\nc: 1.5e3\nd: 12:30:45\ne: 123456789012345678901234567890\n",
    "__proto__: 1\nconstructor: {__proto__: x}\n",
]
REFUSED = {
    "a: &x 1\nb: *x\n": "aliases, anchors and tags are not read",
    "a: !!python/object:os.system x\n": "aliases, anchors and tags are not read",
    "<<: {a: 1}\n": "merges",
    "a: |\n  x\n": "texts of several lines",
    "a: x\n  y\n": "further right",
    "? a\n: b\n": "not `name: value`",
    "a: 1\na: 2\n": "`a` stands twice",
    "a: {b: 1, b: 2}\n": "`b` stands twice",
    "a: b: c\n": "put it in quotes",
    "a: [1\n": "not closed",
    "a: 'x\n": "not closed",
    "- 1\n": "is a mapping",
    "a:\n\t- 1\n": "a tab",
    "a: 1\n---\nb: 2\n": "more than one document",
    "a: .inf\n": "not a finite number",
    "a: 1_000\n": "underscores",
    f"a: {'[' * 99}{']' * 99}": "deeper than 16 levels",
    f"a: {'x' * 300_000}": "a job document is short",
    "": "no document",
}


def test_yaml_is_read_as_the_command_line_reads_it(page: Page, tmp_path: Path) -> None:  # noqa: F811 - a fixture
    page.goto("/")
    answers: list[dict[str, str]] = page.evaluate(
        """async (texts) => {
          const { asJson } = await import("/dashboard/scripts/yaml.js");
          return texts.map((text) => {
            try { return { json: asJson(text) }; } catch (error) { return { error: error.message }; }
          });
        }""",
        [*READ, *REFUSED],
    )
    file = tmp_path / "job.yaml"
    for text, answer in zip(READ, answers, strict=False):
        file.write_text(text)
        assert json.loads(answer["json"]) == read_document(file), text
    for (text, said), answer in zip(REFUSED.items(), answers[len(READ) :], strict=True):
        assert said in answer.get("error", ""), (text[:60], answer)
        assert re.match(r"Line \d+: ", answer["error"])


YAML = """kind: capacity # one
model: {source: builtin, name: digits_cnn}
data:
  source: builtin
  name: digits
task: {type: classification}
collection:
  batch_size: -1
"""


def test_a_document_in_yaml_is_checked_estimated_and_submitted(page: Page, embedded: Embedded) -> None:  # noqa: F811
    asked: list[dict[str, Any]] = []

    def estimated(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or "{}"))
        plan = {"id": "x", "state": "queued", "fits": None, "peak": None, "seconds": None, "why": None}
        done = {"state": "succeeded", "fits": True, "peak": {"device": None, "host": 2**20, "disk": 0}, "seconds": 90.0,
                "seconds_range": [45.0, 180.0]}  # fmt: skip
        more = {
            "why": "<b>all layers in one pass</b>",
            "smallest_budget": {"device": None, "host": 2**19, "disk": None},
        }
        ended = route.request.method == "GET"
        route.fulfill(status=200 if ended else 202, json=plan | done | more if ended else plan)

    page.route("**/v1/estimates**", estimated)
    page.goto("/#/new")
    editor = page.get_by_label("Job document")
    editor.fill(YAML)
    page.get_by_role("button", name="Check only").click()
    expect(page.get_by_role("alert")).to_contain_text("take 1 to 65536")
    page.get_by_role("button", name="/collection/batch_size").click()
    assert page.evaluate("getSelection().toString()") == "batch_size: -1"
    editor.fill(YAML.replace("-1", "*x"))
    page.get_by_role("button", name="Submit job").click()
    expect(page.get_by_role("alert")).to_contain_text("Line 8: aliases, anchors and tags are not read")
    editor.fill(YAML.replace("-1", "32"))
    page.get_by_role("button", name="Estimate").click()
    expect(page.get_by_text("The job fits. Nothing was started.")).to_be_visible()
    expect(page.locator(".split aside")).to_contain_text("1 MiB on the host")
    expect(page.locator(".split aside")).to_contain_text("1 min 30 s (45 s to 3 min 0 s)")
    expect(page.locator(".split aside")).to_contain_text("<b>all layers in one pass</b>")
    assert asked[0]["collection"] == {"batch_size": 32}
    page.get_by_role("button", name="Submit job").click()
    expect(page.get_by_text("Waiting for a worker")).to_be_visible()


def test_an_ended_job_runs_again(page: Page, embedded: Embedded) -> None:  # noqa: F811
    document = {**seeding.DOCUMENT, "name": "of the thesis", "labels": {"round": "one"}}
    first = seeding.finished(embedded.engine, embedded.artifacts, LOCAL_TENANT, document)
    page.goto(f"/#/jobs/{first}")
    page.get_by_role("link", name="Run again").click()
    editor = page.get_by_label("Job document")
    expect(editor).to_have_value(re.compile("of the thesis"))
    written = json.loads(editor.input_value())
    stored = read_job(embedded.engine, LOCAL_TENANT, first)
    assert written == {**stored.document, "name": "of the thesis"}
    parse_document(editor.input_value().encode())
    editor.fill(json.dumps({**written, "labels": {"round": "two"}}))
    page.get_by_role("button", name="Submit job").click()
    expect(page.get_by_text("round: two")).to_be_visible()
    expect(page.get_by_text("Waiting for a worker")).to_be_visible()
