"""A snapshot of one commit of a model on the hub, fetched into the store.

::

    listing    read once: the commit, and for each file that is wanted a plain name, a size and a digest
    fetching   into a folder of its own, each file exactly as listed
    keeping    the whole folder gets its name at once; a branch or tag points to it last

The store has the layout of the library that reads it offline.
"""

import contextlib
import fnmatch
import hashlib
import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import huggingface_hub.constants

from catalog.requests.inputs import HuggingFaceModel
from worker.execution.loader_context import LoaderContext
from worker.execution.models.hub_transport import bounds, open_client
from worker.execution.refusal import Refusal, Unavailable, names

FILES = ("config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
         "special_tokens_map.json", "added_tokens.json", "adapter_config.json", "generation_config.json",
         "preprocessor_config.json", "modules.json", "*_Pooling/config.json")  # fmt: skip
"""Patterns of the files that are wanted."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"[A-Za-z0-9_][\w.\-+=@,() ]{0,199}", re.ASCII)
_MOST_PARTS = 8
_MOST_LISTING_BYTES = 16 * 2**20
_MOST_FILES = 1_000
_MOST_JSON_BYTES = 128 * 2**20
_ANSWER_SECONDS = 60.0
_SLOWEST_BYTES_A_SECOND = 2**15
"""A file may take so much longer than an answer as it has bytes at this rate."""
_TRIES = 3
_PAUSE_SECONDS = 1.0
_AT_A_TIME = 4
_STAGE = ".fetching-"
_STAGE_SECONDS = 7 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """One file as the hub lists it."""

    name: str
    size: int
    sha256: str | None
    blob: str | None
    """Git's digest, of a file that is not kept as a large one."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The files of one commit that are wanted."""

    commit: str
    files: tuple[HubFile, ...]


def fetch_snapshot(source: HuggingFaceModel, context: LoaderContext) -> Path:
    """Fetch what is missing of one commit of a model."""
    endpoint = huggingface_hub.constants.ENDPOINT
    store = context.store / "hub" / f"models--{source.id.replace('/', '--')}"
    with open_client(endpoint, _headers()) as client:
        listing = _read_listing(client, endpoint, source)
        if not context.shapes_only and not any(_is_weights(file) for file in listing.files):
            raise Refusal(f"{source.id} has no safetensors weights; no other format is read", pointer="/model/id")
        folder = store / "snapshots" / listing.commit
        wanted = [
            file
            for file in listing.files
            if not (context.shapes_only and _is_weights(file)) and not _is_there(folder / file.name, file)
        ]
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(store)
        _require_room(source, wanted, store)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=store))
        try:
            within = stage / listing.commit
            within.mkdir()
            _Fetch(client, f"{endpoint}/{source.id}/resolve/{listing.commit}", within).all(wanted, context)
            _keep(store, listing, stage, source.revision or "main")
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return folder


def _headers() -> dict[str, str]:
    token = None if huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else huggingface_hub.get_token()
    return {"user-agent": "kronoscope"} | ({} if token is None else {"authorization": f"Bearer {token}"})


def _is_weights(file: HubFile) -> bool:
    return file.name.endswith(".safetensors")


def _is_there(path: Path, file: HubFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size


def _read_listing(client: httpx2.Client, endpoint: str, source: HuggingFaceModel) -> Listing:
    revision = quote(source.revision or "main", safe="")
    what = f"the list of files of {source.id}"
    with _asked(source.id):
        answer = client.get(
            f"{endpoint}/api/models/{source.id}/revision/{revision}",
            params={"blobs": "true"},
            extensions=bounds(what, _MOST_LISTING_BYTES, _ANSWER_SECONDS),
        )
    _require_success(answer, source)
    try:
        found = json.loads(answer.content)
    except (ValueError, RecursionError) as error:
        kind = names([answer.headers.get("content-type", "no type")])
        raise _bad(f"{what} is not JSON (its type is {kind}, its first bytes {answer.content[:40]!r})") from error
    if not isinstance(found, dict):
        raise _bad(f"{what} is not an object (got {type(found).__name__})")
    commit, siblings = found.get("sha"), found.get("siblings")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise _bad(f"`sha` in {what} is not a commit of 40 hexadecimal digits (got {_shown(commit)})")
    if _COMMIT.fullmatch(source.revision or "") and commit != source.revision:
        raise _bad(f"`sha` in {what} is {commit}, but {source.revision} was asked for")
    if not isinstance(siblings, list):
        raise _bad(f"`siblings` in {what} is not a list (got {_shown(siblings)})")
    files = tuple(_read_file(each, what) for each in siblings if _is_wanted(each, what))
    _require_places(files, what)
    return Listing(commit=commit, files=files)


def _is_wanted(entry: Any, what: str) -> bool:  # noqa: ANN401 - whatever JSON holds
    name = entry.get("rfilename") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise _bad(f"an entry of `siblings` in {what} has no text as `rfilename` (got {_shown(entry)})")
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in FILES)


