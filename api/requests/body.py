"""The body of a request, read as bounded bytes within a deadline before anything is built from it.

Without these bounds a server waits for a half-sent body as long as the caller likes, and buffers all of it.
"""

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from api.problem_details import Refusal
from jobs.codec import guard_body
from jobs.errors import DocumentRefused


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "body-too-large", "Body too large", f"the body has more than {limit:,} bytes; send less")


async def read_body(request: Request, limit_bytes: int, deadline_seconds: float) -> bytes:
    """Read the body of a request."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 15 or int(declared) > limit_bytes):
        raise _too_large(limit_bytes)
    raw = bytearray()
    try:
        async with asyncio.timeout(deadline_seconds):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > limit_bytes:
                    raise _too_large(limit_bytes)
    except TimeoutError:
        raise Refusal(
            408,
            "body-timeout",
            "The body did not arrive",
            f"the body was not complete after {deadline_seconds:g} s; send it without pauses",
            headers={"connection": "close"},
        ) from None
    except ClientDisconnect:
        raise Refusal(400, "bad-request", "Bad request", "the body ended before its declared length") from None
    return bytes(raw)


async def read_document_body(request: Request, limit_bytes: int, deadline_seconds: float) -> bytes:
    """Read a body that must be declared as JSON.

    Args:
        request: The request; its body must not have been read.
        limit_bytes: The largest body that is read.
        deadline_seconds: The time in which it must arrive.

    Returns:
        The bytes, which are not parsed yet.

    Raises:
        Refusal: 415 for another media type or a compressed body; as `read_body` otherwise.
    """
    content_type = request.headers.get("content-type")
    encoding = request.headers.get("content-encoding")
    _check_media_type(content_type, encoding)
    return await read_body(request, limit_bytes, deadline_seconds)


def _check_media_type(content_type: str | None, encoding: str | None) -> None:
    """Refuse by the headers alone, before a byte of the body is read."""
    try:
        guard_body(b"{}", content_type, encoding)
    except DocumentRefused as error:
        (complaint,) = error.complaints
        raise Refusal(
            415, "unsupported-media-type", "Unsupported media type", f"the body {complaint.message}"
        ) from None
