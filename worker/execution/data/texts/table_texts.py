"""Table texts: the texts, pairs, labels and tags of columns, as a stream of batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.execution.data.labels import Labels
from worker.execution.data.stream import DataRequest, DataStream
from worker.execution.data.table_files import Table
from worker.execution.data.texts.tagged_words import read_tagged_words, tag_words, tagged_stream
from worker.execution.data.texts.text import Text, text_stream
from worker.execution.data.texts.text_rows import (
    LABELLED,
    list_unused,
    require_no_tensors,
    require_pair_named,
    require_pairs_make_sense,
    require_text,
)
from worker.execution.refusal import Refusal, names


@dataclass(frozen=True, kw_only=True)
class TableColumns:
    """The columns that are read, with the fields of the document that name them."""

    text: str
    pair: str | None
    label: str | None
    fields: tuple[str, str, str]
    """Of the text, the other half of a pair, and the label."""
    place: str
    """The pointer to the field that names the table."""

    @property
    def named(self) -> dict[str, str]:
        """The columns that there are, by field."""
        columns = zip(self.fields, (self.text, self.pair, self.label), strict=True)
        return {field: name for field, name in columns if name is not None}

    def labels(self, request: DataRequest, *, untyped: bool) -> Labels:
        """Return an empty column of labels."""
        return Labels(
            column=self.label or "",
            request=request,
            pointer=f"/data/{self.fields[2]}",
            code="wrong_type",
            untyped=untyped,
        )

    def require_pairs(self, task: str) -> None:
        """Refuse pairs that the task has no use for."""
        pointer = f"/data/{self.fields[1]}"
        if self.pair is not None and task == "token_classification":
            raise Refusal("has no place in `token_classification`; leave it out", pointer=pointer)
        if self.pair is not None:
            require_pairs_make_sense(self.text, self.pair, task, pointer)


def table_stream(table: Table, columns: TableColumns, labels: Labels, where: str, length: int) -> DataStream:
    """Tokenise a table's texts, cut to ``length`` tokens, with labels, which are empty where a text has tags."""
    request, task = labels.request, labels.request.task.type
    values = dict(zip(columns.named, table.columns, strict=True))
    texts = values[columns.fields[0]]
    if not texts:
        raise Refusal("the data set holds no row", pointer=columns.place, code="empty_data")
    if columns.label is None and task in (*LABELLED, "token_classification"):
        raise Refusal(
            f"is null, and `{task}` needs a column of tags or labels; name it, of {names(list(table.there), 20)}",
            pointer=f"/data/{columns.fields[2]}",
            code="no_targets",
        )
    if task == "token_classification":
        list_unused(table.there, (columns.text, columns.label), where, request.context)
        describe_columns(columns.text, None, columns.label, request)
        return _tagged(values, columns, labels, length)
    require_no_tensors(table.there, columns.place)
    require_pair_named(table.there, columns.text, columns.pair, task, columns.fields[1])
    label = columns.label if task in LABELLED else None
    list_unused(table.there, (columns.text, columns.pair, label), where, request.context)
    describe_columns(columns.text, columns.pair, label, request)
    numbers = labels.numbers() if len(labels) else None
    return text_stream(_texts(values, columns), numbers, length, request, "/data")


def describe_columns(text: str, pair: str | None, label: str | None, request: DataRequest) -> None:
    """Record the columns that are read."""
    columns = {"text": text, "pair": pair, "label": label}
    request.context.describe("columns", {name: each[:200] for name, each in columns.items() if each is not None})


def _texts(values: Mapping[str, list[Any]], columns: TableColumns) -> list[Text]:
    """The texts, or pairs of them."""
    first, second, _ = columns.fields
    for field, name in columns.named.items():
        for row, text in enumerate(values[field] if field in (first, second) else ()):
            require_text(text, name, f"row {row}", f"/data/{field}", "wrong_type")
    return values[first] if second not in values else list(zip(values[first], values[second], strict=True))


def _tagged(values: Mapping[str, list[Any]], columns: TableColumns, labels: Labels, length: int) -> DataStream:
    """The words of one column with the tags of another."""
    names, count = (columns.text, labels.column), labels.request.context.byte_count(columns.place)
    rows = zip(values[columns.fields[0]], values[columns.fields[2]], strict=True)
    words = [
        read_tagged_words(dict(zip(names, row, strict=True)), names, f"row {number}", labels, count)
        for number, row in enumerate(rows)
    ]
    return tagged_stream(tag_words(words, labels), length, labels.request, "/data")
