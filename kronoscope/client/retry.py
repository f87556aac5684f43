"""Retries of a service that is away: how long the client goes on, and how soon it asks again."""

import time

RETRY_STATUSES = frozenset({429, 502, 503, 504})
"""HTTP statuses that may change by themselves."""
PAUSE_SECONDS = 2.0


class RetryWindow:
    """The time for which failures are retried; it begins with the first failure and ends with an answer."""

    def __init__(self, seconds: float) -> None:
        """Set the window's length."""
        self._seconds = seconds
        self._since: float | None = None

    def reset(self) -> None:
        """End the window, as the service has answered."""
        self._since = None

    def pause(self, failure: Exception, pause_seconds: float) -> None:
        """Sleep before the service is asked again."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        left = self._since + self._seconds - now
        if left <= 0:
            raise failure
        time.sleep(min(pause_seconds, left))


def retry_after_seconds(header: str | None) -> float:
    """Return the pause that a header Retry-After asks for."""
    return float(header) if header is not None and header.isdecimal() else PAUSE_SECONDS
