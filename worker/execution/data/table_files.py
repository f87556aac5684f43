"""Table files: columns of parquet, CSV and JSON, read row by row from open files; nothing is unpacked to the disk.

Of a small file a reader can make any number of bytes: a column of one repeated text, or a compressed page. So parquet
and CSV are read apart, JSON a row at a time, and values are counted as they come: what would not fit, or is more than
a file of its size should hold, is refused before it is all there. The kernel holds the process apart to what an honest
file of that size needs::

    memory       128 MiB beyond the library's own, twice the file where that is more
    processor    8 s, and as many again for every 64 MiB of the file
"""

import codecs
import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from engine.memory.plan import readable_bytes
from worker.execution.data.apart.apart_process import ApartFault, ApartProcess, Limits
from worker.execution.data.byte_count import ByteCount
from worker.execution.data.labels import Labels
from worker.execution.data.texts.text_rows import LABELLED
from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal, names, storable_text, unique_keys

_PROGRAM = "worker.execution.data.apart.table_program"
# the allocators of the library's own keep what was freed
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
_LEAST_BYTES = 128 * 2**20
_BYTES_PER_FILE_BYTE = 2
_PROCESSOR_SECONDS = 8
_FILE_BYTES = 64 * 2**20
_REPLY_SECONDS = 120.0
_MOST_REPLY_BYTES = 64 * 2**20
LABEL_FIELDS = ("target_column", "label_key")
"""Fields of the document that name a column of labels."""
SUFFIXES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
_HIDDEN = re.compile(r"(^|/)(\.|__)")
"""Such as copies in .ipynb_checkpoints, and what macOS writes beside files."""
_SPLIT_WORDS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")
"""Words of the ``datasets`` library: a split's name stands for the longer ones that begin with it."""
_MOST_LINE_BYTES = 16 * 2**20
_LIST_CHARACTERS = 2**18
_ENTRY_BYTES = 64
_BLANK = " \t\r\n"
_BLANKS = re.compile(f"[{_BLANK}]*")
_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
_MOST_COLUMNS = 1_000
"""Most columns that are listed by name."""


