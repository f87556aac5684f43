"""Uploads of a client: a model's folder or a file of data, sent in parts, and gone on with where it broke off."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from catalog.requests.uploads import UploadKind, UploadView, is_read
from kronoscope.client.connection import Connection
from kronoscope.client.errors import ClientError, ServiceUnreachable
from kronoscope.client.responses import build
from kronoscope.client.retry import RETRY_STATUSES, RetryWindow

_PART_BYTES = 8 * 2**20
_PATIENCE_SECONDS = 60
_RETRIED = {*RETRY_STATUSES, 408, 409}
"""Statuses after which what has come is asked for again; a request that was cut may still hold its file."""


def send_upload(
    connection: Connection, path: Path, report: Callable[[int, int], None], kind: UploadKind | None = None
) -> UploadView:
    """Send what the service has not got yet of a folder or file; `Client.upload` describes it."""
    kind = kind or ("model" if path.is_dir() else "data")
    folder = path if path.is_dir() else path.parent
    files = [_declaration(folder, name) for name in files_of(path, kind)]
    if not files:
        message = f"{path} is neither a model's folder (config.json, *.safetensors) nor a file of data (.safetensors, "
        message += ".jsonl, .csv, .parquet, .txt); unpack archives, and convert pickles to safetensors"
        raise ClientError(0, "Nothing to upload", message)
    upload = build(UploadView, connection.call("POST", "/v1/uploads", json={"kind": kind, "files": files}))
    address, window = f"/v1/uploads/{upload.id}", RetryWindow(_PATIENCE_SECONDS)
    while not upload.complete:
        report(sum(each.received_bytes for each in upload.files), sum(each.size_bytes for each in upload.files))
        missing = next((each for each in upload.files if each.received_bytes < each.size_bytes), None)
        try:
            if missing is None:
                answer = connection.call("POST", f"{address}:complete")
            else:
                with (folder / missing.name).open("rb") as file:
                    file.seek(missing.received_bytes)
                    part = file.read(_PART_BYTES)
                last = missing.received_bytes + len(part) - 1
                span = {"content-range": f"bytes {missing.received_bytes}-{last}/{missing.size_bytes}"}
                answer = connection.call("PUT", f"{address}/{missing.name}", content=part, headers=span)
            window.reset()
        except ClientError as error:
            if not isinstance(error, ServiceUnreachable) and error.status not in _RETRIED:
                raise
            window.pause(error, error.retry_seconds)
            answer = _asked(connection, address, window)
        upload = build(UploadView, answer)
    return upload


def files_of(path: Path, kind: UploadKind) -> list[str]:
    """Return the names of the files of a folder, or of a file, that the service reads."""
    if kind == "data":
        return [path.name] if path.is_file() and is_read(kind, path.name) else []
    depth = ("*", "*/*") if kind == "model" else ("*.json", "artifacts/**/*")
    below = [each.relative_to(path).as_posix() for pattern in depth for each in path.glob(pattern) if each.is_file()]
    return sorted(name for name in below if is_read(kind, name))


def _declaration(folder: Path, name: str) -> dict[str, Any]:
    with (folder / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"name": name, "size_bytes": file.tell(), "sha256": digest}


def _asked(connection: Connection, address: str, window: RetryWindow) -> Any:  # noqa: ANN401 - JSON
    """Ask how far an upload has come, until the service is there again."""
    while True:
        try:
            return connection.call("GET", address)
        except ServiceUnreachable as error:
            window.pause(error, error.retry_seconds)
