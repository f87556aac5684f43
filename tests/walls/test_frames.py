"""Frames are claims: one that is beyond its bounds ends the job at once."""

import itertools
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from catalog.frame_bounds import BOUNDS, FrameBeyond, cut
from catalog.frames import _FRAMES, Failed, Finished, LogLine, decode, encode
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT, Job
from jobs.repository.results import events_after
from jobs.schema.database import reading
from jobs.schema.tables import counters, jobs
from worker.supervision import frame_writer
from worker.supervision.supervisor import Supervisor

Attempt = Callable[..., Job]
Line = Callable[[Any], list[str]]

DIGEST = "0" * 64
FAILED = {"frame": "failed", "category": "usage", "code": "x", "message": "m"}
FAILED |= {"pointer": None, "layer": None, "detail": None}
PROGRESS = {"frame": "progress", "stage": "collection", "done": 1, "total": 2, "unit": "batches"}
ARTIFACT = {"frame": "artifact", "name": "a", "sha256": DIGEST, "size_bytes": 1, "media_type": "text/plain"}
ROW = {"frame": "layer", "kind": "capacity", "ordinal": 0, "layer": "a", "outcome": {}, "observed": {}}
SUMMARY = {"frame": "summary", "kind": "capacity"}
CACHED = {"name": "a", "sha256": DIGEST, "size_bytes": 1}
FILLED = {"frame": "cache_filled", "key": DIGEST, "files": [CACHED]}

BEYOND = {
    "a long message": FAILED | {"message": "m" * 100_000},
    "a category of its own": FAILED | {"category": "evil"},
    "a code that is a label": FAILED | {"code": 'x"} 1\nevil'},
    "a long code": FAILED | {"code": "x" * 200},
    "text that no database stores": FAILED | {"message": "\0"},
    "half a surrogate pair": FAILED | {"message": "\ud800"},
    "a negative count": PROGRESS | {"done": -1},
    "a count beyond integers": PROGRESS | {"total": 10**30},
    "a stage that is a page": PROGRESS | {"stage": "<b>" * 1000},
    "an artifact without a digest": ARTIFACT | {"sha256": "g" * 64},
    "an artifact of less than nothing": ARTIFACT | {"size_bytes": -5},
    "a long name of an artifact": ARTIFACT | {"name": "a" * 5000},
    "a row of no analysis": ROW | {"kind": "evil"},
    "a row of an analysis that is not asked for": ROW | {"kind": "spectrum"},
    "a row at a negative place": ROW | {"ordinal": -1},
    "a level of its own": {"frame": "log", "level": "critical", "message": "m"},
    "a long line": {"frame": "log", "level": "info", "message": "m" * 2_000_000},
    "a large environment": {"frame": "started", "environment": {"a": "m" * 100_000}},
    "a digest of the model that is longer than one": {"frame": "finished", "model_sha256": "m" * 65},
    "three megabytes of what was read": {"frame": "finished", "reading": {"labels": "m" * 3_000_000}},
    "a hundred thousand notices": {"frame": "finished", "notices": ["m"] * 100_000},
    "a key that leads elsewhere": {"frame": "cache_asked", "key": "../" * 21 + "a"},
    "an entry under another key": FILLED | {"key": "evil"},
    "an entry of files that lead elsewhere": FILLED | {"files": [CACHED | {"name": "../../evil"}]},
    "an entry of hidden files": FILLED | {"files": [CACHED | {"name": ".place"}]},
    "an entry of less than nothing": FILLED | {"files": [CACHED | {"size_bytes": -1}]},
    "an entry of a file without a digest": FILLED | {"files": [CACHED | {"sha256": "evil"}]},
    "an entry of sixty thousand files": FILLED | {"files": [CACHED] * 60_000},
    "a round of its own": {"frame": "divided", "round": "evil", "pieces": []},
    "a trace that holds a path": FAILED | {"trace": [{"module": "/srv/a.py", "line": 1, "function": "f"}]},
    "a part of the model in a form of its own": SUMMARY | {"summary": {"coverage": {"parts": [{"kind": "evil"}]}}},
    "eighty thousand pieces": {"frame": "divided", "round": "collect", "pieces": [{}] * 80_000},
}


@pytest.fixture
def attempt(ledger: Engine, settings: Any, scripted: Any, submitted: Any, job: Any) -> Attempt:
    """``attempt(["raw", line])``: the job after one attempt of a child that does just that."""

    def run(*steps: Any, **document: Any) -> Job:
        job_id = submitted(**document)
        chosen = settings()
        held = claim(ledger, job_id, "test", secrets.token_hex(8), chosen.ledger.lease_seconds)
        assert held is not None
        Supervisor(ledger, held, chosen, scripted(["started"], *steps)).run()
        found: Job = job(job_id)
        return found

    return run


