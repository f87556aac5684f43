"""How long a service that is away is borne, and how soon it is asked again."""

import time

AGAIN = frozenset({429, 502, 503, 504})
"""Answers that later may be others."""
PAUSE_SECONDS = 2.0


class Patience:
    """Bears troubles until they have lasted ``seconds``; what is silent because nobody listened counts for nothing."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def heard(self) -> None:
        """The service is there."""
        self._since = None

    def bear(self, trouble: Exception, pause_seconds: float) -> None:
        """Pause before the service is asked again.

        Raises:
            Exception: The ``trouble``, where it has lasted too long.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        left = self._since + self._seconds - now
        if left <= 0:
            raise trouble
        time.sleep(min(pause_seconds, left))


def pause_of(header: str | None) -> float:
    """The seconds of a header Retry-After, else the usual ones."""
    return float(header) if header is not None and header.isdecimal() else PAUSE_SECONDS
