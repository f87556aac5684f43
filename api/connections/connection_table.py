"""All connections of one process: admitted by number, and ended where a deadline has passed.

::

    a client is silent before or between requests   header_seconds: 408 where a part has come, else closed
    a request's body does not end                   body_seconds: 408 by the route that reads it; a second later cut
    a reader takes nothing of an answer             stream_write_seconds: cut
    too many connections, of one client or in all   the one that waits longest for its client gives way;
                                                    where none waits, the new one is refused with 429

A connection whose request is complete is never ended here: its answer is the application's.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from api.connections.client_addresses import ClientAddresses
from api.settings import Settings

Reason = Literal["headers", "body", "reader", "room", "refused"]
REASONS: tuple[Reason, ...] = ("headers", "body", "reader", "room", "refused")
_ROUTE_SECONDS = 1.0
"""Time that a route has to answer 408 by itself."""


class Connection(Protocol):
    """One connection, as the table sees it."""

    @property
    def peer(self) -> str:
        """The address at the other end."""

    @property
    def waits_since(self) -> float | None:
        """Since when the client owes bytes of a request; None while its request is complete."""

    def overdue(self, now: float) -> Reason | None:
        """Return the deadline that has passed."""

    def cut(self, reason: Reason) -> None:
        """End the connection."""


class ConnectionTable:
    """The open connections, by client."""

    def __init__(self, settings: Settings, count: Callable[[Reason], None]) -> None:
        """Begin without any.

        Args:
            settings: The caps and the deadlines.
            count: Counts one connection that was ended or refused.
        """
        self.header_seconds = settings.header_seconds
        self.body_seconds = settings.body_seconds + _ROUTE_SECONDS
        self.write_seconds = settings.stream_write_seconds
        self.body_bytes = settings.body_limit_bytes
        self.addresses = ClientAddresses(settings.trusted_proxies)
        self._most = settings.connections
        self._most_per_client = settings.connections_per_client
        self._count = count
        self._open: set[Connection] = set()
        self._by_client: defaultdict[str, set[Connection]] = defaultdict(set)

    @property
    def open_connections(self) -> int:
        """The number of open connections."""
        return len(self._open)

    def admit(self, connection: Connection) -> bool:
        """Admit a new connection, in place of another one where a cap is reached.

        Args:
            connection: The new connection.

        Returns:
            False where there is no room: its cap is reached by connections that are being answered.
        """
        client = self.addresses.direct_client(connection.peer)
        rivals: Iterable[Connection] = () if client is None else self._by_client[client]
        full = client is not None and len(self._by_client[client]) >= self._most_per_client
        if (full and not self._make_room(rivals)) or (
            len(self._open) >= self._most and not self._make_room(self._open)
        ):
            self._drop_client(client)
            self._count("refused")
            return False
        self._open.add(connection)
        if client is not None:
            self._by_client[client].add(connection)
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended.

        Args:
            connection: The connection, admitted or not.
        """
        self._open.discard(connection)
        client = self.addresses.direct_client(connection.peer)
        if client is not None:
            self._by_client[client].discard(connection)
        self._drop_client(client)

    def sweep(self, now: float) -> None:
        """End every connection whose deadline has passed.

        Args:
            now: The time of the event loop.
        """
        for connection in tuple(self._open):
            reason = connection.overdue(now)
            if reason is not None:
                self._end(connection, reason)

    def _make_room(self, connections: Iterable[Connection]) -> bool:
        waiting = [(since, id(each), each) for each in connections if (since := each.waits_since) is not None]
        if not waiting:
            return False
        self._end(min(waiting)[2], "room")
        return True

    def _end(self, connection: Connection, reason: Reason) -> None:
        self._count(reason)
        self.remove(connection)
        connection.cut(reason)

    def _drop_client(self, client: str | None) -> None:
        if client is not None and not self._by_client[client]:
            del self._by_client[client]
