"""The codec from the bytes of a request to a job document, and from records to digests.

Bytes are guarded before anything is built from them: size, encoding, depth, number of keys and
every number. Only then are they validated, strictly: `true`, `"12"` and `3.0` are no integers.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from catalog import DOCUMENT
from catalog.field_errors import Complaint, complaints
from catalog.record import canonical_json, plain
from catalog.requests.job import JobDocument
from jobs.errors import DocumentRefused

T = TypeVar("T")

MAX_BODY_BYTES = 256 * 1024
MAX_DEPTH = 16
MAX_KEYS = 2_000
MAX_VALUES = 20_000
MAX_CLAIM_MARKS = 2_000_000

_MAX_REPORTED = 20
_ADAPTER: TypeAdapter[JobDocument] = TypeAdapter(DOCUMENT)
# strings are skipped whole; one that never ends is swallowed to the end, which keeps the scan linear
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Number:
    """A number that JSON can write and no field can take; it waits to be found, with its path."""

    def __init__(self, complaint: str) -> None:
        self.complaint = complaint


class _Repeated(dict[str, Any]):
    """An object that names a key twice."""


def parse_document(raw: bytes) -> JobDocument:
    """Parse and validate a job document.

    Args:
        raw: The request's body, JSON in UTF-8.

    Returns:
        The document, with every default filled in.

    Raises:
        DocumentRefused: If it is not valid; with a complaint for each fault, at most twenty.
    """
    return _parsed(raw, _ADAPTER, DOCUMENT)


def parse_record(raw: bytes, shape: type[T]) -> T:
    """Parse and validate a record in JSON that stands alone, outside a document, such as a schedule.

    ``DocumentRefused`` if it is not valid, with one complaint per field.
    """
    return _parsed(raw, TypeAdapter(shape), shape)


def parse_claim(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object that may be large, under the guards of a document's values.

    ``DocumentRefused`` with the place of what no field can take.
    """
    # of each value a mark, which takes a hundred times less than the value that is built of it
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_CLAIM_MARKS:
        _refuse("too_long", f"holds more than {MAX_CLAIM_MARKS:,} commas and brackets; at most as many are read")
    try:
        text = raw.decode()
        _check_depth(raw)
        value = json.loads(text, parse_constant=_not_finite, parse_float=_float, parse_int=_int)
    except ValueError as error:
        _refuse("json_invalid", "is not JSON in UTF-8", cause=error)
    if not isinstance(value, dict):
        _refuse("dict_type", "must be an object")
    if found := tuple(itertools.islice(_walk(value), _MAX_REPORTED)):
        raise DocumentRefused(found)
    return value


