"""A synchronous client of the service: ``Client("http://127.0.0.1:8000").submit(document)``.

Every method raises ``ClientError``, with the service's own sentences, where the service refuses, and
``ServiceUnreachable``, one of its kinds, where the service does not answer.
"""

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx

from catalog.requests.uploads import UploadView
from catalog.responses.device_views import DeviceView
from catalog.responses.estimate_view import EstimateView
from catalog.responses.series import SeriesView
from catalog.responses.views import ArtifactView, EventView, JobView, ResultsView
from kronoscope.client.artifact_files import read_memory_curve, save_artifact
from kronoscope.client.connection import DEFAULT_URL, VISIBLE_ASCII, Connection, find_full_id
from kronoscope.client.document_fields import set_field
from kronoscope.client.errors import ClientError, DownloadFailed, ServiceUnreachable, content_of, refusal_of
from kronoscope.client.event_stream import follow_events, read_events
from kronoscope.client.responses import Layer, build, build_layer, build_results
from kronoscope.client.retry import RetryWindow
from kronoscope.client.uploads import send_upload

__all__ = ["DEFAULT_URL", "Client", "ClientError", "DownloadFailed", "ServiceUnreachable"]


class Client:
    """A client of one service with one key; as a context manager it closes its connections at the end."""

    def __init__(self, url: str | None = None, key: str | None = None, *, timeout_seconds: float = 30) -> None:
        """Set up the client; it connects with its first request.

        Args:
            url: The service's address; None takes KRONOSCOPE_URL, or ``http://127.0.0.1:8000``.
            key: The API key; None takes KRONOSCOPE_KEY. Embedded mode needs none.
            timeout_seconds: How long one response may take, without the time that a request asks to wait.

        Raises:
            ClientError: If address or key is malformed.
        """
        self.url = (url or os.environ.get("KRONOSCOPE_URL") or DEFAULT_URL).rstrip("/")
        self._connection = Connection(self.url, key or os.environ.get("KRONOSCOPE_KEY"), timeout_seconds)

    def __repr__(self) -> str:
        """Return one line: the address, and whether a key is sent; the key is not shown."""
        address = httpx.URL(self.url).copy_with(userinfo=b"")
        return f"<Client of {address}, {'with' if self._connection.has_key else 'without'} a key>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._connection.http.close()

    def submit(self, document: Mapping[str, Any], *, idempotency_key: str | None = None) -> JobView:
        """Submit a job.

        Args:
            idempotency_key: The same key and document give the same job, however often; None makes a new job.

        Returns:
            The job as it was accepted, or as it is by now.

        Raises:
            ClientError: If the document or the key is not accepted.
        """
        headers = _idempotent(idempotency_key)
        return build(JobView, self._connection.call("POST", "/v1/jobs", json=dict(document), headers=headers))

    def upload(self, path: Path, report: Callable[[int, int], None] = lambda _sent, _total: None) -> UploadView:
        """Send a model's folder or a file of data, or the rest of it; documents name it as `{source: upload, id: …}`.

        Args:
            report: Receives the sent bytes and those in all.
        """
        return send_upload(self._connection, path, report)

    def import_run(self, folder: Path, report: Callable[[int, int], None] = lambda _sent, _total: None) -> JobView:
        """Send the folder of a foreground run, whose results become a job that is marked as imported."""
        upload = send_upload(self._connection, folder, report, "run")
        return build(JobView, self._connection.call("POST", f"/v1/uploads/{upload.id}:import"))

    def estimate(self, document: Mapping[str, Any], *, idempotency_key: str | None = None) -> EstimateView:
        """Estimate what a job would take, without running it; wait until a worker has planned it.

        Args:
            idempotency_key: The same key and document give the same estimate; None makes a new one.

        Returns:
            The estimate, whether or not the job fits.

        Raises:
            ClientError: If the document is not accepted, or its model, data and task do not belong together.
        """
        headers = _idempotent(idempotency_key)
        estimate = build(
            EstimateView, self._connection.call("POST", "/v1/estimates", json=dict(document), headers=headers)
        )
        if estimate.ended:
            return estimate
        path = f"/v1/estimates/{quote(estimate.id, safe='')}"

        def has_ended(response: httpx.Response) -> bool:
            return build(EstimateView, content_of(response)).ended

        return build(EstimateView, content_of(self._connection.wait_for_change(path, {}, RetryWindow(60), has_ended)))

    def document(self, job_id: str) -> dict[str, Any]:
        """Return a job's document for another job like it: to be edited, estimated and submitted.

        Returns:
            The document with every default written out, the job's name and its priority; a deadline is left out.
        """
        job = self.job(job_id)
        schedule = {"schedule": {"priority": job.priority}} if job.priority else {}
        return {**job.document, "labels": dict(job.labels), **({"name": job.name} if job.name else {}), **schedule}

    def rerun(
        self, job_id: str, changes: Mapping[str, Any] | None = None, *, idempotency_key: str | None = None
    ) -> JobView:
        """Submit a job's document again.

        Args:
            changes: Fields of the document that are set, each by its path: ``{"collection.batch_size": 32}``.
            idempotency_key: As ``submit`` takes it.

        Returns:
            The new job.

        Raises:
            ClientError: If there is no such job, or its document is not accepted with the changes.
        """
        document = self.document(job_id)
        try:
            for path, value in (changes or {}).items():
                set_field(document, path, value)
        except ValueError as error:
            raise ClientError(0, "Unusable change", str(error)) from error
        return self.submit(document, idempotency_key=idempotency_key)

    def validate(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check a job document without storing it.

        Returns:
            The document as it would be stored, with every default written out.

        Raises:
            ClientError: If the document is not accepted.
        """
        answer: Mapping[str, Any] = self._connection.call(
            "POST", "/v1/jobs", json=dict(document), params={"validate_only": "true"}
        )
        return dict(answer["document"])

    def job(self, job_id: str, *, wait_seconds: float = 0) -> JobView:
        """Return a job.

        Args:
            wait_seconds: How long to wait until it has ended, at most 30; 0 returns it as it is.
        """
        return build(
            JobView,
            self._connection.call(
                "GET", _path(job_id), **(self._connection.wait_options(wait_seconds) if wait_seconds else {})
            ),
        )

    def follow(self, job_id: str, *, patience_seconds: float = 60) -> Iterator[JobView]:
        """Yield a job each time that it has changed, until it has ended.

        Args:
            patience_seconds: How long the service may be away once the job was seen.

        Yields:
            The job, at last in its final state.

        Raises:
            ClientError: If there is no such job, or the service does not come back in time.
        """
        window = RetryWindow(patience_seconds)
        answer = self._connection.send("GET", _path(job_id))
        while True:
            job = build(JobView, content_of(answer))
            yield job
            if job.ended:
                return
            tag = answer.headers.get("etag")
            condition = {"if-none-match": tag} if tag else {}
            answer = self._connection.wait_for_change(
                _path(job_id), condition, window, lambda each: each.status_code == httpx.codes.OK
            )

    def events(
        self, job_id: str, *, after: int = 0, follow: bool = True, patience_seconds: float = 60
    ) -> Iterator[EventView]:
        """Yield a job's events as they happen, until it has ended.

        Args:
            after: The number of the last event that the caller has; 0 begins at the first.
            follow: False yields those that there are by now.
            patience_seconds: How long the service may be away; then the stream goes on where it was.

        Yields:
            Each event once, in order.

        Raises:
            ClientError: If there is no such job, or the service does not come back in time.
        """
        path = f"{_path(job_id)}/events"
        connect = partial(self._connection.open_events, path)
        if not follow:
            yield from read_events(partial(self._connection.send, "GET", path), after)
            return
        try:
            yield from follow_events(connect, refusal_of, after, patience_seconds)
        except httpx.HTTPError as error:
            raise ServiceUnreachable(self.url, type(error).__name__) from error

    def jobs(  # noqa: PLR0913 - each is a filter of the list
        self,
        *,
        state: str | None = None,
        kind: str | None = None,
        label: str | Sequence[str] | None = None,
        name: str | None = None,
        coverage: str | None = None,
        since: str | None = None,
        until: str | None = None,
        sort: Literal["newest", "oldest"] = "newest",
        parent: str | None = None,
        fields: Sequence[str] = (),
    ) -> Iterator[JobView]:
        """Yield the tenant's jobs, page after page.

        Args:
            state: Only jobs in this state; None for all. Likewise the others.
            kind: Only jobs of this analysis.
            label: Only jobs with this label, as ``name=value``; of several, with all of them.
            name: Only jobs whose name has this part, in any case.
            coverage: Only jobs done in part (``partial``), or with a diagonal of some parameters (``diagonal``).
            since: Only jobs submitted since then: a moment with its offset from UTC, or a time before now, ``2d``.
            until: Only jobs submitted before then, likewise.
            sort: Which jobs come first.
            parent: Only pieces of this divided job; None for whole jobs.
            fields: Large fields to fetch too: ``document`` whole, or ``plan``.

        Yields:
            Each job, without its placement.
        """
        labels = [label] if isinstance(label, str) else label
        options = {"state": state, "kind": kind, "label": labels, "name": name, "since": since, "until": until}
        options |= {"coverage": coverage, "parent": parent, "fields": ",".join(fields) or None, "limit": "100"}
        options["sort"] = None if sort == "newest" else sort  # a service of an older version has no word for a default
        params = {option: value for option, value in options.items() if value is not None and value != []}
        yield from (build(JobView, item) for item in self._connection.pages("/v1/jobs", params, cursor="before"))

    def full_id(self, job_id: str) -> str:
        """Return the id of the job that a short id names.

        Args:
            job_id: An id, or the last 8 or more characters of one, as lists and the page show it.

        Returns:
            The whole id; what does not look like the end of one is returned as it is.

        Raises:
            ClientError: If no job of the tenant, or more than one, has an id with this end.
        """
        return find_full_id(self._connection, job_id)

    def cancel(self, job_id: str) -> JobView:
        """Cancel a queued or running job, and return it; an ended one stays as it is."""
        return build(JobView, self._connection.call("POST", f"{_path(job_id)}:cancel"))

    def reschedule(self, job_id: str, schedule: Mapping[str, Any]) -> JobView:
        """Replace the schedule of a queued or running job.

        Args:
            schedule: The block `schedule` of a job document: `priority`, and `deadline` or `within`.

        Returns:
            The job with its new schedule.

        Raises:
            ClientError: If it has ended, or the deadline has passed.
        """
        return build(JobView, self._connection.call("PUT", f"{_path(job_id)}/schedule", json=dict(schedule)))

    def annotate(self, job_id: str, *, labels: Mapping[str, str] | None = None, note: str | None = None) -> JobView:
        """Replace all labels of a job, or its note; what is None stays.

        Returns:
            The job; its document has the labels that it was submitted with.

        Raises:
            ClientError: If labels or note are not accepted.
        """
        given = {name: value for name, value in (("labels", labels), ("note", note)) if value is not None}
        return build(JobView, self._connection.call("PATCH", _path(job_id), json=given))

    def delete(self, job_id: str) -> None:
        """Delete an ended job with its results and files.

        Raises:
            ClientError: If it has not ended.
        """
        self._connection.send("DELETE", _path(job_id))

    def results(self, job_id: str) -> ResultsView:
        """Return summaries (the analysis's own record where it is known), manifest and files of a job, so far."""
        return build_results(self._connection.call("GET", f"{_path(job_id)}/results"))

    def series(self, job_id: str) -> SeriesView:
        """Return the checkpoints of a series with what they have stored so far, and the overlaps of neighbours."""
        return build(SeriesView, self._connection.call("GET", f"{_path(job_id)}/series"))

    def layers(self, job_id: str, *, kind: str | None = None) -> Iterator[Layer]:
        """Yield the rows of a job's results, one per layer and analysis; ``kind`` is the only one, None takes all."""
        params = {"limit": "100"} | ({"kind": kind} if kind else {})
        yield from (
            build_layer(item) for item in self._connection.pages(f"{_path(job_id)}/layers", params, cursor="after")
        )

    def log(self, job_id: str) -> str:
        """Return a job's reproducibility log: JSON lines, one record per layer."""
        return self._connection.send("GET", f"{_path(job_id)}/log").text

    def memory_curve(self, results: ResultsView) -> Mapping[str, Any] | None:
        """Download a job's memory curve.

        Args:
            results: The job's results, which list its files.

        Returns:
            The bytes held over time, and the planned and measured figures of each stage; None where the job has left
            no curve, or it cannot be downloaded.
        """
        return read_memory_curve(self._connection, f"{_path(results.job.id)}/artifacts", results.artifacts)

    def download(self, job_id: str, artifact: ArtifactView, folder: Path) -> Path:
        """Download a file; it appears under its name only once its digest has been checked.

        Args:
            artifact: The file, from the list in the job's results.
            folder: Where to put it; subfolders of its name are made.

        Returns:
            Its path.

        Raises:
            DownloadFailed: If the bytes are not those that the job recorded, or the connection broke.
        """
        return save_artifact(self._connection, f"{_path(job_id)}/artifacts/{quote(artifact.name)}", artifact, folder)

    def menu(self) -> Mapping[str, Any]:
        """Return every analysis, with the JSON schemas of its options, metrics and summary."""
        answer: Mapping[str, Any] = self._connection.call("GET", "/v1/analyses")
        return answer

    def devices(self) -> Iterator[DeviceView]:
        """Yield the devices of the service's workers, page after page."""
        yield from (
            build(DeviceView, item) for item in self._connection.pages("/v1/devices", {"limit": "100"}, cursor="after")
        )

    def ready(self) -> bool:
        """Return whether the service can take jobs now."""
        return self.unready() is None

    def unready(self) -> str | None:
        """Return the reason why the service cannot take jobs now; None where it can."""
        try:
            self._connection.send("GET", "/readyz")
        except ClientError as error:
            return "; ".join(error.lines)
        return None


def _idempotent(key: str | None) -> dict[str, str]:
    if key is not None and not VISIBLE_ASCII.fullmatch(key):
        raise ClientError(0, "Invalid idempotency key", "take 1 to 255 visible ASCII characters, such as a UUID")
    return {"idempotency-key": key or str(uuid.uuid4())}


def _path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"
