"""A TCP listener before a store that takes what it is sent and answers nothing, for as long as it is told to."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

_BYTES = 65_536


class HeldStore:
    """Hands everything on between ``release`` and ``hold``; in the meantime every request waits."""

    def __init__(self, store_url: str | None = None) -> None:
        """Stand before a store, or before nothing at all."""
        self.asked = threading.Event()
        """Set once a request waits."""
        self._store = None if store_url is None else urlsplit(store_url)
        self._passing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def hold(self) -> None:
        """Answer no more."""
        self.asked.clear()
        self._passing.clear()

    def release(self) -> None:
        """Answer what has been asked, and what will be."""
        self._passing.set()

    def close(self) -> None:
        """End every connection."""
        for each in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._passing.set()
        for thread in list(self._threads):
            thread.join(60)
        for each in [self._listener, *self._open]:
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                self._start(self._serve, client)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            request = self._held(client)
            if self._store is None or not request:
                return
            server = socket.create_connection((str(self._store.hostname), int(self._store.port or 80)), timeout=60)
            self._open.append(server)
            self._start(_pump, server, client)
            while request:
                server.sendall(request)
                request = self._held(client)
            server.shutdown(socket.SHUT_WR)

    def _held(self, client: socket.socket) -> bytes:
        request = client.recv(_BYTES)
        if request and not self._passing.is_set():
            self.asked.set()
            self._passing.wait()
        return request


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_BYTES):
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def held_store(store_url: str | None = None) -> Iterator[HeldStore]:
    """One that is closed in the end; it holds from the start."""
    store = HeldStore(store_url)
    try:
        yield store
    finally:
        store.close()