@pytest.fixture
def line(tmp_path: Path) -> Callable[[Any], list[str]]:
    """``line(frame)``: the step that sends a frame as it is, cut by nobody."""
    numbers = itertools.count()

    def step(frame: Any) -> list[str]:
        path = tmp_path / f"frame{next(numbers)}"
        path.write_text(json.dumps(frame) + "\n")
        return ["raw_file", str(path)]

    return step


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("name", BEYOND)
def test_a_frame_beyond_its_bounds_ends_the_job_without_a_second_attempt(
    attempt: Attempt, line: Line, name: str
) -> None:
    ended = attempt(line(BEYOND[name]), ["sleep", 60])
    assert ended.state == "failed"
    assert ended.failure is not None
    assert (ended.failure["category"], ended.failure["code"]) == ("fatal", "broken_child")
    assert ended.attempt == 1
    assert len(ended.failure["message"]) < 1_000


def test_no_label_of_a_metric_is_what_a_job_says(attempt: Attempt, line: Line, ledger: Engine) -> None:
    attempt(line(FAILED | {"category": "evil"}))
    attempt(line(FAILED | {"code": "evil"}))
    with reading(ledger) as connection:
        labels = connection.execute(select(counters.c.label)).scalars().all()
    assert not [each for each in labels if "evil" in each]


@pytest.mark.parametrize(
    ("document", "pieces"),
    [({}, 1), ({}, 2), ({"shards": 2}, 3), ({"shards": "auto"}, 3), ({"shards": 1}, 4096)],
)
def test_a_job_is_divided_into_no_more_pieces_than_it_asks_for(
    attempt: Attempt, line: Line, ledger: Engine, document: Any, pieces: int
) -> None:
    cut_at = range(pieces)
    whole = {"round": "collect", "count": pieces, "total": pieces}
    frame = {"frame": "divided", "round": "collect"}
    frame["pieces"] = [{**whole, "index": each, "begin": each, "end": each + 1} for each in cut_at]
    ended = attempt(line(frame), **document)
    assert ended.state == "failed"
    assert ended.failure is not None
    assert (ended.failure["category"], ended.failure["code"]) == ("fatal", "broken_child")
    with reading(ledger) as connection:
        assert connection.execute(select(jobs.c.id).where(jobs.c.parent_id == ended.id)).all() == []


def test_a_flood_of_rows_ends_the_job(attempt: Attempt, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_writer, "_MOST", {**frame_writer._MOST, frame_writer.LayerDone: 20})
    ended = attempt(*(line(ROW | {"ordinal": each}) for each in range(30)))
    assert ended.failure is not None
    assert ended.failure["code"] == "broken_child"
    assert "more than 20 frames `layer`" in ended.failure["message"]


def test_a_flood_of_stages_ends_the_job(attempt: Attempt, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_writer, "_MOST_STAGES", 20)
    ended = attempt(*(line(PROGRESS | {"stage": f"stage{each % 2}"}) for each in range(30)))
    assert ended.failure is not None
    assert ended.failure["code"] == "broken_child"


def test_the_honest_process_cuts_what_it_says() -> None:
    long = Failed(category="usage", code="x", message="m" * 9_000, pointer=None, layer=None, detail="d" * 90_000)
    said = decode(encode(long))
    assert isinstance(said, Failed)
    assert said.message == "m" * 3_999 + "…"
    many = decode(encode(Finished(unused=tuple(str(each) for each in range(5_000)))))
    assert isinstance(many, Finished)
    assert many.unused[-2:] == ("998", "and 4,001 more")
    assert decode(encode(LogLine(level="info", message="as it is"))) == LogLine(level="info", message="as it is")


def test_every_field_of_every_frame_has_its_bound() -> None:
    for name, kind in _FRAMES.items():
        fields = set(kind.__dataclass_fields__) - {"frame"}
        assert set(BOUNDS[name].known) == fields, name
        assert cut({"frame": name}) == {"frame": name}


@pytest.mark.parametrize(
    "frame",
    [
        FAILED | {"message": {"a": 1}},
        PROGRESS | {"done": "1"},
        PROGRESS | {"done": True},
        PROGRESS | {"kept": 1},
        ROW | {"outcome": [1]},
        {"frame": "planned", "plan": []},
        {"frame": "finished", "unused": [1]},
        {"frame": "cache_asked", "key": 1},
        FILLED | {"files": {}},
        FILLED | {"files": [1]},
        FILLED | {"files": [{"name": "a"}]},
        FILLED | {"files": [CACHED | {"uri": "x"}]},
    ],
)
def test_a_field_of_another_type_is_no_frame(frame: Any) -> None:
    with pytest.raises(ValueError, match="not a frame"):
        decode(json.dumps(frame).encode())


def test_a_long_line_is_stored_in_part(attempt: Attempt, line: Line, ledger: Engine) -> None:
    ended = attempt(line({"frame": "log", "level": "info", "message": "m" * 100_000}), ["finish"])
    assert ended.state == "succeeded"
    logged = [each.data["message"] for each in events_after(ledger, LOCAL_TENANT, ended.id, 0) if each.type == "log"]
    assert [len(each) for each in logged] == [8_000]


def test_what_lies_beyond_is_named() -> None:
    with pytest.raises(FrameBeyond, match="`category` is 'evil', and must be one of usage, transient, fatal"):
        decode(json.dumps(FAILED | {"category": "evil"}).encode())
