"""What goes wrong between a client and the service, as errors with the service's own sentences."""

from typing import Any

import httpx

from catalog.complaints import Complaint
from kronoscope.client.retry import PAUSE_SECONDS, pause_of


class ClientError(Exception):
    """The service refused; ``lines`` are its sentences, one per fault."""

    def __init__(self, status: int, title: str, detail: str, complaints: tuple[Complaint, ...] = ()) -> None:
        self.status = status
        self.title = title
        self.detail = detail
        self.complaints = complaints
        self.retry_seconds = PAUSE_SECONDS
        """When it is worth asking again, where it is."""
        super().__init__("; ".join(self.lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """What to mend: each fault with the field it is about, else the service's one sentence."""
        if self.complaints:
            return tuple(f"{each.pointer} {each.message}".strip() for each in self.complaints)
        return (self.detail or self.title,)


class ServiceUnreachable(ClientError):
    """Nobody answers at the address."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            0, "The service does not answer", f"nothing answers at {url} ({reason}); is `kronoscope serve` running?"
        )


class DownloadFailed(ClientError):
    """The file did not come, or not as it was recorded."""


def content_of(answer: httpx.Response) -> Any:  # noqa: ANN401 - whatever JSON holds
    """The JSON of an answer.

    Raises:
        ClientError: If it holds none: somebody else answers at the address.
    """
    try:
        return answer.json()
    except ValueError as error:
        raise _unexpected(answer) from error


def _unexpected(answer: httpx.Response) -> ClientError:
    detail = f"{answer.request.url} answered {answer.status_code}, not as Kronoscope does; check the address"
    return ClientError(answer.status_code, "Unexpected answer", detail)


def refusal_of(answer: httpx.Response) -> ClientError:
    """The service's problem document, or as much as can be said without one."""
    refused = _refused(answer)
    refused.retry_seconds = pause_of(answer.headers.get("retry-after"))
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
    except (ValueError, KeyError, TypeError, AttributeError):
        return _unexpected(answer)
