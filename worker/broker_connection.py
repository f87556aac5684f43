"""The broker connection: Celery's use of Redis, in which no message and no answer of the server ends a worker.

The database is the queue, so a broker's fault costs wake-ups, and the poll finds the jobs meanwhile. Celery's own
consumer ends the process on an error answer (READONLY after a failover, OOM when Redis is full) and on a list item that
is not a message. Celery's redelivery of unacknowledged messages is left out, with the scripts that it runs in Redis:
wake-ups are acknowledged as they come, and a user of Redis who may run scripts may do almost everything.

Celery never sees a message of the queue: it logs names and ids in full, holds what is dated ahead in memory, and sends
the callbacks that a message names. It gets one that is made here for each wake-up, and what is none is dropped.
"""

import base64
import json
import logging
import re
import time
import uuid
from typing import Any

from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown
from kombu.transport import redis

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 8.0
_STEADY_SECONDS = 60.0
"""A connection that held so long ends a series of failures."""
_STEP_SECONDS = 0.5
_TASK = "worker.tasks.ring"
_MESSAGE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_LINE_SECONDS = 60.0
"""Between two lines about messages that were dropped."""

_log = logging.getLogger("kronoscope.worker.broker")


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

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(*arguments, **named)
        self._dropped = 0
        self._said_at = -_LINE_SECONDS

    def _deliver(self, message: object, queue: str) -> None:
        """Deliver a wake-up for what came, or drop it."""
        wakeup = _wakeup_for(message)
        if wakeup is not None:
            super()._deliver(wakeup, queue)
            return
        self._dropped += 1
        if time.monotonic() - self._said_at >= _LINE_SECONDS:
            _log.warning(
                "%d message%s of the queue %s no wake-up and %s dropped; see who else writes to this Redis",
                self._dropped,
                *(("", "is", "was") if self._dropped == 1 else ("s", "are", "were")),
            )
            self._dropped, self._said_at = 0, time.monotonic()


def _wakeup_for(message: object) -> dict[str, Any] | None:
    """Return a message of our own with the id of one that came; None where that is not a wake-up."""
    headers = message.get("headers") if isinstance(message, dict) else None
    identity = headers.get("id") if isinstance(headers, dict) and headers.get("task") == _TASK else None
    if not (isinstance(identity, str) and _MESSAGE_ID.fullmatch(identity)):
        return None
    embedded = dict.fromkeys(("callbacks", "errbacks", "chain", "chord"))
    absent = ("shadow", "eta", "expires", "group", "parent_id", "argsrepr", "kwargsrepr", "origin")
    return {
        "body": base64.b64encode(json.dumps([[identity], {}, embedded]).encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            **dict.fromkeys(absent),
            "lang": "py",
            "task": _TASK,
            "id": identity,
            "root_id": identity,
            "retries": 0,
            "timelimit": [None, None],
            "ignore_result": True,
        },
        "properties": {
            "correlation_id": identity,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": ""},
            "delivery_tag": str(uuid.uuid4()),
            "body_encoding": "base64",
            "priority": 0,
        },
    }


class SteadyConsumer(Consumer):  # type: ignore[misc]
    """A consumer that connects anew after whatever its broker or a message brings about."""

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(*arguments, **named)
        self._broker_errors: tuple[type[Exception], ...] = (*self.connection_errors, *self.channel_errors)
        self.channel_errors: tuple[type[Exception], ...] = (*self._broker_errors, Exception)
        self._pause = _FIRST_PAUSE_SECONDS
        self._failed_at = -_STEADY_SECONDS

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        """Log the error, and wait."""
        super().on_connection_error_before_connected(exc)
        self._wait(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Close the connection, and wait where the broker is at fault; a bad message is gone from its list."""
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
