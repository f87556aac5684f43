"""The backlog at the broker: the number of wake-ups, so that a relay sends no more where no worker receives them."""

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

QUEUE = "celery"
"""The list that holds them: Celery's own name for its default queue, which is also its key in Redis."""
_SECONDS = 3


class BrokerBacklog:
    """Counts the wake-ups at one Redis; connects on the first call, and again after a lost connection."""

    def __init__(self, redis_url: str) -> None:
        """Set up the count; it connects on the first call.

        Args:
            redis_url: The broker's address, with its password.
        """
        self._redis = redis.Redis.from_url(
            redis_url, socket_connect_timeout=_SECONDS, socket_timeout=_SECONDS, retry=Retry(NoBackoff(), 1)
        )

    def __call__(self) -> int:
        """Return how many wake-ups no worker has received yet."""
        return int(self._redis.llen(QUEUE))

    def close(self) -> None:
        """Give the connection back."""
        self._redis.close()
