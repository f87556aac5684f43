"""How long a query may wait for its answer, by the clock of the process that asks.

PostgreSQL's `statement_timeout` ends a slow query, and TCP's own limits notice a machine that is gone. Neither helps
where a connection is open and silent: behind a proxy that hangs or a pooler that is paused, every packet is
acknowledged and no answer comes. So every wait of a connection ends here, and the connection with it: what comes
later would be the answer to another question.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen

QUERY_SECONDS = 40.0
"""One query's limit where no block sets one: longer than the server's own limit, which ends it with a better word."""

_POLL_SECONDS = 0.1

RV = TypeVar("RV")


class _Budget:
    """The time left for the queries of one block together."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds


_budget: ContextVar[_Budget | None] = ContextVar("kronoscope_query_budget", default=None)


@contextmanager
def limit_queries(seconds: float) -> Iterator[None]:
    """Let all queries of a block together wait so long, each of them in this thread, or in one with its context.

    A query beyond the limit raises `LedgerUnavailable`. It is infinite for a block whose queries wait for others, as a
    migration does.
    """
    token = _budget.set(_Budget(seconds))
    try:
        yield
    finally:
        _budget.reset(token)


def connect_limited(*arguments: Any, **named: Any) -> "LimitedConnection":  # noqa: ANN401 - passed on
    """Connect as `psycopg.connect` does, within what is left for the block's queries."""
    budget = _budget.get()
    if budget is None or math.isinf(budget.left):
        return LimitedConnection.connect(*arguments, **named)
    if budget.left <= 0:
        raise psycopg.OperationalError("no time is left to connect in")
    allowed = min(float(named.get("connect_timeout", math.inf)), max(1.0, budget.left))
    began = time.monotonic()
    try:
        return LimitedConnection.connect(*arguments, **{**named, "connect_timeout": math.ceil(allowed)})
    finally:
        budget.left -= time.monotonic() - began


class LimitedConnection(psycopg.Connection[Any]):
    """A connection to PostgreSQL on which no wait is longer than its limit."""

    def wait(self, gen: PQGen[RV], interval: float = _POLL_SECONDS, timeout: float | None = None) -> RV:
        """Wait for an answer, as psycopg does; close the connection where none comes in time."""
        budget = _budget.get()
        limit = QUERY_SECONDS if budget is None else max(0.0, budget.left)
        if math.isinf(limit):
            return super().wait(gen, interval, timeout)
        began = time.monotonic()
        try:
            return super().wait(gen, interval, limit if timeout is None else min(limit, timeout))
        except psycopg.OperationalError:
            if time.monotonic() - began >= limit:
                self.pgconn.finish()
            raise
        finally:
            if budget is not None:
                budget.left -= time.monotonic() - began
