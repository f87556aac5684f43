"""Uploads of a client: a model's folder or a file of data, sent in parts, and gone on with where it broke off."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from catalog.requests.uploads import UploadKind, UploadView, is_read, plain_name
from kronoscope.client.connection import Connection
from kronoscope.client.errors import ClientError, ServiceUnreachable
from kronoscope.client.responses import build
from kronoscope.client.retry import RETRY_STATUSES, RetryWindow

NOTHING_READ = (
    "is neither a model's folder (config.json, *.safetensors) nor a file of data (.safetensors, .jsonl, .csv, "
    ".parquet, .txt); unpack archives, and convert pickles to safetensors"
)
"""The refusal of a path without a file that the service reads."""
_PART_BYTES = 8 * 2**20
_PATIENCE_SECONDS = 60
_LEAST_PART_BYTES = 64 * 2**10
_STORED_BYTES_A_SECOND = 4 * 2**20
_TOO_SLOW, _BUSY = 408, 409
_RETRIED = {*RETRY_STATUSES, _TOO_SLOW, _BUSY}
"""Statuses after which what has come is asked for again; a request that was cut may still hold its file."""


def send_upload(
    connection: Connection, path: Path, report: Callable[[int, int], None], kind: UploadKind | None = None
) -> UploadView:
    """Send what the service has not got yet of a folder or file; `Client.upload` describes it."""
    kind = kind or ("model" if path.is_dir() else "data")
    places = files_of(path, kind)
    files = [_declaration(name, place) for name, place in places.items()]
    if not files:
        raise ClientError(0, "Nothing to upload", f"{path} {NOTHING_READ}")
    sizes: dict[str, int] = {each["name"]: each["size_bytes"] for each in files}
    total = sum(sizes.values())
    upload = build(UploadView, connection.call("POST", "/v1/uploads", json={"kind": kind, "files": files}))
    address, part_bytes, most = f"/v1/uploads/{upload.id}", _PART_BYTES, sum(_received(upload, sizes).values())
    window, storing = RetryWindow(_PATIENCE_SECONDS), RetryWindow(_PATIENCE_SECONDS + total / _STORED_BYTES_A_SECOND)
    while not upload.complete:
        # names are the client's own: those of an answer could lead to any file of its user
        received = _received(upload, sizes)
        before, asked = sum(received.values()), False
        report(before, total)
        name = next((name for name in sizes if received[name] < sizes[name]), None)
        try:
            if name is None:
                answer = connection.call("POST", f"{address}:complete")
            else:
                with places[name].open("rb") as file:
                    file.seek(received[name])
                    part = file.read(min(part_bytes, sizes[name] - received[name]))
                span = f"bytes {received[name]}-{received[name] + len(part) - 1}/{sizes[name]}"
                answer = connection.call("PUT", f"{address}/{name}", content=part, headers={"content-range": span})
        except ClientError as error:
            if not isinstance(error, ServiceUnreachable) and error.status not in _RETRIED:
                raise
            if error.status == _TOO_SLOW:
                part_bytes = max(part_bytes // 2, _LEAST_PART_BYTES)
            # all has come, and a request that was cut is still storing it
            (storing if name is None and error.status == _BUSY else window).pause(error, error.retry_seconds)
            answer, asked = _asked(connection, address, window), True
        upload = build(UploadView, answer)
        come = sum(_received(upload, sizes).values())
        if come > most:
            most = come
            window.reset()
        elif not (asked or upload.complete or come > before):
            raise _malformed(f"{come:,} bytes of the upload, though more were sent")
    return upload


def files_of(path: Path, kind: UploadKind) -> dict[str, Path]:
    """Return the files of a folder, or the file, that the service reads, by the names under which they are declared.

    A model has a `config.json`.
    """
    if kind == "data":
        name = plain_name(path.name) if path.is_file() else None
        return {} if name is None else {name: path}
    depth = ("*", "*/*") if kind == "model" else ("*.json", "artifacts/**/*")
    below = sorted(each for pattern in depth for each in path.glob(pattern) if each.is_file())
    files = {name: each for each in below if is_read(kind, name := each.relative_to(path).as_posix())}
    return files if kind != "model" or "config.json" in files else {}


def _declaration(name: str, place: Path) -> dict[str, Any]:
    with place.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"name": name, "size_bytes": file.tell(), "sha256": digest}


def _received(upload: UploadView, sizes: dict[str, int]) -> dict[str, int]:
    """Return how much has come of each declared file; of an answer, other names and sizes are refused."""
    found = {each.name: each.received_bytes for each in upload.files if each.size_bytes == sizes.get(each.name)}
    if found.keys() != sizes.keys() or not all(0 <= found[name] <= sizes[name] for name in sizes):
        raise _malformed("other files than were declared")
    return found


def _malformed(what: str) -> ClientError:
    return ClientError(0, "Unexpected answer", f"an answer of the service has {what}; check the address")


def _asked(connection: Connection, address: str, window: RetryWindow) -> Any:  # noqa: ANN401 - JSON
    """Ask how far an upload has come, until the service is there again."""
    while True:
        try:
            return connection.call("GET", address)
        except ServiceUnreachable as error:
            window.pause(error, error.retry_seconds)
