"""Webhooks: the request for one, and how it and its deliveries are shown."""

import re
from typing import Literal

from catalog.brief import Brief
from catalog.record import FieldError, record
from catalog.responses.views import JobState, Timestamp

_URL = re.compile(
    r"https://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([1-9][0-9]{0,4}))?([/?][!-\"$-~]{0,1700})?"
)
_LAST_PORT = 65_535


@record
class WebhookRequest:
    """A request for a webhook."""

    url: str
    """The address that each change of a job's state is posted to, such as `https://example.com/kronoscope`."""

    def __post_init__(self) -> None:
        """Refuse an address that no delivery could reach."""
        match = _URL.fullmatch(self.url)
        if match is None or int(match[2] or 443) > _LAST_PORT:
            rule = (
                "must be an https address in ASCII, without user and fragment, its path at most 1,700 characters long"
            )
            raise FieldError("url", f"{rule}, such as https://example.com/kronoscope")


@record
class WebhookView(Brief):
    """An address that hears of jobs."""

    id: str
    """The webhook's id."""
    url: str
    """The address."""
    created_at: Timestamp
    """The moment when it was made."""
    secret: str | None
    """The key of its signatures (`whsec_…`), where it is new; null afterwards."""


@record
class WebhookListView:
    """All webhooks, the oldest first."""

    items: tuple[WebhookView, ...]
    """The webhooks."""


@record
class DeliveryView(Brief, shown=("job", "after", "state", "outcome")):
    """A change of a job's state on its way to a webhook."""

    id: str
    """The header `webhook-id` of every attempt."""
    job: str
    """The job's id."""
    before: JobState | None
    """The state that it left; null of a new job."""
    after: JobState
    """The state that it entered."""
    state: Literal["pending", "delivered", "failed"]
    """`failed`: it is not sent again."""
    attempts: int
    """Attempts that have begun."""
    outcome: str | None
    """The end of the last attempt, in words."""
    created_at: Timestamp
    """The moment of the change."""
    due_at: Timestamp
    """The moment of the next attempt, or of the end."""


@record
class DeliveryListView:
    """Deliveries, newest first."""

    items: tuple[DeliveryView, ...]
    """The deliveries, at most 100."""
