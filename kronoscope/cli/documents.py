"""Read a job document from a YAML 1.2 or JSON file, with single values set on the command line.

Only plain values are passed on (what JSON can say), and whether they mean anything is for the
service, or the worker, to judge: there is one validator.
"""

import contextlib
import json
import math
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ruamel.yaml
from ruamel.yaml.error import YAMLError

from catalog import DOCUMENT
from catalog.record import FieldError, plain
from catalog.record_reader import read
from catalog.requests.uploads import UploadKind
from kronoscope.client.client import Client, ClientError
from kronoscope.client.document_fields import set_field
from kronoscope.client.uploads import NOTHING_READ, files_of
from kronoscope.display.progress import Display

MAX_DOCUMENT_BYTES = 256 * 1024
_MAX_VALUES = 20_000
_MAX_DEPTH = 16
_MAX_INTEGER_BITS = 1024


class DocumentUnreadable(ValueError):
    """A file, or a `--set`, that is not a job document; each fault is a sentence."""


def read_document(path: Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Read a job document."""
    return change_document(_parse(path), settings, path.name)


def change_document(document: dict[str, Any], settings: Sequence[str], name: str) -> dict[str, Any]:
    """Set single fields of a job document in place, each as it stands after `--set`, and return it.

    ``DocumentUnreadable`` if a setting cannot be read, or the document holds what JSON cannot write.
    """
    for setting in settings:
        _put(document, setting)
    _require_plain(document, name)
    return document


def edit_document(document: dict[str, Any]) -> dict[str, Any]:
    """Let the user edit a document as YAML, in the editor of $VISUAL or $EDITOR, and return what was saved.

    ``DocumentUnreadable`` if the editor fails; or what it saved is not a document, whose file the message names.
    """
    writer = ruamel.yaml.YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # typed by its default
    descriptor, name = tempfile.mkstemp(prefix="kronoscope-job-", suffix=".yaml")
    path = Path(name)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        writer.dump(document, file)
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        subprocess.run([*shlex.split(editor), name], check=True)  # noqa: S603 - the user names the editor
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        path.unlink()
        raise DocumentUnreadable(f"the editor {editor!r} failed ({error}); name another in $VISUAL") from error
    # a text that cannot be read stays in its file, so that nothing typed is lost
    saved = read_document(path)
    path.unlink()
    return saved


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise DocumentUnreadable(f"{path}: cannot be read ({error.strerror}); give a YAML or JSON file") from error
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise DocumentUnreadable(f"{path}: has more than {MAX_DOCUMENT_BYTES:,} bytes; a job document is short")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentUnreadable(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    value = _json(text, path) if path.suffix.lower() == ".json" else _yaml(text, path)
    if not isinstance(value, dict):
        raise DocumentUnreadable(f"{path}: is not a mapping; a job document begins with `kind: …`")
    return value


def _json(text: str, path: Path) -> Any:  # noqa: ANN401 - whatever the file says
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise DocumentUnreadable(
            f"{path}: is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DocumentUnreadable(f"{path}: is not valid JSON: {error}") from error


def _yaml(text: str, path: Path) -> Any:  # noqa: ANN401 - whatever the file says
    # PyYAML reads YAML 1.1, where 1e-4 is a string and `no` is false
    reader = ruamel.yaml.YAML(typ="safe", pure=True)
    try:
        return reader.load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = " ".join(str(getattr(error, "problem", None) or "it cannot be parsed").split())
        raise DocumentUnreadable(f"{path}: is not valid YAML{where}: {problem[:200]}") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise DocumentUnreadable(f"{path}: is not valid YAML: {str(error)[:200]}") from error


def _put(document: dict[str, Any], setting: str) -> None:
    """Set one value, and make the blocks that lead to it."""
    path, separator, text = setting.partition("=")
    if not separator or not all(path.strip().split(".")):
        raise DocumentUnreadable(f"--set {setting}: write it as `collection.batch_size=32`")
    value = _yaml(text, Path(f"--set {path}"))
    try:
        set_field(document, path, value)
    except ValueError as error:
        raise DocumentUnreadable(f"--set {setting}: {error}") from error


def _require_plain(value: Any, name: str) -> None:  # noqa: ANN401 - whatever the file says
    """Refuse values that JSON cannot write, and too many of them: references can make 1 kB of YAML endless."""
    count = 0
    pending: list[tuple[str, Any, int]] = [("", value, 0)]
    while pending:
        path, item, depth = pending.pop()
        count += 1
        if count > _MAX_VALUES or depth > _MAX_DEPTH:
            raise DocumentUnreadable(f"{name}: holds more than {_MAX_VALUES:,} values or {_MAX_DEPTH} levels")
        if isinstance(item, dict):
            for key, below in item.items():
                if not isinstance(key, str):
                    raise DocumentUnreadable(f"{name}: {path or '/'} has a key that is not a string; put it in quotes")
                _require_text(key, name, path or "/")
                pending.append((f"{path}/{key}", below, depth + 1))
        elif isinstance(item, list):
            pending.extend((f"{path}/{place}", below, depth + 1) for place, below in enumerate(item))
        else:
            _require_scalar(item, name, path)


def _require_scalar(item: Any, name: str, path: str) -> None:  # noqa: ANN401 - whatever the file says
    if isinstance(item, str):
        _require_text(item, name, path)
    elif isinstance(item, int) and item.bit_length() > _MAX_INTEGER_BITS:
        raise DocumentUnreadable(f"{name}: {path} is an integer of {item.bit_length():,} bits; take a smaller one")
    elif isinstance(item, float) and not math.isfinite(item):
        raise DocumentUnreadable(f"{name}: {path} is not a finite number; take one")
    elif item is not None and not isinstance(item, (int, float)):
        raise DocumentUnreadable(f"{name}: {path} is a {type(item).__name__}; put it in quotes")


def _require_text(text: str, name: str, path: str) -> None:
    """Refuse half of a surrogate pair, which an escape can name and UTF-8 cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = path.encode("ascii", "backslashreplace").decode()
        raise DocumentUnreadable(
            f"{name}: {shown} has half of a character (a lone surrogate) at position {error.start}; write it whole"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`{twice[:60]}` stands twice in one object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number; take a finite number")


def require_uploads(document: dict[str, Any], paths: Sequence[Path]) -> dict[str, Any]:
    """Judge a document and what is to be sent for it, before anything is sent.

    Args:
        paths: Model's folders and files of data.

    Returns:
        The document as it will be, with an id of zeros for each upload.

    Raises:
        DocumentUnreadable: If nothing of a path is read, two are of one block, or the block is not a mapping.
    """
    first: dict[str, Path] = {}
    for path in paths:
        kind = _kind(path)
        if not files_of(path, kind):
            raise DocumentUnreadable(f"--upload {path} {NOTHING_READ}")
        if kind in first:
            raise DocumentUnreadable(
                f"--upload {path} is `{kind}` of the document, as --upload {first[kind]} is; leave one of them out"
            )
        if not isinstance(document.get(kind) or {}, dict):
            raise DocumentUnreadable(
                f"`{kind}` must be a block beside --upload {path} (got {document[kind]!r:.60}); "
                f"leave it out, or write its options as `{kind}: {{…}}`"
            )
        first[kind] = path
        document = _name_upload(document, kind, "0" * 32)
    return document


def validate_uploads(client: Client, document: dict[str, Any], paths: Sequence[Path]) -> Mapping[str, Any]:
    """Let the service check a document before its uploads are sent, and return it with an id of zeros for each.

    ``DocumentUnreadable`` or ``ClientError`` if it would be refused for anything but that they are not there yet.
    """
    named = require_uploads(document, paths)
    missing = {f"/{_kind(path)}/id" for path in paths}
    try:
        return client.validate(named)
    except ClientError as error:
        others = tuple(each for each in error.complaints if each.pointer not in missing or each.code != "not_found")
        if not error.complaints:
            raise
        if others:
            raise ClientError(error.status, error.title, error.detail, others) from error
    with contextlib.suppress(FieldError):  # of a service of another version
        return dict(plain(read(DOCUMENT, named, "document")))
    return named


def with_upload(client: Client, document: dict[str, Any], path: Path, display: Display) -> dict[str, Any]:
    """Send a folder or file, and return the document with it as model or data; other options of the block stay."""
    sent = client.upload(path, lambda done, total: display.update(f"upload {path.name}", done, total, "bytes"))
    return _name_upload(document, sent.kind, sent.id)


def unsent_files(path: Path) -> list[str]:
    """Return the names of the files of a folder that an upload leaves out."""
    sent = files_of(path, _kind(path))
    return sorted({each.name for each in path.glob("*") if each.is_file()} - set(sent))


def _kind(path: Path) -> UploadKind:
    return "model" if path.is_dir() else "data"


def _name_upload(document: dict[str, Any], kind: str, upload_id: str) -> dict[str, Any]:
    sources = ("source", "path", "id", "name", "revision", "factory", "kwargs", "split")
    block = {name: value for name, value in (document.get(kind) or {}).items() if name not in sources}
    return {**document, kind: {**block, "source": "upload", "id": upload_id}}
