"""Table files: columns of parquet, CSV and JSON, read row by row from open files; nothing is unpacked to the disk.

Of a small file a reader can make any number of bytes: a column of one repeated text, or a compressed page. So rows are
read in small batches, and counted as they come; what would not fit is refused before it is all there.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from worker.execution.data.byte_count import ByteCount
from worker.execution.data.request import DataRequest
from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal, names, storable_text, unique_keys

SUFFIXES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
_ROWS_AT_ONCE = 16
_CSV_BLOCK_BYTES = 4 * 2**20
_MOST_LINE_BYTES = 16 * 2**20
_MOST_DOCUMENT_BYTES = 256 * 2**20
"""Most bytes of a JSON file that is one list, which is read at once."""
_DECODED_PER_BYTE = 24
"""`[],` has three bytes, and takes 64 once it is a list in a list."""
_POINTER = "/data/id"
_MOST_COLUMNS = 1_000
"""Most columns that are listed by name."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns of a data set."""

    columns: list[list[Any]]
    """The values of each column that is read."""
    there: tuple[str, ...]
    """Names of all columns."""


def read_columns(
    place: OpenFile | OpenFolder, split: str, columns: Mapping[str, str], limit: int | None, request: DataRequest
) -> Table:
    """Read columns of a file, or of all files of a folder whose names hold the split's, else of all."""
    found: list[list[Any]] = [[] for _ in columns]
    there: dict[str, None] = {}
    count = request.context.byte_count(_POINTER)
    for row in itertools.islice(_rows(_files(place, split, request.context), columns, count, there), limit):
        for column, value in zip(found, row, strict=True):
            count.add_value(value)
            column.append(value)
    return Table(columns=found, there=tuple(there))


def _rows(
    files: Iterable[OpenFile], columns: Mapping[str, str], count: ByteCount, there: dict[str, None]
) -> Iterator[Sequence[Any]]:
    """Rows of all files; ``there`` takes the names of their columns."""
    for file in files:
        try:
            yield from _READERS[SUFFIXES[file.suffix]](file, columns, count, there)
        except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
            raise Refusal(
                f"{file.name} cannot be read as {SUFFIXES[file.suffix]}: {storable_text(str(error))[:300]}",
                pointer=_POINTER,
                code="wrong_format",
            ) from error


def _files(place: OpenFile | OpenFolder, split: str, context: LoaderContext) -> Iterator[OpenFile]:
    if isinstance(place, OpenFile):
        listed = [place.name]
    else:
        every = [name for name in place.walk() if _suffix(name) in SUFFIXES]
        listed = [name for name in every if split in name.rpartition("/")[2].rpartition(".")[0]] or every
    if not listed or len({SUFFIXES.get(_suffix(name)) for name in listed} | {None}) != 2:
        raise Refusal(
            f"{place.name} must hold data files of one kind: {', '.join(SUFFIXES)}",
            pointer=_POINTER,
            code="wrong_format",
        )
    if isinstance(place, OpenFile):
        yield place
        return
    if listed == every and len(every) > 1 and not all(split in name for name in every):
        context.notice(
            f"no file of {place.name} has `{split}` in its name, so all {len(every)} are read: {names(every)}"
        )
    for name in sorted(set(every) - set(listed)):
        context.unused(f"file {names([name])} of {place.name}")
    for name in listed:
        file = place.file(name)
        if file is not None:
            yield file


def _suffix(name: str) -> str:
    return "." + name.rpartition(".")[2]


def _parquet(
    file: OpenFile,
    columns: Mapping[str, str],
    count: ByteCount,  # noqa: ARG001 - as every reader
    there: dict[str, None],
) -> Iterator[Sequence[Any]]:
    with file.open() as stream, pyarrow.parquet.ParquetFile(stream, pre_buffer=False) as table:
        _require_columns(table.schema_arrow.names, columns, there)
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=list(columns.values()), use_threads=False):
            yield from zip(*(batch.column(name).to_pylist() for name in columns.values()), strict=True)


def _csv(
    file: OpenFile,
    columns: Mapping[str, str],
    count: ByteCount,  # noqa: ARG001 - as every reader
    there: dict[str, None],
) -> Iterator[Sequence[Any]]:
    with file.open() as stream:
        _require_columns(_header(stream), columns, there)
        stream.seek(0)
        with pyarrow.csv.open_csv(
            stream,
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK_BYTES),
            parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=list(columns.values()),
                # texts, also where they look like numbers
                column_types={name: pa.string() for field, name in columns.items() if field != "target_column"},
            ),
        ) as reader:
            for batch in reader:
                yield from zip(*(batch.column(name).to_pylist() for name in columns.values()), strict=True)


def _header(stream: BinaryIO) -> list[str]:
    first = pa.py_buffer(stream.readline(_CSV_BLOCK_BYTES))
    options = pyarrow.csv.ReadOptions(use_threads=False)
    found: list[str] = pyarrow.csv.read_csv(pa.BufferReader(first), read_options=options).column_names
    return found


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
            if file.stat().st_size > _MOST_DOCUMENT_BYTES:
                raise ValueError(f"a list of more than {_MOST_DOCUMENT_BYTES:,} bytes; write one object in a line")
            count.require(_DECODED_PER_BYTE * file.stat().st_size)
            stream.seek(0)
            yield from json.loads(stream.read().decode("utf-8-sig"), object_pairs_hook=unique_keys)
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
                yield json.loads(text, object_pairs_hook=unique_keys)


def _require_columns(there: Sequence[str], columns: Mapping[str, str], known: dict[str, None]) -> None:
    known.update(dict.fromkeys(list(there)[:_MOST_COLUMNS]))
    for field, name in columns.items():
        if name not in there:
            raise Refusal(f"`{name}` is not a column; there are {names(list(there), 20)}", pointer=f"/data/{field}")
    twice = next((name for name in columns.values() if list(there).count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two columns are called `{twice}`")


_READERS = {"parquet": _parquet, "csv": _csv, "json": _json}
