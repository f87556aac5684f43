"""The frame pipe, at the child's end: whole lines, in order, and progress no more often than is useful.

Answers of the parent come over a pipe of their own, one line for each question.
"""

import os
import select
import time
from collections.abc import Callable
from dataclasses import replace

from catalog.frames import (
    ArtifactWritten,
    CacheAnswer,
    CacheAsked,
    Frame,
    LogLine,
    Planned,
    Progress,
    decode_answer,
    encode,
)
from worker.execution.refusal import storable_text

_PROGRESS_SECONDS = 0.2
_LOOK_SECONDS = 0.2
"""Between two looks, while an answer is awaited, whether the job is to stop."""
_ANSWER_BYTES = 4096


class FramePipe:
    """Writes frames to a descriptor. One thread writes."""

    def __init__(self, descriptor: int, answers: int | None = None) -> None:
        self._descriptor = descriptor
        self._answers = answers
        self._last: Progress | None = None
        self._reported = 0.0

    def send(self, frame: Frame) -> None:
        """Write one frame."""
        line = memoryview(encode(frame))
        while line:
            line = line[os.write(self._descriptor, line) :]

    def ask(self, question: CacheAsked, checkpoint: Callable[[], None]) -> CacheAnswer:
        """Ask the parent, and wait for its answer."""
        if self._answers is None:
            return CacheAnswer(job=None)
        self.send(question)
        line = b""
        while not line.endswith(b"\n"):
            checkpoint()
            if select.select([self._answers], [], [], _LOOK_SECONDS)[0]:
                part = os.read(self._answers, _ANSWER_BYTES)
                if not part:
                    break  # the parent is gone
                line += part
        return decode_answer(line)

    def report(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """Send progress: the first of a stage, its last, and a few a second in between."""
        now, before = time.monotonic(), self._last
        self._last = Progress(stage=stage, done=done, total=total, unit=unit)
        if before is not None and stage == before.stage and done != total and now - self._reported < _PROGRESS_SECONDS:
            return
        self._reported = now
        self.send(self._last)

    def keep(self) -> None:
        """Send that a checkpoint holds all that was last reported as done."""
        if self._last is not None:
            self.send(replace(self._last, kept=True))

    def log(self, level: str, message: str) -> None:
        """Send a line for the job's log."""
        message = storable_text(message)
        known: dict[str, LogLine] = {
            "debug": LogLine(level="debug", message=message),
            "warning": LogLine(level="warning", message=message),
        }
        self.send(known.get(level) or LogLine(level="info", message=message))

    def planned(self, plan: object) -> None:
        """Send the memory plan."""
        self.send(Planned(plan=plan if isinstance(plan, dict) else {}))

    def artifact(self, name: str, sha256: str, size_bytes: int, media_type: str) -> None:
        """Announce a complete file."""
        self.send(ArtifactWritten(name=name, sha256=sha256, size_bytes=size_bytes, media_type=media_type))
