"""The errors of the client, with the service's own sentences."""

from typing import Any

import httpx

from catalog.field_errors import Complaint
from kronoscope.client.retry import PAUSE_SECONDS, retry_after_seconds


class ClientError(Exception):
    """A refusal of the service; ``lines`` are its sentences, one per fault."""

    def __init__(self, status: int, title: str, detail: str, complaints: tuple[Complaint, ...] = ()) -> None:
        self.status = status
        self.title = title
        self.detail = detail
        self.complaints = complaints
        self.retry_seconds = PAUSE_SECONDS
        """Pause before another attempt, where one may succeed."""
        super().__init__("; ".join(self.lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """The faults, each with its field; the service's one sentence where it names none."""
        if self.complaints:
            return tuple(f"{each.pointer} {each.message}".strip() for each in self.complaints)
        return (self.detail or self.title,)


class ServiceUnreachable(ClientError):
    """No answer at the service's address."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            0, "The service does not answer", f"nothing answers at {url} ({reason}); is `kronoscope serve` running?"
        )


class DownloadFailed(ClientError):
    """A file that did not arrive, or not as it was recorded."""


def content_of(answer: httpx.Response) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return the JSON of a response."""
    try:
        return answer.json()
    except (ValueError, RecursionError) as error:
        raise unexpected(answer) from error


def unexpected(answer: httpx.Response) -> ClientError:
    """Return the error for a response that Kronoscope would not send."""
    detail = f"{answer.request.url} answered {answer.status_code}, not as Kronoscope does; check the address"
    return ClientError(answer.status_code, "Unexpected answer", detail)


def refusal_of(answer: httpx.Response) -> ClientError:
    """Return the error that a refusing response stands for."""
    refused = _refused(answer)
    refused.retry_seconds = retry_after_seconds(answer.headers.get("retry-after"))
    return refused


def _refused(answer: httpx.Response) -> ClientError:
    try:
        problem = answer.json()
        complaints = tuple(
            Complaint(
                pointer=str(fault.get("pointer") or fault.get("parameter") or ""),
                code=str(fault.get("code")),
                message=str(fault.get("message")),
            )
            for fault in problem.get("errors") or ()
        )
        return ClientError(answer.status_code, str(problem["title"]), str(problem.get("detail") or ""), complaints)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return unexpected(answer)
