"""Uploads over HTTP: files are declared, sent in parts that may break off, and named by jobs once all are proved."""

import asyncio
import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from api.problem_details import Refusal, not_found
from api.requests.auth import KeyInUse, Reader, Submitter
from api.requests.body import read_record
from api.requests.openapi import UPLOAD_BODY, error_responses
from api.requests.response_bodies import job_view
from api.routes.results import owned_job
from api.service import Service, ServiceOf
from catalog.requests.uploads import UploadDocument, UploadedFile, UploadView
from catalog.responses.views import JobView
from jobs.errors import UploadRefused
from jobs.objects.uploads import Uploads
from jobs.records import Caller
from jobs.repository.imports import import_run

router = APIRouter(prefix="/v1/uploads", tags=["uploads"])

_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})")
_CREATE_ERRORS = error_responses(408, 413, 415, 507)
_LOCATION = {"Location": {"description": "The job", "schema": {"type": "string"}}}
_IMPORT_ANSWERS = {201: {"headers": _LOCATION}, **error_responses(404, 409)}
_SEND_ERRORS = error_responses(404, 408, 409, 411, 413, 415, 507)


@router.post("", operation_id="create_upload", status_code=201, responses=_CREATE_ERRORS, openapi_extra=UPLOAD_BODY)
async def create_upload(request: Request, caller: Submitter, service: ServiceOf) -> UploadView:
    """Declare the files of a model or of data, and reserve their bytes; the same again finds how far it has come."""
    settings = service.settings
    document = await read_record(request, settings, UploadDocument)
    declare, require_room = _uploads(service, caller).declare, partial(_require_room, service)
    upload_id = await run_in_threadpool(declare, document, settings.ledger.stored_bytes, require_room)
    return await run_in_threadpool(_rechecked, service, caller, upload_id)


@router.get("/{upload_id}", operation_id="read_upload", responses=error_responses(404))
def read_upload(upload_id: str, caller: Reader, service: ServiceOf) -> UploadView:
    """The files of an upload, and how far each has come."""
    return _rechecked(service, caller, upload_id)


@router.put("/{upload_id}/{name:path}", operation_id="send_file", responses=_SEND_ERRORS)
async def send_file(upload_id: str, name: str, request: Request, caller: Submitter, service: ServiceOf) -> UploadView:
    """Send a file, or the part of it that `Content-Range` names; what comes of a part that breaks off is kept."""
    upload = await run_in_threadpool(_rechecked, service, caller, upload_id, name, use=True)
    first, length = _part(request, _file(upload, name))
    _require_room(service, length)
    uploads = _uploads(service, caller)
    with uploads.writer(upload.id, name) as part:
        # as no other writer leaves it behind any more
        file = _file(await run_in_threadpool(_owned, service, caller, upload_id), name)
        if first != file.received_bytes:
            come = f"{file.received_bytes:,} of the {file.size_bytes:,} bytes of {name} have come"
            if file.received_bytes == file.size_bytes:
                come = f"all {file.size_bytes:,} bytes of {name} have come"
                raise UploadRefused("offset", f"{come}; once the others have, POST /v1/uploads/{upload.id}:complete")
            raise UploadRefused("offset", f"{come}; go on there")
        with _refusing_a_full_disk():
            key = KeyInUse(service, caller.key)
            await receive_part(request, part, length, service.settings.body_seconds, key)
            await run_in_threadpool(key.require)
            if first + length == file.size_bytes:
                _require_room(service, file.size_bytes)
                await run_in_threadpool(uploads.store, upload.id, file)
    return await run_in_threadpool(_owned, service, caller, upload_id)


@router.post("/{upload_id}:complete", operation_id="complete_upload", responses=error_responses(404, 409, 507))
def complete_upload(upload_id: str, caller: Submitter, service: ServiceOf) -> UploadView:
    """Let jobs name an upload, once all of it has come."""
    upload = _rechecked(service, caller, upload_id)
    with _refusing_a_full_disk():
        _uploads(service, caller).complete(upload, partial(_require_room, service))
    return _owned(service, caller, upload_id)


@router.post("/{upload_id}:import", operation_id="import_run", status_code=201, responses=_IMPORT_ANSWERS)
async def import_folder(upload_id: str, caller: Submitter, service: ServiceOf, response: Response) -> JobView:
    """Store a job of the folder of a foreground run; it is marked as imported wherever it is shown."""

    def act() -> JobView:
        KeyInUse(service, caller.key).require()  # after the wait for others' imports
        upload = _rechecked(service, caller, upload_id)
        job_id = import_run(service.engine, service.artifacts, caller.tenant_id, upload)
        _uploads(service, caller).remove(upload_id)
        return job_view(owned_job(service, caller.tenant_id, job_id))

    # one at a time: a folder's results may take many times their bytes
    view = await to_thread.run_sync(act, limiter=service.imports)
    response.headers["location"] = f"/v1/jobs/{view.id}"
    return view


