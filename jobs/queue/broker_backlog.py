"""The doorbells that lie at the broker: how many, so that nobody rings for ever where nobody listens."""

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

QUEUE = "celery"
"""The list that holds them: Celery's own name for its default queue, which is also its key in Redis."""
_SECONDS = 3


class LyingDoorbells:
    """Asks one Redis; connects when it is asked, and again after a connection was lost."""

    def __init__(self, redis_url: str) -> None:
        self._redis = redis.Redis.from_url(
            redis_url, socket_connect_timeout=_SECONDS, socket_timeout=_SECONDS, retry=Retry(NoBackoff(), 1)
        )

    def __call__(self) -> int:
        """How many doorbells nobody has taken yet.

        Raises:
            redis.RedisError: If the broker does not answer.
        """
        return int(self._redis.llen(QUEUE))

    def close(self) -> None:
        """Give the connection back."""
        self._redis.close()
