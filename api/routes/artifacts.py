"""Artifacts over HTTP: listed, and sent whole or in part, verified against their recorded digests."""

import base64
import hashlib
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote

from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from api.problem_details import Refusal, not_found
from api.requests.auth import KeyInUse, Reader
from api.requests.etags import has_current
from api.requests.file_reads import FileReads
from api.requests.openapi import error_responses
from api.requests.response_bodies import artifact_view
from api.routes.results import owned_job
from api.service import Service, ServiceOf
from catalog.record import record
from catalog.responses.views import ArtifactListView
from jobs.errors import ArtifactDamaged
from jobs.records import Artifact
from jobs.repository.results import list_artifacts, read_artifact

_CHUNK_BYTES = 256 * 1024
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
_TYPE = re.compile(r"[a-z0-9.+-]+/[a-z0-9.+-]+")

_CONTENT: dict[str, Any] = {
    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    # the type of the file, as the list gives it; its bytes have no schema
    "*/*": {},
}

FILE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file",
        "content": _CONTENT,
        "headers": {
            "ETag": {"description": "SHA-256 in hex", "schema": {"type": "string"}},
            "Digest": {"description": "SHA-256 in base64 (RFC 3230)", "schema": {"type": "string"}},
            "Repr-Digest": {"description": "The same (RFC 9530)", "schema": {"type": "string"}},
        },
    },
    206: {"description": "The part that `Range` names", "content": _CONTENT},
    307: {
        "description": "Fetch the file from the store itself, within minutes and without your key",
        "headers": {
            "Location": {"description": "Its signed address", "schema": {"type": "string"}},
            "Digest": {"description": "SHA-256 in base64 (RFC 3230), to verify", "schema": {"type": "string"}},
        },
    },
    304: {"description": "Still the file of `If-None-Match`"},
}
"""Answers to a request for a file."""

router = APIRouter(prefix="/v1/jobs/{job_id}/artifacts", tags=["artifacts"])


@record
class DownloadOptions:
    """The conditions of a download (RFC 9110), and where it may come from."""

    byte_range: Annotated[str | None, Header(alias="range", description="One range: `bytes=0-1023`.")] = None
    if_range: Annotated[str | None, Header(description="Send the part only if the file still has this ETag.")] = None
    if_none_match: Annotated[str | None, Header(description="The ETag that you have.")] = None
    direct: Annotated[bool, Query(description="`false`: through the API, never from the store itself.")] = True


@router.get("", operation_id="list_artifacts", summary="List files", responses=error_responses(404))
def list_all(job_id: str, caller: Reader, service: ServiceOf) -> ArtifactListView:
    """All files of the job so far, with their digests."""
    owned_job(service, caller.tenant_id, job_id)
    files = list_artifacts(service.engine, caller.tenant_id, job_id)
    return ArtifactListView(items=tuple(artifact_view(file) for file in files))


@router.api_route(
    "/{name:path}",
    operation_id="download_artifact",
    methods=["GET"],
    summary="Download a file",
    response_class=Response,
    responses={**FILE_RESPONSES, **error_responses(404, 416)},
)
async def download(
    job_id: str, name: str, caller: Reader, service: ServiceOf, options: Annotated[DownloadOptions, Depends()]
) -> Response:
    """The bytes of a file, verified against the digest that was recorded."""
    artifact = await run_in_threadpool(read_artifact, service.engine, caller.tenant_id, job_id, name)
    if artifact is None:
        raise not_found("there is no such file")
    headers = _headers(artifact)
    etag = headers["etag"]
    if has_current(options.if_none_match, etag):
        return Response(status_code=304, headers=headers)
    store_url = _signed_url(artifact, headers, service) if options.direct else None
    if store_url is not None:
        # the response is as short-lived as the address in it
        moved = {"location": store_url, "cache-control": "no-store"}
        return Response(status_code=307, headers={**headers, **moved})
    part = None
    if options.byte_range is not None and options.if_range in (None, etag):
        part = _part(options.byte_range, artifact.size_bytes)
    first, last = part or (0, artifact.size_bytes - 1)
    whole = last - first + 1 == artifact.size_bytes
    if whole:
        file = await service.file_reads.open(artifact)
    else:
        file = await service.file_reads.open_verified(artifact, first)
    headers["content-length"] = str(last - first + 1)
    if part is not None:
        headers["content-range"] = f"bytes {first}-{last}/{artifact.size_bytes}"
    key = KeyInUse(service, caller.key)
    chunks = _chunks(service.file_reads, file, last - first + 1, artifact.sha256 if whole else None, key)
    # read before anything is sent, so that a damaged file of one chunk can still be refused
    begin = await anext(chunks, b"")
    return StreamingResponse(
        _resumed(begin, chunks),
        status_code=206 if part else 200,
        headers=headers,
        media_type=headers.pop("content-type"),
    )


def _signed_url(artifact: Artifact, headers: dict[str, str], service: Service) -> str | None:
    """Return the signed address of the file in the store; None where the file goes through the API."""
    if not service.settings.signed_seconds:
        return None
    answers = {name: headers[name] for name in ("content-disposition", "content-type")}
    return service.artifacts.store.signed_url(artifact.uri, service.settings.signed_seconds, answers)


def _headers(artifact: Artifact) -> dict[str, str]:
    digest = base64.b64encode(bytes.fromhex(artifact.sha256)).decode()
    media_type = artifact.media_type if _TYPE.fullmatch(artifact.media_type) else "application/octet-stream"
    return {
        "content-type": media_type,
        "etag": f'"{artifact.sha256}"',
        "digest": f"sha-256={digest}",
        "repr-digest": f"sha-256=:{digest}:",
        "accept-ranges": "bytes",
        # the bytes under a name never change, but who may read them can
        "cache-control": "private, no-cache",
        "content-disposition": f"attachment; filename*=UTF-8''{quote(artifact.name.rpartition('/')[2], safe='')}",
    }


def _part(header: str, size: int) -> tuple[int, int] | None:
    """Return first and last byte of one range; None, the whole file, for several ranges or another unit (RFC 9110)."""
    match = _RANGE.fullmatch(header.replace(" ", ""))
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        first, last = max(0, size - int(match[2])), size - 1
    else:
        first = int(match[1])
        last = min(int(match[2]), size - 1) if match[2] else size - 1
        if match[2] and int(match[2]) < first:
            return None
    if first > last:
        raise Refusal(
            416,
            "range-not-satisfiable",
            "Range not satisfiable",
            f"the file has {size:,} bytes; ask for a range within them",
            headers={"content-range": f"bytes */{size}"},
        )
    return first, last


async def _resumed(begin: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield begin
    async for chunk in rest:
        yield chunk


async def _chunks(
    reads: FileReads, file: BinaryIO, length: int, sha256: str | None, key: KeyInUse
) -> AsyncIterator[bytes]:
    """Yield the bytes while the key is valid; the last chunk of a whole file only if the digest of all is right."""
    digest = hashlib.sha256()
    left = length
    try:
        while left > 0:
            chunk = await reads.read(file, min(_CHUNK_BYTES, left), digest)
            left -= len(chunk)
            if not chunk or (left == 0 and sha256 is not None and digest.hexdigest() != sha256):
                raise ArtifactDamaged("a file changed after it was recorded; it is not served")
            if key.is_due():
                await run_in_threadpool(key.require_if_due)
            yield chunk
    finally:
        file.close()
