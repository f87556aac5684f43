"""A job's events as they arrive, put together across connections that break: each once, and in order."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx

from catalog.responses import EventView
from kronoscope.client.responses import build
from kronoscope.client.retry import AGAIN, PAUSE_SECONDS, Patience, pause_of


def follow_events(
    connect: Callable[[int], AbstractContextManager[httpx.Response]],
    refusal: Callable[[httpx.Response], Exception],
    after: int,
    patience_seconds: float,
) -> Iterator[EventView]:
    """The events numbered above ``after``, until the job has ended.

    Raises:
        Exception: The ``refusal`` of an answer that no second try would mend, or of the last one when the service has
            refused, or not answered, for ``patience_seconds``.
        httpx.HTTPError: The last one, where it did not answer at all.
    """
    pause, patience = PAUSE_SECONDS, Patience(patience_seconds)
    while True:
        trouble: Exception | None = None
        try:
            with connect(after) as answer:
                if answer.status_code == httpx.codes.NO_CONTENT:
                    return
                for told in _told(_lines(answer, refusal)):
                    patience.heard()
                    if isinstance(told, float):
                        pause = told
                    elif told is not None and told.seq > after:
                        after = told.seq
                        yield told
                        if told.ends:
                            return
        except _Later as later:
            trouble, pause = later.refusal, later.seconds
        except httpx.HTTPError as error:
            trouble = error
        if trouble is None:
            time.sleep(pause)
        else:
            patience.bear(trouble, pause)


class _Later(Exception):
    """The service asks to come again."""

    def __init__(self, refusal: Exception, seconds: float) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
        self.seconds = seconds


def _lines(answer: httpx.Response, refusal: Callable[[httpx.Response], Exception]) -> Iterator[str]:
    if answer.is_success:
        return answer.iter_lines()
    answer.read()
    if answer.status_code in AGAIN:
        raise _Later(refusal(answer), pause_of(answer.headers.get("retry-after")))
    raise refusal(answer)


def _told(lines: Iterable[str]) -> Iterator[EventView | float | None]:
    """Each event, each hint how many seconds to pause, and None for a sign of life."""
    data: list[str] = []
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if line.startswith(":"):
            yield None
        elif name == "data":
            data.append(value)
        elif name == "retry" and value.isdigit():
            yield int(value) / 1000
        elif not line and data:
            told: dict[str, Any] = json.loads("\n".join(data))
            data = []
            yield build(EventView, told)