def _read_file(entry: Mapping[str, Any], what: str) -> HubFile:
    name, size, large, blob = entry["rfilename"], entry.get("size"), entry.get("lfs"), entry.get("blobId")
    parts = name.split("/")
    if len(parts) > _MOST_PARTS or not all(_PART.fullmatch(part) for part in parts):
        raise _bad(f"`rfilename` in {what} is not a plain name beneath the folder (got {_shown(name)})")
    if type(size) is not int or not 0 <= size < 2**62:
        raise _bad(f"`size` of {name} in {what} is not a number of bytes (got {_shown(size)})")
    if not name.endswith(".safetensors") and size > _MOST_JSON_BYTES:
        raise _bad(f"{name} in {what} has {size:,} bytes; at most {_MOST_JSON_BYTES:,} are read")
    sha256 = large.get("sha256") if isinstance(large, dict) else None
    if large is not None and (not isinstance(sha256, str) or not _SHA256.fullmatch(sha256)):
        raise _bad(f"`lfs` of {name} in {what} has no SHA-256 (got {_shown(large)})")
    if sha256 is not None or blob is None:
        return HubFile(name=name, size=size, sha256=sha256, blob=None)
    if not isinstance(blob, str) or not _COMMIT.fullmatch(blob):
        raise _bad(f"`blobId` of {name} in {what} is not 40 hexadecimal digits (got {_shown(blob)})")
    return HubFile(name=name, size=size, sha256=None, blob=blob)


def _require_places(files: tuple[HubFile, ...], what: str) -> None:
    """Refuse too many files, and two that could not lie in one folder."""
    if len(files) > _MOST_FILES:
        raise _bad(f"{what} has {len(files):,} files that are wanted; at most {_MOST_FILES:,} are fetched")
    seen: set[str] = set()
    folders = {file.name[:at] for file in files for at in range(len(file.name)) if file.name[at] == "/"}
    for file in files:
        if file.name in seen or file.name in folders:
            raise _bad(f"{what} has two entries for {names([file.name])}")
        seen.add(file.name)


def _require_success(answer: httpx2.Response, source: HuggingFaceModel) -> None:
    status, code = answer.status_code, answer.headers.get("x-error-code", "")
    if status == 200:
        return
    if code == "GatedRepo":
        named = f"{source.id}{f' at {source.revision}' if source.revision else ''}"
        raise Refusal(f"{named} asks for an agreement that was not given here", pointer="/model/id")
    if code == "RevisionNotFound":
        raise Refusal(f"{source.id} has no revision `{source.revision or 'main'}`", pointer="/model/revision")
    if status in (401, 403, 404):
        raise Refusal(f"{source.id} is not on the hub, or not public", pointer="/model/id", code="not_found")
    raise _unavailable(source.id, f"status {status}")


def _require_room(source: HuggingFaceModel, files: list[HubFile], store: Path) -> None:
    """Refuse what would fill the disk, before a byte is written."""
    wanted, free = sum(file.size for file in files), shutil.disk_usage(store).free
    if wanted > free * 0.9:
        raise Refusal(f"{source.id} has {wanted:,} bytes; the model store has {free:,} left", pointer="/model/id")


def _remove_stale(store: Path) -> None:
    """Remove what fetches that were killed have left."""
    for stage in store.glob(f"{_STAGE}*"):
        with contextlib.suppress(OSError):
            if stage.stat().st_mtime < time.time() - _STAGE_SECONDS:
                shutil.rmtree(stage)


