"""Clients that a library would not be: silent, slow, malformed, from any address of this machine's loopback network."""

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator

import httpx

from tests.api.server import NO_TLS, Server

ATTACKER = "127.0.0.2"
"""Another address of loopback, which no server trusts."""
OTHER = "127.0.0.3"


@contextlib.contextmanager
def connect(server: Server, source: str = ATTACKER) -> Iterator[socket.socket]:
    """A connection from this address."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60, source_address=(source, 0)) as opened:
        yield opened


def client(server: Server, source: str = OTHER, key: str | None = None) -> httpx.Client:
    """An honest client at this address."""
    transport = httpx.HTTPTransport(local_address=source, verify=NO_TLS)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(transport=transport, base_url=server.url, headers=headers, timeout=60)


def received(connection: socket.socket) -> bytes:
    """Everything that comes until the other side closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def answer(connection: socket.socket) -> http.client.HTTPResponse:
    """One answer, read to its end; its `status` and headers remain."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed; what it sent before is dropped."""
    connection.setblocking(False)
    try:
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    finally:
        connection.setblocking(True)
    return True


def closed(connections: list[socket.socket]) -> int:
    """The number of those that the other side has closed."""
    return sum(map(is_closed, connections))


def seconds_of(client: httpx.Client, path: str) -> float:
    """What an answer takes."""
    began = time.perf_counter()
    assert client.get(path).status_code == 200
    return time.perf_counter() - began


def head(server: Server, first: str, *lines: str) -> bytes:
    """The header of a request."""
    return "\r\n".join((first, f"Host: 127.0.0.1:{server.port}", *lines, "", "")).encode()
