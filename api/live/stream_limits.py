"""The caps on streams of events: so many at a time in this process, and so many of each key."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from api.problem_details import Refusal

_RETRY_SECONDS = 10


class StreamLimits:
    """The count of open streams in this process, against its caps."""

    def __init__(self, most: int, most_per_key: int) -> None:
        """Begin with no stream.

        Args:
            most: Cap on all streams of this process.
            most_per_key: Cap on the streams of one key; requests without a key have none of their own.
        """
        self._most = most
        self._most_per_key = most_per_key
        self._open: Counter[str | None] = Counter()

    @property
    def open_streams(self) -> int:
        """The number of open streams."""
        return self._open.total()

    @contextlib.contextmanager
    def slot(self, key: str | None) -> Iterator[None]:
        """Hold a slot for one stream while the context lasts.

        Args:
            key: Prefix of the API key; None in embedded mode.

        Yields:
            Nothing; the slot is released with the context.

        Raises:
            Refusal: 429 where the key has as many streams as it may, 503 where all slots are taken.
        """
        if key is not None and self._open[key] >= self._most_per_key:
            raise _refusal(
                429, "too-many-streams", f"this key has {self._most_per_key} streams of events open; end one of them"
            )
        if self._open.total() >= self._most:
            raise _refusal(503, "streams-full", f"all {self._most} streams of events are taken; try again in a moment")
        self._open[key] += 1
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]


def _refusal(status: int, kind: str, detail: str) -> Refusal:
    detail += ", or ask with `Accept: application/json`, or `GET /v1/jobs/{job_id}?wait=30`"
    headers = {"retry-after": str(_RETRY_SECONDS)}
    return Refusal(status, kind, "Too many streams of events", detail, headers=headers)
