"""The table process: reads columns of a parquet or CSV file within limits of the kernel, some rows at a time.

python -P -m worker.execution.data.apart.table_program --file FD …
"""

import contextlib
import json
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from worker.execution.data.apart.program import end, enter_limits, serve

_MOST_COLUMNS = 20_000
_ROW_BYTES_AT_ONCE = 2**20
_FEWEST_ROWS, _MOST_ROWS = 16, 256
_PIECE_BYTES = 4 * 2**20
"""Rows of a reply, which are more only where one row is."""
_SHORT_BYTES, _SHORT_ROWS = 2**14, 2**12
"""Rows that wait for those of the next batch: a reply costs as much as hundreds of short ones."""
_CSV_BLOCK_BYTES = 4 * 2**20
_MOST_THRIFT_BYTES = 16 * 2**20
_MOST_THRIFT_ENTRIES = 1_000_000
_MOST_CHARACTERS = 200
"""Characters of a message of the library, which may hold a whole row of the file."""
_REMEDIES = {
    "csv": "give a header and as many fields in every row, and quote texts that hold commas or line breaks",
    "parquet": "give an intact parquet file, or name a file of another kind by its own suffix (.csv, .jsonl)",
}
_READABLE = (
    pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_integer, pa.types.is_floating,
    pa.types.is_decimal, pa.types.is_boolean, pa.types.is_null,
)  # fmt: skip
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


def main() -> int:
    """Serve messages until the standard input ends."""
    start = enter_limits(resource.RLIMIT_DATA)
    with os.fdopen(start.descriptor, "rb") as stream:
        table = _Table(stream)
        return serve(table.open, table.answer, start.memory_bytes)


class _Table:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._kind = ""
        self._pieces: Iterator[list[Sequence[Any]]] = iter(())

    def open(self, message: Any) -> Any:  # noqa: ANN401 - decoded from JSON
        """Return the names of all columns, and of the classes of those that have such."""
        self._kind = message["kind"]
        schema: pa.Schema | None = None
        with _remedied(self._kind):
            schema = self._parquet().schema_arrow if self._kind == "parquet" else None
            names: list[str] = self._header() if schema is None else schema.names
        _require_few(len(names))
        return {"names": names, "classes": {} if schema is None else class_names(schema)}

    def answer(self, message: Any) -> Any:  # noqa: ANN401 - decoded from JSON
        """Begin with columns, and return the next rows; none at the end."""
        columns = message.get("columns")
        if columns is not None:
            rows = self._parquet_batches if self._kind == "parquet" else self._csv_batches
            self._pieces = _pieces(rows(columns), columns)
        with _remedied(self._kind):
            return next(self._pieces, [])

    def _parquet(self) -> pyarrow.parquet.ParquetFile:
        self._stream.seek(0)
        return pyarrow.parquet.ParquetFile(
            self._stream,
            pre_buffer=False,
            buffer_size=2**20,
            thrift_string_size_limit=_MOST_THRIFT_BYTES,
            thrift_container_size_limit=_MOST_THRIFT_ENTRIES,
        )

    def _parquet_batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        table = self._parquet()
        schema = table.schema_arrow
        for name in columns:
            _require_readable(name, schema.field(name).type)
        for group in range(table.num_row_groups):
            facts = table.metadata.row_group(group)
            row_bytes = facts.total_byte_size // max(1, facts.num_rows)
            rows = max(_FEWEST_ROWS, min(_MOST_ROWS, _ROW_BYTES_AT_ONCE // max(1, row_bytes)))
            yield from table.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)

    def _header(self) -> list[str]:
        self._stream.seek(0)
        line = self._stream.readline(_CSV_BLOCK_BYTES)
        _require_few(line.count(b",") + 1)
        first = pa.py_buffer(line)
        options = pyarrow.csv.ReadOptions(use_threads=False)
        found: list[str] = pyarrow.csv.read_csv(pa.BufferReader(first), read_options=options).column_names
        return found

    def _csv_batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        self._stream.seek(0)
        with pyarrow.csv.open_csv(
            self._stream,
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK_BYTES),
            parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=columns,
                # a type found by looking would cut the class 01 to 1, and hold for the first block alone
                column_types=dict.fromkeys(columns, pa.string()),
            ),
        ) as reader:
            for batch in reader:
                for start in range(0, batch.num_rows, _MOST_ROWS):
                    yield batch.slice(start, _MOST_ROWS)


@contextlib.contextmanager
def _remedied(kind: str) -> Iterator[None]:
    """Give what the library says of a file in one line, with the remedy; a want of memory is no fault of that kind."""
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            raise
        raise ValueError(f"{' '.join(str(error).split())[:_MOST_CHARACTERS].rstrip('.')}; {_REMEDIES[kind]}") from error


def _require_few(columns: int) -> None:
    if columns > _MOST_COLUMNS:
        raise ValueError(f"it has {columns:,} columns; at most {_MOST_COLUMNS:,} are read")


def class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the names that the ``datasets`` library has written for the class numbers of columns."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    found = {}
    for name in schema.names if isinstance(features, dict) else ():
        inner = features.get(name)
        # tags of words are a list of classes
        while isinstance(inner, (list, dict)) and (isinstance(inner, list) or "feature" in inner):
            inner = (inner[0] if inner else None) if isinstance(inner, list) else inner["feature"]
        given = inner.get("names") if isinstance(inner, dict) and inner.get("_type") == "ClassLabel" else None
        if isinstance(given, list) and all(isinstance(each, str) for each in given):
            found[name] = given
    return found


def _require_readable(name: str, found: pa.DataType) -> None:
    """Require values that a message can hold."""
    inner = _value_type(found)
    if not any(is_readable(inner) for is_readable in _READABLE):
        part = "write the part of it that is meant as a column"
        remedy = part if pa.types.is_nested(inner) else "cast its values to string with pyarrow (`column.cast(...)`)"
        shown = f"`{name[:80]}` holds {str(found)[:60]}"
        raise ValueError(f"column {shown}; texts, numbers and their lists are read: {remedy}")


def _value_type(found: pa.DataType) -> pa.DataType:
    return _value_type(found.value_type) if isinstance(found, (*_LISTS, pa.DictionaryType)) else found


def _values(batch: pa.RecordBatch, name: str) -> list[Any]:
    """Return the values of a column, decimals as the numbers that they are."""
    values: list[Any] = batch.column(name).to_pylist()
    return [_number(each, name) for each in values] if pa.types.is_decimal(_value_type(batch[name].type)) else values


def _number(value: Any, name: str) -> Any:  # noqa: ANN401 - a decimal, null, or a list of them
    if not isinstance(value, Decimal):
        return value if value is None else [_number(each, name) for each in value]
    number = int(value) if value == int(value) else float(value)
    if Decimal(repr(number)) != value:
        remedy = "round it with pyarrow (`column.cast('float64')`)"
        raise ValueError(f"column `{name[:80]}` holds {value}, which float64 would round to {number}; {remedy}")
    return number


def _pieces(batches: Iterator[pa.RecordBatch], columns: list[str]) -> Iterator[list[Sequence[Any]]]:
    """Rows of bounded size together."""
    piece, size = list[Sequence[Any]](), 0
    for batch in batches:
        for row in zip(*(_values(batch, name) for name in columns), strict=True):
            piece.append(row)
            size += sum(len(value) for value in row if isinstance(value, (str, list)))
            if size > _PIECE_BYTES:
                yield piece
                piece, size = [], 0
        if size > _SHORT_BYTES or len(piece) >= _SHORT_ROWS:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


if __name__ == "__main__":
    sys.setrecursionlimit(500)
    end(main())