class _Fetch:
    """The fetching of files into one folder, several at a time."""

    def __init__(self, client: httpx2.Client, url: str, folder: Path) -> None:
        self._client = client
        self._url = url
        self._folder = folder
        self._ended = threading.Event()

    def all(self, files: list[HubFile], context: LoaderContext) -> None:
        """Fetch all files, or raise what went wrong with the first that failed."""
        with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="fetch") as pool:
            pending = {pool.submit(self._one, file) for file in files}
            try:
                while pending:
                    done, pending = wait(pending, timeout=1.0, return_when=FIRST_EXCEPTION)
                    for each in done:
                        each.result()
                    context.checkpoint()
            finally:
                self._ended.set()
                pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, file: HubFile) -> None:
        place = self._folder / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        seconds = _ANSWER_SECONDS + file.size / _SLOWEST_BYTES_A_SECOND
        limits = bounds(file.name, file.size, seconds)
        with place.open("xb") as output, _asked(file.name):
            for left in reversed(range(_TRIES)):
                try:
                    self._read_into(output, file, limits)
                    break
                except httpx2.TransportError:
                    if not left or self._ended.wait(_PAUSE_SECONDS):
                        raise
        _require_listed(place, file)

    def _read_into(self, output: Any, file: HubFile, limits: dict[str, Any]) -> None:  # noqa: ANN401 - a binary file
        """Append what is missing of a file."""
        there = output.tell()
        headers = {"range": f"bytes={there}-"} if there else {}
        url = f"{self._url}/{quote(file.name)}"
        with self._client.stream("GET", url, headers=headers, extensions=limits) as answer:
            if answer.status_code == 200 and there:
                there = output.seek(0)
                output.truncate()
            elif answer.status_code != (206 if there else 200):
                raise _unavailable(file.name, f"status {answer.status_code}")
            elif there and not answer.headers.get("content-range", "").startswith(f"bytes {there}-"):
                raise _bad(f"{file.name} was asked for from byte {there} on, and another part is sent")
            length = answer.headers.get("content-length", str(file.size - there))
            if length != str(file.size - there):
                raise _bad(f"{file.name} is listed with {file.size:,} bytes and sent with {names([length])}")
            for chunk in answer.iter_raw():
                output.write(chunk)
                if self._ended.is_set():
                    raise _unavailable(file.name, "another file failed")
                if output.tell() > file.size:
                    raise _bad(f"{file.name} is listed with {file.size:,} bytes, and more are sent")


def _require_listed(place: Path, file: HubFile) -> None:
    """Refuse a file that has not the size and digest that the hub lists."""
    size = place.stat().st_size
    if size != file.size:
        raise _bad(f"{file.name} is listed with {file.size:,} bytes, and {size:,} are sent")
    with place.open("rb") as opened:
        if file.sha256 is not None and hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
            raise _bad(f"{file.name} has not the SHA-256 that is listed")
        if file.blob is not None:
            git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
            while chunk := opened.read(2**20):
                git.update(chunk)
            if git.hexdigest() != file.blob:
                raise _bad(f"{file.name} has not the digest that is listed as `blobId`")


def _keep(store: Path, listing: Listing, stage: Path, revision: str) -> None:
    """Give the files their place, the list by which an incomplete folder is known before, and the revision after."""
    _write(store / "trees" / f"{listing.commit}.json", _tree(listing), stage)
    folder, fetched = store / "snapshots" / listing.commit, stage / listing.commit
    try:
        fetched.rename(folder)
    except OSError:  # a part is there already
        for path in sorted(each for each in fetched.rglob("*") if each.is_file()):
            place = folder / path.relative_to(fetched)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
    if revision != listing.commit:
        _write(store / "refs" / revision, listing.commit, stage)


def _write(place: Path, text: str, stage: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    written = stage / "written"
    written.write_text(text)
    written.replace(place)


def _tree(listing: Listing) -> str:
    """The list of files as the library keeps it, in version 1 of its format."""
    files = {}
    for file in listing.files:
        entry: dict[str, Any] = {"size": file.size, "blob_id": file.blob or ""}
        if file.sha256 is not None:
            entry |= {"lfs_sha256": file.sha256, "lfs_size": file.size}
        files[file.name] = entry
    return json.dumps({"format_version": 1, "files": files})


@contextlib.contextmanager
def _asked(what: str) -> Iterator[None]:
    """Say in a sentence what the HTTP library raises about an answer."""
    try:
        yield
    except httpx2.TooManyRedirects as error:
        raise _bad(f"the hub sends from one address to the next without end for {what}") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, ConnectionError, TimeoutError) as error:
        raise _unavailable(what, type(error).__name__) from error


def _bad(sentence: str) -> Refusal:
    return Refusal(
        f"{sentence}; nothing was kept. Look at what HF_ENDPOINT names, or take `source: directory`",
        pointer="/model/id",
        code="hub_answer",
    )


def _unavailable(what: str, why: str) -> Unavailable:
    return Unavailable(
        f"the hub did not answer for {what} ({why}); try again, or take `source: directory`",
        pointer="/model/id",
        code="hub_unreachable",
    )


def _shown(value: object) -> str:
    return names([value if isinstance(value, str) else repr(value)[:100]])
