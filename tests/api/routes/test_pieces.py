"""A divided job over HTTP and on its page: its pieces with it, and the way between them."""

import secrets
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from catalog.frames import Divided, Failed, Finished
from catalog.record import plain
from catalog.requests.pieces import Piece
from jobs.queue import attempt_endings, attempt_writes, claims
from jobs.queue.division import divide
from jobs.queue.piece_progress import report_piece
from jobs.records import LOCAL_TENANT
from jobs.repository.pieces import read_pieces
from jobs.schema.identifiers import new_id
from tests.api import seeding
from tests.api.conftest import Embedded, Keyed
from tests.api.expect import problem
from tests.api.routes.test_dashboard import browser, page  # noqa: F401 - fixtures of the room
from tests.api.routes.test_jobs import tenant


def test_a_divided_job_is_read_with_its_pieces(keyed: Keyed, ours: httpx.Client, theirs: httpx.Client) -> None:
    job_id, claims = seeding.divided(keyed.engine, tenant(keyed), 3)
    first = ours.get(f"/v1/jobs/{job_id}")
    body = first.json()
    assert (body["state"], body["parent"], body["piece"]) == ("waiting", None, None)
    assert [(each["index"], each["count"], each["id"], each["examples"]) for each in body["pieces"]] == [
        (n, 3, claims[n].job_id, 16) for n in range(3)
    ]
    assert {(each["state"], each["worker"], each["attempt"]) for each in body["pieces"]} == {
        ("running", "node-7:4711", 1)
    }
    attempt_writes.write_progress(keyed.engine, claims[0], {"stage": "collection", "percent": 25.0})
    attempt_endings.finish(keyed.engine, claims[1], Finished(examples=15))
    later = ours.get(f"/v1/jobs/{job_id}", headers={"if-none-match": first.headers["etag"]})
    assert later.status_code == 200, "the end of a piece is news of its job"
    told = [(each["state"], each["progress"], each["examples"], each["worker"]) for each in later.json()["pieces"]]
    assert told == [
        *[("running", 25.0, 16, "node-7:4711"), ("succeeded", 100.0, 15, None), ("running", None, 16, "node-7:4711")],
    ]
    events = ours.get(f"/v1/jobs/{job_id}/events", headers={"accept": "application/json"}).json()["items"]
    assert [each["data"]["state"] for each in events if each["type"] == "piece"] == ["succeeded"]
    piece = ours.get(f"/v1/jobs/{claims[0].job_id}").json()
    assert (piece["parent"], piece["pieces"], piece["links"]["parent"]) == (job_id, None, f"/v1/jobs/{job_id}")
    assert piece["piece"] == {
        "round": "collect",
        "index": 0,
        "count": 3,
        "begin": 0,
        "end": 16,
        "total": 48,
        "layers": None,
    }
    assert piece["name"] == "digits · piece 1 of 3"
    problem(theirs.get(f"/v1/jobs/{claims[0].job_id}"), 404)


def test_lists_hold_whole_jobs_unless_pieces_are_asked_for(
    keyed: Keyed, ours: httpx.Client, theirs: httpx.Client
) -> None:
    job_id, claims = seeding.divided(keyed.engine, tenant(keyed), 3)
    ids = {each.job_id for each in claims}

    def listed(client: httpx.Client, **params: Any) -> set[str]:
        return {each["id"] for each in client.get("/v1/jobs", params={"limit": 100, **params}).json()["items"]}

    whole = listed(ours)
    assert job_id in whole
    assert not whole & ids
    assert listed(ours, parent=job_id) == ids
    assert listed(ours, parent=job_id, state="succeeded") == set()
    assert listed(ours, id=claims[0].job_id[-12:]) == {claims[0].job_id}
    # another tenant's job is as one that does not exist
    problem(theirs.get("/v1/jobs", params={"parent": job_id}), 404)
    problem(ours.get("/v1/jobs", params={"parent": new_id()}), 404)
    problem(ours.get("/v1/jobs", params={"parent": "x"}), 422)
    following = ours.get("/v1/jobs", params={"parent": job_id, "limit": 1})
    assert f"parent={job_id}" in following.headers["link"]


def test_a_piece_is_cancelled_and_deleted_with_its_job(keyed: Keyed, ours: httpx.Client) -> None:
    job_id, claims = seeding.divided(keyed.engine, tenant(keyed), 2)
    assert ours.post(f"/v1/jobs/{claims[0].job_id}:cancel").json()["state"] == "cancelling"
    assert ours.get(f"/v1/jobs/{job_id}").json()["state"] == "cancelling"
    problem(ours.delete(f"/v1/jobs/{job_id}"), 409)
    for each in claims:
        attempt_endings.hand_back(keyed.engine, each)
    assert ours.get(f"/v1/jobs/{job_id}").json()["state"] == "cancelled"
    refused = problem(ours.delete(f"/v1/jobs/{claims[0].job_id}"), 409)
    assert job_id in refused["detail"]
    assert ours.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert ours.get(f"/v1/jobs/{claims[1].job_id}").status_code == 404


