"""The HTTP transport to a hub of which nothing is believed.

::

    an address   that of the configured hub itself; any other one is public, and reached over https (over http too where
                 the hub's own scheme is http). A name is resolved once, and the connection goes to what was checked
    an answer    as many bytes as are asked for and no more, without compression, and whole by its deadline
"""

import ipaddress
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx2

from catalog.public_address import Address, is_public
from worker.execution.refusal import Refusal, Unavailable, names

_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 30.0
_MOST_REDIRECTS = 10
_MOST_ASIDE_BYTES = 2**18
"""Most bytes of an answer that is a redirect or an error."""
_DELIVERS = (200, 206)
_EXTENSION = "kronoscope"
_PORTS = {"http": 80, "https": 443}


def open_client(endpoint: str, headers: Mapping[str, str]) -> httpx2.Client:
    """Return a client for one hub."""
    return httpx2.Client(
        transport=_HubTransport(endpoint),
        headers={**headers, "accept-encoding": "identity"},
        timeout=httpx2.Timeout(_SILENT_SECONDS, connect=_CONNECT_SECONDS),
        follow_redirects=True,
        max_redirects=_MOST_REDIRECTS,
        trust_env=False,  # the transport asks for proxies, and no other file of the user's holds for this
    )


def bounds(what: str, most_bytes: int, seconds: float) -> dict[str, Any]:
    """Return the extensions of a request that bound its answer, through all redirects."""
    return {_EXTENSION: _Bounds(what, most_bytes, seconds)}


class _Bounds:
    """The bounds of one answer."""

    def __init__(self, what: str, most_bytes: int, seconds: float) -> None:
        self.what = what
        self.most_bytes = most_bytes
        self.seconds = seconds
        self.until = time.monotonic() + seconds

    def require_time(self) -> None:
        """Refuse an answer that is late."""
        if time.monotonic() >= self.until:
            raise Unavailable(
                f"the hub did not deliver {self.what} within {self.seconds:,.0f} s; try again, or take "
                "`source: directory`",
                pointer="/model/id",
                code="hub_unreachable",
            )


class _Deadline:
    """The timer that ends a connection, also while it waits for a byte."""

    def __init__(self, seconds: float) -> None:
        self._socket: socket.socket | None = None
        self._over = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(max(0.0, seconds), self._end)
        self._timer.daemon = True
        self._timer.start()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Take note of the socket when it is there, as the HTTP library reports it."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
            if self._over:
                self._end()

    def stop(self) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        with self._lock:
            self._over = True
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:  # it has ended meanwhile
                    return


class _Body(httpx2.SyncByteStream):
    """The body of an answer, cut at its bounds."""

    def __init__(self, inner: httpx2.SyncByteStream, most_bytes: int, limits: _Bounds, end: Callable[[], None]) -> None:
        self._inner = inner
        self._most_bytes = most_bytes
        self._limits = limits
        self._end = end

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        try:
            for chunk in self._inner:
                count += len(chunk)
                if count > self._most_bytes:
                    raise Refusal(
                        f"the hub sends more than the {self._most_bytes:,} bytes that {self._limits.what} may have; "
                        "nothing was kept",
                        pointer="/model/id",
                        code="hub_answer",
                    )
                self._limits.require_time()
                yield chunk
        except httpx2.TransportError:
            self._limits.require_time()
            raise

    def close(self) -> None:
        self._inner.close()
        self._end()


class _HubTransport(httpx2.BaseTransport):
    """A transport that checks each hop; every request has a connection of its own."""

    def __init__(self, endpoint: str) -> None:
        self._home = _origin(httpx2.URL(endpoint))
        self._verify = httpx2.create_ssl_context()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        limits: _Bounds = request.extensions[_EXTENSION]
        proxy = _proxy_of(request.url)
        hosts = self._hosts(request.url, resolve=proxy is None)
        for host in hosts[:-1]:
            try:
                return self._send(request, host, proxy, limits)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                limits.require_time()
        return self._send(request, hosts[-1], proxy, limits)

    def _send(self, request: httpx2.Request, host: str, proxy: str | None, limits: _Bounds) -> httpx2.Response:
        limits.require_time()
        deadline = _Deadline(limits.until - time.monotonic())
        inner = httpx2.HTTPTransport(verify=self._verify, trust_env=False, proxy=proxy)

        def end() -> None:
            deadline.stop()
            inner.close()

        extensions = {**request.extensions, "sni_hostname": request.url.host, "trace": deadline.trace}
        pinned = httpx2.Request(
            request.method, request.url.copy_with(host=host), headers=request.headers, extensions=extensions
        )
        try:
            answer = inner.handle_request(pinned)
            _require_identity(answer, limits)
        except BaseException:
            end()
            limits.require_time()
            raise
        assert isinstance(answer.stream, httpx2.SyncByteStream)  # noqa: S101 - of a synchronous transport
        most_bytes = limits.most_bytes if answer.status_code in _DELIVERS else _MOST_ASIDE_BYTES
        return httpx2.Response(
            answer.status_code,
            headers=answer.headers,
            stream=_Body(answer.stream, most_bytes, limits, end),
            extensions=answer.extensions,
        )

    def _hosts(self, url: httpx2.URL, *, resolve: bool) -> list[str]:
        """Return the hosts or addresses to connect to, of which the first that answers is taken."""
        if _origin(url) == self._home:
            return [url.host]
        if url.scheme not in ("https", self._home[0]):
            raise _refused(url, f"its scheme is not {' or '.join(dict.fromkeys(('https', self._home[0])))}")
        addresses = _addresses(url)
        if not addresses and not resolve:  # a name that only the proxy can resolve
            return [url.host]
        if not addresses:
            raise httpx2.ConnectError(f"{names([url.host])} has no address")
        for address in addresses:
            if not is_public(address):
                raise _refused(url, f"its address {address} is not public")
        return [str(address) for address in addresses] if resolve else [url.host]


def _require_identity(answer: httpx2.Response, limits: _Bounds) -> None:
    """Refuse compression, which was not asked for and hides how much there is."""
    coding = answer.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        raise Refusal(
            f"the hub sends {limits.what} with Content-Encoding {names([coding])}, though it was asked for none; "
            "look at what HF_ENDPOINT names",
            pointer="/model/id",
            code="hub_answer",
        )


def _refused(url: httpx2.URL, why: str) -> Refusal:
    shown = f"{url.scheme}://{url.host}" + ("" if url.port is None else f":{url.port}")
    return Refusal(
        f"the hub sends elsewhere, to {names([shown])}, and {why}; nothing was asked there. If that is the hub which "
        "you mean, set HF_ENDPOINT to it",
        pointer="/model/id",
        code="hub_answer",
    )


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or _PORTS.get(url.scheme)


def _proxy_of(url: httpx2.URL) -> str | None:
    """Return the proxy that the environment names for an address."""
    proxies = urllib.request.getproxies()
    if urllib.request.proxy_bypass(f"{url.host}:{url.port}" if url.port else url.host):
        return None
    return proxies.get(url.scheme) or proxies.get("all")


def _addresses(url: httpx2.URL) -> list[Address]:
    try:
        found = socket.getaddrinfo(url.host, url.port or _PORTS[url.scheme], type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found))
