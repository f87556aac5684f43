"""The broker connection: Celery's use of Redis, in which no message and no answer of the server ends a worker.

The database is the queue, so a broker's fault costs wake-ups, and the poll finds the jobs meanwhile. Celery's own
consumer ends the process on an error answer (OOM, NOPERM) and on what is not a message.

A worker subscribes to its ledger's channel, and neither reads nor writes a key. Celery never sees what was sent there:
it logs names and ids in full, holds what is dated ahead in memory, and sends the callbacks that a message names. Every
message, whatever it says, is a wake-up.
"""

import time
from collections.abc import Callable
from typing import Any

from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown
from kombu.transport import redis
from typing_extensions import override

_PAUSE_STEPS = 6
_STEP_SECONDS = 0.5
_WAKEUP = '{"body": "", "properties": {"delivery_tag": "", "delivery_info": {}}}'
"""The least that kombu takes for a message."""


class _Channel(redis.Channel):  # type: ignore[misc]  # kombu publishes no types
    do_restore = False

    def _size(self, _queue: str) -> int:
        return 0

    def _queue_bind(self, exchange: str, _routing_key: str, _pattern: str, queue: str) -> None:
        """Bind the queue here, without an entry in Redis, which a subscriber does not need."""
        self._fanout_queues[queue] = exchange, ""

    def _subscribe(self) -> None:
        """Subscribe by the channel's name: Redis' rules allow a pattern only where they name the same pattern."""
        client = self.subclient
        self._in_listen = client.connection
        client.subscribe(*(topic for queue in self.active_fanout_queues for topic in self._get_subscribe_topics(queue)))

    def _handle_message(self, client: object, reply: object) -> dict[str, object]:
        return {**super()._handle_message(client, reply), "data": _WAKEUP}


class Transport(redis.Transport):  # type: ignore[misc]
    """Redis for wake-ups alone."""

    Channel = _Channel


class SteadyConsumer(Consumer):  # type: ignore[misc]
    """A consumer that connects anew after whatever its broker brings about."""

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(*arguments, **named)
        self.channel_errors: tuple[type[Exception], ...] = (Exception,)

    @override
    def create_task_handler(self, **_: object) -> Callable[[object], None]:
        # a message is no task: it makes this process's Agent poll the queue, which says which job is next
        agent = self.app.service.agent
        return lambda _: agent.wake()

    @override
    def on_connection_error_before_connected(self, exc: Exception) -> None:
        super().on_connection_error_before_connected(exc)
        _pause()

    @override
    def on_connection_error_after_connected(self, exc: Exception) -> None:
        super().on_connection_error_after_connected(exc)
        _pause()


def _pause() -> None:
    """Let some seconds pass before another try, unless the worker is to end."""
    for _ in range(_PAUSE_STEPS):
        maybe_shutdown()
        time.sleep(_STEP_SECONDS)
