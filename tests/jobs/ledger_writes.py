"""What the holder of a job can write and a zombie tries to, and how others come before a reaper."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from sqlalchemy import Engine

from catalog.frames import ArtifactWritten, Failed, LayerDone, LogLine, Planned, Started, Summarised
from jobs.queue import attempt_endings, attempt_writes, claims, reaper
from jobs.queue.crash_signatures import record_crash
from jobs.records import Claim
from jobs.schema.database import reading


def frame_of_layer(ordinal: int, trace: int) -> LayerDone:
    return LayerDone(kind="capacity", ordinal=ordinal, layer=f"l{ordinal}", outcome={"trace": trace}, observed={"s": 1})


def frame_of_file(name: str, sha256: str) -> ArtifactWritten:
    return ArtifactWritten(name=name, sha256=sha256, size_bytes=3, media_type="application/json")


def frame_of_failure(category: Any) -> Failed:
    return Failed(category=category, code="told", message="m", pointer=None, layer=None, detail="/srv/secret")


WRITES: dict[str, Callable[[Engine, Claim], object]] = {
    "heartbeat": lambda engine, mine: claims.heartbeat(engine, mine, 3600),
    "started": lambda engine, mine: attempt_writes.write_started(engine, mine, Started(environment={"by": "zombie"})),
    "progress": lambda engine, mine: attempt_writes.write_progress(engine, mine, {"stage": "zombie"}),
    "plan": lambda engine, mine: attempt_writes.write_plan(engine, mine, Planned(plan={"planning_errors": ["zombie"]})),
    "layer": lambda engine, mine: attempt_writes.write_layer(engine, mine, frame_of_layer(9, 9)),
    "artifact": lambda engine, mine: attempt_writes.write_artifact(
        engine, mine, frame_of_file("zombie", "f" * 64), "u"
    ),
    "summary": lambda engine, mine: attempt_writes.write_summary(
        engine, mine, Summarised(kind="capacity", summary={"z": 1})
    ),
    "log": lambda engine, mine: attempt_writes.write_log_line(engine, mine, LogLine(level="info", message="zombie")),
    "crash": lambda engine, mine: record_crash(engine, mine, {"signal": 9}),
    "finish": attempt_endings.finish,
    "usage": lambda engine, mine: attempt_endings.fail(engine, mine, frame_of_failure("usage")),
    "transient": lambda engine, mine: attempt_endings.fail(engine, mine, frame_of_failure("transient")),
    "fatal": lambda engine, mine: attempt_endings.fail(engine, mine, frame_of_failure("fatal")),
    "hand_back": attempt_endings.hand_back,
    "decline": lambda engine, mine: attempt_endings.decline(engine, mine, "not_started"),
}


@contextmanager
def overtaken(come: Callable[[], None]) -> Iterator[None]:
    """Let ``come`` happen once, after a reaper has read who is silent and before it takes anybody."""
    waiting = [come]

    @contextmanager
    def reading_slowly(engine: Engine) -> Iterator[Any]:
        with reading(engine) as connection:
            yield connection
        if waiting:
            waiting.pop()()

    with patch.object(reaper, "reading", reading_slowly):
        yield
