"""The audit lines of requests without a valid key, of which a client can send any number.

::

    the first five of a client address in a minute   a line each
    those after them                                 one line with their number, when the minute is over
    clients beyond the thousandth of a minute        one line with their number, for all of them together
"""

import asyncio
from collections import Counter

from jobs.tenancy.audit_log import write_audit_line

_SECONDS = 60.0
_LINES = 5
_CLIENTS = 1000
_OTHERS = None
"""Stands for the clients that are not counted by themselves."""


class RefusedLines:
    """The requests of the minute that runs, by client."""

    def __init__(self) -> None:
        self._requests: Counter[str | None] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def take_line(self, client: str) -> bool:
        """Count a request.

        Args:
            client: The address that it is counted by.

        Returns:
            Whether it has a line of its own.
        """
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SECONDS, self.write)
        counted = client if client in self._requests or len(self._requests) < _CLIENTS else _OTHERS
        self._requests[counted] += 1
        return counted is not _OTHERS and self._requests[counted] <= _LINES

    def write(self) -> None:
        """Write the lines of the minute that are due at its end, and begin another one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        requests, self._requests = self._requests, Counter()
        for client, count in requests.items():
            together = count if client is _OTHERS else count - _LINES
            if together > 0:
                write_audit_line(action="request", outcome="unauthorised", key=None, client=client, requests=together)
