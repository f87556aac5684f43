"""Wake-ups: after a commit that queues work, one message to every agent of its ledger, which says "poll the queue".

It carries nothing, and nothing waits for it or repeats it: where Redis does not deliver one, an agent's own poll finds
the job. Its channel is named after the ledger, so that two services on one Redis do not wake each other.
"""

import functools
import time
from typing import Any

import structlog
from kombu import Connection, Exchange
from sqlalchemy import Engine, func, select

from jobs.codec import sha256_of
from jobs.rounds import Rounds
from jobs.schema.database import across_tenants, reading
from jobs.schema.tables import tenants

TRANSPORT_OPTIONS: dict[str, Any] = {
    "ack_emulation": False,  # nothing is redelivered, so nothing is kept in Redis
    "fanout_prefix": "/kronoscope.",
    "socket_connect_timeout": 3,
}
"""Settings of kombu's Redis for sender and receivers; the prefix is the one that Redis' rules for their user allow."""
_SOCKET_SECONDS = 3
_PAUSE_SECONDS = 0.05
"""After each message: whatever a process queues meanwhile is in the next one."""
_ROUND_SECONDS = 600.0
"""Between two messages without a reason, so that a broker that works again is in the log."""


class WakeupSender(Rounds):
    """A thread that sends the wake-ups of this process: one for all that are asked for in the same moment.

    The first shows whether the broker answers, the last is for what a worker hands back as it ends.
    """

    def __init__(self, engine: Engine, redis_url: str) -> None:
        log = structlog.get_logger("kronoscope.wakeups")
        super().__init__("wake-ups", [("wake-up", _ROUND_SECONDS, self._send)], log, self._publish)
        self._engine, self._redis_url = engine, redis_url

    def wake(self) -> None:
        """Have a wake-up be sent."""
        self.postpone("wake-up", 0)

    @functools.cached_property
    def exchange(self) -> Exchange:
        """The exchange of this ledger, named by a digest of when the ledger was made and of its database's name."""
        with reading(across_tenants(self._engine)) as connection:
            identity = [connection.execute(select(func.min(tenants.c.created_at))).scalar_one().isoformat()]
            if connection.dialect.name == "postgresql":  # of a file each process may have its own name
                identity.append(connection.execute(select(func.current_database())).scalar_one())
        return Exchange(sha256_of(identity)[:32], "fanout", durable=False)

    def _publish(self) -> None:
        options = {**TRANSPORT_OPTIONS, "socket_timeout": _SOCKET_SECONDS, "max_retries": 1}
        with Connection(self._redis_url, transport_options=options) as connection:
            connection.Producer(exchange=self.exchange).publish("", retry=False)

    def _send(self) -> None:
        self._publish()
        time.sleep(_PAUSE_SECONDS)