class TableProcess:
    """A file that is open apart; ``open_table`` makes one."""

    def __init__(self, process: ApartProcess, file: OpenFile, kind: str, pointer: str) -> None:
        self._process = process
        self._file = file
        self._pointer = pointer
        self._kind = kind
        opened = self._asked({"kind": kind})
        self.names: list[str] = opened["names"]
        """Names of all columns."""
        self.classes: dict[str, list[str]] = opened["classes"]
        """Names of the classes by their numbers, of each column for which the schema has them."""

    def rows(self, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        """Return the values of columns, row by row; all values of CSV are texts."""
        message: dict[str, Any] = {"columns": list(columns)}
        while rows := self._asked(message):
            yield from rows
            message = {}

    def _asked(self, message: object) -> Any:  # noqa: ANN401 - each message has its own reply
        try:
            return self._process.ask(message)
        except ApartFault as fault:
            size = readable_bytes(self._file.stat().st_size)
            raise Refusal(
                f"{self._file.name}, of {size}, cannot be read as {self._kind}: {storable_text(str(fault))}"
                + ("; write it with pages, rows and dictionaries of a few MiB" if fault.exhausted else ""),
                pointer=self._pointer,
                code="budget_exceeded" if fault.exhausted else "wrong_format",
            ) from fault


@contextlib.contextmanager
def open_table(file: OpenFile, kind: str, count: ByteCount) -> Iterator[TableProcess]:
    """Open a parquet or CSV file in a process of its own, within the limits above, and end that at last.

    The checkpoint of the count is called while the process is waited for.
    """
    size = file.stat().st_size
    limits = Limits(
        memory_bytes=max(_LEAST_BYTES, _BYTES_PER_FILE_BYTE * size),
        processor_seconds=_PROCESSOR_SECONDS * max(1, -(-size // _FILE_BYTES)),
        reply_seconds=_REPLY_SECONDS,
        reply_bytes=_MOST_REPLY_BYTES,
    )
    with ApartProcess.start(_PROGRAM, file, limits, count.checkpoint, _ENVIRONMENT) as process:
        yield TableProcess(process, file, kind, count.pointer)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns of a data set."""

    columns: list[list[Any]]
    """The values of each column that is read."""
    there: tuple[str, ...]
    """Names of all columns."""


def read_columns(
    place: OpenFile | OpenFolder,
    split: str,
    columns: Mapping[str, str],
    limit: int | None,
    labels: Labels,
    pointer: str,
) -> Table:
    """Read columns of a file, or of all files of a folder whose names hold the split as a word, else of all."""
    context = labels.request.context
    there: dict[str, None] = {}
    count = context.byte_count(pointer)
    rows = itertools.islice(_rows(_files(place, split, context, pointer), columns, count, there, labels), limit)
    return Table(columns=take_rows(rows, columns, labels, count), there=tuple(there))


def take_rows(
    rows: Iterable[Sequence[Any]], columns: Mapping[str, str], labels: Labels, count: ByteCount
) -> list[list[Any]]:
    """Return the values of each column; labels of a text go to ``labels`` as they come, and their column is empty."""
    found: list[list[Any]] = [[] for _ in columns]
    labelled = labels.request.task.type in LABELLED
    for number, row in enumerate(rows):
        for field, column, value in zip(columns, found, row, strict=True):
            count.add_value(value)
            if labelled and field in LABEL_FIELDS:
                labels.add(value, f"row {number}")
            else:
                column.append(value)
    return found


def column_names(file: OpenFile, count: ByteCount) -> list[str]:
    """Return the names of all columns of a CSV or parquet file."""
    with _reading(file, count.pointer), open_table(file, SUFFIXES[file.suffix], count) as table:
        return list(table.names)


def is_untyped(place: OpenFile | OpenFolder, split: str) -> bool:
    """Return whether what is read is CSV, which does not tell the number 1 from the text "1"."""
    listed = [place.name] if isinstance(place, OpenFile) else _chosen(_data_files(place), split)[0]
    return any(_suffix(name) == ".csv" for name in listed)


def _rows(
    files: Iterable[OpenFile], columns: Mapping[str, str], count: ByteCount, there: dict[str, None], labels: Labels
) -> Iterator[Sequence[Any]]:
    """Rows of all files; ``there`` takes the names of their columns, and ``labels`` those of their classes."""
    for file in files:
        count.allow_file(file)
        with _reading(file, count.pointer):
            if SUFFIXES[file.suffix] == "json":
                yield from _json(file, columns, count, there)
            else:
                yield from _apart(file, columns, count, there, labels)


@contextlib.contextmanager
def _reading(file: OpenFile, pointer: str) -> Iterator[None]:
    """Refuse a file that raises within."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(
            f"{file.name} cannot be read as {SUFFIXES[file.suffix]}: {storable_text(str(error))[:300]}",
            pointer=pointer,
            code="wrong_format",
        ) from error


def _files(place: OpenFile | OpenFolder, split: str, context: LoaderContext, pointer: str) -> Iterator[OpenFile]:
    if isinstance(place, OpenFile):
        listed = [place.name]
    else:
        every = _data_files(place)
        listed, named = _chosen(every, split)
    if not listed or len({SUFFIXES.get(_suffix(name)) for name in listed} | {None}) != 2:
        raise Refusal(
            f"{place.name} must hold data files of one kind: {', '.join(SUFFIXES)}",
            pointer=pointer,
            code="wrong_format",
        )
    if isinstance(place, OpenFile):
        yield place
        return
    if len(listed) > 1:
        if named:
            context.log("info", f"{len(listed)} files of {place.name} are read: {names(listed)}")
        else:
            context.notice(
                f"no file of {place.name} has the word `{split}` in its name, so all {len(listed)} are read: "
                f"{names(listed)}"
            )
    for name in sorted(set(every) - set(listed)):
        context.unused(f"file {names([name])} of {place.name}")
    for name in listed:
        file = place.file(name)
        if file is not None:
            yield file


def _data_files(folder: OpenFolder) -> list[str]:
    return [name for name in folder.walk() if _suffix(name) in SUFFIXES]


def _chosen(every: Iterable[str], split: str) -> tuple[list[str], bool]:
    """Choose the data files of a folder that are read, and say whether their names hold the split.

    A file's own name comes before those of its folders, as for the ``datasets`` library: ``train-test/test.csv`` is of
    one split.
    """
    visible = [name for name in every if not _HIDDEN.search(name)]
    words = [word for word in _SPLIT_WORDS if split in _SPLIT_WORDS and word.startswith(split)] or [split]
    pattern = re.compile("|".join(map(_as_word, words)))
    for part in (2, 0):
        found = [name for name in visible if pattern.search(name.rpartition(".")[0].rpartition("/")[part])]
        if found:
            return found, True
    return visible, False


def _as_word(text: str) -> str:
    """Return a pattern of a text between other characters than its own: train1 is of train, and fold10 not of fold1."""
    before, after = (r"[^\W_]" if edge.isdigit() else r"[^\W\d_]" for edge in (text[:1], text[-1:]))
    return f"(?<!{before}){re.escape(text)}(?!{after})"


def _suffix(name: str) -> str:
    return "." + name.rpartition(".")[2].lower()


def _apart(
    file: OpenFile, columns: Mapping[str, str], count: ByteCount, there: dict[str, None], labels: Labels
) -> Iterator[Sequence[Any]]:
    with open_table(file, SUFFIXES[file.suffix], count) as table:
        _require_columns(table.names, columns, there)
        label = next((columns[field] for field in LABEL_FIELDS if field in columns), None)
        labels.name_classes(table.classes.get(label, ()) if label is not None else ())
        yield from table.rows(tuple(columns.values()))


def _json(
    file: OpenFile, columns: Mapping[str, str], count: ByteCount, there: dict[str, None]
) -> Iterator[Sequence[Any]]:
    for number, row in enumerate(_json_rows(file, count)):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is not an object")  # noqa: TRY004 - a fault of the file
        if number == 0:
            _require_columns(list(row), columns, there)
        if len(there) < _MOST_COLUMNS:
            there.update(dict.fromkeys(row))
        yield [row.get(name) for name in columns.values()]


def _json_rows(file: OpenFile, count: ByteCount) -> Iterator[Any]:
    """Rows of a file that is one list, or has one object in a line."""
    with file.open() as stream:
        if stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            stream.seek(0)
            yield from _listed(stream, count)
            return
        stream.seek(0)
        for number in itertools.count(1):
            line = stream.readline(_MOST_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > _MOST_LINE_BYTES:
                raise ValueError(f"line {number} is longer than {_MOST_LINE_BYTES:,} bytes")
            if line.strip():
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                count.require(decoded_bytes(text))
                yield json.loads(text, object_pairs_hook=unique_keys)


def _listed(stream: BinaryIO, count: ByteCount) -> Iterator[Any]:
    """Rows of one list, of which a part is decoded at a time."""
    texts = codecs.getreader("utf-8-sig")(stream)
    text, place, before, wanted = texts.read(_LIST_CHARACTERS).lstrip(_BLANK)[1:], 0, "", _LIST_CHARACTERS
    while True:
        try:
            found = _next_row(text, place, before)
        except ValueError:
            more = texts.read(wanted)
            if not more or len(text) - place > _MOST_LINE_BYTES:
                raise
            text, place, wanted = text[place:] + more, 0, 2 * wanted
            count.require(decoded_bytes(text))
            continue
        if found is None:
            break
        yield found[0]
        place, before, wanted = found[1], ",", _LIST_CHARACTERS
    if (text[place:].strip(_BLANK) + texts.read(_LIST_CHARACTERS)).strip(_BLANK) != "]":
        raise ValueError("something follows the list")


def _next_row(text: str, place: int, before: str) -> tuple[Any, int] | None:
    """Return the row of a list that begins at a place, and the place of its end; None at the end of the list."""
    start = _BLANKS.match(text, place).end()  # type: ignore[union-attr]  # it matches everywhere
    if text.startswith("]", start):
        return None
    if not text.startswith(before, start):
        raise ValueError("the rows of a list stand between commas")
    row = _BLANKS.match(text, start + len(before))
    return _DECODER.raw_decode(text, row.end())  # type: ignore[union-attr]  # it matches everywhere


def decoded_bytes(text: str) -> int:
    """Return the most bytes that JSON takes once it is decoded: `[],` has three, and takes 64 in a list of lists."""
    return len(text) * (1 if text.isascii() else 4) + _ENTRY_BYTES * sum(map(text.count, ",[{"))


def _require_columns(there: Sequence[str], columns: Mapping[str, str], known: dict[str, None]) -> None:
    known.update(dict.fromkeys(list(there)[:_MOST_COLUMNS]))
    for field, name in columns.items():
        if name not in there:
            raise Refusal(f"`{name}` is not a column; there are {names(list(there), 20)}", pointer=f"/data/{field}")
    twice = next((name for name in columns.values() if list(there).count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two columns are called `{twice}`")
