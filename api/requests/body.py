"""The body of a request, read as bounded bytes within a deadline before anything is built from it.

Without these bounds a server waits for a half-sent body as long as the caller likes, and buffers all of it.
"""

import asyncio
from typing import TypeVar

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from api.problem_details import Refusal
from api.requests.auth import KeyInUse
from api.settings import Settings
from jobs.codec import guard_body, parse_record
from jobs.errors import DocumentRefused

T = TypeVar("T")


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "body-too-large", "Body too large", f"the body has more than {limit:,} bytes; send less")


async def _read(request: Request, limit_bytes: int, deadline_seconds: float) -> bytes:
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


async def read_record(request: Request, settings: Settings, kind: type[T]) -> T:
    """Read a body as a record; ``DocumentRefused`` if it is not one, and as `read_document_body`."""
    return await run_in_threadpool(parse_record, await read_document_body(request, settings), kind)


async def read_document_body(request: Request, settings: Settings) -> bytes:
    """Read a body that must be declared as JSON, unparsed, within the settings' limits of bytes and time.

    ``Refusal``: 415 for another media type or a compressed body, 408 or 413 beyond the limits, 400 if it ends early,
    401 if the key is no longer valid then.
    """
    try:
        # by the headers alone, before a byte of the body is read
        guard_body(b"{}", request.headers.get("content-type"), request.headers.get("content-encoding"))
    except DocumentRefused as error:
        (complaint,) = error.complaints
        raise Refusal(
            415, "unsupported-media-type", "Unsupported media type", f"the body {complaint.message}"
        ) from None
    raw = await _read(request, settings.body_limit_bytes, settings.body_seconds)
    # a body that came slowly is not acted upon once its key is revoked
    await run_in_threadpool(KeyInUse(request.app.state.service, request.state.caller.key).require)
    return raw
