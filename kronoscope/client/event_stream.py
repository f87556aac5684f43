"""A job's events as they arrive, joined across connections that break: each once, and in order."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import httpx

from catalog.responses.views import EventListView, EventView
from kronoscope.client.errors import ClientError, content_of, unexpected
from kronoscope.client.responses import build
from kronoscope.client.retry import PAUSE_SECONDS, RETRY_STATUSES, RetryWindow, retry_after_seconds

_MILLISECONDS = re.compile(r"\d{1,12}", re.ASCII)
_LONGEST_PAUSE_SECONDS = 60.0


def follow_events(
    connect: Callable[[int], AbstractContextManager[httpx.Response]],
    refusal: Callable[[httpx.Response], Exception],
    after: int,
    patience_seconds: float,
) -> Iterator[EventView]:
    """Yield a job's events until it has ended, and connect again where the connection breaks."""
    pause, window = PAUSE_SECONDS, RetryWindow(patience_seconds)
    while True:
        failure: Exception | None = None
        try:
            with connect(after) as response:
                if response.status_code == httpx.codes.NO_CONTENT:
                    return
                for item in _parse(_lines(response, refusal)):
                    window.reset()
                    if isinstance(item, float):
                        pause = item
                    elif item is not None and item.seq > after:
                        after = item.seq
                        yield item
                        if item.ends:
                            return
        except _RetryLater as later:
            failure, pause = later.refusal, later.seconds
        except httpx.HTTPError as error:
            failure = error
        if failure is None:
            time.sleep(pause)
        else:
            window.pause(failure, pause)


def read_events(send: Callable[..., httpx.Response], after: int) -> Iterator[EventView]:
    """Yield the events that a job has by now, page after page."""
    while True:
        answer = send(params={"after": str(after)}, headers={"accept": "application/json"})
        content = content_of(answer)
        if not isinstance(content, dict) or not {"items", "through", "more"} <= content.keys():
            raise unexpected(answer)
        page = build(EventListView, content)
        yield from page.items
        if not page.more or page.through <= after:
            return
        after = page.through


class _RetryLater(Exception):
    """The service asks to come again."""

    def __init__(self, refusal: Exception, seconds: float) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
        self.seconds = seconds


def _lines(response: httpx.Response, refusal: Callable[[httpx.Response], Exception]) -> Iterator[str]:
    if response.is_success:
        return response.iter_lines()
    response.read()
    if response.status_code in RETRY_STATUSES:
        raise _RetryLater(refusal(response), retry_after_seconds(response.headers.get("retry-after")))
    raise refusal(response)


def _parse(lines: Iterable[str]) -> Iterator[EventView | float | None]:
    """Yield each event, each hint as seconds to pause, and None for a keepalive."""
    data: list[str] = []
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if line.startswith(":"):
            yield None
        elif name == "data":
            data.append(value)
        elif name == "retry" and _MILLISECONDS.fullmatch(value):
            yield min(int(value) / 1000, _LONGEST_PAUSE_SECONDS)
        elif not line and data:
            yield _event("\n".join(data))
            data = []


def _event(text: str) -> EventView:
    try:
        value = json.loads(text)
        if type(value["seq"]) is int:
            return build(EventView, value)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    detail = f"the stream holds {text[:80]!r}, which is no event of Kronoscope's; check the address"
    raise ClientError(200, "Unexpected answer", detail)
