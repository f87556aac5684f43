"""The service from Python, synchronously: ``Client("http://127.0.0.1:8000").submit(document)``.

Every error of the service is a ``ClientError`` whose text is the service's own sentences; a
service that does not answer is ``ServiceUnreachable``.
"""

import hashlib
import ipaddress
import json
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from catalog.responses import ArtifactView, DeviceView, EstimateView, EventView, JobView, ResultsView
from kronoscope.client.errors import ClientError, DownloadFailed, ServiceUnreachable, content_of, refusal_of
from kronoscope.client.event_stream import follow_events
from kronoscope.client.responses import Layer, build, build_layer, build_results
from kronoscope.client.retry import AGAIN, Patience

__all__ = ["DEFAULT_URL", "MEMORY_CURVE", "Client", "ClientError", "DownloadFailed", "ServiceUnreachable"]

MEMORY_CURVE = "memory_curve.json"
DEFAULT_URL = "http://127.0.0.1:8000"
_WAIT_SECONDS = 20.0
_ASK_EVERY_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
_VISIBLE = re.compile(r"[!-~]{1,255}")  # what a header can carry


class Client:
    """One service, one key."""

    def __init__(self, url: str | None = None, key: str | None = None, *, timeout_seconds: float = 30) -> None:
        self.url = (url or os.environ.get("KRONOSCOPE_URL") or DEFAULT_URL).rstrip("/")
        _require_address(self.url)
        key = key or os.environ.get("KRONOSCOPE_KEY")
        if key and not _VISIBLE.fullmatch(key):
            raise ClientError(
                0, "No key", "KRONOSCOPE_KEY is no key of a service; it has visible ASCII characters only"
            )
        self._timeout_seconds = timeout_seconds
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_seconds, connect=_CONNECT_SECONDS),
            # a proxy in the environment has no business between here and this machine; a key follows no redirect
            trust_env=not _is_local(self.url),
            follow_redirects=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def submit(self, document: Mapping[str, Any], *, idempotency_key: str | None = None) -> JobView:
        """Submit a job. The same idempotency key and document give the same job, however often.

        Raises:
            ClientError: If the document or the key is not accepted.
        """
        headers = _idempotent(idempotency_key)
        return build(JobView, self._call("POST", "/v1/jobs", json=dict(document), headers=headers))

    def estimate(self, document: Mapping[str, Any], *, idempotency_key: str | None = None) -> EstimateView:
        """What the job would take, without running it; returns when a worker has planned it.

        Raises:
            ClientError: If the document is not accepted, or its model, data and task do not belong together.
        """
        headers = _idempotent(idempotency_key)
        found = build(EstimateView, self._call("POST", "/v1/estimates", json=dict(document), headers=headers))
        if found.ended:
            return found
        address = f"/v1/estimates/{quote(found.id, safe='')}"
        news = self._news(address, {}, Patience(60), lambda answer: build(EstimateView, content_of(answer)).ended)
        return build(EstimateView, content_of(news))

    def validate(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """The document as it would be stored, every default written out; nothing is stored."""
        answer: Mapping[str, Any] = self._call(
            "POST", "/v1/jobs", json=dict(document), params={"validate_only": "true"}
        )
        return dict(answer["document"])

    def job(self, job_id: str, *, wait_seconds: float = 0) -> JobView:
        """One job, now or when it has ended, whichever comes first within ``wait_seconds`` (at most 30)."""
        return build(JobView, self._call("GET", _path(job_id), **(self._waiting(wait_seconds) if wait_seconds else {})))

    def follow(self, job_id: str, *, patience_seconds: float = 60) -> Iterator[JobView]:
        """The job each time that it has changed, until it has ended.

        Once it was seen, it goes on where the service is away for less than ``patience_seconds``.

        Raises:
            ClientError: If there is no such job, or the service does not come back in time.
        """
        patience = Patience(patience_seconds)
        answer = self._send("GET", _path(job_id))
        while True:
            job = build(JobView, content_of(answer))
            yield job
            if job.ended:
                return
            tag = answer.headers.get("etag")
            known = {"if-none-match": tag} if tag else {}
            answer = self._news(_path(job_id), known, patience, lambda found: found.status_code == httpx.codes.OK)

    def events(self, job_id: str, *, after: int = 0, patience_seconds: float = 60) -> Iterator[EventView]:
        """What happens to a job, as it happens, until it has ended; begins behind the event numbered ``after``.

        Where the connection breaks, or the service is away for less than ``patience_seconds``, it goes on where it was.

        Raises:
            ClientError: If there is no such job, or the service does not come back in time.
        """
        address = f"{_path(job_id)}/events"

        def connect(position: int) -> AbstractContextManager[httpx.Response]:
            headers = {"accept": "text/event-stream", "last-event-id": str(position)}
            # a stream without events gives signs of life four times a minute
            return self._http.stream(
                "GET", address, headers=headers, timeout=httpx.Timeout(60, connect=_CONNECT_SECONDS)
            )

        try:
            yield from follow_events(connect, refusal_of, after, patience_seconds)
        except httpx.HTTPError as error:
            raise ServiceUnreachable(self.url, type(error).__name__) from error

    def jobs(self, *, state: str | None = None, kind: str | None = None, label: str | None = None) -> Iterator[JobView]:
        """Your jobs, newest first, page after page."""
        given = {"state": state, "kind": kind, "label": label, "limit": "100"}
        params = {name: value for name, value in given.items() if value is not None}
        yield from (build(JobView, item) for item in self._pages("/v1/jobs", params, cursor="before"))

    def cancel(self, job_id: str) -> JobView:
        """Cancel a queued or running job; an ended one stays as it is."""
        return build(JobView, self._call("POST", f"{_path(job_id)}:cancel"))

    def reschedule(self, job_id: str, schedule: Mapping[str, Any]) -> JobView:
        """Give a queued or running job the terms `priority`, `deadline` or `within`, in place of those it has.

        Raises:
            ClientError: If it has ended, or the deadline has passed.
        """
        return build(JobView, self._call("PUT", f"{_path(job_id)}/schedule", json=dict(schedule)))

    def delete(self, job_id: str) -> None:
        """Delete an ended job with its results and files."""
        self._send("DELETE", _path(job_id))

    def results(self, job_id: str) -> ResultsView:
        """Summaries, manifest and the list of files."""
        return build_results(self._call("GET", f"{_path(job_id)}/results"))

    def layers(self, job_id: str, *, kind: str | None = None) -> Iterator[Layer]:
        """Every row, page after page."""
        params = {"limit": "100"} | ({"kind": kind} if kind else {})
        yield from (build_layer(item) for item in self._pages(f"{_path(job_id)}/layers", params, cursor="after"))

    def log(self, job_id: str) -> str:
        """The reproducibility log: JSON lines, one record per layer."""
        return self._send("GET", f"{_path(job_id)}/log").text

    def memory_curve(self, results: ResultsView) -> Mapping[str, Any] | None:
        """What a job held when, and its stages beside their plan; None where it has left none."""
        if not any(artifact.name == MEMORY_CURVE for artifact in results.artifacts):
            return None
        try:
            found: Mapping[str, Any] = json.loads(
                b"".join(self._stream(f"{_path(results.job.id)}/artifacts/{MEMORY_CURVE}"))
            )
        except (ClientError, ValueError):
            # the results are whole without it; downloading it says what is wrong
            return None
        return found

    def download(self, job_id: str, artifact: ArtifactView, folder: Path) -> Path:
        """One file, into ``folder``; it appears there only when its digest has been checked.

        Raises:
            ClientError: If the bytes are not those that the job recorded.
        """
        root = folder.resolve()
        target = (root / artifact.name).resolve()
        if not target.is_relative_to(root):
            raise ClientError(0, "Unsafe name", f"the service names a file {artifact.name!r} outside the folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".part-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                for part in self._stream(f"{_path(job_id)}/artifacts/{quote(artifact.name)}"):
                    digest.update(part)
                    file.write(part)
            if digest.hexdigest() != artifact.sha256:
                raise DownloadFailed(0, "Damaged file", f"{artifact.name} arrived damaged; download it again")
            Path(temporary).replace(target)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return target

    def menu(self) -> Mapping[str, Any]:
        """Every analysis with the JSON schemas of its options, metrics and summary."""
        answer: Mapping[str, Any] = self._call("GET", "/v1/analyses")
        return answer

    def devices(self) -> Iterator[DeviceView]:
        """What the service's workers compute on, page after page."""
        yield from (build(DeviceView, item) for item in self._pages("/v1/devices", {"limit": "100"}, cursor="after"))

    def ready(self) -> bool:
        """Whether the service can take jobs now."""
        return self.unready() is None

    def unready(self) -> str | None:
        """Why the service cannot take jobs now; None where it can."""
        try:
            self._send("GET", "/readyz")
        except ClientError as error:
            return "; ".join(error.lines)
        return None

    def _pages(self, path: str, params: dict[str, str], *, cursor: str) -> Iterator[Mapping[str, Any]]:
        while True:
            page = self._call("GET", path, params=params)
            yield from page["items"]
            if page.get("next") is None:
                return
            params = {**params, cursor: page["next"]}

    def _stream(self, path: str) -> Iterator[bytes]:
        try:
            with self._http.stream("GET", path) as answer:
                elsewhere = answer.headers.get("location") if answer.is_redirect else None
                if elsewhere is None and (answer.is_error or answer.is_redirect):
                    answer.read()
                    raise refusal_of(answer)
                if elsewhere is None:
                    yield from answer.iter_bytes()
            if elsewhere is not None:
                yield from self._stream_elsewhere(path, elsewhere)
        except httpx.RemoteProtocolError as error:
            # also how a service ends a file whose last bytes are not what it recorded
            message = f"{path} broke off; try again, and if it breaks off again, the file is damaged in the service"
            raise DownloadFailed(0, "Download broke off", message) from error
        except httpx.HTTPError as error:
            raise ServiceUnreachable(self.url, type(error).__name__) from error

    def _stream_elsewhere(self, path: str, url: str) -> Iterator[bytes]:
        """What a store sends at a signed address: that is all it needs, so the key stays here."""
        _require_address(url)
        local = _is_local(url)
        with (
            httpx.Client(timeout=self._http.timeout, trust_env=not local, follow_redirects=False) as bare,
            bare.stream("GET", url) as answer,
        ):
            if not answer.is_success:
                message = f"{path} is kept in a store that answered {answer.status_code}; try again"
                raise DownloadFailed(answer.status_code, "The store refused", message)
            yield from answer.iter_bytes()

    def _waiting(self, seconds: float) -> dict[str, Any]:
        # what the service may take for its answer begins when the wait is over
        timeout = httpx.Timeout(seconds + self._timeout_seconds, connect=_CONNECT_SECONDS)
        return {"params": {"wait": str(seconds)}, "timeout": timeout}

    def _news(
        self, path: str, headers: dict[str, str], patience: Patience, is_news: Callable[[httpx.Response], bool]
    ) -> httpx.Response:
        """The first answer that is news, of a service that may be away, or answer at once for want of room to wait."""
        while True:
            asked = time.monotonic()
            try:
                answer = self._send("GET", path, headers=headers, **self._waiting(_WAIT_SECONDS))
            except ClientError as error:
                if not isinstance(error, ServiceUnreachable) and error.status not in AGAIN:
                    raise
                patience.bear(error, error.retry_seconds)
                continue
            patience.heard()
            if is_news(answer):
                return answer
            time.sleep(max(0.0, asked + _ASK_EVERY_SECONDS - time.monotonic()))

    def _call(self, method: str, path: str, **options: Any) -> Any:  # noqa: ANN401 - httpx's options, JSON back
        return content_of(self._send(method, path, **options))

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401 - httpx's options
        try:
            answer = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ServiceUnreachable(self.url, type(error).__name__) from error
        if answer.is_error or (answer.is_redirect and answer.status_code != httpx.codes.NOT_MODIFIED):
            raise refusal_of(answer)
        return answer


def _idempotent(key: str | None) -> dict[str, str]:
    if key is not None and not _VISIBLE.fullmatch(key):
        message = "an idempotency key is 1 to 255 visible ASCII characters, such as a UUID"
        raise ClientError(0, "No idempotency key", message)
    return {"idempotency-key": key or str(uuid.uuid4())}


def _path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _require_address(url: str) -> None:
    try:
        parsed = httpx.URL(url)
        sound = parsed.scheme in ("http", "https") and bool(parsed.host)
    except httpx.InvalidURL:
        sound = False
    if not sound:
        raise ClientError(0, "No address", f"{url!r} is no address of a service; write one like {DEFAULT_URL}")


def _is_local(url: str) -> bool:
    host = httpx.URL(url).host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
