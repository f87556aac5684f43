"""ETags of RFC 9110, section 8.8.3: a caller's entity tags, compared with the current one."""


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
