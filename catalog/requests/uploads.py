"""Uploads: the files of a model, or a file of data, as they are declared and as far as they have come."""

import re
from collections.abc import Mapping
from typing import Literal

from catalog.record import FieldError, record

_MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                "added_tokens.json", "model.safetensors.index.json", "preprocessor_config.json", "modules.json",
                "1_Pooling/config.json")  # fmt: skip
_DATA_SUFFIXES = (".safetensors", ".jsonl", ".csv", ".parquet", ".txt")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_FILES = 500
_MOST_DEEP = 5
_MOST_NAME = 128
_MOST_BYTES = 2**44
RUN_ARTIFACTS = "artifacts/"
RUN_TYPES = {".json": "application/json", ".jsonl": "application/jsonl", ".csv": "text/csv", ".svg": "image/svg+xml",
             ".png": "image/png", ".safetensors": "application/vnd.safetensors"}  # fmt: skip
"""Media types of the artifacts of a run that may be imported."""
_RUN_FILES = ("job.json", "results.json")
UploadKind = Literal["model", "data", "run"]
_TAKEN: Mapping[UploadKind, tuple[str, ...]] = {
    "model": (*_MODEL_FILES, "*.safetensors"), "data": _DATA_SUFFIXES, "run": (*_RUN_FILES, *RUN_TYPES),
}  # fmt: skip
_SUFFIXES: Mapping[UploadKind, tuple[str, ...]] = {"model": (".safetensors",), "data": _DATA_SUFFIXES, "run": ()}


@record
class DeclaredFile:
    """A file that is to be sent."""

    name: str
    """The file's name: `config.json`, `*.safetensors` and the like, or for data any with a suffix that is read."""
    size_bytes: int
    """Its length."""
    sha256: str
    """Its SHA-256, in 64 hexadecimal digits."""

    def __post_init__(self) -> None:
        """Refuse sizes and digests that cannot be."""
        if not 1 <= self.size_bytes <= _MOST_BYTES:
            raise FieldError("size_bytes", f"is {self.size_bytes:,}; send files of 1 to {_MOST_BYTES:,} bytes")
        if not _SHA256.fullmatch(self.sha256):
            raise FieldError("sha256", "must be 64 hexadecimal digits in lower case, as `sha256sum` prints them")


@record
class UploadDocument:
    """The declaration of an upload; the same one again finds the upload that it made."""

    kind: UploadKind
    """The block of a job document that will name it; `run` for the folder of a foreground run, to be imported."""
    files: tuple[DeclaredFile, ...]
    """All files, each by a name of its own; data are one file."""

    def __post_init__(self) -> None:
        """Refuse names that no loader reads, or that stand twice."""
        most = 1 if self.kind == "data" else _MOST_FILES
        if not 1 <= len(self.files) <= most:
            raise FieldError("files", f"lists {len(self.files):,} files; an upload of {self.kind} has 1 to {most}")
        names = [file.name for file in self.files]
        for name in names:
            if not is_read(self.kind, name):
                raise FieldError("files", f"lists {name[:80]!r}, {_why_not_read(self.kind, name)}")
            if names.count(name) > 1:
                raise FieldError("files", f"lists {name!r} twice; list each file once")


@record
class UploadedFile(DeclaredFile):
    """A file that is being sent."""

    received_bytes: int
    """Bytes that have come, from which to go on."""


@record
class UploadView:
    """An upload as far as it has come."""

    id: str
    """The id by which a job document names it."""
    kind: UploadKind
    """The block of the document that may."""
    complete: bool
    """Whether jobs may name it."""
    files: tuple[UploadedFile, ...]
    """Its files, by name."""


def is_read(kind: UploadKind, name: str) -> bool:
    """Return whether the loaders read a file of this name, or an import takes it."""
    if kind == "run":
        parts = name.removeprefix(RUN_ARTIFACTS).split("/")
        is_artifact = name.startswith(RUN_ARTIFACTS) and len(parts) <= _MOST_DEEP and all(map(_NAME.fullmatch, parts))
        return name in _RUN_FILES or (is_artifact and len(name) <= _MOST_NAME and name.endswith((*RUN_TYPES,)))
    is_plain = bool(_NAME.fullmatch(name)) and name.endswith(_SUFFIXES[kind])
    return is_plain or (kind == "model" and name in _MODEL_FILES)


def _why_not_read(kind: UploadKind, name: str) -> str:
    if name.lower().endswith(_SUFFIXES[kind]):
        taken = f"1 to {_MOST_NAME} of A-Z, a-z, 0-9, `_`, `.` and `-`, neither of the last two first"
        return f"a name that is not taken; call it by {taken}, with the suffix in lower case"
    remedy = "unpack archives, convert pickles to safetensors, leave other files out"
    return f"which is not read: it takes {', '.join(_TAKEN[kind])}; {remedy}"


def plain_name(name: str) -> str | None:
    """Return the name under which a file of data is declared: its own, or one with its suffix; None if it is not read.

    A service takes few characters in a name, and no loader needs more than the suffix.
    """
    suffix = next((each for each in _DATA_SUFFIXES if name.lower().endswith(each)), None)
    if suffix is None or is_read("data", name):
        return name if suffix else None
    return f"data{suffix}"