@pytest.mark.browser
def test_the_page_shows_the_pieces_as_they_are_computed(page: Page, embedded: Embedded) -> None:  # noqa: F811
    engine = embedded.engine
    job_id, claims = seeding.divided(engine, LOCAL_TENANT, 3)
    page.goto("/#/jobs")
    expect(page.locator(f"a[href='#/jobs/{job_id}']")).to_have_count(1)
    expect(page.locator(f"a[href='#/jobs/{claims[0].job_id}']")).to_have_count(0)
    page.goto(f"/#/jobs/{job_id}")
    table = page.get_by_role("region", name="Table of pieces")
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("node-7:4711")
    expect(page.get_by_text("3 running")).to_be_visible()
    attempt_writes.write_progress(engine, claims[0], {"stage": "collection", "percent": 50.0})
    attempt_endings.finish(engine, claims[1])
    report_piece(engine, claims[0], begins=True)
    expect(rows.nth(1)).to_contain_text("Succeeded")
    expect(rows.first.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "50")
    # half of one piece and all of another: 24 of 48 examples, and the collection is 60 per cent of the whole
    expect(page.get_by_text("Collecting curvature in pieces · 24 of 48 examples")).to_be_visible()
    expect(page.get_by_role("progressbar", name="Progress of the job")).to_have_attribute("aria-valuenow", "30")
    rows.first.get_by_role("link", name="piece 1 of 3").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("digits · piece 1 of 3")
    page.get_by_role("link", name=f"job {job_id[-8:]}").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("digits")
    page.get_by_role("button", name="Cancel job").click()
    for each in (claims[0], claims[2]):
        attempt_endings.hand_back(engine, each)
    expect(page.get_by_text("Pieces: 1 succeeded, 2 cancelled")).to_be_visible()
    rows_of_ended = page.locator("tbody tr", has=page.get_by_role("link", name="piece 1 of 3"))
    page.get_by_text("Pieces: 1 succeeded, 2 cancelled").click()
    rows_of_ended.get_by_role("link").click()
    expect(page.get_by_text("collect: examples 1 to 16 of 48")).to_be_visible()
    expect(page.get_by_text("The results are on the page of the whole job.")).to_be_visible()
    expect(page.get_by_text("layers.csv")).to_have_count(0)


@pytest.mark.browser
def test_the_page_shows_a_round_of_queries(page: Page, embedded: Embedded) -> None:  # noqa: F811
    engine = embedded.engine
    job_id, collected = seeding.divided(engine, LOCAL_TENANT, 2)
    for each in collected:
        attempt_endings.finish(engine, each)
    parent = claims.claim(engine, job_id, "node-7:4711", secrets.token_hex(8), 3600)
    assert parent is not None
    shares = ((0, 4), (4, 7))
    pieces = tuple(
        plain(Piece(round="score", index=place, count=2, begin=begin, end=end, total=7))
        for place, (begin, end) in enumerate(shares)
    )
    assert divide(engine, parent, Divided(round="score", pieces=pieces)) == "waiting"
    first = next(each.id for each in read_pieces(engine, LOCAL_TENANT, job_id) if each.piece.round == "score")
    scoring = claims.claim(engine, first, "node-7:4711", secrets.token_hex(8), 3600)
    assert scoring is not None
    attempt_writes.write_progress(engine, scoring, {"stage": "influence", "percent": 50.0})
    report_piece(engine, scoring, begins=True)
    page.goto(f"/#/jobs/{job_id}")
    expect(page.get_by_text("Scoring queries in pieces · 2 of 7 queries")).to_be_visible()
    rows = page.get_by_role("region", name="Table of pieces").locator("tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.nth(2)).to_contain_text("Score · 4 queries")
    # the round fills the bar from 70 to 95 per cent
    expect(page.get_by_role("progressbar", name="Progress of the job")).to_have_attribute("aria-valuenow", "77")
    rows.nth(2).get_by_role("link", name="piece 1 of 2").click()
    expect(page.get_by_text("score: queries 1 to 4 of 7")).to_be_visible()


@pytest.mark.browser
def test_the_page_of_a_failed_job_follows_the_pieces_that_have_yet_to_stop(
    page: Page,  # noqa: F811
    embedded: Embedded,
) -> None:
    engine = embedded.engine

    def failure(category: Any) -> Failed:
        return Failed(category=category, code="bad", message="bad", pointer=None, layer=None, detail=None)

    job_id, claims = seeding.divided(engine, LOCAL_TENANT, 3)
    attempt_endings.fail(engine, claims[0], failure("transient"))
    page.goto(f"/#/jobs/{job_id}")
    rows = page.get_by_role("region", name="Table of pieces").locator("tbody tr")
    expect(rows.first).to_contain_text("1 (1 failed)")
    attempt_endings.fail(engine, claims[1], failure("usage"))
    expect(page.get_by_text("The job failed")).to_be_visible()
    expect(rows.nth(2)).to_contain_text("Cancelling")
    attempt_endings.hand_back(engine, claims[2])
    expect(rows.nth(2)).to_contain_text("Cancelled")
