"""ETags of RFC 9110, section 8.8.3: a caller's entity tags, compared with the current one."""

import re
from collections.abc import Sequence

from api.problem_details import Fault, Refusal

_TAG = re.compile(r'(?:^|,)[ \t]*((?:W/)?"[\x21\x23-\x7e\x80-\xff]*")[ \t]*(?=,|$)')


def has_current(header: str | None, etag: str) -> bool:
    """Return whether `If-None-Match` names the current version.

    A proxy that compresses an answer makes its tag weak (``W/"…"``); this comparison disregards that.

    Args:
        header: The header's value; None where it was not sent.
        etag: The current version's tag, in its quotes.

    Returns:
        True if it is among those of the header, or the header is ``*``.
    """
    return any(part.strip().removeprefix("W/") in (etag, "*") for part in (header or "").split(","))


def require_match(headers: Sequence[str], etag: str) -> None:
    """Refuse a change of another version than the one that the caller has seen.

    The comparison of `If-Match` is the strong one: a weak tag (``W/"…"``) matches nothing.

    Args:
        headers: The values of `If-Match`, one for each line of the header; empty where it was not sent.
        etag: The current version's tag, in its quotes.

    Raises:
        Refusal: 412, with the current tag, if none of the header's tags is the current one and it is not ``*``.
    """
    named = ",".join(headers)
    if not headers or named.strip() == "*" or etag in _TAG.findall(named):
        return
    message = "names no current version of the job; read the job again, and send the `ETag` of that answer as it is"
    raise Refusal(
        412,
        "precondition-failed",
        "The job has changed",
        f"`If-Match` {message}",
        errors=[Fault(pointer=None, parameter="If-Match", code="precondition_failed", message=message)],
        headers={"etag": etag},
    )