def _parsed(raw: bytes, adapter: TypeAdapter[T], shape: type) -> T:
    guard_body(raw)
    try:
        return adapter.validate_json(raw, strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise DocumentRefused(complaints(map(dict, details), shape)) from None


def document_json(document: JobDocument) -> dict[str, Any]:
    """Return the document's fields as JSON stores them, with every default written out.

    Name and schedule are left out: a job's digest identifies what is computed, not when, and not what it is called.
    """
    return {name: value for name, value in plain(document).items() if name not in ("name", "schedule")}


def sha256_of(value: Any) -> str:  # noqa: ANN401 - any record or JSON value
    """Return the SHA-256, in hexadecimal, of the canonical JSON of a value; the order of its keys does not count.

    ``ValueError`` if a number is NaN or infinite.
    """
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def guard_body(raw: bytes, content_type: str | None = "application/json", content_encoding: str | None = None) -> None:
    """Refuse a body that cannot be a job document, in time linear in its size.

    ``DocumentRefused`` names the place and the remedy; the body is never echoed. Codes `unsupported_media_type`,
    `unsupported_encoding` and `body_too_large` have status codes of their own over HTTP (415, 415, 413).
    """
    _check_declared(content_type, content_encoding)
    if len(raw) > MAX_BODY_BYTES:
        _refuse("body_too_large", f"has {len(raw):,} bytes; at most {MAX_BODY_BYTES:,} are read")
    if not raw.strip():
        _refuse("json_invalid", "is empty; send a job document as a JSON object")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse("json_invalid", f"is not UTF-8 (byte {error.start}); encode it as UTF-8", cause=error)
    if text.startswith("\ufeff"):
        _refuse("json_invalid", "starts with a byte order mark; leave it out")
    _check_depth(raw)
    value = _load(text)
    if not isinstance(value, dict):
        _refuse("dict_type", "must be an object: a job document between { and }")
    found = tuple(itertools.islice(_walk(value), _MAX_REPORTED))
    if found:
        raise DocumentRefused(found)


def _check_declared(content_type: str | None, content_encoding: str | None) -> None:
    if (content_encoding or "identity").strip().lower() not in ("", "identity"):
        _refuse("unsupported_encoding", "is compressed; send it as it is, without Content-Encoding")
    if not _is_json(content_type or ""):
        _refuse("unsupported_media_type", "is not declared as JSON; send Content-Type: application/json")


def _is_json(content_type: str) -> bool:
    media_type, _, parameters = content_type.partition(";")
    charset = parameters.replace(" ", "").replace('"', "").lower()
    return media_type.strip().lower() == "application/json" and charset in ("", "charset=utf-8", "charset=utf8")


def _check_depth(raw: bytes) -> None:
    depth = 0
    for match in _BRACKETS.finditer(raw):
        token = match[0]
        if token in (b"{", b"["):
            depth += 1
            if depth > MAX_DEPTH:
                _refuse("too_deep", f"is nested deeper than {MAX_DEPTH} levels; flatten it")
        elif token in (b"}", b"]"):
            depth -= 1


def _load(text: str) -> Any:  # noqa: ANN401 - what JSON holds
    keys = values = 0

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal keys, values
        keys += len(pairs)
        if keys > MAX_KEYS:
            _refuse("too_many_keys", f"has more than {MAX_KEYS:,} keys; a job document has a few dozen")
        built = dict(pairs)
        return built if len(built) == len(pairs) else _Repeated(built)

    try:
        value = json.loads(
            text, object_pairs_hook=build, parse_constant=_not_finite, parse_float=_float, parse_int=_int
        )
    except json.JSONDecodeError as error:
        _refuse(
            "json_invalid", f"is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg})", cause=error
        )
    return value


def _not_finite(_text: str) -> _Number:
    return _Number("is not a finite number; JSON has no NaN and no Infinity")


def _float(text: str) -> float | _Number:
    number = float(text)
    return number if math.isfinite(number) else _Number("is beyond the largest number of 64 bits, about 1.8e308")


def _int(text: str) -> int | _Number:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
        return _Number("is beyond the integers of 64 bits; take one below 2^63")
    return int(text)


def _walk(value: Any, pointer: str = "") -> Iterator[Complaint]:  # noqa: ANN401 - what JSON holds
    """Everything in the parsed body that no field can take; the depth is bounded already."""
    if isinstance(value, _Number):
        yield Complaint(pointer=pointer, code="finite_number", message=value.complaint)
    elif isinstance(value, str):
        yield from _check_text(value, pointer, "holds")
    elif isinstance(value, list):
        if len(value) > MAX_VALUES:
            yield Complaint(
                pointer=pointer,
                code="too_long",
                message=f"lists {len(value):,} values; at most {MAX_VALUES:,} are read",
            )
            return
        for position, item in enumerate(value):
            yield from _walk(item, f"{pointer}/{position}")
    elif isinstance(value, dict):
        if isinstance(value, _Repeated):
            yield Complaint(pointer=pointer, code="repeated_key", message="names a key twice; keep one of them")
        for name, item in value.items():
            faults = tuple(_check_text(name, pointer, "has a key with"))
            yield from faults
            if not faults:
                yield from _walk(item, f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}")


def _check_text(text: str, pointer: str, where: str) -> Iterator[Complaint]:
    if "\0" in text:
        yield Complaint(pointer=pointer, code="nul_character", message=f"{where} a NUL character; leave it out")
    if _SURROGATE.search(text):
        yield Complaint(
            pointer=pointer, code="lone_surrogate", message=f"{where} half of a surrogate pair; write whole characters"
        )


def _refuse(code: str, message: str, cause: Exception | None = None) -> NoReturn:
    raise DocumentRefused((Complaint(pointer="", code=code, message=message),)) from cause
