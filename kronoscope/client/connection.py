"""The connection of a client to its service: addresses, errors, pages, long polls and downloads over HTTP."""

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import httpx

from catalog.public_address import is_loopback
from kronoscope.client.errors import (
    ClientError,
    DownloadFailed,
    ServiceUnreachable,
    content_of,
    refusal_of,
    unexpected,
)
from kronoscope.client.retry import RETRY_STATUSES, RetryWindow

_SHORT_ID = re.compile(r"[0-9a-f-]{8,35}")
DEFAULT_URL = "http://127.0.0.1:8000"
VISIBLE_ASCII = re.compile(r"[!-~]{1,255}")
"""Texts that a header can carry."""
_WAIT_SECONDS = 20.0
_ASK_EVERY_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
_MOST_BYTES = 512 * 2**20
"""Most bytes of an answer that is not a file, a stream of events among them."""
_LIMIT = "kronoscope_most_bytes"
"""The extension of a request whose answer has another limit: a file is cut where it is read."""


class Connection:
    """Requests to one service with one key."""

    def __init__(self, url: str, key: str | None, timeout_seconds: float) -> None:
        """Set up the connection without using it."""
        _require_address(url)
        if key and not VISIBLE_ASCII.fullmatch(key):
            raise ClientError(
                0, "Invalid key", "the API key must be 1 to 255 visible ASCII characters; check KRONOSCOPE_KEY"
            )
        self.url = url
        self.has_key = bool(key)
        self._timeout_seconds = timeout_seconds
        timeout = httpx.Timeout(timeout_seconds, connect=_CONNECT_SECONDS)
        self.http = _http_client(url, timeout, {"authorization": f"Bearer {key}"} if key else {}, base_url=url)

    def pages(self, path: str, params: dict[str, Any], *, cursor: str) -> Iterator[Mapping[str, Any]]:
        """Yield the items of a list, page after page."""
        seen: set[str] = set()
        while True:
            answer = self.send("GET", path, params=params)
            page = content_of(answer)
            if not isinstance(page, dict) or not isinstance(page.get("items"), list):
                raise unexpected(answer)
            yield from page["items"]
            following = page.get("next")
            if following is None:
                return
            if not isinstance(following, str) or following in seen:
                raise unexpected(answer)
            seen.add(following)
            params = {**params, cursor: following}

    def download(self, path: str, most_bytes: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of a file, from the service or from the store that it names."""
        count = 0
        for part in self._parts(path, most_bytes):
            count += len(part)
            if most_bytes is not None and count > most_bytes:
                message = f"{path} is listed with {most_bytes:,} bytes, and more are sent; ask whoever runs the service"
                raise DownloadFailed(0, "Damaged file", message)
            yield part

    def _parts(self, path: str, most_bytes: int | None) -> Iterator[bytes]:
        try:
            with self.http.stream("GET", path, extensions=_limit(most_bytes)) as answer:
                store_url = answer.headers.get("location") if answer.is_redirect else None
                if store_url is None and (answer.is_error or answer.is_redirect):
                    answer.read()
                    raise refusal_of(answer)
                if store_url is None:
                    yield from answer.iter_bytes()
            if store_url is not None:
                yield from self._stream_from_store(path, store_url, most_bytes)
        except httpx.RemoteProtocolError as error:
            # the service ends a file in the same way where its last bytes are not those recorded
            message = f"{path} broke off; try again, and if it breaks off again, the file is damaged in the service"
            raise DownloadFailed(0, "Download broke off", message) from error
        except httpx.HTTPError as error:
            raise ServiceUnreachable(self.url, type(error).__name__) from error

    def _stream_from_store(self, path: str, url: str, most_bytes: int | None) -> Iterator[bytes]:
        """Stream a file from a signed address of the artifact store, which needs no key and gets none."""
        _require_address(url)
        with (
            _http_client(url, self.http.timeout, {}) as bare,
            bare.stream("GET", url, extensions=_limit(most_bytes)) as answer,
        ):
            if not answer.is_success:
                message = f"{path} is kept in a store that answered {answer.status_code}; try again"
                raise DownloadFailed(answer.status_code, "The store refused", message)
            yield from answer.iter_bytes()

    def open_events(self, path: str, position: int) -> AbstractContextManager[httpx.Response]:
        """Open a stream of events."""
        headers = {"accept": "text/event-stream", "last-event-id": str(position)}
        # a stream without events sends a keepalive four times a minute
        return self.http.stream("GET", path, headers=headers, timeout=httpx.Timeout(60, connect=_CONNECT_SECONDS))

    def wait_options(self, seconds: float) -> dict[str, Any]:
        """Return the options of a request that waits in the service."""
        timeout = httpx.Timeout(seconds + self._timeout_seconds, connect=_CONNECT_SECONDS)
        return {"params": {"wait": str(seconds)}, "timeout": timeout}

    def wait_for_change(
        self, path: str, headers: dict[str, str], window: RetryWindow, has_changed: Callable[[httpx.Response], bool]
    ) -> httpx.Response:
        """Poll until a response has changed; the service may be away, or have no room for a long poll."""
        while True:
            asked = time.monotonic()
            try:
                response = self.send("GET", path, headers=headers, **self.wait_options(_WAIT_SECONDS))
            except ClientError as error:
                if not isinstance(error, ServiceUnreachable) and error.status not in RETRY_STATUSES:
                    raise
                window.pause(error, error.retry_seconds)
                continue
            window.reset()
            if has_changed(response):
                return response
            time.sleep(max(0.0, asked + _ASK_EVERY_SECONDS - time.monotonic()))

    def call(self, method: str, path: str, **options: Any) -> Any:  # noqa: ANN401 - httpx's options, JSON back
        """Send a request, and return the JSON of its response."""
        return content_of(self.send(method, path, **options))

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401 - httpx's options
        """Send a request."""
        try:
            answer = self.http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ServiceUnreachable(self.url, type(error).__name__) from error
        if answer.is_error or (answer.is_redirect and answer.status_code != httpx.codes.NOT_MODIFIED):
            raise refusal_of(answer)
        return answer


class _Limited(httpx.SyncByteStream):
    """The bytes of an answer, as many as it may have."""

    def __init__(self, answer: httpx.Response, most_bytes: int) -> None:
        assert isinstance(answer.stream, httpx.SyncByteStream)  # noqa: S101 - of a synchronous client
        self._inner = answer.stream
        self._url = answer.request.url
        self._most_bytes = most_bytes

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        for part in self._inner:
            count += len(part)
            if count > self._most_bytes:
                raise ClientError(
                    0,
                    "Too many bytes",
                    f"{self._url} sends more than the {self._most_bytes:,} bytes that it may have; nothing was kept. "
                    "Check the address, and ask who runs the service",
                )
            yield part

    def close(self) -> None:
        self._inner.close()


def _limit_answer(answer: httpx.Response) -> None:
    """Refuse compression, which was not asked for and hides how much there is, and limit the bytes."""
    coding = answer.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        message = (
            f"{answer.request.url} sends {coding!r:.40}, though it was asked for no compression; check the address"
        )
        raise ClientError(0, "Unexpected answer", message)
    most_bytes = answer.request.extensions.get(_LIMIT, _MOST_BYTES) if answer.is_success else _MOST_BYTES
    answer.stream = _Limited(answer, most_bytes)


def _limit(most_bytes: int | None) -> dict[str, int]:
    return {} if most_bytes is None else {_LIMIT: sys.maxsize}


def _http_client(url: str, timeout: httpx.Timeout, headers: dict[str, str], base_url: str = "") -> httpx.Client:
    return httpx.Client(
        base_url=base_url,
        headers={"accept-encoding": "identity", **headers},
        timeout=timeout,
        # a proxy in the environment has no business between here and this machine; a key follows no redirect
        trust_env=not is_loopback(httpx.URL(url).host),
        follow_redirects=False,
        event_hooks={"response": [_limit_answer]},
    )


def _require_address(url: str) -> None:
    try:
        parsed = httpx.URL(url)
        is_valid = parsed.scheme in ("http", "https") and bool(parsed.host)
        parsed.host.encode("idna")  # as it is looked up: no label is longer than 63 characters
    except (httpx.InvalidURL, UnicodeError):
        is_valid = False
    if not is_valid:
        raise ClientError(0, "Invalid address", f"{url!r} is not an address of a service; write one like {DEFAULT_URL}")


def find_full_id(connection: Connection, job_id: str) -> str:
    """Return the id of the job that a short id names: the last 8 or more characters, as lists and the page show it.

    What does not look like one is returned as it is; ``ClientError`` if not exactly one job of the tenant has this end.
    """
    if not _SHORT_ID.fullmatch(job_id):
        return job_id
    page = connection.call("GET", "/v1/jobs", params={"id": job_id, "limit": "3"})
    ids = [str(item["id"]) for item in page["items"]]
    if len(ids) == 1:
        return ids[0]
    if not ids:
        raise ClientError(404, "Not found", f"no job of yours has an id that ends with {job_id}")
    listed = ", ".join(ids)
    raise ClientError(409, "Ambiguous", f"several jobs have an id that ends with {job_id}: {listed}; give more of it")
