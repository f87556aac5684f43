"""How Celery uses Redis here: no message, and no word of the server's, ends a worker.

The database is the queue, so a broker's fault costs wake-ups, and the poll finds the jobs meanwhile. Celery's own
consumer ends the process on an error answer (READONLY after a failover, OOM when Redis is full) and on a list item that
is no message. And Celery's redelivery of unacknowledged messages is left out, with the scripts that it runs in Redis:
wake-ups are acknowledged as they come, and a user of Redis who may run scripts may do almost everything.
"""

import time
from typing import Any

from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown
from kombu.transport import redis

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 8.0
_STEADY_SECONDS = 60.0
"""A connection that held so long ends a series of failures."""
_STEP_SECONDS = 0.5


class _QoS(redis.QoS):  # type: ignore[misc]  # kombu publishes no types
    restore_at_shutdown = False  # what broke the connection would break the next one too

    def restore_visible(self, *_: object, **__: object) -> None:
        """Restore nothing."""


class _Channel(redis.Channel):  # type: ignore[misc]
    QoS = _QoS
    do_restore = False


class Transport(redis.Transport):  # type: ignore[misc]
    """Redis without redelivery."""

    Channel = _Channel


class SteadyConsumer(Consumer):  # type: ignore[misc]
    """A consumer that connects anew after whatever its broker or a message brings about."""

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(*arguments, **named)
        self._broker_errors: tuple[type[Exception], ...] = (*self.connection_errors, *self.channel_errors)
        self.channel_errors: tuple[type[Exception], ...] = (*self._broker_errors, Exception)
        self._pause = _FIRST_PAUSE_SECONDS
        self._failed_at = -_STEADY_SECONDS

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        """Log the error, and wait.

        Args:
            exc: The error.
        """
        super().on_connection_error_before_connected(exc)
        self._wait(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Close the connection, and wait where the broker is at fault; a bad message is gone from its list.

        Args:
            exc: The error.
        """
        super().on_connection_error_after_connected(exc)
        self._wait(exc)

    def _wait(self, exc: Exception) -> None:
        if not isinstance(exc, self._broker_errors):
            return
        now = time.monotonic()
        steady = now - self._failed_at > self._pause + _STEADY_SECONDS
        self._pause = _FIRST_PAUSE_SECONDS if steady else min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        self._failed_at = now
        while time.monotonic() - now < self._pause:
            maybe_shutdown()
            time.sleep(_STEP_SECONDS)
