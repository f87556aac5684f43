"""A TCP proxy before PostgreSQL that loses replies to COMMIT: the work is done, and whoever asked for it never hears.

The client sends ``COMMIT`` as one simple query; the proxy hands it on, waits until the server has
answered, and then closes both ends without a word. To the client the outcome is unknown, and it is
the one outcome that no retry may count on: done.

It can also fall silent, with every connection open: what a hung proxy or a paused pooler looks like.
"""

import contextlib
import random
import select
import socket
import threading
from dataclasses import dataclass, field

_COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"
_COMMITTED = b"COMMIT\x00"
_BYTES = 65_536
_SERVER_SECONDS = 120
"""A server that stands still for a while has not lost what it was asked for."""


@dataclass
class LossyProxy:
    """Listens on a loopback port and hands everything on; between ``lose`` and ``keep`` some replies are lost."""

    host: str
    upstream_port: int
    port: int = 0
    lost: int = 0
    """Commits whose reply was dropped."""
    _share: float = 0.0
    _statement: bytes | None = None
    _chance: random.Random = field(default_factory=random.Random)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: set[socket.socket] = field(default_factory=set)
    _speaking: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Listen; the port stays the same as long as this proxy lives."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._speaking.set()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def lose(self, share: float, seed: int) -> None:
        """From now on lose this share of the replies to COMMIT."""
        with self._lock:
            self._share, self._chance = share, random.Random(seed)

    def lose_after(self, statement: bytes) -> None:
        """Lose the reply to the one next COMMIT of a transaction in which this text was sent."""
        with self._lock:
            self._statement = statement

    def hush(self) -> None:
        """Hand nothing on any more; connections stay open, and new ones are taken, as by a proxy that hangs."""
        self._speaking.clear()

    def keep(self) -> None:
        """Lose nothing any more, and hand on what came meanwhile."""
        with self._lock:
            self._share, self._statement = 0.0, None
        self._speaking.set()

    def close(self) -> None:
        """End every connection; each is closed by the thread that serves it, which may be looking at it right now."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake who waits for a connection
        self._listener.close()
        self._speaking.set()
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._speaking.wait()
        with contextlib.ExitStack() as held:
            held.callback(_shut, client)
            try:
                server = socket.create_connection((self.host, self.upstream_port), timeout=_SERVER_SECONDS)
            except OSError:
                return
            server.settimeout(None)
            held.callback(_shut, server)
            with self._lock:
                self._open |= {client, server}
            with contextlib.suppress(OSError):
                self._hand_on(client, server)
            with self._lock:
                self._open -= {client, server}

    def _hand_on(self, client: socket.socket, server: socket.socket) -> None:
        transaction = b""
        ends = {each.fileno(): each for each in (client, server)}
        waiting = select.poll()  # select itself takes no descriptor above 1023
        for number in ends:
            waiting.register(number, select.POLLIN)
        while True:
            for number, _ in waiting.poll():
                self._speaking.wait()
                ready = ends[number]
                data = ready.recv(_BYTES)
                if not data:
                    return
                if ready is server:
                    client.sendall(data)
                    continue
                server.sendall(data)
                transaction += data
                if data.endswith(_COMMIT):
                    if self._is_to_be_lost(transaction):
                        self._swallow(server)
                        return
                    transaction = b""

    def _is_to_be_lost(self, transaction: bytes) -> bool:
        with self._lock:
            if self._statement is not None and self._statement in transaction:
                self._statement = None
                return True
            return self._share > 0 and self._chance.random() < self._share

    def _swallow(self, server: socket.socket) -> None:
        """Count it only where the server said that it has committed."""
        reply = b""
        server.settimeout(_SERVER_SECONDS)
        while _COMMITTED not in reply:
            data = server.recv(_BYTES)
            if not data:
                return
            reply += data
        with self._lock:
            self.lost += 1


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