@router.delete("/{upload_id}", operation_id="delete_upload", status_code=204, responses=error_responses(404))
def delete_upload(upload_id: str, caller: Submitter, service: ServiceOf) -> Response:
    """Delete an upload, and free its bytes; a job that names it and has not begun will fail."""
    _uploads(service, caller).remove(_owned(service, caller, upload_id).id)
    return Response(status_code=204)


def _part(request: Request, file: UploadedFile) -> tuple[int, int]:
    """Return the first byte and the length of what a request sends, by its headers."""
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal() or len(declared) > 15:
        raise Refusal(411, "length-required", "A length is needed", "send the bytes with their Content-Length")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "unsupported-media-type", "Unsupported media type", "send the bytes uncompressed")
    length = int(declared)
    whole = f"bytes 0-{file.size_bytes - 1}/{file.size_bytes}"
    span = _RANGE.fullmatch(request.headers.get("content-range", whole))
    first, last, size = (0, -1, -1) if span is None else map(int, span.groups())
    if (last - first + 1, size) != (length, file.size_bytes) or not first <= last < size:
        named = f"`Content-Range: bytes FIRST-LAST/{file.size_bytes}`"
        message = f"{file.name} was declared with {file.size_bytes:,} bytes; send all of them, or a part with {named}"
        raise Refusal(413, "body-too-large", "Not a part of the file", message)
    return first, length


async def receive_part(request: Request, part: BinaryIO, length: int, seconds: float, key: KeyInUse) -> None:
    """Write the body as it comes, while the key is valid; what was written stays, unless more than ``length`` comes."""
    first, left = part.seek(0, os.SEEK_END), length
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                left -= len(chunk)
                if left < 0:
                    part.truncate(first)
                    message = f"the body has more than its Content-Length of {length:,} bytes, and was dropped"
                    raise Refusal(400, "bad-request", "Bad request", message, headers={"connection": "close"})
                if key.is_due():
                    await run_in_threadpool(key.require_if_due)
                await run_in_threadpool(write_whole, part, chunk)
    except (TimeoutError, ClientDisconnect):
        message = f"not all of its {length:,} bytes came within {seconds:g} s; go on where the file has come to"
        raise Refusal(408, "body-timeout", "The body broke off", message, headers={"connection": "close"}) from None


def write_whole(part: BinaryIO, chunk: bytes) -> None:
    """Write a chunk, of which one call to an unbuffered file may take a part."""
    left = memoryview(chunk)
    while left:
        left = left[part.write(left) :]


def _require_room(service: Service, more_bytes: int) -> None:
    root = service.settings.ledger.artifact_root
    root.mkdir(parents=True, exist_ok=True)  # with a bucket, nothing else of the API's is there
    if shutil.disk_usage(root).free - more_bytes < service.settings.disk_floor_bytes:
        raise _full(f" for {more_bytes:,} bytes more, with the second copy of a file while it is stored")


@contextmanager
def _refusing_a_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _full() if error.errno in (errno.ENOSPC, errno.EDQUOT) else error from error


def _full(needed: str = "") -> Refusal:
    message = (
        f"the disk of the service is full{needed}; what has come is kept for a day: go on later, or ask its operator"
    )
    return Refusal(507, "disk-full", "The service has no room", message, headers={"retry-after": "300"})


def _uploads(service: Service, caller: Caller) -> Uploads:
    return Uploads(service.engine, service.artifacts, caller.tenant_id)


def _rechecked(
    service: Service, caller: Caller, upload_id: str, name: str | None = None, *, use: bool = False
) -> UploadView:
    """Return an upload, of which the store was asked for all files that count as stored, or for the one of a name."""
    _uploads(service, caller).recheck(upload_id, name)
    return _owned(service, caller, upload_id, use=use)


def _owned(service: Service, caller: Caller, upload_id: str, *, use: bool = False) -> UploadView:
    upload = _uploads(service, caller).find(upload_id, use=use)
    if upload is None:
        raise not_found("there is no such upload")
    return upload


def _file(upload: UploadView, name: str) -> UploadedFile:
    for file in upload.files:
        if file.name == name:
            return file
    raise not_found("the upload was not declared with a file of this name")
